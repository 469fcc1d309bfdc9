/* Euclidean norms of tensors, and of how far each is from a copy of it, many in one call.
 *
 * _native.c includes this. It reads floating-point tensors along one axis, as dense ones and every
 * k-th element of these have it.
 */

enum { LANES = 8 };

/* Sums the squares of x, or of x - copy where there is one; then the copy becomes x. */
#define SQUARES(TYPE, NUMBER)                                                                      \
    do {                                                                                           \
        const TYPE *x = start;                                                                     \
        TYPE *kept = copy;                                                                         \
        double sums[LANES] = {0};                                                                  \
        ptrdiff_t i = 0;                                                                           \
        if (kept == NULL && step == 1)                                                             \
            for (; i + LANES <= count; i += LANES)                                                 \
                for (int lane = 0; lane < LANES; lane++) {                                         \
                    const double number = NUMBER(x[i + lane]);                                     \
                    sums[lane] += number * number;                                                 \
                }                                                                                  \
        else if (step == 1)                                                                        \
            for (; i + LANES <= count; i += LANES)                                                 \
                for (int lane = 0; lane < LANES; lane++) {                                         \
                    const double number = NUMBER(x[i + lane]) - NUMBER(kept[i + lane]);            \
                    sums[lane] += number * number;                                                 \
                    kept[i + lane] = x[i + lane];                                                  \
                }                                                                                  \
        for (; i < count; i++) {                                                                   \
            const double number = NUMBER(x[i * step]) - (kept == NULL ? 0.0 : NUMBER(kept[i]));    \
            sums[0] += number * number;                                                            \
            if (kept != NULL)                                                                      \
                kept[i] = x[i * step];                                                             \
        }                                                                                          \
        double sum = 0;                                                                            \
        for (int lane = 0; lane < LANES; lane++)                                                   \
            sum += sums[lane];                                                                     \
        return sum;                                                                                \
    } while (0)

#define AS_DOUBLE(x) ((double)(x))

static inline double from_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
}

static inline double from_float16(uint16_t bits) {
    const double number = number_of_float16(bits & 0x7fff);
    return bits >> 15 ? -number : number;
}

LOOP static double squares_float32(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy) {
    SQUARES(float, AS_DOUBLE);
}

LOOP static double squares_float64(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy) {
    SQUARES(double, AS_DOUBLE);
}

LOOP static double squares_bfloat16(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy) {
    SQUARES(uint16_t, from_bfloat16);
}

static double squares_float16(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy) {
    SQUARES(uint16_t, from_float16);
}

typedef double (*Squares)(const void *, ptrdiff_t, ptrdiff_t, void *);

static Squares squares_of(const DLTensor *tensor) {
    if (tensor->dtype.lanes != 1)
        return NULL;
    if (tensor->dtype.code == CODE_BFLOAT && tensor->dtype.bits == 16)
        return squares_bfloat16;
    if (tensor->dtype.code != CODE_FLOAT)
        return NULL;
    return tensor->dtype.bits == 16   ? squares_float16
           : tensor->dtype.bits == 32 ? squares_float32
           : tensor->dtype.bits == 64 ? squares_float64
                                      : NULL;
}

/* Whether the elements stand one behind the other in the order of the indices. */
static int is_in_order(const DLTensor *tensor) {
    int64_t wanted = 1;
    for (int32_t d = tensor->ndim; d-- > 0; wanted *= tensor->shape[d])
        if (tensor->shape[d] != 1 && tensor->strides[d] != wanted)
            return 0;
    return 1;
}

/* A tensor as one axis: where it begins, how many elements, how far apart. 0 if it is none.
 * Of more elements than `most`, as many are taken, evenly spread; 0 stands for all. */
static int one_axis(PyObject *object, DLTensor *tensor, int64_t most, Axis *axis) {
    if (!has_memory(object) || tensor_of(object, tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    int64_t elements = 1;
    for (int32_t d = 0; d < tensor->ndim; d++)
        elements *= tensor->shape[d];
    if (tensor->device.type != DEVICE_CPU || tensor->ndim > MOST_AXES || tensor->data == NULL ||
        elements == 0 || (tensor->ndim > 0 && tensor->strides == NULL))
        return 0;
    Axis axes[MOST_AXES];
    /* An expanded tensor has fewer elements in memory than in its shape. */
    if (axes_of(tensor, axes) != 1 || axes[0].size != elements)
        return 0;
    *axis = axes[0];
    if (most > 0 && elements > most) {
        if (!is_in_order(tensor))
            return 0;
        const int64_t every = (elements + most - 1) / most;
        axis->size = (elements + every - 1) / every;
        axis->stride *= every;
    }
    return 1;
}

/* A tensor of floating-point numbers, and a copy of what is taken of it where there is one. */
typedef struct {
    DLTensor tensor, copy;
    Axis axis;
    Squares squares;
} Compared;

static int compared(PyObject *object, PyObject *kept, int64_t most, Compared *found) {
    Axis axis;
    if (!one_axis(object, &found->tensor, most, &found->axis))
        return 0;
    found->squares = squares_of(&found->tensor);
    found->copy.data = NULL;
    if (found->squares == NULL || kept == NULL)
        return found->squares != NULL;
    return one_axis(kept, &found->copy, 0, &axis) && squares_of(&found->copy) == found->squares &&
           axis.size == found->axis.size && axis.stride == 1;
}

/* The arguments of the functions below; 0 where there is nothing to read. */
static int tuples_of(PyObject *args, PyObject **tensors, PyObject **copies, long long *most) {
    if (!PyArg_ParseTuple(args, "O!OL", &PyTuple_Type, tensors, copies, most))
        return 0;
    if (*copies == Py_None)
        *copies = NULL;
    return tensor_of != NULL &&
           (*copies == NULL ||
            (PyTuple_Check(*copies) && PyTuple_Size(*copies) == PyTuple_Size(*tensors)));
}

static PyObject *item_or_null(PyObject *tuple, Py_ssize_t i) {
    return tuple == NULL ? NULL : PyTuple_GetItem(tuple, i);
}

PyDoc_STRVAR(are_here_doc,
             "are_here(tensors, copies, most)\n--\n\n"
             "Whether `norms` can read every tensor of a tuple, and its copy where there are copies.");

static PyObject *are_here(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors, *copies;
    long long most;
    if (!tuples_of(args, &tensors, &copies, &most))
        return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++) {
        Compared found;
        if (!compared(PyTuple_GetItem(tensors, i), item_or_null(copies, i), most, &found))
            return PyErr_Occurred() ? NULL : PyBool_FromLong(0);
    }
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(norms_doc,
             "norms(tensors, copies, most)\n--\n\n"
             "The Euclidean norm of each tensor of a tuple; with copies, of each tensor minus its copy,\n"
             "which then becomes the tensor. Of more elements than `most`, as many are read, evenly\n"
             "spread; 0 reads all. None, with nothing written, where this cannot read one.");

static PyObject *norms(PyObject *module, PyObject *args) {
    PyObject *tensors, *copies;
    long long most;
    PyObject *can_read = are_here(module, args); /* look at all before writing */
    if (can_read != Py_True) {
        Py_XDECREF(can_read);
        if (can_read == NULL)
            return NULL;
        Py_RETURN_NONE;
    }
    Py_DECREF(can_read);
    if (!tuples_of(args, &tensors, &copies, &most))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        Compared x;
        double sum = 0;
        if (compared(PyTuple_GetItem(tensors, i), item_or_null(copies, i), most, &x))
            sum = x.squares((const char *)x.tensor.data + x.tensor.byte_offset,
                            (ptrdiff_t)x.axis.size, (ptrdiff_t)x.axis.stride,
                            x.copy.data ? (char *)x.copy.data + x.copy.byte_offset : NULL);
        PyObject *number = PyFloat_FromDouble(sqrt(sum));
        if (number == NULL || PyList_SetItem(found, i, number) != 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

PyDoc_STRVAR(largest_doc,
             "largest(tensors, most)\n--\n\n"
             "The largest magnitude in each tensor of a tuple, of all elements or of so many, as in\n"
             "`norms`. None where this cannot read one.");

static PyObject *largest(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors;
    long long most;
    if (!PyArg_ParseTuple(args, "O!L", &PyTuple_Type, &tensors, &most))
        return NULL;
    if (tensor_of == NULL)
        Py_RETURN_NONE;
    const Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        DLTensor tensor;
        Axis axis;
        double low, high;
        int can_read = one_axis(PyTuple_GetItem(tensors, i), &tensor, most, &axis);
        if (can_read) {
            tensor.ndim = 1;
            tensor.shape = &axis.size;
            tensor.strides = &axis.stride;
            can_read = range_in(&tensor, &low, &high);
        }
        PyObject *number = can_read ? PyFloat_FromDouble(high) : NULL;
        if (number == NULL || PyList_SetItem(found, i, number) != 0) {
            Py_DECREF(found);
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
    }
    return found;
}
