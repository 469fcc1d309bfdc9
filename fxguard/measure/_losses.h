/* Plain operations of a loss: each is run, its result is read, and it is written down in brief, in the
 * batch of the loss and on its tape. A part of _native.c, which includes it behind _operations.h.
 *
 * fxguard/batch/plain_operations.py has the same in Python, and says what a plain operation is. Here
 * is the way of one that is healthy; where anything else is found before it runs, Python runs it.
 */

enum { MOST_OPERANDS = 16, MOST_RESULTS = 8, MOST_KINDS = 4096 };
enum { OTHERWISE = 0, DONE = 1 }; /* -1 where an error came */

/* What bind_losses is given. */
static struct {
    PyObject *key, *brief, *noted, *made; /* types */
    PyObject *value_of, *name_of_dtype, *kind_of, *is_autocast_on, *look_closely, *has_raised,
        *random_state;
    PyObject *unread, *literals, *writes, *mark;
} losses;

/* Names of attributes, in the order of NAMES_OF_LOSSES. */
static struct {
    PyObject *memories, *beside, *untyped_storage, *cdata, *weak_ref, *values, *pairs, *has_brief,
        *events, *autocast, *module, *calls, *settings, *settings_of, *count, *known, *me,
        *has_noted, *without_gradient, *given_to, *key_of, *forward_class, *handed_on,
        *hands_on, *remember, *modules, *details;
} name_of;

/* The attributes of what is noted on a tape, in their order: see fxguard/batch/tape_graph.py. */
static const char *const NAMES_OF_NOTED[] = {
    "func", "args", "kwargs", "restore_settings", "module", "with_grad", "random_state", "versions",
    "overwrites", "read", "order", "place", "made", "written", "is_gone",
};
static const char *const NAMES_OF_MADE[] = {"number", "call", "before"};
enum { PARTS_OF_NOTED = 15, PARTS_OF_MADE = 3 };
static PyObject *names_of_noted[PARTS_OF_NOTED], *names_of_made[PARTS_OF_MADE];

static const char *const NAMES_OF_LOSSES[] = {
    "_memories", "beside", "untyped_storage", "_cdata", "_weak_ref", "values", "pairs", "_has_brief",
    "_events", "autocast", "module", "calls", "_restore_settings", "settings", "_count", "_known", "_me",
    "has_noted", "_without_gradient", "given_to", "key_of", "_forward_cls", "handed_on",
    "hands_on", "remember", "modules", "details",
};

/* Function to its name, whether it may move elements, and whether it draws; or to None. */
static PyObject *kinds_of_functions;
static PyObject *nodes_of_torch;     /* types of nodes of autograd that no user's function has */
static newfunc new_tuple, new_noted, new_made;
static PyObject *no_items, *no_name;

static int intern(PyObject **names, const char *const *texts, size_t count) {
    for (size_t i = 0; i < count; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return -1;
    return 0;
}

PyDoc_STRVAR(bind_losses_doc,
             "bind_losses(Key, Brief, Noted, Made, value_of, name_of_dtype, kind_of, is_autocast_on,\n"
             "            look_closely, has_raised, random_state, unread, literals, writes, mark)\n--\n\n"
             "Write down plain operations of losses with these: see fxguard.batch.plain_operations.");

static PyObject *bind_losses(PyObject *module, PyObject *args) {
    (void)module;
    PyObject **const kept = (PyObject **)&losses, **const names = (PyObject **)&name_of;
    const size_t count = sizeof losses / sizeof(PyObject *);
    if (!PyTuple_Check(args) || (size_t)PyTuple_Size(args) != count) {
        PyErr_SetString(PyExc_TypeError, "bind_losses takes as many as its text says");
        return NULL;
    }
    if (intern(names, NAMES_OF_LOSSES, sizeof name_of / sizeof(PyObject *)) != 0 ||
        intern(names_of_noted, NAMES_OF_NOTED, PARTS_OF_NOTED) != 0 ||
        intern(names_of_made, NAMES_OF_MADE, PARTS_OF_MADE) != 0)
        return NULL;
    for (Py_ssize_t i = 0; i < 4; i++)
        if (!PyType_Check(PyTuple_GetItem(args, i))) {
            PyErr_SetString(PyExc_TypeError, "bind_losses takes four types first");
            return NULL;
        }
    new_noted = (newfunc)PyType_GetSlot((PyTypeObject *)PyTuple_GetItem(args, 2), Py_tp_new);
    new_made = (newfunc)PyType_GetSlot((PyTypeObject *)PyTuple_GetItem(args, 3), Py_tp_new);
    no_items = PyTuple_New(0);
    no_name = PyUnicode_InternFromString("");
    if (no_items == NULL || no_name == NULL)
        return NULL;
    kinds_of_functions = PyDict_New();
    nodes_of_torch = PySet_New(NULL);
    new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    if (kinds_of_functions == NULL || nodes_of_torch == NULL || new_tuple == NULL)
        return NULL;
    for (size_t i = 0; i < count; i++) /* for as long as the process runs */
        kept[i] = held(PyTuple_GetItem(args, (Py_ssize_t)i));
    Py_RETURN_NONE;
}

/* A tensor that an operation reads. */
typedef struct {
    PyObject *tensor;   /* borrowed: the arguments hold it */
    PyObject *identity; /* its address, as Python has it */
    PyObject *version;  /* how often it was written, before the operation */
    PyObject *key;      /* of the value that it holds in the batch; NULL for none */
    PyObject *noted;    /* what it holds on the tape; NULL for nothing */
    PyObject *keyword;  /* borrowed; NULL for an argument without one */
    long written, position;
    char is_float, needs;
} Operand;

/* An operation of a loss. */
typedef struct {
    PyObject *batch, *live, *tape, *forward; /* borrowed from what the operations follow */
    PyObject *func, *args, *kwargs;          /* borrowed; `kwargs` may be NULL */
    PyObject *name, *place, *random, *module, *calls;
    Operand read[MOST_OPERANDS];
    long count, floats;
    char is_read, may_move, draws;
} Call;

static void let_go_of(Call *call) {
    for (long i = 0; i < call->count; i++) {
        Operand *each = &call->read[i];
        Py_XDECREF(each->identity);
        Py_XDECREF(each->version);
        Py_XDECREF(each->key);
        Py_XDECREF(each->noted);
    }
    Py_XDECREF(call->name);
    Py_XDECREF(call->place);
    Py_XDECREF(call->random);
    Py_XDECREF(call->module);
    Py_XDECREF(call->calls);
}

/* A named tuple. Takes the references to its items, which are NULL after an error. */
static PyObject *named_tuple(PyObject *type, PyObject *items) {
    PyObject *args = items == NULL ? NULL : PyTuple_Pack(1, items);
    PyObject *made = args == NULL ? NULL : new_tuple((PyTypeObject *)type, args, NULL);
    Py_XDECREF(args);
    Py_XDECREF(items);
    return made;
}

/* What a table of live tensors has under an address, if that is of this tensor as it was then. */
static PyObject *held_in(PyObject *table, const Operand *operand) {
    PyObject *entry = PyDict_GetItemWithError(table, operand->identity);
    if (entry == NULL || PyWeakref_GetObject(PyTuple_GetItem(entry, 0)) != operand->tensor)
        return NULL;
    PyObject *then = PyTuple_GetItem(entry, 1);
    return PyLong_Check(then) && PyLong_AsLong(then) == operand->written ? PyTuple_GetItem(entry, 2)
                                                                       : NULL;
}

/* Fills in what a tensor is before the operation. */
static int look_at_operand(Operations *all, Call *call, PyObject *tensor, PyObject *keyword) {
    Operand *operand = &call->read[call->count];
    *operand = (Operand){.tensor = tensor, .keyword = keyword, .position = call->floats};
    if (!attribute_is(tensor, &is_cpu, Py_True))
        return PyErr_Occurred() ? -1 : OTHERWISE;
    PyObject *its_dtype = attribute_of(tensor, &dtype);
    if (its_dtype == NULL)
        return -1;
    operand->is_float = (char)attribute_is(its_dtype, &is_floating_point, Py_True);
    const int may = operand->is_float || !attribute_is(its_dtype, &is_complex, Py_True);
    Py_DECREF(its_dtype);
    if (!may)
        return OTHERWISE;
    operand->version = attribute_of(tensor, &version);
    if (operand->version == NULL) { /* nobody counts how often an inference tensor is written */
        const int is_uncounted = PyErr_ExceptionMatches(PyExc_RuntimeError);
        if (is_uncounted)
            PyErr_Clear();
        return is_uncounted ? OTHERWISE : -1;
    }
    call->count++;
    operand->written = PyLong_AsLong(operand->version);
    operand->identity = PyLong_FromVoidPtr(tensor);
    if (operand->identity == NULL || PyErr_Occurred())
        return -1;
    operand->key = held_in(PyTuple_GetItem(all->followed, 0), operand);
    Py_XINCREF(operand->key);
    PyObject *weights = PyTuple_GetItem(all->followed, 1);
    int found = operand->key != NULL;
    for (Py_ssize_t i = 0; found == 0 && i < PyList_Size(weights); i++)
        found = PySequence_Contains(PyList_GetItem(weights, i), operand->identity);
    call->is_read |= found == 1;
    return found < 0 || PyErr_Occurred() ? -1 : DONE;
}

/* Adds the tensors of an argument; `OTHERWISE` where there is more than tensors and literals. */
static int add_operands(Operations *all, Call *call, PyObject *value, PyObject *keyword) {
    if ((PyObject *)Py_TYPE(value) == plain || (PyObject *)Py_TYPE(value) == parameter) {
        long at = 0;
        while (at < call->count && call->read[at].tensor != value)
            at++;
        int done = DONE;
        if (at == call->count)
            done = at < MOST_OPERANDS ? look_at_operand(all, call, value, keyword) : OTHERWISE;
        if (done == DONE && call->read[at].is_float && keyword == NULL)
            call->floats++;
        return done;
    }
    const int is_tuple = PyTuple_CheckExact(value);
    if (!is_tuple && !PyList_CheckExact(value))
        return PySet_Contains(losses.literals, (PyObject *)Py_TYPE(value));
    int done = DONE;
    for (Py_ssize_t i = 0; done == DONE && i < (is_tuple ? PyTuple_Size(value) : PyList_Size(value));
         i++)
        done = add_operands(all, call,
                            is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i), keyword);
    return done;
}

static int add_all_operands(Operations *all, Call *call) {
    int done = PyTuple_Size(call->args) > 0 ? DONE : OTHERWISE;
    for (Py_ssize_t i = 0; done == DONE && i < PyTuple_Size(call->args); i++)
        done = add_operands(all, call, PyTuple_GetItem(call->args, i), NULL);
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (done == DONE && call->kwargs != NULL &&
           PyDict_Next(call->kwargs, &at, &name, &value)) {
        const int writes = PySet_Contains(losses.writes, name);
        done = writes != 0 ? (writes < 0 ? -1 : OTHERWISE)
                           : add_operands(all, call, value, name);
    }
    return done;
}

/* Asks what a function is: plain, or one that Python runs. */
static int know_function(Operations *all, Call *call) {
    PyObject *func = call->func;
    int found = PySet_Contains(all->apart, func);
    if (found == 0 && (PyObject *)Py_TYPE(func) == all->wrapper)
        found = PySet_Contains(all->views, func);
    if (found != 0)
        return found < 0 ? -1 : OTHERWISE;
    PyObject *known = PyDict_GetItemWithError(kinds_of_functions, func);
    Py_XINCREF(known);
    if (known == NULL) {
        if (PyErr_Occurred())
            return -1;
        if (PyDict_Size(kinds_of_functions) >= MOST_KINDS)
            PyDict_Clear(kinds_of_functions);
        known = PyObject_CallFunctionObjArgs(losses.kind_of, func, NULL);
        if (known == NULL || PyDict_SetItem(kinds_of_functions, func, known) != 0) {
            Py_XDECREF(known);
            return -1;
        }
    }
    found = PyTuple_Check(known) ? DONE : OTHERWISE;
    if (found == DONE) {
        call->name = held(PyTuple_GetItem(known, 0));
        call->may_move = PyTuple_GetItem(known, 1) == Py_True;
        call->draws = PyTuple_GetItem(known, 2) == Py_True;
    }
    Py_DECREF(known);
    return found;
}

/* Finds the line of the script. `OTHERWISE` where a GradScaler multiplies: that is no operation. */
static int find_place(Operations *all, Call *call) {
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    Py_XINCREF(frame);
    int done = DONE;
    while (done == DONE && frame != NULL && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        const int kind = kind_of_code(all, code);
        if (kind == CODE_OF_SCRIPT) {
            PyObject *file = PyObject_GetAttr(code, name_file);
            const int line = PyFrame_GetLineNumber((PyFrameObject *)frame);
            call->place = file == NULL ? NULL : Py_BuildValue("Ni", file, line);
            done = call->place == NULL ? -1 : DONE;
            Py_DECREF(code);
            break;
        }
        Py_DECREF(code);
        if (kind < 0)
            done = -1;
        else if (kind == CODE_OF_SCALER &&
                 PyUnicode_CompareWithASCIIString(call->name, "mul") == 0)
            done = OTHERWISE;
        PyObject *back = done == DONE ? attribute_of(frame, &f_back) : NULL;
        Py_DECREF(frame);
        frame = back;
        if (back == NULL)
            return done == DONE ? -1 : done;
    }
    Py_XDECREF(frame);
    if (call->place == NULL && done == DONE)
        call->place = held(NULL);
    return done;
}

/* Finds the modules of the models that run: mostly none. */
static int find_modules(Call *call) {
    PyObject *modules = PyObject_GetAttr(call->batch, name_of.modules);
    const Py_ssize_t count = modules == NULL ? -1 : PyObject_Size(modules);
    Py_XDECREF(modules);
    if (count > 0) {
        call->module = PyObject_GetAttr(call->batch, name_of.module);
        call->calls = PyObject_GetAttr(call->batch, name_of.calls);
    } else if (count == 0) {
        call->module = held(no_name);
        call->calls = held(no_items);
    }
    return call->module == NULL || call->calls == NULL ? -1 : 0;
}

/* Whether a plain operation may be run here, and all that there is to know before. */
static int prepare(Operations *all, Call *call) {
    PyObject *parts = PyTuple_GetItem(all->followed, 3);
    call->batch = PyTuple_GetItem(parts, 0);
    call->live = PyTuple_GetItem(parts, 1);
    call->tape = PyTuple_GetItem(parts, 2);
    call->forward = PyTuple_GetItem(parts, 3);
    PyObject *said = PyObject_CallNoArgs(PyTuple_GetItem(parts, 5)); /* who compiles what runs */
    Py_XDECREF(said);
    if (said != Py_None)
        return said == NULL ? -1 : OTHERWISE;
    int done = know_function(all, call);
    if (done != DONE)
        return done;
    said = PyObject_CallNoArgs(PyTuple_GetItem(parts, 4)); /* whether in brief */
    Py_XDECREF(said);
    if (said != Py_True)
        return said == NULL ? -1 : OTHERWISE;
    done = is_observed();
    if (done != 0)
        return done < 0 ? -1 : OTHERWISE;
    done = add_all_operands(all, call);
    if (done != DONE || !call->is_read)
        return done;
    done = find_place(all, call);
    return done == DONE && find_modules(call) != 0 ? -1 : done;
}

/* The key of each number that the operation reads: some are new to the batch, or bad in it. */
static int find_keys(Call *call) {
    PyObject *details = PyObject_GetAttr(call->batch, name_of.details);
    if (details == NULL)
        return -1;
    const int is_any_bad = PyDict_Size(details) > 0;
    Py_DECREF(details);
    for (long i = 0; i < call->count; i++) {
        Operand *each = &call->read[i];
        if (!each->is_float || (each->key != NULL && !is_any_bad))
            continue;
        Py_CLEAR(each->key);
        PyObject *label = each->keyword == NULL
                              ? PyUnicode_FromFormat("input[%ld]", each->position)
                              : PyUnicode_FromFormat("input[%U]", each->keyword);
        if (label != NULL)
            each->key = PyObject_CallMethodObjArgs(call->forward, name_of.key_of, each->tensor,
                                                   label, NULL);
        Py_XDECREF(label);
        if (each->key == NULL)
            return -1;
    }
    return 0;
}

/* Keeps the state of the random number generators, if the operation draws. */
static int keep_random(Call *call) {
    if (!call->draws)
        return 0;
    PyObject *given = PyTuple_Pack(2, call->args, call->kwargs == NULL ? Py_None : call->kwargs);
    call->random =
        given == NULL ? NULL : PyObject_CallFunctionObjArgs(losses.random_state, given, NULL);
    Py_XDECREF(given);
    return call->random == NULL ? -1 : 0;
}

/* Whether no tensor that the operation has read was written since. */
static int are_as_before(Call *call) {
    for (long i = 0; i < call->count; i++) {
        const long now = version_of_tensor(call->read[i].tensor);
        if (PyErr_Occurred())
            return -1;
        if (now != call->read[i].written)
            return 0;
    }
    return 1;
}

/* Something by the addresses of the tensors: their keys, or their versions. */
static PyObject *by_identity(Call *call, int of_versions) {
    PyObject *found = PyDict_New();
    for (long i = 0; found != NULL && i < call->count; i++) {
        Operand *each = &call->read[i];
        PyObject *value = of_versions ? each->version : each->is_float ? each->key : NULL;
        if (value != NULL && PyDict_SetItem(found, each->identity, value) != 0)
            Py_CLEAR(found);
    }
    return found;
}

/* Lets Python write an operation down in full: it made something bad, or several things, or raised. */
static int write_in_full(Call *call, PyObject *function, PyObject *made) {
    PyObject *keys = by_identity(call, 0), *versions = by_identity(call, 1), *said = NULL;
    PyObject *named = call->kwargs == NULL ? PyDict_New() : held(call->kwargs);
    if (keys != NULL && versions != NULL && named != NULL)
        said = PyObject_CallFunctionObjArgs(function, call->forward, call->tape,
                                            call->func, call->args, named, versions, keys,
                                            made, NULL);
    Py_XDECREF(keys);
    Py_XDECREF(versions);
    Py_XDECREF(named);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

static void write_raised(Call *call) {
    PyObject *type, *value, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    if (write_in_full(call, losses.has_raised, value) == 0)
        PyErr_Restore(type, value, trace);
    else {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
}

/* The same arguments with other objects in the place of tensors: keys of the batch, or what is on the
 * tape. */
static PyObject *filled(Call *call, PyObject *value, int by_tape) {
    const int is_tuple = PyTuple_CheckExact(value);
    if (is_tuple || PyList_CheckExact(value)) {
        const Py_ssize_t count = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
        PyObject *items = is_tuple ? PyTuple_New(count) : PyList_New(count);
        for (Py_ssize_t i = 0; items != NULL && i < count; i++) {
            PyObject *item = filled(
                call, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i), by_tape);
            if (item == NULL)
                Py_CLEAR(items);
            else if (is_tuple)
                PyTuple_SetItem(items, i, item);
            else
                PyList_SetItem(items, i, item);
        }
        return items;
    }
    for (long i = 0; i < call->count; i++) {
        const Operand *each = &call->read[i];
        if (each->tensor == value)
            return held(by_tape ? each->noted : each->is_float ? each->key : losses.unread);
    }
    return held(value);
}

static PyObject *filled_names(Call *call, int by_tape) {
    PyObject *found = PyDict_New(), *name, *value;
    Py_ssize_t at = 0;
    while (found != NULL && call->kwargs != NULL &&
           PyDict_Next(call->kwargs, &at, &name, &value)) {
        PyObject *own = filled(call, value, by_tape);
        if (own == NULL || PyDict_SetItem(found, name, own) != 0)
            Py_CLEAR(found);
        Py_XDECREF(own);
    }
    return found;
}

/* Adds a number to one that an object counts; the new one, or NULL. */
static PyObject *counted(PyObject *object) {
    PyObject *before = PyObject_GetAttr(object, name_of.count);
    const long number = before == NULL ? -1 : PyLong_AsLong(before);
    PyObject *now = PyErr_Occurred() ? NULL : PyLong_FromLong(number + 1);
    Py_XDECREF(before);
    if (now != NULL && PyObject_SetAttr(object, name_of.count, now) != 0)
        Py_CLEAR(now);
    return now;
}

static int append(PyObject *object, PyObject *name, PyObject *item) {
    PyObject *list = item == NULL ? NULL : PyObject_GetAttr(object, name);
    const int done = list == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(list);
    return done;
}

/* Whether a user's function has made a tensor. */
static int is_by_function(PyObject *tensor) {
    PyObject *node = attribute_of(tensor, &grad_fn);
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node == NULL ? -1 : 0;
    }
    int found = PySet_Contains(nodes_of_torch, (PyObject *)Py_TYPE(node));
    if (found == 0) {
        PyObject *own = PyObject_GetAttr(node, name_of.forward_class);
        if (own != NULL) {
            Py_DECREF(node);
            Py_DECREF(own);
            return 1; /* Python asks whose it is */
        }
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            Py_DECREF(node);
            return -1;
        }
        PyErr_Clear();
        found = PySet_Add(nodes_of_torch, (PyObject *)Py_TYPE(node)) == 0 ? 1 : -1;
    }
    Py_DECREF(node);
    return found < 0 ? -1 : 0;
}

/* What every operand holds on the tape: a part of it belongs there from now on. */
static int give_to_tape(Call *call) {
    for (long i = 0; i < call->count; i++) {
        Operand *each = &call->read[i];
        const int is_own = each->needs ? is_by_function(each->tensor) : 0;
        if (is_own < 0)
            return -1;
        if (each->noted != NULL && !is_own)
            continue;
        Py_CLEAR(each->noted);
        PyObject *named = call->kwargs == NULL ? PyDict_New() : held(call->kwargs);
        if (named != NULL)
            each->noted =
                PyObject_CallMethodObjArgs(call->tape, name_of.given_to, call->func,
                                           call->args, named, each->tensor, each->version, NULL);
        Py_XDECREF(named);
        if (each->noted == NULL)
            return -1;
    }
    return 0;
}

/* Called when a tensor that was noted on a tape is gone: the tape forgets it. */
static PyObject *tensor_gone(PyObject *of, PyObject *reference) {
    (void)reference;
    PyObject *tape = PyWeakref_GetObject(PyTuple_GetItem(of, 1));
    if (tape == NULL)
        return NULL;
    if (tape == Py_None)
        Py_RETURN_NONE;
    PyObject *known = PyObject_GetAttr(tape, name_of.known);
    if (known == NULL)
        return NULL;
    if (PyDict_DelItem(known, PyTuple_GetItem(of, 0)) != 0)
        PyErr_Clear(); /* it has forgotten it before */
    Py_DECREF(known);
    Py_RETURN_NONE;
}

static PyMethodDef TENSOR_GONE = {"tensor_gone", tensor_gone, METH_O, NULL};

/* Notes what a tensor holds from now on, in a table of live tensors. `gone` may be NULL. */
static int know(PyObject *table, PyObject *identity, PyObject *tensor, PyObject *written,
                PyObject *holds, PyObject *gone) {
    PyObject *reference = PyWeakref_NewRef(tensor, gone);
    PyObject *entry = reference == NULL ? NULL : PyTuple_Pack(3, reference, written, holds);
    const int done = entry == NULL ? -1 : PyDict_SetItem(table, identity, entry);
    Py_XDECREF(reference);
    Py_XDECREF(entry);
    return done;
}

/* What the operation has made. */
typedef struct {
    PyObject *tensor, *identity, *version, *needs, *value; /* the first one is borrowed */
    double low, high;
    char has_numbers;
} Made;

typedef struct {
    Made all[MOST_RESULTS];
    Py_ssize_t count, floats;
    char is_one; /* and no tuple of one */
} Results;

/* Notes at the node of autograd what a tensor holds on the tape, unless something is noted there: an
   operation may hand on what it has read. */
static int mark_node(PyObject *tensor, PyObject *me, PyObject *value) {
    PyObject *node = attribute_of(tensor, &grad_fn);
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node == NULL ? -1 : 0;
    }
    PyObject *kept = PyObject_GetAttr(node, metadata);
    PyObject *number = attribute_of(tensor, &output_nr);
    PyObject *key = number == NULL ? NULL : PyTuple_Pack(2, losses.mark, number);
    PyObject *pair = PyTuple_Pack(2, me, value);
    const int has_all = kept != NULL && key != NULL && pair != NULL;
    const int is_known = has_all ? PyDict_Contains(kept, key) : -1;
    const int is_set = is_known > 0 || (is_known == 0 && PyDict_SetItem(kept, key, pair) == 0);
    Py_DECREF(node);
    Py_XDECREF(kept);
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_XDECREF(pair);
    return is_set ? 0 : -1;
}

/* A new object of a dataclass, without a call of its constructor. NULL where one of its parts is. */
static PyObject *new_object(newfunc make, PyObject *type, PyObject **names, PyObject **parts,
                            size_t count) {
    PyObject *made = make((PyTypeObject *)type, no_items, NULL);
    for (size_t i = 0; made != NULL && i < count; i++)
        if (parts[i] == NULL || PyObject_SetAttr(made, names[i], parts[i]) != 0)
            Py_CLEAR(made);
    return made;
}

/* Notes a call that belongs on the tape, and what it has made: new objects in `results`. */
static int note_call(Operations *all, Call *call, Results *results) {
    PyObject *settings = PyObject_GetAttr(call->tape, name_of.settings);
    if (settings == Py_None) {
        Py_DECREF(settings);
        settings = PyObject_CallMethodObjArgs(call->tape, name_of.settings_of, NULL);
    }
    PyObject *args = filled(call, call->args, 1), *named = filled_names(call, 1);
    PyObject *enabled = PyObject_CallNoArgs(all->is_grad_enabled), *nothing = PyDict_New();
    PyObject *read = PyTuple_New(call->count), *order = counted(call->tape);
    PyObject *made = PyTuple_New(results->count), *its_note = NULL;
    PyObject *numbers[MOST_RESULTS] = {NULL};
    int is_done = made != NULL;
    for (long i = 0; read != NULL && i < call->count; i++)
        PyTuple_SetItem(read, i, held(call->read[i].noted));
    for (Py_ssize_t i = 0; is_done && i < results->count; i++) {
        numbers[i] = counted(call->tape);
        PyObject *path = numbers[i] == NULL  ? NULL
                         : results->is_one ? Py_BuildValue("(()O)", numbers[i])
                                           : Py_BuildValue("((n)O)", i, numbers[i]);
        is_done = path != NULL;
        if (is_done)
            PyTuple_SetItem(made, i, path);
    }
    PyObject *parts[PARTS_OF_NOTED] = {
        call->func, args, named, settings, call->module, enabled,
        call->random == NULL ? Py_None : call->random, nothing, Py_None, read, order, call->place,
        made, no_items, Py_False,
    };
    if (is_done)
        its_note = new_object(new_noted, losses.noted, names_of_noted, parts, PARTS_OF_NOTED);
    is_done = its_note != NULL;
    for (Py_ssize_t i = 0; i < results->count; i++) {
        if (is_done) {
            PyObject *of_value[PARTS_OF_MADE] = {numbers[i], its_note, Py_None};
            results->all[i].value =
                new_object(new_made, losses.made, names_of_made, of_value, PARTS_OF_MADE);
            is_done = results->all[i].value != NULL;
        }
        Py_XDECREF(numbers[i]);
    }
    PyObject *all_of_them[] = {settings, args, named, enabled, nothing, read, order, made, its_note};
    for (size_t i = 0; i < sizeof all_of_them / sizeof *all_of_them; i++)
        Py_XDECREF(all_of_them[i]);
    return is_done ? 0 : -1;
}

/* Finds what each operand holds on the tape. Whether the call belongs there; -1 for an error. */
static int find_noted(Call *call, PyObject *known) {
    int belongs = 0;
    for (long i = 0; i < call->count; i++) {
        Operand *each = &call->read[i];
        PyObject *needs = attribute_of(each->tensor, &requires_grad);
        if (needs == NULL)
            return -1;
        each->needs = needs == Py_True;
        Py_DECREF(needs);
        PyObject *found = held_in(known, each);
        if (found != NULL && (PyObject *)Py_TYPE(found) != losses.made) {
            found = PyWeakref_GetObject(found); /* what is given belongs to those who read it */
            if (found == Py_None)
                found = NULL;
        }
        if (PyErr_Occurred())
            return -1;
        Py_XINCREF(found);
        each->noted = found;
        belongs |= each->needs || (found != NULL && (PyObject *)Py_TYPE(found) == losses.made);
    }
    return belongs;
}

/* Notes what one tensor holds on the tape from now on. */
static int remember_made(Call *call, PyObject *known, PyObject *me, Made *now) {
    PyObject *of = PyTuple_Pack(2, now->identity, me);
    PyObject *gone = of == NULL ? NULL : PyCFunction_NewEx(&TENSOR_GONE, of, NULL);
    int done = gone == NULL ? -1
                            : know(known, now->identity, now->tensor, now->version, now->value, gone);
    if (done == 0 && now->needs != Py_True)
        done = append(call->tape, name_of.without_gradient, now->identity);
    if (done == 0)
        done = mark_node(now->tensor, me, now->value);
    Py_XDECREF(of);
    Py_XDECREF(gone);
    return done;
}

/* `Tape.ran`. */
static int note_on_tape(Operations *all, Call *call, Results *results) {
    PyObject *known = PyObject_GetAttr(call->tape, name_of.known);
    PyObject *me = PyObject_GetAttr(call->tape, name_of.me);
    const int belongs = known == NULL || me == NULL ? -1 : find_noted(call, known);
    int done = belongs < 0 ? -1 : 0;
    if (belongs == 1) {
        done = give_to_tape(call);
        if (done == 0)
            done = note_call(all, call, results);
        for (Py_ssize_t i = 0; done == 0 && i < results->count; i++)
            done = remember_made(call, known, me, &results->all[i]);
        if (done == 0)
            done = PyObject_SetAttr(call->tape, name_of.has_noted, Py_True);
    }
    Py_XDECREF(known);
    Py_XDECREF(me);
    return done;
}

/* `LiveTensors.remember`, of a tensor in the memory of a CPU. */
static int note_in_batch(PyObject *table, Call *call, Made *now, PyObject *key) {
    PyObject *others = PyObject_GetAttr(call->live, name_of.beside);
    const Py_ssize_t count = others == NULL ? -1 : PyObject_Size(others);
    Py_XDECREF(others);
    if (count != 0) {
        PyObject *said = count < 0 ? NULL
                                   : PyObject_CallMethodObjArgs(call->live, name_of.remember,
                                                                now->tensor, key, NULL);
        Py_XDECREF(said);
        return said == NULL ? -1 : 0;
    }
    if (know(table, now->identity, now->tensor, now->version, key, NULL) != 0)
        return -1;
    PyObject *storage = PyObject_CallMethodObjArgs(now->tensor, name_of.untyped_storage, NULL);
    PyObject *memory = storage == NULL ? NULL : PyObject_GetAttr(storage, name_of.cdata);
    PyObject *memories = PyObject_GetAttr(call->live, name_of.memories);
    int done = memory == NULL || memories == NULL ? -1 : PyDict_Contains(memories, memory);
    if (done == 0) {
        PyObject *said = PyObject_CallMethodObjArgs(storage, name_of.weak_ref, NULL);
        done = said == NULL ? -1 : 0;
        Py_XDECREF(said);
    }
    if (done >= 0)
        done = PyDict_SetItem(memories, memory, key);
    Py_XDECREF(storage);
    Py_XDECREF(memory);
    Py_XDECREF(memories);
    return done;
}

/* `LossBatch.has_made`: a new value. Its key, or NULL. */
static PyObject *new_value(PyObject *table, Call *call, Made *now) {
    PyObject *values = PyObject_GetAttr(call->batch, name_of.values);
    PyObject *index = values == NULL ? NULL : PyLong_FromSsize_t(PyList_Size(values));
    PyObject *its_dtype = attribute_of(now->tensor, &dtype), *name = NULL, *key = NULL;
    if (its_dtype != NULL)
        name = PyObject_CallFunctionObjArgs(losses.name_of_dtype, its_dtype, NULL);
    PyObject *value = index == NULL || name == NULL
                          ? NULL
                          : PyObject_CallFunctionObjArgs(losses.value_of, call->name, name, index,
                                                         now->needs, NULL);
    PyObject *pair = Py_BuildValue("dd", now->low, now->high);
    if (value != NULL && pair != NULL && PyList_Append(values, value) == 0 &&
        append(call->batch, name_of.pairs, pair) == 0)
        key = named_tuple(losses.key, Py_BuildValue("iO", -1, index));
    PyObject *is_on = key == NULL ? NULL : PyObject_CallNoArgs(losses.is_autocast_on);
    if (is_on == NULL ||
        (is_on == Py_True && PyObject_SetAttr(call->batch, name_of.autocast, is_on) != 0) ||
        note_in_batch(table, call, now, key) != 0)
        Py_CLEAR(key);
    Py_XDECREF(values);
    Py_XDECREF(index);
    Py_XDECREF(its_dtype);
    Py_XDECREF(name);
    Py_XDECREF(value);
    Py_XDECREF(pair);
    Py_XDECREF(is_on);
    return key;
}

/* Whether two tensors are of one dtype. -1 where an error came. */
static int same_dtype(PyObject *one, PyObject *other) {
    PyObject *first = attribute_of(one, &dtype), *second = attribute_of(other, &dtype);
    const int found = first == NULL || second == NULL ? -1 : first == second;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return found;
}

/* Notes that a tensor holds what its operand held, if the operation has only moved that: 1, 0, -1. */
static int note_move(PyObject *table, Call *call, Made *now) {
    const Operand *first = &call->read[0]; /* it is the first argument, if that is a tensor */
    if (!call->may_move || call->count == 0 || first->tensor != PyTuple_GetItem(call->args, 0) ||
        !first->is_float)
        return 0;
    const int is_same = same_dtype(first->tensor, now->tensor); /* it has elements: they were read */
    return is_same != 1 ? is_same : note_in_batch(table, call, now, first->key) == 0 ? 1 : -1;
}

/* The keys of what was made: new values. With their places in the result, if it is no tensor. */
static PyObject *new_values(PyObject *table, Call *call, Results *results) {
    if (results->is_one)
        return new_value(table, call, &results->all[0]);
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < results->count; i++) {
        if (!results->all[i].has_numbers)
            continue;
        PyObject *key = new_value(table, call, &results->all[i]);
        PyObject *pair = key == NULL ? NULL : Py_BuildValue("nN", i, key);
        if (pair == NULL || PyList_Append(found, pair) != 0)
            Py_CLEAR(found);
        Py_XDECREF(pair);
    }
    return found;
}

/* Adds the operation to the batch, with keys in the place of tensors. */
static int add_brief(PyObject *table, Call *call, Results *results) {
    PyObject *made = new_values(table, call, results);
    if (made == NULL)
        return -1;
    PyObject *args = filled(call, call->args, 0), *named = filled_names(call, 0);
    PyObject *brief = NULL;
    if (args != NULL && named != NULL)
        brief = named_tuple(losses.brief, PyTuple_Pack(7, call->func, args, named, call->module,
                                                       call->calls, call->place, made));
    const int is_added = brief != NULL &&
                         PyObject_SetAttr(call->batch, name_of.has_brief, Py_True) == 0 &&
                         append(call->batch, name_of.events, brief) == 0;
    Py_DECREF(made);
    Py_XDECREF(args);
    Py_XDECREF(named);
    Py_XDECREF(brief);
    return is_added ? 0 : -1;
}

/* Reads one tensor that was made: 1 where it can be written down in brief, 0 where not. */
static int read_made(PyObject *tensor, Made *now) {
    *now = (Made){.tensor = tensor};
    if ((PyObject *)Py_TYPE(tensor) != plain)
        return 0;
    now->version = attribute_of(tensor, &version);
    if (now->version == NULL) {
        const int is_uncounted = PyErr_ExceptionMatches(PyExc_RuntimeError);
        if (is_uncounted)
            PyErr_Clear();
        return is_uncounted ? 0 : -1;
    }
    PyObject *its_dtype = attribute_of(tensor, &dtype);
    if (its_dtype == NULL)
        return -1;
    const int is_number = may_be_bad(its_dtype);
    Py_DECREF(its_dtype);
    now->has_numbers =
        (char)(is_number && has_memory(tensor) && find_range(tensor, &now->low, &now->high));
    if (PyErr_Occurred() || (is_number && !(now->has_numbers && now->high <= DBL_MAX)))
        return PyErr_Occurred() ? -1 : 0;
    now->identity = PyLong_FromVoidPtr(tensor);
    now->needs = attribute_of(tensor, &requires_grad);
    return now->identity == NULL || now->needs == NULL ? -1 : 1;
}

/* Reads what was made: a tensor, or several. 1 where it can be written down in brief, 0 where not. */
static int read_results(Call *call, PyObject *result, Results *results) {
    const int is_tuple = PyTuple_Check(result);
    results->is_one = !is_tuple && !PyList_Check(result);
    const Py_ssize_t count = results->is_one ? 1
                             : is_tuple      ? PyTuple_Size(result)
                                             : PyList_Size(result);
    int done = count > 0 && count <= MOST_RESULTS ? are_as_before(call) : 0;
    while (done == 1 && results->count < count) {
        PyObject *item = results->is_one ? result
                         : is_tuple      ? PyTuple_GetItem(result, results->count)
                                         : PyList_GetItem(result, results->count);
        Made *now = &results->all[results->count++];
        done = read_made(item, now);
        results->floats += done == 1 && now->has_numbers;
    }
    return done == 1 && !results->is_one && call->may_move && results->floats == 1 ? 0 : done;
}

/* Looks at what a plain operation has made, and writes it down. */
static int write_down(Operations *all, PyObject *table, Call *call, PyObject *result) {
    Results results;
    results.count = results.floats = 0;
    int done = read_results(call, result, &results);
    if (done == 0) {
        done = write_in_full(call, losses.look_closely, result);
    } else if (done == 1) {
        done = note_on_tape(all, call, &results);
        int is_noted = results.floats == 0;
        if (done == 0 && !is_noted && results.is_one)
            is_noted = note_move(table, call, &results.all[0]);
        if (is_noted < 0)
            done = -1;
        else if (done == 0 && !is_noted)
            done = add_brief(table, call, &results);
    }
    for (Py_ssize_t i = 0; i < results.count; i++) {
        Py_XDECREF(results.all[i].version);
        Py_XDECREF(results.all[i].identity);
        Py_XDECREF(results.all[i].needs);
        Py_XDECREF(results.all[i].value);
    }
    return done;
}

/* Tells who looks at what belongs to no loss, before and after an operation of one. */
static int tell_before(Operations *all, Call *call) {
    if (!all->has_bad && !all->awaits && PyDict_Size(all->leaves) == 0)
        return 0;
    PyObject *named = call->kwargs == NULL ? PyDict_New() : held(call->kwargs);
    PyObject *given = named == NULL ? NULL : PyTuple_Pack(2, call->args, named);
    PyObject *said = given == NULL ? NULL
                                   : PyObject_CallMethodObjArgs(all->hooks, name_of.handed_on, given, NULL);
    Py_XDECREF(named);
    Py_XDECREF(given);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

static int tell_after(Operations *all, Call *call, PyObject *result) {
    if (is_tensor(result)) {
        PyObject *its_dtype = attribute_of(result, &dtype);
        const int is_float = its_dtype == NULL ? -1 : attribute_is(its_dtype, &is_floating_point, Py_True);
        Py_XDECREF(its_dtype);
        if (is_float != 0)
            return is_float < 0 ? -1 : 0;
    }
    PyObject *said = PyObject_CallMethodObjArgs(all->hooks, name_of.hands_on, call->func,
                                                call->args, result, NULL);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* Runs an operation that may belong to the loss that is followed. `OTHERWISE` where Python has to;
 * nothing has been done then. */
static int run_in_brief(Operations *all, PyObject *func, PyObject *args, PyObject *kwargs,
                        PyObject **result) {
    if (losses.key == NULL || PyTuple_Size(all->followed) < 4)
        return OTHERWISE;
    PyObject *followed = held(all->followed), *table = PyTuple_GetItem(followed, 0);
    Call call;
    memset(&call, 0, offsetof(Call, read));
    call.count = call.floats = 0;
    call.is_read = call.may_move = call.draws = 0;
    call.func = func;
    call.args = args;
    call.kwargs = kwargs != NULL && PyDict_Size(kwargs) > 0 ? kwargs : NULL;
    *result = NULL;
    int done = prepare(all, &call);
    if (done == DONE && !call.is_read) {
        *result = run_operation(all, func, args, kwargs);
    } else if (done == DONE && tell_before(all, &call) == 0 && find_keys(&call) == 0 &&
               keep_random(&call) == 0) {
        *result = PyObject_Call(func, args, call.kwargs);
        if (*result == NULL)
            write_raised(&call);
        else if (write_down(all, table, &call, *result) != 0 ||
                 tell_after(all, &call, *result) != 0)
            Py_CLEAR(*result);
    }
    let_go_of(&call);
    Py_DECREF(followed);
    return done == DONE && *result == NULL ? -1 : done;
}
