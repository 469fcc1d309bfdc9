/* What a script computes, operation by operation: runs each, reads what it made, and keeps a short
 * record of it. A part of _native.c, which includes it.
 *
 * A record keeps no tensor, and is no object of the garbage collector: it holds functions, code,
 * numbers and other records, all of them older. fxguard/script/operations.py has the same in Python.
 */

enum { MOST_LOST = 50, NO_PATH = -1, UNCOUNTED = -1, FEW = 4 };

typedef struct {
    PyObject_HEAD
    PyObject *func, *code, *kwargs, *dtype;
    PyObject *args;      /* NULL for few, which are here: a tuple would call the garbage collector */
    PyObject *few[FEW];
    PyObject *reference; /* to the tensor; NULL where the table has another record in its place */
    PyObject *later;     /* has the numbers once a device has told them; NULL where they are known */
    double low, high;
    long count, last, depth, path, version;
} Record;

static PyTypeObject *record_type;

/* A record may be the last to hold another one, and so on: they go one after the other. */
static PyObject *lost;
static int nested;

static void let_go(Record *record) {
    Py_CLEAR(record->func);
    Py_CLEAR(record->code);
    Py_CLEAR(record->args);
    Py_CLEAR(record->kwargs);
    Py_CLEAR(record->dtype);
    Py_CLEAR(record->later);
    if (record->count <= FEW)
        for (long i = 0; i < record->count; i++)
            Py_CLEAR(record->few[i]);
    PyTypeObject *type = Py_TYPE(record);
    PyObject_Free(record);
    Py_DECREF(type);
}

static void record_dealloc(PyObject *self) {
    Record *record = (Record *)self;
    Py_CLEAR(record->reference);
    if (nested >= MOST_LOST) {
        record->reference = lost; /* a link now */
        lost = self;
        return;
    }
    nested++;
    let_go(record);
    if (--nested == 0)
        while (lost != NULL) {
            Record *next = (Record *)lost;
            lost = next->reference;
            next->reference = NULL;
            nested++;
            let_go(next);
            nested--;
        }
}

static PyObject *held(PyObject *object) {
    PyObject *found = object == NULL ? Py_None : object;
    Py_INCREF(found);
    return found;
}

static PyObject *args_of(Record *record) {
    if (record->args != NULL)
        return held(record->args);
    PyObject *args = PyTuple_New(record->count);
    for (long i = 0; args != NULL && i < record->count; i++)
        PyTuple_SetItem(args, i, held(record->few[i]));
    return args;
}

static PyObject *name_of_pair; /* the attribute of what has the numbers later */

static PyObject *pair_of_record(Record *record) {
    if (record->later != NULL)
        return PyObject_GetAttr(record->later, name_of_pair);
    return Py_BuildValue("dd", record->low, record->high);
}

#define GETTER(NAME, RESULT)                                                                       \
    static PyObject *record_##NAME(PyObject *self, void *closure) {                                \
        (void)closure;                                                                             \
        Record *record = (Record *)self;                                                           \
        return RESULT;                                                                             \
    }

GETTER(func, held(record->func))
GETTER(code, held(record->code))
GETTER(args, args_of(record))
GETTER(kwargs, record->kwargs == NULL ? PyDict_New() : held(record->kwargs))
GETTER(dtype, held(record->dtype))
GETTER(last, PyLong_FromLong(record->last))
GETTER(depth, PyLong_FromLong(record->depth))
GETTER(path, record->path == NO_PATH ? held(NULL) : PyLong_FromLong(record->path))
GETTER(pair, pair_of_record(record))
GETTER(later, held(record->later))

static PyGetSetDef RECORD_ATTRIBUTES[] = {
    {"func", record_func, NULL, "What ran.", NULL},
    {"code", record_code, NULL, "The code that called it.", NULL},
    {"args", record_args, NULL, "Its arguments, without their tensors.", NULL},
    {"kwargs", record_kwargs, NULL, "Likewise.", NULL},
    {"dtype", record_dtype, NULL, "Of what it made.", NULL},
    {"last", record_last, NULL, "The place in the code.", NULL},
    {"depth", record_depth, NULL, "How many records led to it.", NULL},
    {"path", record_path, NULL, "Which of several results it is.", NULL},
    {"pair", record_pair, NULL, "The smallest and the largest magnitude.", NULL},
    {"later", record_later, NULL, "Has them once a device has told them, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot RECORD_SLOTS[] = {
    {Py_tp_dealloc, record_dealloc},
    {Py_tp_getset, RECORD_ATTRIBUTES},
    {Py_tp_doc, "One operation that has run."},
    {0, NULL},
};

static PyType_Spec RECORD_SPEC = {
    .name = "fxguard.measure._native.Record",
    .basicsize = sizeof(Record),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = RECORD_SLOTS,
};

#include "_table.h"

/* The records of live tensors, and what runs each operation. */

enum { KINDS_OF_CODE = 256 };
enum { CODE_OF_SCRIPT = 0, CODE_INNER = 1, CODE_OF_GRAPH = 2, CODE_OF_SCALER = 3 };

typedef struct {
    PyObject_HEAD
    PyObject *hooks;                       /* what Python does with operations */
    PyObject *mode;                        /* whose __torch_function__ it is; NULL for nobody's */
    PyObject *followed; /* what belongs to a loss: its tensors, its weights, functions that read no
                         * number, and, for _losses.h, its batch, that batch's live tensors, its
                         * tape, its forward, and two that say whether to run in brief; NULL where
                         * Python has to be asked */
    PyObject *plain_types, *apart, *views; /* sets: of types, of functions, of functions */
    PyObject *unknown;                     /* in the place of a tensor without a record */
    PyObject *setitem, *tolist;
    PyObject *leaves;  /* of autograd that were read: address to a weak reference */
    PyObject *noted;   /* the key in the metadata of a node of autograd */
    PyObject *is_grad_enabled;
    PyObject *wrapper;    /* the type of what gets an attribute */
    Table table;
    PyObject *codes[KINDS_OF_CODE]; /* code that was asked about, and its kind */
    unsigned char kinds[KINDS_OF_CODE];
    long most_depth;
    long long count, unread;
    char pauses, has_bad, awaits, is_direct;
    char infers; /* whether the last tensor was made in inference mode */
} Operations;

/* Names of attributes. */
static PyObject *is_inference, *metadata, *name_kind, *name_turned, *name_other, *name_apart,
    *name_inside, *name_raised, *name_objected, *name_otherwise, *name_pair, *name_waits, *name_name,
    *name_get, *name_set, *name_file;

static long version_of_tensor(PyObject *tensor) {
    PyObject *found = attribute_of(tensor, &version);
    if (found == NULL)
        return UNCOUNTED;
    const long number = PyLong_AsLong(found);
    Py_DECREF(found);
    return number;
}

static int is_tensor(PyObject *object) {
    return (PyObject *)Py_TYPE(object) == plain || (PyObject *)Py_TYPE(object) == parameter ||
           PyObject_TypeCheck(object, (PyTypeObject *)plain);
}

/* The record of what a tensor holds now, borrowed; NULL without one, or where an error came. */
static Record *record_of(Operations *all, PyObject *tensor, int whatever_version) {
    Record *record = entry_of(&all->table, tensor)->record;
    if (record == NULL || PyWeakref_GetObject(record->reference) != tensor)
        return NULL;
    if (whatever_version || record->version == UNCOUNTED)
        return record;
    return version_of_tensor(tensor) == record->version && !PyErr_Occurred() ? record : NULL;
}

/* What a record keeps of an argument. */
static PyObject *kept_of(Operations *all, PyObject *value, PyObject *result, long *depth) {
    PyObject *found = value;
    if (is_tensor(value)) {
        found = (PyObject *)record_of(all, value, value == result);
        if (found == NULL && PyErr_Occurred())
            return NULL;
        if (found == NULL)
            found = all->unknown;
        else if (((Record *)found)->depth >= *depth)
            *depth = ((Record *)found)->depth + 1;
    } else if (PyTuple_CheckExact(value)) {
        const Py_ssize_t count = PyTuple_Size(value);
        PyObject *items = PyTuple_New(count);
        for (Py_ssize_t i = 0; items != NULL && i < count; i++) {
            PyObject *kept = kept_of(all, PyTuple_GetItem(value, i), result, depth);
            if (kept == NULL)
                Py_CLEAR(items);
            else
                PyTuple_SetItem(items, i, kept);
        }
        return items;
    } else if (PyList_CheckExact(value)) {
        PyObject *items = PyList_New(0);
        for (Py_ssize_t i = 0; items != NULL && i < PyList_Size(value); i++) {
            PyObject *item = PyList_GetItem(value, i);
            Py_INCREF(item);
            PyObject *kept = kept_of(all, item, result, depth);
            Py_DECREF(item);
            if (kept == NULL || PyList_Append(items, kept) != 0)
                Py_CLEAR(items);
            Py_XDECREF(kept);
        }
        return items;
    } else if (!PyFloat_CheckExact(value) && !PyLong_CheckExact(value) && value != Py_None) {
        const int is_plain = PySet_Contains(all->plain_types, (PyObject *)Py_TYPE(value));
        if (is_plain < 0)
            return NULL;
        if (!is_plain)
            found = all->unknown;
    }
    Py_INCREF(found);
    return found;
}

static PyObject *kept_of_names(Operations *all, PyObject *kwargs, PyObject *result, long *depth) {
    PyObject *kept = PyDict_New(), *name, *value;
    Py_ssize_t at = 0;
    while (kept != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        PyObject *found = kept_of(all, value, result, depth);
        if (found == NULL || PyDict_SetItem(kept, name, found) != 0)
            Py_CLEAR(kept);
        Py_XDECREF(found);
    }
    return kept;
}

/* The same without records, which is what begins a new chain. */
static PyObject *without_records(Operations *all, PyObject *value) {
    if (Py_TYPE(value) == record_type)
        value = all->unknown;
    const int is_tuple = PyTuple_CheckExact(value);
    if (!is_tuple && !PyList_CheckExact(value)) {
        Py_INCREF(value);
        return value;
    }
    const Py_ssize_t count = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
    PyObject *items = is_tuple ? PyTuple_New(count) : PyList_New(count);
    for (Py_ssize_t i = 0; items != NULL && i < count; i++) {
        PyObject *kept = without_records(
            all, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i));
        if (kept == NULL)
            Py_CLEAR(items);
        else if (is_tuple)
            PyTuple_SetItem(items, i, kept);
        else
            PyList_SetItem(items, i, kept);
    }
    return items;
}

/* Whether code is the script's, a library's, a graph's, or a GradScaler's. -1 where an error came instead. */
static int kind_of_code(Operations *all, PyObject *code) {
    const size_t at = ((uintptr_t)code >> 4) % KINDS_OF_CODE;
    if (all->codes[at] == code)
        return all->kinds[at];
    PyObject *found = PyObject_CallMethodObjArgs(all->hooks, name_kind, code, NULL);
    const long kind = found == NULL ? -1 : PyLong_AsLong(found);
    Py_XDECREF(found);
    if (kind < 0)
        return -1;
    PyObject *before = all->codes[at];
    Py_INCREF(code);
    all->codes[at] = code;
    all->kinds[at] = (unsigned char)kind;
    Py_XDECREF(before);
    return (int)kind;
}

/* Finds the code of the script that runs now, and the place in it. 1 where there is some, 0 where
 * not, -1 where an error came instead. */
static int find_caller(Operations *all, PyObject **code, long *last) {
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != NULL && frame != Py_None) {
        PyObject *own = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int kind = kind_of_code(all, own);
        if (kind == CODE_OF_SCRIPT) {
            PyObject *at = attribute_of(frame, &f_lasti);
            Py_DECREF(frame);
            *last = at == NULL ? -1 : PyLong_AsLong(at);
            *code = own;
            Py_XDECREF(at);
            if (at != NULL)
                return 1;
            Py_DECREF(own);
            return -1;
        }
        Py_DECREF(own);
        const int is_inner = kind == CODE_INNER || kind == CODE_OF_SCALER;
        PyObject *back = is_inner ? attribute_of(frame, &f_back) : NULL;
        Py_DECREF(frame);
        if (!is_inner)
            return kind < 0 ? -1 : 0;
        frame = back;
        if (back == NULL)
            return -1;
    }
    Py_XDECREF(frame);
    return 0;
}

/* Fills in what a record keeps of the arguments. */
static int keep_args(Operations *all, Record *record, PyObject *args, PyObject *kwargs,
                     PyObject *result, int keeps_all) {
    const Py_ssize_t count = PyTuple_Size(args);
    if (count > FEW) {
        record->count = FEW + 1;
        record->args = kept_of(all, args, result, &record->depth);
        if (record->args == NULL)
            return -1;
    } else {
        for (; record->count < count; record->count++) {
            PyObject *value = PyTuple_GetItem(args, record->count);
            record->few[record->count] = kept_of(all, value, result, &record->depth);
            if (record->few[record->count] == NULL)
                return -1;
        }
    }
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        record->kwargs = kept_of_names(all, kwargs, result, &record->depth);
        if (record->kwargs == NULL)
            return -1;
    }
    if (record->depth <= all->most_depth || keeps_all)
        return 0;
    record->depth = 0;
    PyObject **each = record->args != NULL ? &record->args : record->few;
    for (long i = 0; i < (record->args != NULL ? 1 : record->count); i++) {
        PyObject *before = each[i];
        each[i] = without_records(all, before);
        if (each[i] == NULL) {
            each[i] = before;
            return -1;
        }
        Py_DECREF(before);
    }
    return 0;
}

/* How often a tensor that was just made was written; nobody counts it in inference mode. To ask there
 * takes a hundred times as long, for an error: so who was one of those before is asked first. */
static long version_of_made(Operations *all, PyObject *tensor) {
    if (all->infers) {
        PyObject *uncounted = PyObject_CallMethodObjArgs(tensor, is_inference, NULL);
        all->infers = uncounted == Py_True;
        Py_XDECREF(uncounted);
        if (uncounted != Py_False)
            return UNCOUNTED;
    }
    const long number = version_of_tensor(tensor);
    if (number == UNCOUNTED && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        all->infers = 1;
    }
    return number;
}

/* A new record, whose place and numbers are set by the caller. */
static Record *record_made(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs,
                           PyObject *result, PyObject *its_dtype, long path, int keeps_all) {
    Record *record = PyObject_New(Record, record_type);
    if (record == NULL)
        return NULL;
    record->func = held(func);
    record->dtype = held(its_dtype);
    record->code = record->kwargs = record->args = record->reference = record->later = NULL;
    record->path = path;
    record->depth = record->count = 0;
    record->last = -1;
    if (keep_args(all, record, args, kwargs, result, keeps_all) == 0) {
        record->version = version_of_made(all, result);
        if (!PyErr_Occurred())
            record->reference = PyWeakref_NewRef(result, NULL);
        if (record->reference != NULL)
            return record;
    }
    Py_DECREF(record);
    return NULL;
}

/* Notes a tensor that cannot be made again, at its position: a leaf, or one without a record. */
static int give(Operations *all, PyObject *value, PyObject *kept, long position, PyObject *given) {
    PyObject *found = attribute_of(value, &is_leaf);
    if (found == NULL)
        return -1;
    const int leaf = found == Py_True;
    Py_DECREF(found);
    if (!leaf && Py_TYPE(kept) == record_type)
        return 0;
    PyObject *counted = attribute_of(value, &version);
    PyObject *key = PyLong_FromLong(position);
    PyObject *pair = counted == NULL ? NULL : PyTuple_Pack(2, value, counted);
    int done = key == NULL || pair == NULL ? -1 : PyDict_SetItem(given, key, pair);
    Py_XDECREF(counted);
    Py_XDECREF(key);
    Py_XDECREF(pair);
    if (done != 0 || !leaf || !attribute_is(value, &requires_grad, Py_True))
        return done;
    key = PyLong_FromVoidPtr(value);
    PyObject *reference = PyWeakref_NewRef(value, NULL);
    done = key == NULL || reference == NULL ? -1 : PyDict_SetItem(all->leaves, key, reference);
    Py_XDECREF(key);
    Py_XDECREF(reference);
    return done;
}

/* The same for an argument, or for what is nested in it; counts positions. */
static int give_all(Operations *all, PyObject *value, PyObject *kept, long *position,
                    PyObject *given) {
    const int is_tuple = PyTuple_CheckExact(value);
    if (is_tuple || PyList_CheckExact(value)) {
        const Py_ssize_t count = is_tuple ? PyTuple_Size(kept) : PyList_Size(kept);
        if (count != (is_tuple ? PyTuple_Size(value) : PyList_Size(value)))
            return PyErr_Occurred() ? -1 : 0; /* it was changed meanwhile */
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *item = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
            PyObject *own = is_tuple ? PyTuple_GetItem(kept, i) : PyList_GetItem(kept, i);
            if (give_all(all, item, own, position, given) != 0)
                return -1;
        }
        return 0;
    }
    const long at = (*position)++;
    return is_tensor(value) ? give(all, value, kept, at, given) : 0;
}

/* Notes an operation at its node of autograd. */
static int note_at_node(Operations *all, Record *record, PyObject *args, PyObject *kwargs,
                        PyObject *result) {
    PyObject *enabled = PyObject_CallNoArgs(all->is_grad_enabled);
    Py_XDECREF(enabled);
    if (enabled != Py_True) /* the node of a view that was written then could not be asked for */
        return enabled == NULL ? -1 : 0;
    PyObject *node = attribute_of(result, &grad_fn);
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node == NULL ? -1 : 0;
    }
    PyObject *kept = PyObject_GetAttr(node, metadata), *given = PyDict_New(), *noted = NULL;
    Py_DECREF(node);
    int done = kept == NULL || given == NULL ? -1 : 0;
    long position = 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_Size(args); i++)
        done = give_all(all, PyTuple_GetItem(args, i),
                        record->args != NULL ? PyTuple_GetItem(record->args, i) : record->few[i],
                        &position, given);
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (done == 0 && record->kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        PyObject *own = PyDict_GetItemWithError(record->kwargs, name);
        done = own == NULL ? -1 : give_all(all, value, own, &position, given);
    }
    if (done == 0)
        noted = PyTuple_Pack(2, record, given);
    done = noted == NULL ? -1 : PyDict_SetItem(kept, all->noted, noted);
    Py_XDECREF(kept);
    Py_XDECREF(given);
    Py_XDECREF(noted);
    return done;
}

/* Counts a tensor whose numbers are not read here, if they may be bad. */
static int count_unread(Operations *all, PyObject *tensor) {
    PyObject *its_dtype = attribute_of(tensor, &dtype);
    if (its_dtype == NULL)
        return -1;
    all->unread += attribute_is(its_dtype, &is_floating_point, Py_True) ||
                   attribute_is(its_dtype, &is_complex, Py_True);
    Py_DECREF(its_dtype);
    return PyErr_Occurred() ? -1 : 0;
}

/* Asks Python for the range of a tensor that is not read here: of complex numbers, or on a device,
 * which tells it later. 0 if it has none, -1 for an error. */
static int ask_for_pair(Operations *all, PyObject *tensor, double *low, double *high,
                        PyObject **later) {
    PyObject *pair = PyObject_CallMethodObjArgs(all->hooks, name_pair, tensor, NULL);
    if (pair == NULL || pair == Py_None) {
        Py_XDECREF(pair);
        return pair == NULL ? -1 : 0;
    }
    if (!PyTuple_Check(pair)) {
        *low = *high = 0.0;
        *later = pair;
        return 1;
    }
    const int is_pair = PyArg_ParseTuple(pair, "dd", low, high);
    Py_DECREF(pair);
    return is_pair ? 1 : -1;
}

/* Whether a dtype is of floating-point or complex numbers. */
static int may_be_bad(PyObject *its_dtype) {
    return attribute_is(its_dtype, &is_floating_point, Py_True) ||
           attribute_is(its_dtype, &is_complex, Py_True);
}

/* Tells Python of an operation that has made no floating-point numbers, if something may be bad. */
static int tell_other(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs,
                      PyObject *result) {
    if (!all->has_bad && !all->awaits)
        return 0;
    PyObject *named = kwargs == NULL ? Py_None : kwargs;
    PyObject *said =
        PyObject_CallMethodObjArgs(all->hooks, name_other, func, args, named, result, NULL);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Notes what an operation has made, or written to. -1 where an error came. */
static int note(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs, PyObject *result,
                long path) {
    if ((PyObject *)Py_TYPE(func) == all->wrapper) { /* such as a gradient: nothing has made it here */
        const int is_view = PySet_Contains(all->views, func);
        if (is_view != 1)
            return is_view;
    }
    const int is_plain = (PyObject *)Py_TYPE(result) == plain || (PyObject *)Py_TYPE(result) == parameter;
    if (!is_plain || !attribute_is(result, &layout, strided) ||
        !attribute_is(result, &is_nested, Py_False)) {
        return PyErr_Occurred() ? -1 : is_plain ? count_unread(all, result) : 0;
    }
    const int is_here = attribute_is(result, &is_cpu, Py_True);
    PyObject *its_dtype = attribute_of(result, &dtype);
    if (its_dtype == NULL)
        return -1;
    const int is_known = PySet_Contains(dtypes, its_dtype);
    Record *record = NULL;
    PyObject *code = NULL, *needs = NULL, *later = NULL;
    int done = -1;
    DLTensor memory;
    double low, high;
    if (is_known < 0)
        goto end;
    if ((is_known == 0 || !is_here) && may_be_bad(its_dtype)) {
        const int is_read = ask_for_pair(all, result, &low, &high, &later);
        if (is_read != 1) {
            done = is_read < 0 ? -1 : count_unread(all, result);
            goto end;
        }
    } else if (is_known == 0 || !is_here) {
        done = PyErr_Occurred() || tell_other(all, func, args, kwargs, result) != 0 ? -1 : 0;
        goto end;
    } else {
        if (tensor_of(result, &memory) != 0) { /* such as a value of a transform */
            PyErr_Clear();
            done = 0;
            goto end;
        }
        if (memory.dtype.code != CODE_FLOAT && memory.dtype.code != CODE_BFLOAT) {
            done = tell_other(all, func, args, kwargs, result);
            goto end;
        }
        if (!range_in(&memory, &low, &high)) {
            done = 0;
            goto end;
        }
    }
    long last;
    const int is_called = find_caller(all, &code, &last);
    if (is_called != 1) {
        done = is_called;
        goto end;
    }
    needs = attribute_of(result, &requires_grad);
    if (needs == NULL)
        goto end;
    record = record_made(all, func, args, kwargs, result, its_dtype, path, needs == Py_True);
    if (record == NULL)
        goto end;
    record->code = code;
    code = NULL;
    record->last = last;
    record->low = low;
    record->high = high;
    record->later = later;
    later = NULL;
    all->count++;
    if (enter(&all->table, result, record) != 0)
        goto end;
    done = 0;
    PyObject *named = kwargs == NULL ? Py_None : kwargs;
    if (needs == Py_True)
        done = note_at_node(all, record, args, kwargs, result);
    PyObject *said = NULL;
    if (done == 0 && record->later != NULL)
        said = PyObject_CallMethodObjArgs(all->hooks, name_waits, record, args, named, result, NULL);
    else if (done == 0 && !(high <= DBL_MAX))
        said = PyObject_CallMethodObjArgs(all->hooks, name_turned, func, args, named, result, NULL);
    else
        said = held(NULL);
    done = said == NULL ? -1 : done;
    Py_XDECREF(said);
end:
    Py_DECREF(its_dtype);
    Py_XDECREF(code);
    Py_XDECREF(needs);
    Py_XDECREF(later);
    Py_XDECREF(record);
    return done;
}

/* Whether an operation has written to a weight, which it returns. */
static int writes_weight(PyObject *args, PyObject *result) {
    return (PyObject *)Py_TYPE(result) == parameter && PyTuple_Size(args) > 0 &&
           PyTuple_GetItem(args, 0) == result;
}

/* Looks at what an operation has made, or handed to Python. */
static int look(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs, PyObject *result) {
    if ((PyObject *)Py_TYPE(result) == plain || writes_weight(args, result))
        return note(all, func, args, kwargs, result, NO_PATH);
    if ((PyTuple_Check(result) || PyList_Check(result)) && func != all->tolist) {
        const int is_tuple = PyTuple_Check(result);
        for (Py_ssize_t i = 0; i < (is_tuple ? PyTuple_Size(result) : PyList_Size(result)); i++) {
            PyObject *item = is_tuple ? PyTuple_GetItem(result, i) : PyList_GetItem(result, i);
            if ((PyObject *)Py_TYPE(item) != plain)
                continue;
            Py_INCREF(item);
            const int done = note(all, func, args, kwargs, item, (long)i);
            Py_DECREF(item);
            if (done != 0)
                return done;
        }
        return 0;
    }
    if (func == all->setitem) {
        PyObject *written = PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : Py_None;
        return (PyObject *)Py_TYPE(written) == plain || (PyObject *)Py_TYPE(written) == parameter
                   ? note(all, func, args, kwargs, written, NO_PATH)
                   : 0;
    }
    return tell_other(all, func, args, kwargs, result);
}

/* Tells Python of an exception that is on its way. It goes on, or the one that Python raises does. */
static void tell(Operations *all, PyObject *name, PyObject *func, PyObject *args, PyObject *kwargs) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    PyObject *said =
        PyObject_CallMethodObjArgs(all->hooks, name, value, func, args, kwargs, NULL);
    if (said == NULL) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return;
    }
    Py_DECREF(said);
    Py_XDECREF(trace);
    trace = PyException_GetTraceback(value); /* frames may have been left out */
    PyErr_Restore(type, value, trace);
}

/* Runs an operation and looks at it. */
static PyObject *run_operation(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs) {
    if (all->pauses)
        return PyObject_Call(func, args, kwargs);
    PyObject *transform = PyObject_CallNoArgs(innermost_transform);
    if (transform == NULL)
        return NULL;
    Py_DECREF(transform);
    if (transform != Py_None)
        return PyObject_CallMethodObjArgs(all->hooks, name_inside, func, args,
                                          kwargs == NULL ? Py_None : kwargs, NULL);
    const int is_apart = PySet_Contains(all->apart, func);
    if (is_apart != 0)
        return is_apart < 0 ? NULL
                            : PyObject_CallMethodObjArgs(all->hooks, name_apart, func, args,
                                                         kwargs == NULL ? Py_None : kwargs, NULL);
    PyObject *result = PyObject_Call(func, args, kwargs);
    if (result != NULL && look(all, func, args, kwargs, result) != 0) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (trace != NULL)
            PyException_SetTraceback(value, trace);
        PyObject *said = PyObject_CallMethodObjArgs(all->hooks, name_objected, value, NULL);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        if (said == NULL)
            Py_CLEAR(result);
        Py_XDECREF(said);
    }
    return result;
}

static int as_names(PyObject **kwargs) {
    if (*kwargs == Py_None)
        *kwargs = NULL;
    if (*kwargs == NULL || PyDict_Check(*kwargs))
        return 0;
    PyErr_SetString(PyExc_TypeError, "keywords are a dictionary");
    return -1;
}

PyDoc_STRVAR(run_doc, "run(func, args, kwargs)\n--\n\nRun an operation, and look at it.");

static PyObject *operations_run(PyObject *self, PyObject *given) {
    PyObject *func, *args, *kwargs;
    if (!PyArg_ParseTuple(given, "OO!O", &func, &PyTuple_Type, &args, &kwargs) ||
        as_names(&kwargs) != 0)
        return NULL;
    return run_operation((Operations *)self, func, args, kwargs);
}

/* Whether a tensor belongs to a loss: 1, 0, or -1 where an error came. */
static int is_followed(PyObject *known, PyObject *weights, PyObject *tensor) {
    PyObject *key = PyLong_FromVoidPtr(tensor);
    int found = key == NULL ? -1 : PyDict_Contains(known, key);
    for (Py_ssize_t i = 0; weights != NULL && found == 0 && i < PyList_Size(weights); i++)
        found = PySequence_Contains(PyList_GetItem(weights, i), key);
    Py_XDECREF(key);
    return found;
}

/* The same for an argument, where a container counts as if it held one. */
static int may_hold(PyObject *known, PyObject *weights, PyObject *value) {
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value) || PyDict_CheckExact(value))
        return 1;
    return is_tensor(value) ? is_followed(known, weights, value) : 0;
}

/* Whether the name of a function is this one. */
static int is_called(PyObject *func, PyObject *name) {
    PyObject *found = PyObject_GetAttr(func, name_name);
    const int is_same = found == NULL ? -1 : PyUnicode_Compare(found, name) == 0;
    Py_XDECREF(found);
    return is_same;
}

/* Whether a call may read what belongs to a loss, as `Loss.may_read` says. */
static int may_read(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs) {
    PyObject *known = PyTuple_GetItem(all->followed, 0);
    PyObject *weights = PyTuple_GetItem(all->followed, 1);
    PyObject *quiet = PyTuple_GetItem(all->followed, 2);
    int found = PySet_Contains(quiet, func);
    if (found != 0)
        return found < 0 ? -1 : 0;
    found = PySet_Contains(all->apart, func);
    if (found != 0)
        return found;
    if ((PyObject *)Py_TYPE(func) == all->wrapper) {
        found = PySet_Contains(all->views, func);
        if (found != 0)
            return found;
        found = is_called(func, name_get);
        if (found != 0)
            return found < 0 ? -1 : 0;
        found = is_called(func, name_set);
        if (found != 0)
            return found < 0 || PyTuple_Size(args) == 0
                       ? -1
                       : is_followed(known, NULL, PyTuple_GetItem(args, 0));
    }
    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_Size(args); i++)
        found = may_hold(known, weights, PyTuple_GetItem(args, i));
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (found == 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value))
        found = may_hold(known, weights, value);
    return found;
}

/* Lets Python run what may belong to a loss. */
static PyObject *ask_python(Operations *all, PyObject *given, PyObject *names) {
    PyObject *otherwise = PyObject_GetAttr(all->hooks, name_otherwise);
    PyObject *found = otherwise == NULL ? NULL : PyObject_Call(otherwise, given, names);
    Py_XDECREF(otherwise);
    return found;
}

#include "_losses.h"

/* As a `__torch_function__`. */
static PyObject *operations_call(PyObject *self, PyObject *given, PyObject *names) {
    Operations *all = (Operations *)self;
    const Py_ssize_t count = PyTuple_Size(given);
    PyObject *func, *args, *kwargs = NULL;
    if ((!all->is_direct && all->followed == NULL) || (names != NULL && PyDict_Size(names) > 0) ||
        count < 3)
        return ask_python(all, given, names);
    func = PyTuple_GetItem(given, 0);
    args = PyTuple_GetItem(given, 2);
    if (count > 3)
        kwargs = PyTuple_GetItem(given, 3);
    if (count > 4 || !PyTuple_Check(args)) {
        PyErr_SetString(PyExc_TypeError, "an operation is a function, types, a tuple, and keywords");
        return NULL;
    }
    if (as_names(&kwargs) != 0)
        return NULL;
    PyObject *result = NULL;
    int is_run = 0;
    if (!all->is_direct) {
        const int may = may_read(all, func, args, kwargs);
        if (may < 0)
            return NULL;
        if (may) {
            is_run = run_in_brief(all, func, args, kwargs, &result);
            if (is_run == OTHERWISE)
                return ask_python(all, given, names);
        }
    }
    if (!is_run)
        result = run_operation(all, func, args, kwargs);
    if (result == NULL)
        tell(all, name_raised, func, args, kwargs == NULL ? Py_None : kwargs);
    return result;
}

PyDoc_STRVAR(of_doc, "of(tensor)\n--\n\nThe record of what a tensor holds now, or None.");

static PyObject *operations_of(PyObject *self, PyObject *tensor) {
    Record *record = record_of((Operations *)self, tensor, 0);
    return record == NULL && PyErr_Occurred() ? NULL : held((PyObject *)record);
}

static PyObject *operations_new(PyTypeObject *type, PyObject *given, PyObject *names) {
    (void)names;
    PyObject *kept[11];
    long most_depth;
    Py_ssize_t most_known;
    if (!PyArg_ParseTuple(given, "OOOOOOOOO!OOln", &kept[0], &kept[1], &kept[2], &kept[3], &kept[4],
                          &kept[5], &kept[6], &kept[7], &PyDict_Type, &kept[8], &kept[9], &kept[10],
                          &most_depth, &most_known))
        return NULL;
    const allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Operations *all = (Operations *)make(type, 0);
    if (all == NULL)
        return NULL;
    for (int i = 0; i < 11; i++)
        Py_INCREF(kept[i]);
    all->hooks = kept[0];
    all->plain_types = kept[1];
    all->apart = kept[2];
    all->views = kept[3];
    all->unknown = kept[4];
    all->setitem = kept[5];
    all->tolist = kept[6];
    all->wrapper = kept[7];
    all->leaves = kept[8];
    all->noted = kept[9];
    all->is_grad_enabled = kept[10];
    all->most_depth = most_depth;
    all->table.least = (size_t)most_known;
    if (make_room(&all->table, all->table.least) != 0)
        Py_CLEAR(all);
    return (PyObject *)all;
}

static int operations_traverse(PyObject *self, visitproc visit, void *arg) {
    Operations *all = (Operations *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(all->hooks);
    Py_VISIT(all->mode);
    Py_VISIT(all->followed);
    return 0;
}

static int operations_clear(PyObject *self) {
    Operations *all = (Operations *)self;
    Py_CLEAR(all->hooks);
    Py_CLEAR(all->mode);
    Py_CLEAR(all->followed);
    return 0;
}

static void operations_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Operations *all = (Operations *)self;
    Py_CLEAR(all->hooks);
    Py_CLEAR(all->mode);
    Py_CLEAR(all->followed);
    Py_CLEAR(all->plain_types);
    Py_CLEAR(all->apart);
    Py_CLEAR(all->views);
    Py_CLEAR(all->unknown);
    Py_CLEAR(all->setitem);
    Py_CLEAR(all->tolist);
    Py_CLEAR(all->wrapper);
    Py_CLEAR(all->leaves);
    Py_CLEAR(all->noted);
    Py_CLEAR(all->is_grad_enabled);
    empty(&all->table);
    for (int i = 0; i < KINDS_OF_CODE; i++)
        Py_CLEAR(all->codes[i]);
    PyTypeObject *type = Py_TYPE(self);
    const freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define FLAG(NAME)                                                                                 \
    static PyObject *get_##NAME(PyObject *self, void *closure) {                                   \
        (void)closure;                                                                             \
        return PyBool_FromLong(((Operations *)self)->NAME);                                        \
    }                                                                                              \
    static int set_##NAME(PyObject *self, PyObject *value, void *closure) {                        \
        (void)closure;                                                                             \
        const int is_true = value == NULL ? 0 : PyObject_IsTrue(value);                            \
        if (is_true < 0)                                                                           \
            return -1;                                                                             \
        ((Operations *)self)->NAME = (char)is_true;                                                \
        return 0;                                                                                  \
    }

FLAG(pauses)
FLAG(has_bad)
FLAG(awaits)
FLAG(is_direct)

static PyObject *get_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((Operations *)self)->count);
}

static PyObject *get_unread(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((Operations *)self)->unread);
}

static PyObject *get_mode(PyObject *self, void *closure) {
    (void)closure;
    return held(((Operations *)self)->mode);
}

static int set_mode(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    Operations *all = (Operations *)self;
    PyObject *before = all->mode;
    Py_XINCREF(value);
    all->mode = value;
    Py_XDECREF(before);
    return 0;
}

static PyObject *get_followed(PyObject *self, void *closure) {
    (void)closure;
    return held(((Operations *)self)->followed);
}

static int set_followed(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    if (value == NULL || value == Py_None) {
        Py_CLEAR(((Operations *)self)->followed);
        return 0;
    }
    PyObject *known, *weights, *quiet, *parts = NULL;
    if (!PyTuple_CheckExact(value) ||
        !PyArg_ParseTuple(value, "O!O!O!|O!", &PyDict_Type, &known, &PyList_Type, &weights,
                          &PyFrozenSet_Type, &quiet, &PyTuple_Type, &parts) ||
        (parts != NULL && PyTuple_Size(parts) != 6)) {
        PyErr_SetString(PyExc_TypeError, "tensors, weights, functions and parts of a loss");
        return -1;
    }
    Operations *all = (Operations *)self;
    PyObject *before = all->followed;
    Py_INCREF(value);
    all->followed = value;
    Py_XDECREF(before);
    return 0;
}

static PyGetSetDef OPERATIONS_ATTRIBUTES[] = {
    {"followed", get_followed, set_followed, "What belongs to a loss; None: ask Python.", NULL},
    {"__self__", get_mode, set_mode, "The mode, as of a method of it.", NULL},
    {"pauses", get_pauses, set_pauses, "Whether nothing is looked at.", NULL},
    {"has_bad", get_has_bad, set_has_bad, "Whether something was bad.", NULL},
    {"awaits", get_awaits, set_awaits, "Whether a device has yet to tell numbers.", NULL},
    {"is_direct", get_is_direct, set_is_direct, "Whether calls are operations of no loss.", NULL},
    {"count", get_count, NULL, "How many operations were noted.", NULL},
    {"unread", get_unread, NULL, "How many made a tensor whose numbers C cannot read.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Torch asks each time whose method it calls, by a name that no type remembers. */
static PyObject *operations_getattro(PyObject *self, PyObject *name) {
    Operations *all = (Operations *)self;
    if (all->mode != NULL && PyUnicode_CompareWithASCIIString(name, "__self__") == 0)
        return held(all->mode);
    return PyObject_GenericGetAttr(self, name);
}

static PyMethodDef OPERATIONS_METHODS[] = {
    {"run", operations_run, METH_VARARGS, run_doc},
    {"of", operations_of, METH_O, of_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot OPERATIONS_SLOTS[] = {
    {Py_tp_new, operations_new},
    {Py_tp_dealloc, operations_dealloc},
    {Py_tp_traverse, operations_traverse},
    {Py_tp_clear, operations_clear},
    {Py_tp_call, operations_call},
    {Py_tp_getattro, operations_getattro},
    {Py_tp_methods, OPERATIONS_METHODS},
    {Py_tp_getset, OPERATIONS_ATTRIBUTES},
    {Py_tp_doc, "Runs the operations of a script, and keeps the records of live tensors."},
    {0, NULL},
};

static PyType_Spec OPERATIONS_SPEC = {
    .name = "fxguard.measure._native.Operations",
    .basicsize = sizeof(Operations),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = OPERATIONS_SLOTS,
};

/* Adds both types to the module. */
static int add_operations(PyObject *module) {
    const struct {
        PyObject **at;
        const char *name;
    } names[] = {
        {&is_inference, "is_inference"}, {&metadata, "metadata"},
        {&name_kind, "kind_of"},   {&name_turned, "turned_bad"},
        {&name_other, "other"},    {&name_apart, "apart"},        {&name_raised, "raised"},
        {&name_inside, "inside"}, {&name_objected, "objected"}, {&name_otherwise, "otherwise"},
        {&name_pair, "pair_of"},  {&name_waits, "waits"},       {&name_of_pair, "pair"},
        {&name_name, "__name__"}, {&name_get, "__get__"},       {&name_set, "__set__"},
        {&name_file, "co_filename"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *names[i].at = PyUnicode_InternFromString(names[i].name);
        if (*names[i].at == NULL)
            return -1;
    }
    PyObject *record = PyType_FromSpec(&RECORD_SPEC);
    PyObject *operations = record == NULL ? NULL : PyType_FromSpec(&OPERATIONS_SPEC);
    if (operations == NULL)
        return -1;
    record_type = (PyTypeObject *)record;
    Py_INCREF(record); /* for as long as the process runs */
    if (PyModule_AddObject(module, "Record", record) != 0)
        return -1;
    return PyModule_AddObject(module, "Operations", operations);
}
