/* A call like one that came before, from Python's objects to the launch: see replay.py, which says what is remembered.
 *
 * What a tensor is comes by DLPack's table of C functions, of which torch has one; new tensors by a function of torch
 * that is called as Python would call it, so that their memory is as all of torch's. The rest of Python that is used is
 * declared in replay.h, from its stable interface: no headers of Python are needed.
 *
 * Python's lock is held but for the launch itself. A record that is in use is not freed: each user has counted it. */
#include "replay.h"

Torch torch;

typedef struct {
    TVMFFIObject object;
    TVMFFISeqCell cell;
} List;

/* What a launch is given, as it is put together: lists and views are taken from the front. */
typedef struct {
    const Record *record;
    Call *call;
    DLTensor *made, views[VIEWS];
    TVMFFIAny items[PARTS], *item;
    List lists[LISTS], *list;
} Arranged;

static Object *none(void) {
    Py_IncRef(torch.none);
    return torch.none;
}

/* arguments: a tuple, or NULL for none. */
static Object *called(const Callable *function, Object *arguments) {
    if (function->direct) return function->direct(function->self, arguments);
    return arguments ? PyObject_Call(function->object, arguments, NULL) : PyObject_CallNoArgs(function->object);
}

static Object *ask(const Callable *function) { return called(function, NULL); }

/* Of a question or an attribute whose answer is a number: 0, anything else, or -1 where it could not be had. */
static long long number(Object *answer) {
    long long found = -1;
    if (answer == NULL) {
        PyErr_Clear();
        return -1;
    }
    if (answer == torch.no) {
        found = 0;
    } else {
        found = PyLong_AsLongLong(answer);
        if (found == -1) PyErr_Clear();
    }
    Py_DecRef(answer);
    return found;
}

static int is_tensor(Object *given) {
    Object *type = PyObject_Type(given);
    int found = type == torch.tensor || type == torch.parameter;
    Py_DecRef(type);
    return found;
}

static uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

static int traced(void) { return torch.included ? torch.included(torch.tracer) : number(ask(&torch.tracing)) != 0; }

/* Nothing but plain eager mode, as `ops.route` asks for it. */
static int eager(void) {
    Object *level = PyDict_GetItem(torch.levels, torch.level);
    if (level == NULL) return 0;
    Py_IncRef(level);
    return number(level) < 0 && number(ask(&torch.modes)) == 0 && number(ask(&torch.functorch)) == 0 && !traced();
}

/* A view with a negation or a conjugation to be done, or zeros without memory. */
static int is_pending(const Object *tensor) {
    const char *impl;
    uint64_t keys;
    memcpy(&impl, (const char *)tensor + torch.impl, sizeof impl);
    memcpy(&keys, impl + torch.keys, sizeof keys);
    return (keys & torch.pending) != 0;
}

Object *route(Object *self, Object *const *given, Size count) {
    long long grad = number(ask(&torch.grad));
    Object *found = torch.direct;
    (void)self;
    if (count < 1 || given[0] == torch.none || grad < 0 || !eager()) return none();
    for (int i = 0; i < count; ++i) {
        if (given[i] == torch.none) continue;
        if (!is_tensor(given[i]) || is_pending(given[i])) return none();
        if (grad && number(PyObject_GetAttr(given[i], torch.needs_grad)) != 0) found = torch.record;
    }
    Py_IncRef(found);
    return found;
}

static int same_device(DLDevice one, DLDevice other) {
    return one.device_type == other.device_type && one.device_id == other.device_id;
}

static int first_of(Object *const *given, int i) {
    int first = 0;
    while (given[first] != given[i]) ++first;
    return first;
}

int look(const CallCache *cache, Object *const *given, Size count, int recorded, Call *call) {
    long long grad;
    uint64_t hash = 0;
    if (count < 1 || count > GIVENS || !eager() || number(ask(&torch.filling)) != 0 ||
        (grad = recorded ? 0 : number(ask(&torch.grad))) < 0)
        return 0;
    call->count = (int)count;
    call->tensors = 0;
    for (int i = 0; i < count; ++i) {
        DLTensor *t = &call->tensor[i];
        if (given[i] == torch.none || !is_tensor(given[i])) {
            Size of_other = given[i] == torch.none ? 1 : PyObject_Hash(given[i]);
            if (of_other == -1) {
                PyErr_Clear();
                return 0;
            }
            hash = mixed(hash, (uint64_t)of_other);
            continue;
        }
        if (is_pending(given[i]) || (grad && number(PyObject_GetAttr(given[i], torch.needs_grad)) != 0)) return 0;
        if (torch.dlpack->dltensor_from_py_object_no_sync(given[i], t)) {
            PyErr_Clear();
            return 0;
        }
        t->data = (char *)t->data + t->byte_offset;
        t->byte_offset = 0;
        if (!call->tensors) call->device = t->device;
        if (t->ndim > DIMENSIONS || t->strides == NULL || t->data == NULL || !same_device(t->device, call->device))
            return 0;
        call->tensors |= (uint64_t)1 << i;
        call->same[i] = (int16_t)first_of(given, i);
        hash = mixed(hash, t->dtype.code | (uint64_t)t->dtype.bits << 8 | (uint64_t)t->ndim << 16 |
                               (uint64_t)call->same[i] << 24 | ((uintptr_t)t->data & 15) << 32);
        for (int d = 0; d < t->ndim; ++d) hash = mixed(hash, (uint64_t)t->shape[d] << 32 ^ (uint64_t)t->strides[d]);
    }
    call->stream = NULL;
    if (!call->tensors || call->device.device_type > kDLCUDA || !find_overlaps(call)) return 0;
    if (call->device.device_type == kDLCUDA) {
        if (torch.device.object && number(ask(&torch.device)) != call->device.device_id) return 0;
        if (torch.dlpack->current_work_stream(kDLCUDA, call->device.device_id, &call->stream)) {
            PyErr_Clear();
            return 0;
        }
    }
    if (cache->by_stream) {
        if (call->stream && number(ask(&torch.captures)) != 0) return 0;
        hash = mixed(hash, (uintptr_t)call->stream);
    }
    call->hash = hash;
    return 1;
}

static int same_tensor(const Given *known, const DLTensor *t, int same) {
    size_t bytes = (size_t)t->ndim * sizeof *t->shape;
    return known->other == NULL && known->same == same && known->dimensions == t->ndim &&
           !memcmp(&known->dtype, &t->dtype, sizeof t->dtype) && known->address == ((uintptr_t)t->data & 15) &&
           !memcmp(known->sizes, t->shape, bytes) && !memcmp(known->strides, t->strides, bytes);
}

/* The same bits: 0.0 is not -0.0. */
static int same_real(Object *known, Object *given) {
    double one = PyFloat_AsDouble(known), other = PyFloat_AsDouble(given);
    return !memcmp(&one, &other, sizeof one);
}

/* The same type and the same value. */
static int same_other(Object *known, Object *given) {
    Object *one, *other;
    int found;
    if (known == given) return 1;
    if (known == NULL) return 0;
    one = PyObject_Type(known), other = PyObject_Type(given);
    if (one != other)
        found = 0;
    else
        found = one == torch.real ? same_real(known, given) : PyObject_RichCompareBool(known, given, EQUAL);
    Py_DecRef(one);
    Py_DecRef(other);
    if (found < 0) PyErr_Clear();
    return found > 0;
}

static int fits(const CallCache *cache, const Record *record, const Call *call, Object *const *given) {
    if (record == NULL || record->hash != call->hash || record->givens != call->count || !same_overlaps(record, call) ||
        !same_device(record->device, call->device) || (cache->by_stream && record->stream != call->stream))
        return 0;
    for (int i = 0; i < call->count; ++i)
        if (call->tensors >> i & 1 ? !same_tensor(&record->given[i], &call->tensor[i], call->same[i])
                                   : !same_other(record->given[i].other, given[i]))
            return 0;
    return 1;
}

Record *find(CallCache *cache, const Call *call, Object *const *given) {
    Record **set = cache->record[call->hash % SETS];
    for (int i = 0; i < WAYS; ++i)
        if (fits(cache, set[i], call, given)) return set[i];
    return NULL;
}

void leave(Record *record) {
    if (record == NULL || --record->users) return;
    for (int i = 0; i < record->givens; ++i) Py_DecRef(record->given[i].other);
    for (int i = 0; i < record->made; ++i) Py_DecRef(record->make[i]);
    for (int i = 0; i < record->constants; ++i) Py_DecRef(record->owner[i]);
    for (int i = 0; i < record->steps; ++i) TVMFFIObjectDecRef(record->step[i].run);
    Py_DecRef(record->note);
    free(record);
}

static void drop(Object **made, int count) {
    for (int i = 0; i < count; ++i) Py_DecRef(made[i]);
}

/* 0 where there was no memory. */
static int allocate(const Record *record, Object **made, DLTensor *tensors) {
    for (int i = 0; i < record->made; ++i) {
        made[i] = called(&torch.make[record->device.device_type], record->make[i]);
        if (made[i] == NULL || torch.dlpack->dltensor_from_py_object_no_sync(made[i], &tensors[i])) {
            PyErr_Clear();
            drop(made, i + (made[i] != NULL));
            return 0;
        }
    }
    return 1;
}

static DLTensor *viewed(Arranged *to, int i) {
    const View *view = &to->record->view[i];
    const DLTensor *of = view->place < GIVENS ? &to->call->tensor[view->place] : &to->made[view->place - GIVENS];
    to->views[i] = view->tensor;
    to->views[i].data = (char *)of->data + of->byte_offset + view->offset;
    return &to->views[i];
}

static TVMFFIAny value(Arranged *to, const Part *part) {
    TVMFFIAny found = {.type_index = kTVMFFINone};
    if (part->kind == OF_INT || part->kind == OF_ADDRESS) {
        found.type_index = kTVMFFIInt;
        found.v_int64 = part->kind == OF_INT ? part->integer : (int64_t)(uintptr_t)to->call->tensor[part->place].data;
    } else if (part->kind == OF_FLOAT) {
        found.type_index = kTVMFFIFloat;
        found.v_float64 = part->real;
    } else if (part->kind != OF_NONE) {
        found.type_index = kTVMFFIDLTensorPtr;
        found.v_ptr = part->kind == OF_GIVEN  ? &to->call->tensor[part->place]
                      : part->kind == OF_MADE ? &to->made[part->place]
                      : part->kind == OF_VIEW ? viewed(to, part->place)
                                              : (DLTensor *)&to->record->constant[part->place];
    }
    return found;
}

/* An argument from its parts; what comes behind them. tvm-ffi's tuples are objects: here they stand on the stack,
 * counted once, so that nothing frees them. */
static const Part *arrange(Arranged *to, const Part *part, TVMFFIAny *given) {
    TVMFFIAny *items = to->item;
    List *list = to->list;
    int count = part->place;
    if (part->kind != OF_LIST) {
        *given = value(to, part);
        return part + 1;
    }
    ++to->list;
    to->item += count;
    memset(list, 0, sizeof *list);
    list->object.combined_ref_count = (uint64_t)1 << 32 | 1;
    list->object.type_index = kTVMFFIArray;
    list->cell.data = items;
    list->cell.size = list->cell.capacity = count;
    ++part;
    for (int i = 0; i < count; ++i) part = arrange(to, part, &items[i]);
    given->type_index = kTVMFFIArray;
    given->zero_padding = 0;
    given->v_obj = &list->object;
    return part;
}

/* 0 where a function does not take such a call, or a launch fails. */
static int run(const Record *record, Call *call, DLTensor *made) {
    TVMFFIAny given[PARTS], result = {.type_index = kTVMFFINone};
    Arranged to;
    int failed = 0;
    to.record = record;
    to.call = call;
    to.made = made;
    for (int i = 0; i < record->steps && !failed; ++i) {
        const Step *step = &record->step[i];
        const Part *part = &record->part[step->first];
        to.item = to.items;
        to.list = to.lists;
        for (int j = 0; j < step->arguments; ++j) part = arrange(&to, part, &given[j]);
        failed = TVMFFIFunctionCall(step->run, given, step->arguments, &result);
        if (result.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(result.v_obj);
        result.type_index = kTVMFFINone;
    }
    return !failed;
}

static int launch(const Record *record, Call *call, DLTensor *made) {
    TVMFFIStreamHandle before = NULL;
    int on_gpu = call->device.device_type == kDLCUDA, done;
    void *python;
    if (on_gpu && TVMFFIEnvSetStream(kDLCUDA, call->device.device_id, call->stream, &before)) return 0;
    python = PyEval_SaveThread();
    done = run(record, call, made);
    PyEval_RestoreThread(python);
    if (on_gpu && before != call->stream) TVMFFIEnvSetStream(kDLCUDA, call->device.device_id, before, NULL);
    if (!done) {
        TVMFFIObjectHandle error = NULL;
        TVMFFIErrorMoveFromRaised(&error);
        if (error) TVMFFIObjectDecRef(error);
        PyErr_Clear();
    }
    return done;
}

static Object *result_of(const Record *record, Object *const *given, Object **made, int i) {
    int place = record->result[i];
    Object *found = place < 0 ? torch.none : place < GIVENS ? given[place] : made[place - GIVENS];
    Py_IncRef(found);
    return found;
}

static Object *results(const Record *record, Object *const *given, Object **made) {
    Object *found;
    if (!record->is_tuple) return result_of(record, given, made, 0);
    found = PyTuple_New(record->results);
    for (int i = 0; found && i < record->results; ++i) PyTuple_SetItem(found, i, result_of(record, given, made, i));
    return found;
}

Object *take(Object *self, Object *const *given, Size count) {
    CallCache *cache = PyCapsule_GetPointer(self, NAME);
    Object *made[MADE], *found = NULL;
    DLTensor tensors[MADE];
    Record *record;
    Call call;
    if (!look(cache, given, count, 0, &call)) return none();
    record = find(cache, &call, given);
    if (record == NULL || record->refused) return none();
    ++record->users;
    record->chances = IN_USE;
    if (allocate(record, made, tensors)) {
        if (launch(record, &call, tensors))
            found = results(record, given, made);
        else
            record->refused = 1;
        drop(made, record->made);
    }
    leave(record);
    if (found) return found;
    PyErr_Clear();
    return none();
}

Object *known(Object *self, Object *const *given, Size count) {
    CallCache *cache = PyCapsule_GetPointer(self, NAME);
    Record *record;
    Call call;
    if (!look(cache, given, count, 1, &call)) return none();
    record = find(cache, &call, given);
    if (record == NULL || record->refused || record->note == NULL) return none();
    Py_IncRef(record->note);
    return record->note;
}
