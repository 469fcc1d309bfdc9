/* The smallest and the largest magnitude of a tensor that lies in memory, in one read of it.
 *
 * A tensor comes in by DLPack's C exchange, the standard for handing memory from one library to
 * another: nothing here includes or links PyTorch, and one build serves all versions of it. The
 * file keeps to Python's limited API of 3.10, so that one build serves all versions of Python, too.
 *
 * The bits of a non-negative floating-point number, read as an integer, are in the order of the
 * numbers, inf above all finite ones and NaN above inf. So the loops compare integers. Nothing here
 * starts a thread: a pool of our own would not survive a fork, and would compete with torch's. Large
 * tensors are cut, and read by torch's threads.
 */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* DLPack 1: https://github.com/dmlc/dlpack/blob/v1.3/include/dlpack/dlpack.h */

enum { DLPACK_MAJOR = 1, DEVICE_CPU = 1 };
enum { CODE_INT = 0, CODE_UINT = 1, CODE_FLOAT = 2, CODE_BFLOAT = 4, CODE_BOOL = 6 };

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous;
    void *managed[3];
    int (*tensor_of)(void *object, DLTensor *out); /* borrows; an error of Python's where it fails */
    void *current_work_stream;
} ExchangeAPI;

/* The loops. Each is compiled for several instruction sets where the loader can choose among them
 * when it loads the library; other compilers vectorize for what they are told to build for. */

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define LOOP __attribute__((target_clones("arch=x86-64-v4", "avx2", "default"), optimize("O3")))
#else
#define LOOP
#endif

typedef struct {
    uint64_t low, high; /* bits of the magnitudes */
} Bits;

#define SEARCH(INT, MAGNITUDE, AT)                                                                 \
    do {                                                                                           \
        const INT *x = start;                                                                      \
        INT low = (INT)found->low, high = (INT)found->high;                                        \
        for (ptrdiff_t i = 0; i < count; i++) {                                                    \
            const INT m = MAGNITUDE(INT, x[AT]);                                                   \
            low = m < low ? m : low;                                                               \
            high = m > high ? m : high;                                                            \
        }                                                                                          \
        found->low = (uint64_t)low;                                                                \
        found->high = (uint64_t)high;                                                              \
    } while (0)

#define DEFINE_LOOPS(NAME, INT, MAGNITUDE)                                                         \
    LOOP static void NAME##_dense(const void *start, ptrdiff_t count, Bits *found) {               \
        SEARCH(INT, MAGNITUDE, i);                                                                 \
    }                                                                                              \
    static void NAME##_spaced(const void *start, ptrdiff_t count, ptrdiff_t step, Bits *found) {   \
        SEARCH(INT, MAGNITUDE, i * step);                                                          \
    }

/* Floating-point numbers without their sign are non-negative as signed integers, too: these are
 * compared by one instruction on more machines. */
#define WITHOUT_SIGN(INT, x) ((INT)((x) & (INT)(((uint64_t)1 << (8 * sizeof(INT) - 1)) - 1)))
#define ABSOLUTE(INT, x) ((INT)((x) >> (8 * sizeof(INT) - 1) ? (INT)0 - (x) : (x)))
#define AS_IT_IS(INT, x) (x)

DEFINE_LOOPS(float16, int16_t, WITHOUT_SIGN)
DEFINE_LOOPS(float32, int32_t, WITHOUT_SIGN)
DEFINE_LOOPS(float64, int64_t, WITHOUT_SIGN)
DEFINE_LOOPS(int8, uint8_t, ABSOLUTE)
DEFINE_LOOPS(int16, uint16_t, ABSOLUTE)
DEFINE_LOOPS(int32, uint32_t, ABSOLUTE)
DEFINE_LOOPS(int64, uint64_t, ABSOLUTE)
DEFINE_LOOPS(uint8, uint8_t, AS_IT_IS)
DEFINE_LOOPS(uint16, uint16_t, AS_IT_IS)
DEFINE_LOOPS(uint32, uint32_t, AS_IT_IS)
DEFINE_LOOPS(uint64, uint64_t, AS_IT_IS)

/* From bits to numbers. */

static double number_of_float64(uint64_t bits) {
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static double number_of_float32(uint64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float number;
    memcpy(&number, &low, sizeof number);
    return number;
}

static double number_of_bfloat16(uint64_t bits) { return number_of_float32(bits << 16); }

static double number_of_float16(uint64_t bits) {
    const uint64_t exponent = bits >> 10, fraction = bits & 0x3ff;
    if (exponent == 0) /* a subnormal number, in units of the smallest one */
        return (double)fraction * number_of_float32(0x33800000); /* 2**-24 */
    if (exponent == 0x1f)
        return number_of_float32(0x7f800000 | fraction << 13);
    return number_of_float32((exponent + 112) << 23 | fraction << 13);
}

static double number_of_bool(uint64_t bits) { return bits != 0; } /* any byte may be a True */

/* Integers are rounded as a float32 is, with which they are compared elsewhere. */
static double number_of_integer(uint64_t bits) { return (double)(float)bits; }

typedef struct {
    uint8_t code, bits;
    void (*dense)(const void *, ptrdiff_t, Bits *);
    void (*spaced)(const void *, ptrdiff_t, ptrdiff_t, Bits *);
    double (*number_of)(uint64_t);
    uint64_t largest; /* what the search for the smallest begins with */
} Kind;

static const Kind KINDS[] = {
    {CODE_FLOAT, 32, float32_dense, float32_spaced, number_of_float32, INT32_MAX},
    {CODE_BFLOAT, 16, float16_dense, float16_spaced, number_of_bfloat16, INT16_MAX},
    {CODE_FLOAT, 16, float16_dense, float16_spaced, number_of_float16, INT16_MAX},
    {CODE_FLOAT, 64, float64_dense, float64_spaced, number_of_float64, INT64_MAX},
    {CODE_BOOL, 8, uint8_dense, uint8_spaced, number_of_bool, UINT8_MAX},
    {CODE_INT, 64, int64_dense, int64_spaced, number_of_integer, UINT64_MAX},
    {CODE_INT, 32, int32_dense, int32_spaced, number_of_integer, UINT32_MAX},
    {CODE_INT, 16, int16_dense, int16_spaced, number_of_integer, UINT16_MAX},
    {CODE_INT, 8, int8_dense, int8_spaced, number_of_integer, UINT8_MAX},
    {CODE_UINT, 64, uint64_dense, uint64_spaced, number_of_integer, UINT64_MAX},
    {CODE_UINT, 32, uint32_dense, uint32_spaced, number_of_integer, UINT32_MAX},
    {CODE_UINT, 16, uint16_dense, uint16_spaced, number_of_integer, UINT16_MAX},
    {CODE_UINT, 8, uint8_dense, uint8_spaced, number_of_integer, UINT8_MAX},
};

static const Kind *kind_of(const DLTensor *tensor) {
    if (tensor->dtype.lanes == 1)
        for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
            if (KINDS[i].code == tensor->dtype.code && KINDS[i].bits == tensor->dtype.bits)
                return &KINDS[i];
    return NULL;
}

/* The elements, as few long runs as there are. */

enum { MOST_AXES = 64 };

typedef struct {
    int64_t size, stride, index;
} Axis;

/* The axes along which there are different elements, by stride, those that continue each other
 * joined. What is dense in memory in any order is one axis. */
static int axes_of(const DLTensor *tensor, Axis *axes) {
    int count = 0;
    for (int32_t d = 0; d < tensor->ndim; d++) {
        const Axis axis = {tensor->shape[d], tensor->strides[d], 0};
        if (axis.size == 1 || axis.stride == 0) /* an expanded axis repeats its elements */
            continue;
        int at = count++;
        for (; at > 0 && axes[at - 1].stride > axis.stride; at--)
            axes[at] = axes[at - 1];
        axes[at] = axis;
    }
    if (count == 0) { /* one element */
        axes[0] = (Axis){1, 1, 0};
        return 1;
    }
    int kept = 0;
    for (int d = 0; d < count; d++) {
        if (kept && axes[d].stride == axes[kept - 1].stride * axes[kept - 1].size)
            axes[kept - 1].size *= axes[d].size;
        else
            axes[kept++] = axes[d];
    }
    return kept;
}

static void read_runs(const Kind *kind, const char *start, Axis *axes, int count, Bits *found) {
    const ptrdiff_t element = kind->bits / 8;
    for (;;) {
        if (axes[0].stride == 1)
            kind->dense(start, (ptrdiff_t)axes[0].size, found);
        else
            kind->spaced(start, (ptrdiff_t)axes[0].size, (ptrdiff_t)axes[0].stride, found);
        int d = 1; /* on to the next run */
        for (; d < count; d++) {
            start += axes[d].stride * element;
            if (++axes[d].index < axes[d].size)
                break;
            start -= axes[d].size * axes[d].stride * element;
            axes[d].index = 0;
        }
        if (d == count)
            return;
    }
}

/* A large tensor is cut across its last axis. torch_parallel_for, of torch's stable C interface,
 * shares the pieces among torch's threads: a range, its smallest part, and what does a part. */

enum { LARGE = 1 << 20, PIECE = 1 << 19, MOST_PIECES = 256 }; /* the first two in bytes */

typedef int32_t (*ParallelFor)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);

static ParallelFor parallel_for;

typedef struct {
    const Kind *kind;
    const char *start;
    const Axis *axes;
    int count;
    int64_t pieces;
    Bits found[MOST_PIECES];
} Cut;

static void read_pieces(int64_t begin, int64_t end, void *context) {
    Cut *cut = context;
    const Axis last = cut->axes[cut->count - 1];
    for (int64_t piece = begin; piece < end; piece++) {
        const int64_t from = last.size * piece / cut->pieces;
        const int64_t to = last.size * (piece + 1) / cut->pieces;
        Axis axes[MOST_AXES];
        memcpy(axes, cut->axes, (size_t)cut->count * sizeof *axes);
        axes[cut->count - 1].size = to - from;
        const ptrdiff_t offset = (ptrdiff_t)(from * last.stride) * (cut->kind->bits / 8);
        Bits found = {cut->kind->largest, 0};
        read_runs(cut->kind, cut->start + offset, axes, cut->count, &found);
        cut->found[piece] = found;
    }
}

static Bits read_large(const Kind *kind, const char *start, const Axis *axes, int count,
                       int64_t bytes) {
    Cut cut;
    cut.kind = kind;
    cut.start = start;
    cut.axes = axes;
    cut.count = count;
    cut.pieces = bytes / PIECE < MOST_PIECES ? bytes / PIECE : MOST_PIECES;
    if (axes[count - 1].size < cut.pieces)
        cut.pieces = axes[count - 1].size;
    if (parallel_for == NULL || parallel_for(0, cut.pieces, 1, read_pieces, &cut) != 0)
        read_pieces(0, cut.pieces, &cut);
    Bits all = cut.found[0];
    for (int64_t piece = 1; piece < cut.pieces; piece++) {
        all.low = cut.found[piece].low < all.low ? cut.found[piece].low : all.low;
        all.high = cut.found[piece].high > all.high ? cut.found[piece].high : all.high;
    }
    return all;
}

/* Python's side. */

static int (*tensor_of)(void *, DLTensor *);

/* The types of tensors that are read, and of no subclass; a layout, and a set of dtypes. */
static PyObject *plain, *parameter, *strided, *dtypes;

#include "_attributes.h"

static Attribute is_cpu = {.text = "is_cpu"}, is_nested = {.text = "is_nested"},
                 layout = {.text = "layout"}, dtype = {.text = "dtype"},
                 requires_grad = {.text = "requires_grad"}, is_leaf = {.text = "is_leaf"},
                 version = {.text = "_version"}, grad_fn = {.text = "grad_fn"},
                 output_nr = {.text = "output_nr"}, backward_hooks = {.text = "_backward_hooks"},
                 is_floating_point = {.text = "is_floating_point"},
                 is_complex = {.text = "is_complex"}, f_back = {.text = "f_back"},
                 f_lasti = {.text = "f_lasti"};

static Attribute *const OF_TENSORS[] = {&is_cpu,  &is_nested, &layout,  &dtype,     &requires_grad,
                                        &is_leaf, &version,   &grad_fn, &output_nr, &backward_hooks,
                                        NULL};
static Attribute *const OF_DTYPES[] = {&is_floating_point, &is_complex, NULL};
static Attribute *const OF_FRAMES[] = {&f_back, &f_lasti, NULL};

/* Names of a hook's attribute, and of a tensor's method. */
static PyObject *hook_id, *data_ptr;

/* Finds the attributes of tensors of two types, of dtypes, and of frames. */
static int find_all_attributes(PyObject *tensor, PyObject *other, PyObject *some_dtypes) {
    PyObject *each = PyObject_GetIter(some_dtypes);
    PyObject *some = each == NULL ? NULL : PyIter_Next(each);
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    const int is_found =
        some != NULL && frame != NULL &&
        find_attributes(OF_TENSORS, (PyTypeObject *)tensor, (PyTypeObject *)other) == 0 &&
        find_attributes(OF_DTYPES, Py_TYPE(some), NULL) == 0 &&
        find_attributes(OF_FRAMES, Py_TYPE(frame), NULL) == 0;
    Py_XDECREF(each);
    Py_XDECREF(some);
    if (!is_found && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no dtype, or no frame, to ask");
    return is_found ? 0 : -1;
}

PyDoc_STRVAR(bind_doc,
             "bind(exchange, tensor, parameter, strided, dtypes, parallel_for)\n--\n\n"
             "Read objects of these two types, and of no subclass, that have this layout and one of\n"
             "these dtypes, by this DLPack C exchange API; large ones in pieces, by the function at\n"
             "this address, where it is not 0.");

static PyObject *bind(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *capsule, *kept[4];
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OOOOO!K", &capsule, &kept[0], &kept[1], &kept[2], &PyFrozenSet_Type,
                          &kept[3], &address))
        return NULL;
    const ExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL)
        return NULL;
    if (api->version.major != DLPACK_MAJOR || api->tensor_of == NULL) {
        PyErr_SetString(PyExc_ImportError, "this version of DLPack's exchange is not known");
        return NULL;
    }
    hook_id = PyUnicode_InternFromString("id");
    data_ptr = PyUnicode_InternFromString("data_ptr");
    if (hook_id == NULL || data_ptr == NULL ||
        find_all_attributes(kept[0], kept[1], kept[3]) != 0)
        return NULL;
    for (int i = 0; i < 4; i++) /* for as long as the process runs */
        Py_INCREF(kept[i]);
    plain = kept[0];
    parameter = kept[1];
    strided = kept[2];
    dtypes = kept[3];
    tensor_of = api->tensor_of;
    parallel_for = (ParallelFor)(uintptr_t)address;
    Py_RETURN_NONE;
}

/* Whether the exchange can succeed. Torch takes a millisecond to raise its error where not. */
static int has_memory(PyObject *object) {
    if ((PyObject *)Py_TYPE(object) != plain && (PyObject *)Py_TYPE(object) != parameter)
        return 0;
    if (!attribute_is(object, &is_cpu, Py_True) || !attribute_is(object, &layout, strided) ||
        !attribute_is(object, &is_nested, Py_False))
        return 0;
    PyObject *found = attribute_of(object, &dtype);
    const int is_known = found != NULL && PySet_Contains(dtypes, found) == 1;
    Py_XDECREF(found);
    return is_known;
}

/* Whether there is something to read, and its smallest and largest magnitude if so. */
static int range_in(const DLTensor *tensor, double *low, double *high) {
    const Kind *kind = kind_of(tensor);
    if (kind == NULL || tensor->device.type != DEVICE_CPU || tensor->data == NULL ||
        tensor->ndim > MOST_AXES || (tensor->ndim > 0 && tensor->strides == NULL))
        return 0;
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (tensor->shape[d] == 0)
            return 0;
    Axis axes[MOST_AXES];
    const int count = axes_of(tensor, axes);
    const char *start = (const char *)tensor->data + tensor->byte_offset;
    Bits found = {kind->largest, 0};
    int64_t bytes = kind->bits / 8;
    for (int d = 0; d < count; d++)
        bytes *= axes[d].size;
    if (bytes < LARGE) {
        read_runs(kind, start, axes, count, &found);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = read_large(kind, start, axes, count, bytes);
        Py_END_ALLOW_THREADS
    }
    *low = kind->number_of(found.low);
    *high = kind->number_of(found.high);
    return 1;
}

#include "_norms.h"
#include "_described.h"

/* The same of what the exchange gives of an object. Leaves no error. */
static int find_range(PyObject *object, double *low, double *high) {
    DLTensor tensor;
    if (tensor_of(object, &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    return range_in(&tensor, low, high);
}

/* The same as a pair; None where there is nothing to read. */
static PyObject *range_of(PyObject *object) {
    double smallest, largest;
    if (!find_range(object, &smallest, &largest))
        Py_RETURN_NONE;
    PyObject *low = PyFloat_FromDouble(smallest);
    PyObject *high = PyFloat_FromDouble(largest);
    PyObject *pair = low == NULL || high == NULL ? NULL : PyTuple_Pack(2, low, high);
    Py_XDECREF(low);
    Py_XDECREF(high);
    return pair;
}

PyDoc_STRVAR(abs_min_max_doc,
             "abs_min_max(tensor)\n--\n\n"
             "The smallest and the largest magnitude, or None where this cannot read the tensor.\n\n"
             "The largest is NaN where any element is; the smallest is that of the others then.");

static PyObject *abs_min_max(PyObject *module, PyObject *object) {
    (void)module;
    if (tensor_of == NULL || !has_memory(object))
        Py_RETURN_NONE;
    return range_of(object);
}

/* Functions that say who sees what is done to tensors. */
static PyObject *count_modes, *innermost_transform;

PyDoc_STRVAR(bind_observers_doc,
             "bind_observers(count_modes, innermost_transform)\n--\n\n"
             "Ask these two who sees what is done to tensors: how many dispatch modes there are, and\n"
             "which transform of torch.func is the innermost, None where there is none.");

static PyObject *bind_observers(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *modes, *transform;
    if (!PyArg_ParseTuple(args, "OO", &modes, &transform))
        return NULL;
    Py_INCREF(modes); /* for as long as the process runs */
    Py_INCREF(transform);
    count_modes = modes;
    innermost_transform = transform;
    Py_RETURN_NONE;
}

/* Whether somebody may be tracing what is done to tensors, or batching or differentiating it. -1
 * where an error came instead. */
static int is_observed(void) {
    PyObject *found = PyObject_CallNoArgs(count_modes);
    const long modes = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    if (modes != 0)
        return modes < 0 ? -1 : 1;
    found = PyObject_CallNoArgs(innermost_transform);
    Py_XDECREF(found); /* None lives without us */
    return found == NULL ? -1 : found != Py_None;
}

PyDoc_STRVAR(read_or_doc,
             "abs_min_max(value)\n--\n\n"
             "The smallest and the largest magnitude, or what the function gives that this was made\n"
             "with.");

static PyObject *read_or(PyObject *otherwise, PyObject *object) {
    const int observed = count_modes == NULL ? 1 : is_observed();
    if (observed < 0)
        return NULL;
    if (!observed) {
        PyObject *found = abs_min_max(NULL, object);
        if (found != Py_None)
            return found;
        Py_DECREF(found);
    }
    return PyObject_CallFunctionObjArgs(otherwise, object, NULL);
}

static PyMethodDef READ_OR = {"abs_min_max", read_or, METH_O, read_or_doc};

PyDoc_STRVAR(reading_or_doc,
             "reading_or(otherwise)\n--\n\n"
             "A function that gives what `abs_min_max` gives of a value, and what this one gives where\n"
             "that is None, or somebody sees what is done to tensors.");

/* A function with what to call where C cannot read a tensor. */
static PyObject *reading(PyMethodDef *method, PyObject *module, PyObject *otherwise) {
    PyObject *name = PyObject_GetAttrString(module, "__name__");
    PyObject *made = name == NULL ? NULL : PyCFunction_NewEx(method, otherwise, name);
    Py_XDECREF(name);
    return made;
}

static PyObject *reading_or(PyObject *module, PyObject *otherwise) {
    return reading(&READ_OR, module, otherwise);
}

static PyObject *read_dense_or(PyObject *otherwise, PyObject *object) {
    if (tensor_of != NULL && (PyObject *)Py_TYPE(object) == plain) {
        PyObject *found = range_of(object);
        if (found != Py_None)
            return found;
        Py_DECREF(found);
    }
    return PyObject_CallFunctionObjArgs(otherwise, object, NULL);
}

static PyMethodDef READ_DENSE_OR = {"abs_min_max", read_dense_or, METH_O, read_or_doc};

PyDoc_STRVAR(reading_dense_or_doc,
             "reading_dense_or(otherwise)\n--\n\n"
             "The same for what is known to be a dense tensor outside every transform: it asks\n"
             "nothing but the type.");

static PyObject *reading_dense_or(PyObject *module, PyObject *otherwise) {
    return reading(&READ_DENSE_OR, module, otherwise);
}

/* Whether a list says, in a pair, that this is the run of something, and up to which magnitude
 * nothing is new in it. Takes the list, and a function that gives the number of the run. */
static PyObject *is_below(PyObject *known, PyObject *object) {
    const int observed = count_modes == NULL || tensor_of == NULL ? 1 : is_observed();
    if (observed != 0 || !has_memory(object))
        return observed < 0 ? NULL : PyBool_FromLong(0);
    PyObject *now = PyObject_CallNoArgs(PyTuple_GetItem(known, 1));
    PyObject *pair = now == NULL ? NULL : PyList_GetItem(PyTuple_GetItem(known, 0), 0);
    if (pair == NULL) {
        Py_XDECREF(now);
        return NULL;
    }
    Py_INCREF(pair); /* another thread may replace it */
    int is_now = -1;
    double limit = 0;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        is_now = PyObject_RichCompareBool(now, PyTuple_GetItem(pair, 0), Py_EQ);
        limit = PyFloat_AsDouble(PyTuple_GetItem(pair, 1));
    }
    Py_DECREF(now);
    Py_DECREF(pair);
    if (PyErr_Occurred())
        return NULL;
    double low, high;
    return PyBool_FromLong(is_now == 1 && find_range(object, &low, &high) && 0 < high &&
                           high < limit);
}

PyDoc_STRVAR(is_below_doc,
             "is_below(tensor)\n--\n\n"
             "Whether the tensor's largest magnitude is finite, not 0, and below what the list says that\n"
             "this was made with, which has to be of the run of now. False where C cannot read it.");

static PyMethodDef IS_BELOW = {"is_below", is_below, METH_O, is_below_doc};

PyDoc_STRVAR(below_doc,
             "below(known, number_of_run)\n--\n\n"
             "A function that tells most tensors from those that somebody has to hear of: see its text.\n\n"
             "Args:\n"
             "    known: a list of one pair, the number of a run and a magnitude; whoever has it changes it.\n"
             "    number_of_run: gives the number of what runs now.");

static PyObject *below(PyObject *module, PyObject *args) {
    PyObject *known, *number;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &known, &number))
        return NULL;
    return reading(&IS_BELOW, module, args);
}

PyDoc_STRVAR(packed_doc,
             "packed(pairs)\n--\n\n"
             "The numbers of a list of pairs, as doubles one behind the other.\n\n"
             "None where anything else is in the list.");

static PyObject *packed(PyObject *module, PyObject *pairs) {
    (void)module;
    if (!PyList_CheckExact(pairs))
        Py_RETURN_NONE;
    const Py_ssize_t count = PyList_Size(pairs);
    PyObject *bytes = PyByteArray_FromStringAndSize(NULL, count * 2 * (Py_ssize_t)sizeof(double));
    if (bytes == NULL)
        return NULL;
    char *at = PyByteArray_AsString(bytes);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PyList_GetItem(pairs, i);
        const int is_pair = PyTuple_CheckExact(pair) && PyTuple_Size(pair) == 2;
        for (Py_ssize_t j = 0; j < 2; j++, at += sizeof(double)) {
            PyObject *number = is_pair ? PyTuple_GetItem(pair, j) : NULL;
            if (number == NULL || !PyFloat_CheckExact(number)) {
                Py_DECREF(bytes);
                Py_RETURN_NONE;
            }
            const double value = PyFloat_AsDouble(number);
            memcpy(at, &value, sizeof value);
        }
    }
    return bytes;
}

PyDoc_STRVAR(all_finite_doc,
             "all_finite(numbers)\n--\n\n"
             "Whether the second number of each pair is neither NaN nor inf, of what `packed` gave.");

static PyObject *all_finite(PyObject *module, PyObject *numbers) {
    (void)module;
    if (!PyByteArray_CheckExact(numbers)) {
        PyErr_SetString(PyExc_TypeError, "all_finite takes what packed has given");
        return NULL;
    }
    const char *at = PyByteArray_AsString(numbers) + sizeof(double);
    const Py_ssize_t pairs = PyByteArray_Size(numbers) / (2 * (Py_ssize_t)sizeof(double));
    for (Py_ssize_t i = 0; i < pairs; i++) {
        double high;
        memcpy(&high, at + i * 2 * (Py_ssize_t)sizeof(double), sizeof high);
        if (!(high <= DBL_MAX)) /* none is negative but the reasons why there is no number */
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(any_filled_doc,
             "any_filled(references, names)\n--\n\n"
             "Whether anything is in a container that one of these weakly referenced objects has under\n"
             "one of these names. Objects that are gone have none.");

static PyObject *any_filled(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *references, *names;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &references, &PyTuple_Type, &names))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(references); i++) {
        PyObject *object = PyWeakref_GetObject(PyList_GetItem(references, i));
        if (object == NULL)
            return NULL;
        if (object == Py_None)
            continue;
        PyObject *attributes = PyObject_GenericGetDict(object, NULL);
        if (attributes == NULL)
            return NULL;
        int filled = 0;
        for (Py_ssize_t j = 0; filled == 0 && j < PyTuple_Size(names); j++) {
            PyObject *name = PyTuple_GetItem(names, j);
            PyObject *held = PyDict_GetItemWithError(attributes, name);
            if (held == NULL && !PyErr_Occurred())
                PyErr_SetObject(PyExc_KeyError, name);
            filled = held == NULL ? -1 : PyObject_IsTrue(held);
        }
        Py_DECREF(attributes);
        if (filled != 0)
            return filled < 0 ? NULL : PyBool_FromLong(1);
    }
    Py_RETURN_FALSE;
}

PyDoc_STRVAR(versions_of_doc,
             "versions_of(tensors)\n--\n\n"
             "How often each tensor of a tuple was written. None where anything does not tell.");

static PyObject *versions_of(PyObject *module, PyObject *tensors) {
    (void)module;
    if (!PyTuple_Check(tensors))
        Py_RETURN_NONE;
    const Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *versions = PyTuple_New(count);
    for (Py_ssize_t i = 0; versions != NULL && i < count; i++) {
        PyObject *written = attribute_of(PyTuple_GetItem(tensors, i), &version);
        if (written == NULL)
            Py_CLEAR(versions);
        else
            PyTuple_SetItem(versions, i, written);
    }
    if (versions != NULL)
        return versions;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL; /* an interrupt */
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(are_finite_doc,
             "are_finite(tensors)\n--\n\n"
             "Whether this can read every tensor of a tuple, and finds neither NaN nor inf.");

static PyObject *are_finite(PyObject *module, PyObject *tensors) {
    (void)module;
    if (tensor_of == NULL || !PyTuple_Check(tensors))
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
        PyObject *tensor = PyTuple_GetItem(tensors, i);
        double low, high;
        if (!has_memory(tensor) || !find_range(tensor, &low, &high) || !(high <= DBL_MAX))
            return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(state_of_doc,
             "state_of(references)\n--\n\n"
             "How often each of these weakly referenced tensors was written, and the addresses of their\n"
             "elements. None where one of them is gone, or does not tell.");

static PyObject *state_of(PyObject *module, PyObject *references) {
    (void)module;
    if (!PyTuple_Check(references))
        Py_RETURN_NONE;
    const Py_ssize_t count = PyTuple_Size(references);
    PyObject *versions = PyTuple_New(count), *addresses = PyTuple_New(count), *state = NULL;
    Py_ssize_t i = 0;
    for (; versions != NULL && addresses != NULL && i < count; i++) {
        PyObject *tensor = PyWeakref_GetObject(PyTuple_GetItem(references, i));
        if (tensor == NULL || tensor == Py_None)
            break;
        Py_INCREF(tensor); /* asking may run anything */
        PyObject *written = attribute_of(tensor, &version);
        PyObject *address =
            written == NULL ? NULL : PyObject_CallMethodObjArgs(tensor, data_ptr, NULL);
        Py_DECREF(tensor);
        if (address == NULL) {
            Py_XDECREF(written);
            break;
        }
        PyTuple_SetItem(versions, i, written);
        PyTuple_SetItem(addresses, i, address);
    }
    if (versions != NULL && addresses != NULL && i == count)
        state = PyTuple_Pack(2, versions, addresses);
    Py_XDECREF(versions);
    Py_XDECREF(addresses);
    if (state != NULL)
        return state;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL; /* an interrupt */
    PyErr_Clear();
    Py_RETURN_NONE;
}

/* Whether a tensor still has the hook that somebody noted for it. -1 where an error came instead. */
static int has_hook(PyObject *tensor, PyObject *handles) {
    PyObject *key = PyLong_FromVoidPtr(tensor);
    PyObject *handle = key == NULL ? NULL : PyDict_GetItemWithError(handles, key);
    Py_XDECREF(key);
    if (handle == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(handle);
    PyObject *hooks = attribute_of(tensor, &backward_hooks);
    PyObject *id = hooks == NULL ? NULL : PyObject_GetAttr(handle, hook_id);
    Py_DECREF(handle);
    int found = -1;
    if (id != NULL)
        found = hooks == Py_None ? 0 : PySequence_Contains(hooks, id);
    Py_XDECREF(hooks);
    Py_XDECREF(id);
    return found;
}

PyDoc_STRVAR(all_hooked_doc,
             "all_hooked(values, handles)\n--\n\n"
             "Whether every leaf among these values that requires a gradient has the hook whose handle\n"
             "is kept here under its id. False as well where a value may be a tensor of another type.");

static PyObject *all_hooked(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *values, *handles;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &values, &PyDict_Type, &handles))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(values); i++) {
        PyObject *value = PyTuple_GetItem(values, i);
        if ((PyObject *)Py_TYPE(value) != plain && (PyObject *)Py_TYPE(value) != parameter) {
            if (PyLong_CheckExact(value) || PyFloat_CheckExact(value) || value == Py_None)
                continue;
            Py_RETURN_FALSE;
        }
        const int found = has_hook(value, handles);
        if (found < 0)
            return NULL;
        if (!found && attribute_is(value, &requires_grad, Py_True) &&
            attribute_is(value, &is_leaf, Py_True))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

#include "_operations.h"

/* cuLaunchKernel of the CUDA driver: a function, numbers of programs and threads in three
 * dimensions, shared memory, a stream, the places of the arguments, and nothing. */
typedef int (*starter)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void *, void **, void **);

PyDoc_STRVAR(launch_doc,
             "launch(start, function, threads, shared, stream, elements, row, size, programs, rounds)\n"
             "--\n\n"
             "Start the kernel of fxguard.measure._kernel through the CUDA driver.\n\n"
             "Args:\n"
             "    start: the address of cuLaunchKernel.\n"
             "    function: the driver's handle of the compiled kernel.\n"
             "    threads: of each program.\n"
             "    shared: bytes of shared memory of each program.\n"
             "    stream: the driver's handle of the stream.\n"
             "    elements, row: addresses on the device.\n"
             "    size, programs, rounds: as the kernel takes them.\n\n"
             "Returns:\n"
             "    The driver's answer; 0 where the kernel was started.");

static PyObject *launch(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long start, function, stream, elements, row;
    unsigned long long none = 0; /* the memory that Triton would lend to a kernel that needs some */
    unsigned threads, shared, programs, rounds;
    long long size; /* the driver reads its lower half where the kernel takes 32 bits */
    if (!PyArg_ParseTuple(args, "KKIIKKKLII", &start, &function, &threads, &shared, &stream,
                          &elements, &row, &size, &programs, &rounds))
        return NULL;
    void *places[] = {&elements, &row, &size, &programs, &rounds, &none, &none};
    const starter begin = (starter)(uintptr_t)start;
    const int answer = begin((void *)(uintptr_t)function, programs, 1, 1, threads, 1, 1, shared,
                             (void *)(uintptr_t)stream, places, NULL);
    return PyLong_FromLong(answer);
}

static PyMethodDef METHODS[] = {
    {"launch", launch, METH_VARARGS, launch_doc},
    {"bind", bind, METH_VARARGS, bind_doc},
    {"abs_min_max", abs_min_max, METH_O, abs_min_max_doc},
    {"bind_observers", bind_observers, METH_VARARGS, bind_observers_doc},
    {"reading_or", reading_or, METH_O, reading_or_doc},
    {"reading_dense_or", reading_dense_or, METH_O, reading_dense_or_doc},
    {"below", below, METH_VARARGS, below_doc},
    {"packed", packed, METH_O, packed_doc},
    {"all_finite", all_finite, METH_O, all_finite_doc},
    {"versions_of", versions_of, METH_O, versions_of_doc},
    {"are_finite", are_finite, METH_O, are_finite_doc},
    {"are_here", are_here, METH_VARARGS, are_here_doc},
    {"norms", norms, METH_VARARGS, norms_doc},
    {"changes", changes, METH_VARARGS, changes_doc},
    {"copied", copied, METH_VARARGS, copied_doc},
    {"described", described, METH_O, described_doc},
    {"largest", largest, METH_VARARGS, largest_doc},
    {"state_of", state_of, METH_O, state_of_doc},
    {"any_filled", any_filled, METH_VARARGS, any_filled_doc},
    {"all_hooked", all_hooked, METH_VARARGS, all_hooked_doc},
    {"bind_losses", bind_losses, METH_VARARGS, bind_losses_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Magnitude ranges of tensors in memory.",
    .m_size = -1,
    .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && add_operations(module) != 0)
        Py_CLEAR(module);
    return module;
}
