/* How a call comes to be remembered: what replay.py asks and adds, by ctypes but for `wants`. */
#include "replay.h"

static int has_elements(const DLTensor *t) {
    for (int d = 0; d < t->ndim; ++d)
        if (t->shape[d] == 0) return 0;
    return 1;
}

/* Where a call's record would go: to a place that is free, or that of the one with the fewest chances. */
static Record **place_of(CallCache *cache, uint64_t hash) {
    Record **set = cache->record[hash % SETS], **found = set;
    for (int i = 0; i < WAYS; ++i) {
        if (set[i] == NULL) return &set[i];
        if (set[i]->chances < (*found)->chances) found = &set[i];
    }
    return found;
}

/* Is it a call that may be remembered, has it been asked for before, and is it not known? Where that costs another its
 * place, not at once: with more kinds of calls than places each would only drive out the next. */
static Object *wants(Object *self, Object *const *given, Size count) {
    CallCache *cache = PyCapsule_GetPointer(self, NAME);
    Record *other;
    uint32_t *missed;
    Call call;
    int found;
    if (!look(cache, given, count, 0, &call) || find(cache, &call, given)) return PyBool_FromLong(0);
    for (int i = 0; i < count; ++i)
        if (call.tensors >> i & 1 && !has_elements(&call.tensor[i])) return PyBool_FromLong(0); /* none is launched */
    missed = &cache->missed[call.hash % MISSED];
    found = *missed == (uint32_t)(call.hash >> 32);
    *missed = (uint32_t)(call.hash >> 32);
    other = *place_of(cache, call.hash);
    if (found && other && other->chances) {
        --other->chances;
        found = 0;
    }
    return PyBool_FromLong(found);
}

/* what: the first argument; a call's are behind it. Is the call remembered, and `what` with it? */
static Object *note(Object *self, Object *const *given, Size count) {
    CallCache *cache = PyCapsule_GetPointer(self, NAME);
    Record *record;
    Call call;
    if (count < 2 || !look(cache, given + 1, count - 1, 1, &call)) return PyBool_FromLong(0);
    record = find(cache, &call, given + 1);
    if (record) {
        Object *before = record->note;
        Py_IncRef(record->note = given[0]);
        Py_DecRef(before);
    }
    return PyBool_FromLong(record != NULL);
}

static long long item(Object *tuple, Size i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple, i)); }

static Callable callable(Object *function, int flags) {
    Callable found = {function == torch.none ? NULL : function, NULL, NULL};
    Py_IncRef(function);
    if (found.object && PyCFunction_GetFlags(function) == flags) {
        found.direct = PyCFunction_GetFunction(function);
        found.self = PyCFunction_GetSelf(function);
    }
    PyErr_Clear();
    return found;
}

/* things: (None, False, float, Tensor, Parameter, "requires_grad", a module's names, "_current_level", "direct",
 * "record", makes a tensor on the CPU, on CUDA's device, five questions, the current device's or None, is something
 * traced?, DLPack's table). numbers: the address of c10's question or 0, the tracer's key, and of `Torch` impl, keys and
 * pending. 0 where it is another table. */
TVM_FFI_DLL_EXPORT int tkq_prepare(Object *things, Object *numbers) {
    Object **places[] = {&torch.none, &torch.no, &torch.real, &torch.tensor, &torch.parameter, &torch.needs_grad,
                         &torch.levels, &torch.level, &torch.direct, &torch.record};
    Callable *callables[] = {&torch.make[kDLCPU], &torch.make[kDLCUDA], &torch.modes, &torch.functorch, &torch.grad,
                             &torch.filling, &torch.captures, &torch.device, &torch.tracing};
    int n = sizeof places / sizeof *places, m = sizeof callables / sizeof *callables;
    if (PyTuple_Size(things) != n + m + 1) return 0;
    torch.dlpack = PyCapsule_GetPointer(PyTuple_GetItem(things, n + m), "dlpack_exchange_api");
    if (torch.dlpack == NULL) PyErr_Clear();
    if (torch.dlpack == NULL || torch.dlpack->header.version.major != DLPACK_MAJOR_VERSION ||
        torch.dlpack->dltensor_from_py_object_no_sync == NULL)
        return 0;
    for (int i = 0; i < n; ++i) Py_IncRef(*places[i] = PyTuple_GetItem(things, i));
    for (int i = 0; i < m; ++i)
        *callables[i] = callable(PyTuple_GetItem(things, n + i), i < 2 ? ARGUMENTS : NO_ARGUMENTS);
    torch.included = (_Bool(*)(uint16_t))(uintptr_t)item(numbers, 0);
    torch.tracer = (uint16_t)item(numbers, 1);
    torch.impl = (size_t)item(numbers, 2);
    torch.keys = (size_t)item(numbers, 3);
    torch.pending = (uint64_t)item(numbers, 4);
    return 1;
}

/* `route` as a function of Python's. */
TVM_FFI_DLL_EXPORT Object *tkq_route(void) {
    static Method method = {"route", (void *)route, FAST_CALL, "The way of a call in plain eager mode, or None."};
    return PyCFunction_NewEx(&method, NULL, NULL);
}

static void gone(Object *capsule) {
    CallCache *cache = PyCapsule_GetPointer(capsule, NAME);
    for (int i = 0; i < SETS * WAYS; ++i) leave(cache->record[i / WAYS][i % WAYS]);
    free(cache);
}

/* A capsule with nothing in it yet. */
TVM_FFI_DLL_EXPORT Object *tkq_new(int by_stream) {
    CallCache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) abort();
    cache->by_stream = by_stream;
    return PyCapsule_New(cache, NAME, gone);
}

/* (take, wants, known, note) of a capsule. */
TVM_FFI_DLL_EXPORT Object *tkq_functions(Object *capsule) {
    static Method methods[] = {{"take", (void *)take, FAST_CALL, "The results of a call that is known, or None."},
                               {"wants", (void *)wants, FAST_CALL, "Is it a call to be added?"},
                               {"known", (void *)known, FAST_CALL, "What was noted of such a call, or None."},
                               {"note", (void *)note, FAST_CALL, "Keep something with a call that was added."}};
    int count = sizeof methods / sizeof *methods;
    Object *found = PyTuple_New(count);
    for (int i = 0; found && i < count; ++i) PyTuple_SetItem(found, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    return found;
}

static void record_given(Record *record, const Call *call, Object *given) {
    record->givens = call->count;
    record->overlaps = call->overlaps;
    for (int i = 0; i < call->count; ++i) {
        Given *to = &record->given[i];
        const DLTensor *t = &call->tensor[i];
        if (!(call->tensors >> i & 1)) {
            Py_IncRef(to->other = PyTuple_GetItem(given, i));
            continue;
        }
        to->dtype = t->dtype;
        to->dimensions = t->ndim;
        to->same = call->same[i];
        to->address = (uintptr_t)t->data & 15;
        to->first = t->data;
        memcpy(to->sizes, t->shape, (size_t)t->ndim * sizeof *t->shape);
        memcpy(to->strides, t->strides, (size_t)t->ndim * sizeof *t->strides);
    }
}

/* what: (the place of a tensor, that tensor, its view). 0 where there is no room for it. */
static int record_view(Record *record, Object *what) {
    View *view = &record->view[record->views];
    DLTensor of, *t = &view->tensor;
    if (record->views == VIEWS || torch.dlpack->dltensor_from_py_object_no_sync(PyTuple_GetItem(what, 1), &of) ||
        torch.dlpack->dltensor_from_py_object_no_sync(PyTuple_GetItem(what, 2), t) || t->ndim > DIMENSIONS ||
        t->strides == NULL)
        return 0;
    view->place = (int)item(what, 0);
    view->offset = (char *)t->data + t->byte_offset - ((char *)of.data + of.byte_offset);
    t->shape = memcpy(view->sizes, t->shape, (size_t)t->ndim * sizeof *t->shape);
    t->strides = memcpy(view->strides, t->strides, (size_t)t->ndim * sizeof *t->strides);
    t->byte_offset = 0;
    ++record->views;
    return 1;
}

/* 0 where there is no room for it. */
static int record_part(Record *record, Part *part, Object *pair) {
    Object *what = PyTuple_GetItem(pair, 1);
    part->kind = (int32_t)item(pair, 0);
    if (part->kind == OF_FLOAT) {
        part->real = PyFloat_AsDouble(what);
    } else if (part->kind == OF_CONSTANT) {
        if (record->constants == CONSTANTS) return 0;
        torch.dlpack->dltensor_from_py_object_no_sync(what, &record->constant[record->constants]);
        Py_IncRef(record->owner[record->constants] = what);
        part->place = record->constants++;
    } else if (part->kind == OF_INT) {
        part->integer = PyLong_AsLongLong(what);
    } else if (part->kind == OF_VIEW) {
        part->place = record->views;
        return record_view(record, what);
    } else if (part->kind != OF_NONE) {
        part->place = (int32_t)PyLong_AsLongLong(what);
    }
    return 1;
}

/* How many of the parts from here on are one argument's. lists: counted. */
static int parts_of(const Part *part, int *lists) {
    int found = 1;
    if (part->kind == OF_LIST) {
        ++*lists;
        for (int i = 0; i < part->place; ++i) found += parts_of(part + found, lists);
    }
    return found;
}

/* steps: pairs (function, how many of the parts are its). 0 for more than there is room for. */
static int record_steps(Record *record, Object *steps, Object *parts) {
    Size count = PyTuple_Size(parts);
    if (count > PARTS || PyTuple_Size(steps) > STEPS) return 0;
    for (; record->parts < count; ++record->parts)
        if (!record_part(record, &record->part[record->parts], PyTuple_GetItem(parts, record->parts))) return 0;
    for (int at = 0; record->steps < PyTuple_Size(steps);) {
        Step *step = &record->step[record->steps];
        Object *pair = PyTuple_GetItem(steps, record->steps++);
        int end = at + (int)item(pair, 1), lists = 0;
        step->first = at;
        TVMFFIObjectIncRef(step->run = (TVMFFIObjectHandle)(uintptr_t)item(pair, 0));
        for (; at < end; ++step->arguments) at += parts_of(&record->part[at], &lists);
        if (lists > LISTS) return 0;
    }
    return 1;
}

/* given: of the call. made: for each new tensor the arguments of torch's function. steps: as of `record_steps`. parts:
 * pairs (kind, what), in turn; a list's after it. results: places. Nothing is recorded where that is more than there is
 * room for. */
TVM_FFI_DLL_EXPORT void tkq_add(Object *capsule, Object *given, Object *made, Object *steps, Object *parts,
                                Object *results, int is_tuple) {
    CallCache *cache = PyCapsule_GetPointer(capsule, NAME);
    Size count = PyTuple_Size(given), makes = PyTuple_Size(made), places = PyTuple_Size(results);
    Object *in_place[GIVENS];
    Record *record;
    Call call;
    if (count > GIVENS || makes > MADE || places > RESULTS) return;
    for (int i = 0; i < count; ++i) in_place[i] = PyTuple_GetItem(given, i);
    if (!look(cache, in_place, count, 0, &call) || (record = calloc(1, sizeof *record)) == NULL) return;
    record->users = 1;
    record->chances = NEW;
    record->hash = call.hash;
    record->stream = call.stream;
    record->device = call.device;
    record->is_tuple = is_tuple;
    record_given(record, &call, given);
    for (; record->made < makes; ++record->made)
        Py_IncRef(record->make[record->made] = PyTuple_GetItem(made, record->made));
    for (; record->results < places; ++record->results)
        record->result[record->results] = (int)item(results, record->results);
    if (record_steps(record, steps, parts) && !PyErr_Occurred() && !find(cache, &call, in_place)) {
        Record **place = place_of(cache, record->hash);
        leave(*place);
        *place = record;
    } else {
        PyErr_Clear();
        leave(record);
    }
}
