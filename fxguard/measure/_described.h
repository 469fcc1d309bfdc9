/* What a tensor of data holds, in four numbers.
 *
 * _native.c includes this behind _norms.h.
 */

enum { MOST_READ = 1 << 13, SLOTS = 4 * MOST_READ, AT_ONCE = 512 };

/* What is read of a tensor: its numbers, or its integers. */
typedef struct {
    ptrdiff_t count;
    double numbers[MOST_READ];
    int64_t integers[MOST_READ];
    uint16_t slots[SLOTS]; /* a table of distinct integers, by place; 0 is a free one */
} Sample;

#define READ(TYPE, NUMBER, INTO)                                                                   \
    do {                                                                                           \
        const TYPE *x = (const TYPE *)start;                                                       \
        for (ptrdiff_t i = 0; i < sample->count; i++)                                              \
            INTO[i] = NUMBER(x[i * step]);                                                         \
    } while (0)

#define AS_INTEGER(x) ((int64_t)(x))
#define AS_TRUTH(x) ((x) != 0)

/* Whether the elements are of a type that is read here; then the sample has them. */
static int read_sample(const DLTensor *tensor, const char *start, ptrdiff_t step, Sample *sample) {
    if (tensor->dtype.lanes != 1)
        return 0;
    switch (tensor->dtype.code << 8 | tensor->dtype.bits) {
    case CODE_FLOAT << 8 | 16:
        READ(uint16_t, from_float16, sample->numbers);
        return 1;
    case CODE_BFLOAT << 8 | 16:
        READ(uint16_t, from_bfloat16, sample->numbers);
        return 1;
    case CODE_FLOAT << 8 | 32:
        READ(float, AS_DOUBLE, sample->numbers);
        return 1;
    case CODE_FLOAT << 8 | 64:
        READ(double, AS_DOUBLE, sample->numbers);
        return 1;
    case CODE_BOOL << 8 | 8:
        READ(uint8_t, AS_TRUTH, sample->integers);
        return 1;
    case CODE_UINT << 8 | 8:
        READ(uint8_t, AS_INTEGER, sample->integers);
        return 1;
    case CODE_INT << 8 | 8:
        READ(int8_t, AS_INTEGER, sample->integers);
        return 1;
    case CODE_INT << 8 | 16:
        READ(int16_t, AS_INTEGER, sample->integers);
        return 1;
    case CODE_INT << 8 | 32:
        READ(int32_t, AS_INTEGER, sample->integers);
        return 1;
    case CODE_INT << 8 | 64:
        READ(int64_t, AS_INTEGER, sample->integers);
        return 1;
    default:
        return 0;
    }
}

typedef struct {
    double mean, zeros, typical; /* the share of zeros; the geometric mean of the others */
} Described;

/* Mantissas are multiplied, and their exponents added, since a logarithm takes as long as many. */
static Described described_numbers(const Sample *sample) {
    double sum = 0, logs = 0, product = 1;
    ptrdiff_t some = 0;
    int64_t exponents = 0;
    for (ptrdiff_t i = 0; i < sample->count; i++) {
        const double number = sample->numbers[i];
        sum += number;
        if (number == 0)
            continue;
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        const int64_t exponent = (int64_t)(bits >> 52 & 0x7ff);
        if (exponent == 0 || exponent == 0x7ff) { /* a subnormal number, inf or NaN */
            logs += log2(fabs(number));
        } else {
            bits = (bits & 0xfffffffffffff) | (uint64_t)1023 << 52; /* in [1, 2) */
            double mantissa;
            memcpy(&mantissa, &bits, sizeof mantissa);
            exponents += exponent - 1023;
            product *= mantissa;
        }
        if (++some % AT_ONCE == 0) {
            logs += log2(product);
            product = 1;
        }
    }
    logs += log2(product) + (double)exponents;
    const double count = (double)sample->count;
    return (Described){sum / count, 1 - (double)some / count,
                       exp2(logs / (double)(some ? some : 1))};
}

static Described described_integers(Sample *sample) {
    double sum = 0;
    ptrdiff_t some = 0, distinct = 0;
    int bits = 6;
    while (((ptrdiff_t)1 << bits) < 4 * sample->count)
        bits++;
    const size_t last = ((size_t)1 << bits) - 1;
    memset(sample->slots, 0, (last + 1) * sizeof sample->slots[0]);
    for (ptrdiff_t i = 0; i < sample->count; i++) {
        const int64_t number = sample->integers[i];
        sum += (double)number;
        some += number != 0;
        size_t slot = (size_t)((uint64_t)number * 0x9e3779b97f4a7c15u >> (64 - bits));
        while (sample->slots[slot] != 0 && sample->integers[sample->slots[slot] - 1] != number)
            slot = (slot + 1) & last;
        if (sample->slots[slot] == 0) {
            sample->slots[slot] = (uint16_t)(i + 1);
            distinct++;
        }
    }
    const double count = (double)sample->count;
    return (Described){sum / count, 1 - (double)some / count, (double)distinct};
}

PyDoc_STRVAR(described_doc,
             "described(tensor)\n--\n\n"
             "The largest magnitude; and of up to 8192 elements, evenly spread, the mean, the share of\n"
             "zeros and the geometric mean of the other magnitudes, or of integers how many are\n"
             "distinct. None where this cannot read the tensor.");

static PyObject *described(PyObject *module, PyObject *object) {
    (void)module;
    DLTensor tensor;
    Axis axis;
    double low, high;
    if (tensor_of == NULL || !has_memory(object) || !one_axis(object, &tensor, MOST_READ, &axis) ||
        !range_in(&tensor, &low, &high))
        Py_RETURN_NONE;
    static Sample sample; /* from here on the interpreter's lock is held */
    sample.count = (ptrdiff_t)axis.size;
    if (!read_sample(&tensor, (const char *)tensor.data + tensor.byte_offset,
                     (ptrdiff_t)axis.stride, &sample))
        Py_RETURN_NONE;
    const int is_number = tensor.dtype.code == CODE_FLOAT || tensor.dtype.code == CODE_BFLOAT;
    const Described of = is_number ? described_numbers(&sample) : described_integers(&sample);
    return Py_BuildValue("(dddd)", high, of.mean, of.zeros, of.typical);
}
