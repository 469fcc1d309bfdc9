/* Euclidean norms of tensors, and of how far each is from a copy of it, many in one call.
 *
 * _native.c includes this. It reads floating-point tensors along one axis, as dense ones and every
 * k-th element of these have it.
 */

enum { LANES = 16 };

/* Sums of squares: of a tensor; with a copy also of the tensor minus the copy, and of the copy. */
typedef struct {
    double tensor, change, copy;
} Squares;

static double sum_of(const double *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

/* Adds up the squares of x; where there is a copy, it then becomes x. */
#define SQUARES(TYPE, NUMBER)                                                                      \
    do {                                                                                           \
        const TYPE *restrict x = start;                                                            \
        TYPE *restrict kept = copy;                                                                \
        double sums[LANES] = {0}, changes[LANES] = {0}, before[LANES] = {0};                       \
        ptrdiff_t i = 0;                                                                           \
        if (kept == NULL && step == 1)                                                             \
            for (; i + LANES <= count; i += LANES)                                                 \
                for (int lane = 0; lane < LANES; lane++) {                                         \
                    const double number = NUMBER(x[i + lane]);                                     \
                    sums[lane] += number * number;                                                 \
                }                                                                                  \
        else if (step == 1)                                                                        \
            for (; i + LANES <= count; i += LANES) {                                               \
                for (int lane = 0; lane < LANES; lane++) {                                         \
                    const double number = NUMBER(x[i + lane]), old = NUMBER(kept[i + lane]);       \
                    const double change = number - old;                                            \
                    sums[lane] += number * number;                                                 \
                    changes[lane] += change * change;                                              \
                    before[lane] += old * old;                                                     \
                }                                                                                  \
                memcpy(kept + i, x + i, LANES * sizeof *x);                                        \
            }                                                                                      \
        for (; i < count; i++) {                                                                   \
            const double number = NUMBER(x[i * step]);                                             \
            sums[0] += number * number;                                                            \
            if (kept != NULL) {                                                                    \
                const double old = NUMBER(kept[i]);                                                \
                changes[0] += (number - old) * (number - old);                                     \
                before[0] += old * old;                                                            \
                kept[i] = x[i * step];                                                             \
            }                                                                                      \
        }                                                                                          \
        *found = (Squares){sum_of(sums), sum_of(changes), sum_of(before)};                         \
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

LOOP static void squares_float32(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy,
                                 Squares *found) {
    SQUARES(float, AS_DOUBLE);
}

LOOP static void squares_float64(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy,
                                 Squares *found) {
    SQUARES(double, AS_DOUBLE);
}

LOOP static void squares_bfloat16(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy,
                                  Squares *found) {
    SQUARES(uint16_t, from_bfloat16);
}

static void squares_float16(const void *start, ptrdiff_t count, ptrdiff_t step, void *copy,
                            Squares *found) {
    SQUARES(uint16_t, from_float16);
}

typedef void (*SquaresOf)(const void *, ptrdiff_t, ptrdiff_t, void *, Squares *);

static SquaresOf squares_of(const DLTensor *tensor) {
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
    if (tensor_of(object, tensor) != 0) {
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
    SquaresOf squares;
} Compared;

static int compared(PyObject *object, PyObject *kept, int64_t most, Compared *found) {
    Axis axis;
    if (!has_memory(object) || !one_axis(object, &found->tensor, most, &found->axis))
        return 0;
    found->squares = squares_of(&found->tensor);
    found->copy.data = NULL;
    if (found->squares == NULL || kept == NULL)
        return found->squares != NULL;
    /* A copy was made of such a tensor. */
    return one_axis(kept, &found->copy, 0, &axis) && squares_of(&found->copy) == found->squares &&
           axis.size == found->axis.size && axis.stride == 1;
}

/* The tensors of a tuple, each with its copy where there are copies; NULL where one cannot be read,
 * without an error. PyMem_Free frees it. */
static Compared *all_compared(PyObject *tensors, PyObject *copies, int64_t most) {
    const Py_ssize_t count = PyTuple_Size(tensors);
    if (tensor_of == NULL || (copies != NULL && PyTuple_Size(copies) != count))
        return NULL;
    Compared *found = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *found);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyObject *copy = copies == NULL ? NULL : PyTuple_GetItem(copies, i);
        if (!compared(PyTuple_GetItem(tensors, i), copy, most, &found[i])) {
            PyMem_Free(found);
            found = NULL;
        }
    }
    return found;
}

/* The same of the arguments (tensors, copies, most): all of them, before one is written. */
static Compared *with_copies(PyObject *args, PyObject **tensors) {
    PyObject *copies;
    long long most;
    if (!PyArg_ParseTuple(args, "O!O!L", &PyTuple_Type, tensors, &PyTuple_Type, &copies, &most))
        return NULL;
    return all_compared(*tensors, copies, most);
}

static Squares squares_in(const Compared *x) {
    Squares found;
    x->squares((const char *)x->tensor.data + x->tensor.byte_offset, (ptrdiff_t)x->axis.size,
               (ptrdiff_t)x->axis.stride,
               x->copy.data ? (char *)x->copy.data + x->copy.byte_offset : NULL, &found);
    return found;
}

static int put_norm(PyObject *list, Py_ssize_t i, double squares) {
    PyObject *number = PyFloat_FromDouble(sqrt(squares));
    return number == NULL ? -1 : PyList_SetItem(list, i, number);
}

PyDoc_STRVAR(are_here_doc,
             "are_here(tensors, copies, most)\n--\n\n"
             "Whether every tensor of a tuple can be read, and compared with its copy where there are\n"
             "copies.");

static PyObject *are_here(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors, *copies;
    long long most;
    if (!PyArg_ParseTuple(args, "O!OL", &PyTuple_Type, &tensors, &copies, &most))
        return NULL;
    if (copies != Py_None && !PyTuple_Check(copies))
        Py_RETURN_FALSE;
    Compared *found = all_compared(tensors, copies == Py_None ? NULL : copies, most);
    PyMem_Free(found);
    return PyBool_FromLong(found != NULL);
}

PyDoc_STRVAR(norms_doc,
             "norms(tensors, most)\n--\n\n"
             "The Euclidean norm of each tensor of a tuple. Of more elements than `most`, as many are\n"
             "read, evenly spread; 0 reads all. None where this cannot read one.");

static PyObject *norms(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors;
    long long most;
    if (!PyArg_ParseTuple(args, "O!L", &PyTuple_Type, &tensors, &most))
        return NULL;
    Compared *given = all_compared(tensors, NULL, most);
    if (given == NULL)
        Py_RETURN_NONE;
    const Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++)
        if (put_norm(found, i, squares_in(&given[i]).tensor) != 0)
            Py_CLEAR(found);
    PyMem_Free(given);
    return found;
}

PyDoc_STRVAR(changes_doc,
             "changes(tensors, copies, most)\n--\n\n"
             "Three lists of Euclidean norms: of each tensor minus its copy, of the tensor, and of the\n"
             "copy, which then becomes the tensor. `most` is as in `norms`. None, with nothing written,\n"
             "where this cannot read one.");

static PyObject *changes(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors;
    Compared *given = with_copies(args, &tensors);
    if (PyErr_Occurred())
        return NULL;
    if (given == NULL)
        Py_RETURN_NONE;
    const Py_ssize_t count = PyTuple_Size(tensors);
    PyObject *found[3] = {PyList_New(count), PyList_New(count), PyList_New(count)};
    int is_right = found[0] != NULL && found[1] != NULL && found[2] != NULL;
    for (Py_ssize_t i = 0; is_right && i < count; i++) {
        const Squares sums = squares_in(&given[i]);
        is_right = put_norm(found[0], i, sums.change) == 0 &&
                   put_norm(found[1], i, sums.tensor) == 0 && put_norm(found[2], i, sums.copy) == 0;
    }
    PyMem_Free(given);
    PyObject *all = is_right ? PyTuple_Pack(3, found[0], found[1], found[2]) : NULL;
    for (int i = 0; i < 3; i++)
        Py_XDECREF(found[i]);
    return all;
}

/* Writes what is taken of a tensor into its copy. */
static void take_copy(const Compared *x) {
    const size_t size = x->tensor.dtype.bits / 8;
    const char *from = (const char *)x->tensor.data + x->tensor.byte_offset;
    char *to = (char *)x->copy.data + x->copy.byte_offset;
    if (x->axis.stride == 1) {
        memcpy(to, from, (size_t)x->axis.size * size);
        return;
    }
    for (int64_t i = 0; i < x->axis.size; i++)
        memcpy(to + (size_t)i * size, from + i * x->axis.stride * (ptrdiff_t)size, size);
}

PyDoc_STRVAR(copied_doc,
             "copied(tensors, copies, most)\n--\n\n"
             "Whether each copy has become its tensor, or what is taken of it. `most` is as in `norms`.\n"
             "False, with nothing written, where this cannot read one.");

static PyObject *copied(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors;
    Compared *given = with_copies(args, &tensors);
    if (PyErr_Occurred())
        return NULL;
    if (given == NULL)
        Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); i++)
        take_copy(&given[i]);
    PyMem_Free(given);
    Py_RETURN_TRUE;
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
        PyObject *object = PyTuple_GetItem(tensors, i);
        int can_read = has_memory(object) && one_axis(object, &tensor, most, &axis);
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
