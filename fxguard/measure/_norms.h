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

/* A tensor as one axis: where it begins, how many elements, how far apart. 0 if it is none. */
static int one_axis(PyObject *object, DLTensor *tensor, Axis *axis) {
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
    return 1;
}

PyDoc_STRVAR(norms_doc,
             "norms(tensors, copies)\n--\n\n"
             "The Euclidean norm of each tensor of a tuple; with copies, of each tensor minus its copy,\n"
             "which then becomes the tensor. None, with nothing written, where this cannot read one.");

static PyObject *norms(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *tensors, *copies;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &tensors, &copies))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(tensors);
    const int has_copies = copies != Py_None;
    if (tensor_of == NULL || (has_copies && (!PyTuple_Check(copies) || PyTuple_Size(copies) != count)))
        Py_RETURN_NONE;
    for (int writes = has_copies ? 0 : 1; writes < 2; writes++) { /* look at all before writing */
        PyObject *found = writes ? PyList_New(count) : NULL;
        if (writes && found == NULL)
            return NULL;
        for (Py_ssize_t i = 0; i < count; i++) {
            DLTensor tensor, copy;
            Axis axis, of_copy;
            int fits = one_axis(PyTuple_GetItem(tensors, i), &tensor, &axis);
            const Squares squares = fits ? squares_of(&tensor) : NULL;
            if (squares != NULL && has_copies)
                fits = one_axis(PyTuple_GetItem(copies, i), &copy, &of_copy) &&
                       squares_of(&copy) == squares && of_copy.size == axis.size &&
                       of_copy.stride == 1;
            if (squares == NULL || !fits) {
                Py_XDECREF(found);
                Py_RETURN_NONE;
            }
            if (!writes)
                continue;
            const double sum = squares((const char *)tensor.data + tensor.byte_offset,
                                       (ptrdiff_t)axis.size, (ptrdiff_t)axis.stride,
                                       has_copies ? (char *)copy.data + copy.byte_offset : NULL);
            PyObject *number = PyFloat_FromDouble(sqrt(sum));
            if (number == NULL || PyList_SetItem(found, i, number) != 0) {
                Py_DECREF(found);
                return NULL;
            }
        }
        if (writes)
            return found;
    }
    Py_RETURN_NONE; /* not reached */
}
