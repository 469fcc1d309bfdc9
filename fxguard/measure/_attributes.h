/* Attributes of tensors, dtypes and frames, asked of the descriptors of their types: a look-up by name
 * takes longer. A part of _native.c, which includes it.
 */

typedef struct {
    const char *text;
    PyObject *name, *descriptor;
    descrgetfunc get;
    PyTypeObject *type, *other; /* whose objects it answers for; NULL for those of no type */
} Attribute;

static PyObject *attribute_of(PyObject *object, const Attribute *of) {
    PyTypeObject *type = Py_TYPE(object);
    if (type == of->type || type == of->other)
        return of->get(of->descriptor, object, (PyObject *)type);
    return PyObject_GetAttr(object, of->name);
}

/* Whether an attribute is this object. */
static int attribute_is(PyObject *object, const Attribute *of, PyObject *wanted) {
    PyObject *found = attribute_of(object, of);
    Py_XDECREF(found); /* the object, or its type, has it */
    return found == wanted;
}

/* Finds the descriptors of a type, for as long as the process runs; `other` is a subclass, or NULL. The
 * list ends with a NULL. */
static int find_attributes(Attribute *const *each, PyTypeObject *type, PyTypeObject *other) {
    for (; *each != NULL; each++) {
        Attribute *of = *each;
        of->name = PyUnicode_InternFromString(of->text);
        of->descriptor = of->name == NULL ? NULL : PyObject_GetAttr((PyObject *)type, of->name);
        if (of->descriptor == NULL)
            return -1;
        PyTypeObject *kind = Py_TYPE(of->descriptor);
        of->get = (descrgetfunc)PyType_GetSlot(kind, Py_tp_descr_get);
        if (of->get == NULL || PyType_GetSlot(kind, Py_tp_descr_set) == NULL)
            continue; /* an object may have one of its own in its place */
        of->type = type;
        PyObject *same = other == NULL ? NULL : PyObject_GetAttr((PyObject *)other, of->name);
        if (other != NULL && same == NULL)
            return -1;
        if (same == of->descriptor)
            of->other = other;
        Py_XDECREF(same);
    }
    return 0;
}
