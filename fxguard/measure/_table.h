/* The newest record of each tensor, found by the tensor's address. A part of _operations.h, which
 * includes it. No tensor is kept: when the table is full, it forgets those that are gone.
 */

typedef struct {
    const void *address;
    Record *record; /* NULL where nothing is */
} Entry;

typedef struct {
    Entry *entries; /* twice as many as are used, or more; a power of two */
    size_t size;
    size_t used, most, least; /* what it holds, before it forgets, and at the first time */
} Table;

static Entry *entry_of(const Table *table, const void *address) {
    size_t at = (size_t)((uint64_t)(uintptr_t)address * 0x9E3779B97F4A7C15u >> 32);
    for (;; at++) {
        Entry *entry = &table->entries[at & (table->size - 1)];
        if (entry->record == NULL || entry->address == address)
            return entry;
    }
}

/* Makes room for `most` records. 0, or -1 where there is no memory. */
static int make_room(Table *table, size_t most) {
    size_t size = 2;
    while (size < 2 * most)
        size *= 2;
    Entry *entries = PyMem_Calloc(size, sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    table->entries = entries;
    table->size = size;
    table->most = most;
    table->used = 0;
    return 0;
}

static int is_gone(const Record *record) {
    return PyWeakref_GetObject(record->reference) == Py_None;
}

static int forget_gone(Table *table) {
    const Table before = *table;
    size_t alive = 0;
    for (size_t i = 0; i < before.size; i++)
        alive += before.entries[i].record != NULL && !is_gone(before.entries[i].record);
    if (make_room(table, 2 * alive + table->least) != 0)
        return -1;
    for (size_t i = 0; i < before.size; i++) {
        Entry *each = &before.entries[i];
        if (each->record == NULL || is_gone(each->record))
            continue;
        *entry_of(table, each->address) = *each;
        each->record = NULL;
        table->used++;
    }
    for (size_t i = 0; i < before.size; i++) /* at last: this may run anything */
        Py_XDECREF((PyObject *)before.entries[i].record);
    PyMem_Free(before.entries);
    return 0;
}

/* Puts a record in the table, in place of one that nobody asks for any more. */
static int enter(Table *table, PyObject *tensor, Record *record) {
    Entry *entry = entry_of(table, tensor);
    Record *before = entry->record;
    Py_INCREF((PyObject *)record);
    *entry = (Entry){tensor, record};
    if (before != NULL) {
        Py_CLEAR(before->reference);
        Py_DECREF((PyObject *)before);
        return 0;
    }
    return ++table->used > table->most ? forget_gone(table) : 0;
}

static void empty(Table *table) {
    Entry *entries = table->entries;
    table->entries = NULL;
    for (size_t i = 0; entries != NULL && i < table->size; i++)
        Py_XDECREF((PyObject *)entries[i].record);
    PyMem_Free(entries);
}
