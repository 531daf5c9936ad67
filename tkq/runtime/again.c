/* A call like one that came before, from Python's objects to the launch: see again.py, which says what is remembered.
 *
 * What a tensor is comes by DLPack's table of C functions, of which torch has one; new tensors by a function of torch
 * that is called as Python would call it, so that their memory is as all of torch's. The rest of Python that is used is
 * declared here, from its stable interface: no headers of Python are needed.
 *
 * Python's lock is held but for the launch itself. A record that is in use is not freed: each user has counted it. */
#include <dlpack/dlpack.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

typedef struct Object Object;
typedef intptr_t Size;
typedef Object *(*Function)(Object *, Object *);
typedef struct {
    const char *name;
    void *function;
    int flags;
    const char *text;
} Method;
enum { NO_ARGUMENTS = 4, FAST_CALL = 0x80 };

void Py_IncRef(Object *);
void Py_DecRef(Object *);
Object *PyBool_FromLong(long);
Object *PyCapsule_New(void *, const char *, void (*)(Object *));
void *PyCapsule_GetPointer(Object *, const char *);
Object *PyCFunction_NewEx(Method *, Object *, Object *);
Function PyCFunction_GetFunction(Object *);
Object *PyCFunction_GetSelf(Object *);
int PyCFunction_GetFlags(Object *);
Object *PyDict_GetItem(Object *, Object *);
void PyErr_Clear(void);
void *PyEval_SaveThread(void);
void PyEval_RestoreThread(void *);
double PyFloat_AsDouble(Object *);
long long PyLong_AsLongLong(Object *);
Object *PyLong_FromLongLong(long long);
Object *PyObject_Call(Object *, Object *, Object *);
Object *PyObject_CallNoArgs(Object *);
Object *PyObject_GetAttr(Object *, Object *);
Size PyObject_Hash(Object *);
int PyObject_RichCompareBool(Object *, Object *, int);
Object *PyObject_Type(Object *);
Object *PyTuple_GetItem(Object *, Size);
Object *PyTuple_New(Size);
int PyTuple_SetItem(Object *, Size, Object *);
Size PyTuple_Size(Object *);

enum { GIVENS = 24, MADE = 4, PARTS = 48, LISTS = 4, RESULTS = 6, DIMENSIONS = 5 };
enum { SETS = 64, WAYS = 4, MISSED = 1024, EQUAL = 2 };
enum { OF_GIVEN, OF_MADE, OF_NONE, OF_INT, OF_FLOAT, OF_ADDRESS, OF_KEPT, OF_LIST }; /* again.py's, in this order */
static const char NAME[] = "tkq.runtime.again";

typedef struct {
    Object *object, *self;
    Function direct; /* of a function in C without arguments; else NULL */
} Question;

static struct {
    const DLPackExchangeAPI *dlpack;
    Object *none, *no, *tensor, *parameter, *needs_grad, *levels, *level;
    Object *make[3]; /* by the type of a device: torch's function that makes a tensor there */
    Question modes, functorch, grad, filling, captures, device;
} torch;

typedef struct {
    Object *other; /* NULL for a tensor */
    DLDataType dtype;
    int32_t dimensions;
    int16_t same;     /* the first place where the same tensor is given */
    uint16_t address; /* its last bits, on which it depends how wide an access can be */
    int64_t sizes[DIMENSIONS], strides[DIMENSIONS];
} Given;

typedef struct {
    int32_t kind, place; /* of a list: how many parts follow that are its */
    union {
        int64_t integer;
        double real;
    };
    Object *kept;
    DLTensor tensor; /* of kept */
} Part;

typedef struct {
    int64_t users;
    uint64_t hash;
    void *stream;
    int refused; /* run does not take such calls: they go the long way for good */
    TVMFFIObjectHandle run;
    DLDevice device;
    int givens, made, parts, arguments, results, is_tuple;
    Given given[GIVENS];
    Object *make[MADE];
    Part part[PARTS];
    int result[RESULTS]; /* a place of what is given, GIVENS + a place of what is made, or -1 for None */
} Record;

typedef struct {
    int by_stream; /* calls of another stream are other calls, and what a graph captures goes the long way */
    unsigned turn;
    Record *record[SETS][WAYS];
    uint64_t missed[MISSED];
} Again;

/* What a call is, but for the addresses. */
typedef struct {
    int count;
    uint64_t hash;
    DLDevice device;
    void *stream;
    unsigned tensors; /* a bit for each place */
    int16_t same[GIVENS];
    DLTensor tensor[GIVENS];
} Call;

typedef struct {
    TVMFFIObject object;
    TVMFFISeqCell cell;
} List;

static Object *none(void) {
    Py_IncRef(torch.none);
    return torch.none;
}

static Object *ask(const Question *q) { return q->direct ? q->direct(q->self, NULL) : PyObject_CallNoArgs(q->object); }

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

/* Nothing but plain eager mode, as `ops.route` asks for it; and memory is not to be filled. */
static int plain(void) {
    Object *level = PyDict_GetItem(torch.levels, torch.level);
    if (level == NULL) return 0;
    Py_IncRef(level);
    return number(level) < 0 && number(ask(&torch.modes)) == 0 && number(ask(&torch.functorch)) == 0 &&
           number(ask(&torch.filling)) == 0;
}

static int first_of(Object *const *given, int i) {
    int first = 0;
    while (given[first] != given[i]) ++first;
    return first;
}

/* 0 where it is no call that can be remembered. */
static int look(const Again *again, Object *const *given, Size count, Call *call) {
    long long grad;
    uint64_t hash = 0;
    if (count < 1 || count > GIVENS || !plain() || (grad = number(ask(&torch.grad))) < 0) return 0;
    call->count = (int)count;
    call->tensors = 0;
    for (int i = 0; i < count; ++i) {
        DLTensor *t = &call->tensor[i];
        if (!is_tensor(given[i])) {
            Size of_other = given[i] == torch.none ? 1 : PyObject_Hash(given[i]);
            if (of_other == -1) {
                PyErr_Clear();
                return 0;
            }
            hash = mixed(hash, (uint64_t)of_other);
            continue;
        }
        if (grad && number(PyObject_GetAttr(given[i], torch.needs_grad)) != 0) return 0;
        if (torch.dlpack->dltensor_from_py_object_no_sync(given[i], t)) {
            PyErr_Clear();
            return 0;
        }
        t->data = (char *)t->data + t->byte_offset;
        t->byte_offset = 0;
        if (!call->tensors) call->device = t->device;
        if (t->ndim > DIMENSIONS || t->strides == NULL || t->data == NULL || t->device.device_id != call->device.device_id ||
            t->device.device_type != call->device.device_type)
            return 0;
        call->tensors |= 1u << i;
        call->same[i] = (int16_t)first_of(given, i);
        hash = mixed(hash, t->dtype.code | (uint64_t)t->dtype.bits << 8 | (uint64_t)t->ndim << 16 |
                               (uint64_t)call->same[i] << 24 | ((uintptr_t)t->data & 15) << 32);
        for (int d = 0; d < t->ndim; ++d) hash = mixed(hash, (uint64_t)t->shape[d] << 32 ^ (uint64_t)t->strides[d]);
    }
    call->stream = NULL;
    if (!call->tensors || call->device.device_type > kDLCUDA) return 0;
    if (call->device.device_type == kDLCUDA) {
        if (torch.device.object && number(ask(&torch.device)) != call->device.device_id) return 0;
        if (torch.dlpack->current_work_stream(kDLCUDA, call->device.device_id, &call->stream)) {
            PyErr_Clear();
            return 0;
        }
    }
    if (again->by_stream) {
        if (call->stream && number(ask(&torch.captures)) != 0) return 0;
        hash = mixed(hash, (uintptr_t)call->stream);
    }
    call->hash = hash;
    return 1;
}

static int same_tensor(const Given *known, const DLTensor *t, int same) {
    size_t bytes = (size_t)t->ndim * sizeof *t->shape;
    return known->other == NULL && known->same == same && known->dimensions == t->ndim && known->dtype.code == t->dtype.code &&
           known->dtype.bits == t->dtype.bits && known->dtype.lanes == t->dtype.lanes &&
           known->address == ((uintptr_t)t->data & 15) && !memcmp(known->sizes, t->shape, bytes) &&
           !memcmp(known->strides, t->strides, bytes);
}

/* The same type and the same value. */
static int same_other(Object *known, Object *given) {
    Object *one, *other;
    int found;
    if (known == given) return 1;
    if (known == NULL) return 0;
    one = PyObject_Type(known), other = PyObject_Type(given);
    found = one == other ? PyObject_RichCompareBool(known, given, EQUAL) : 0;
    Py_DecRef(one);
    Py_DecRef(other);
    if (found < 0) PyErr_Clear();
    return found > 0;
}

static int fits(const Again *again, const Record *record, const Call *call, Object *const *given) {
    if (record == NULL || record->hash != call->hash || record->givens != call->count ||
        record->device.device_type != call->device.device_type || record->device.device_id != call->device.device_id ||
        (again->by_stream && record->stream != call->stream))
        return 0;
    for (int i = 0; i < call->count; ++i)
        if (call->tensors >> i & 1 ? !same_tensor(&record->given[i], &call->tensor[i], call->same[i])
                                   : !same_other(record->given[i].other, given[i]))
            return 0;
    return 1;
}

static Record *find(Again *again, const Call *call, Object *const *given) {
    Record **set = again->record[call->hash % SETS];
    for (int i = 0; i < WAYS; ++i)
        if (fits(again, set[i], call, given)) return set[i];
    return NULL;
}

static void leave(Record *record) {
    if (record == NULL || --record->users) return;
    for (int i = 0; i < record->givens; ++i) Py_DecRef(record->given[i].other);
    for (int i = 0; i < record->made; ++i) Py_DecRef(record->make[i]);
    for (int i = 0; i < record->parts; ++i) Py_DecRef(record->part[i].kept);
    if (record->run) TVMFFIObjectDecRef(record->run);
    free(record);
}

static void drop(Object **made, int count) {
    for (int i = 0; i < count; ++i) Py_DecRef(made[i]);
}

/* 0 where there was no memory. */
static int allocate(const Record *record, Object **made, DLTensor *tensors) {
    for (int i = 0; i < record->made; ++i) {
        made[i] = PyObject_Call(torch.make[record->device.device_type], record->make[i], NULL);
        if (made[i] == NULL || torch.dlpack->dltensor_from_py_object_no_sync(made[i], &tensors[i])) {
            PyErr_Clear();
            drop(made, i + (made[i] != NULL));
            return 0;
        }
    }
    return 1;
}

static TVMFFIAny value(const Part *part, Call *call, DLTensor *made) {
    TVMFFIAny found = {.type_index = kTVMFFINone};
    if (part->kind == OF_INT || part->kind == OF_ADDRESS) {
        found.type_index = kTVMFFIInt;
        found.v_int64 = part->kind == OF_INT ? part->integer : (int64_t)(uintptr_t)call->tensor[part->place].data;
    } else if (part->kind == OF_FLOAT) {
        found.type_index = kTVMFFIFloat;
        found.v_float64 = part->real;
    } else if (part->kind != OF_NONE) {
        found.type_index = kTVMFFIDLTensorPtr;
        found.v_ptr = part->kind == OF_GIVEN ? &call->tensor[part->place]
                      : part->kind == OF_MADE ? &made[part->place]
                                              : (DLTensor *)&part->tensor;
    }
    return found;
}

/* tvm-ffi's tuples are objects: here they stand on the stack, counted once, so that nobody frees them. */
static void arrange(const Record *record, Call *call, DLTensor *made, TVMFFIAny *given, TVMFFIAny *items, List *list) {
    for (int i = 0; i < record->parts; ++i) {
        const Part *part = &record->part[i];
        if (part->kind != OF_LIST) {
            *given++ = value(part, call, made);
            continue;
        }
        memset(list, 0, sizeof *list);
        list->object.combined_ref_count = (uint64_t)1 << 32 | 1;
        list->object.type_index = kTVMFFIArray;
        list->cell.data = items;
        list->cell.size = list->cell.capacity = part->place;
        for (int j = 0; j < part->place; ++j) *items++ = value(&record->part[++i], call, made);
        given->type_index = kTVMFFIArray;
        given->zero_padding = 0;
        given++->v_obj = &list++->object;
    }
}

static int launch(const Record *record, Call *call, DLTensor *made) {
    TVMFFIAny given[PARTS], items[PARTS], result = {.type_index = kTVMFFINone};
    TVMFFIStreamHandle before = NULL;
    List lists[LISTS];
    int on_gpu = call->device.device_type == kDLCUDA, failed;
    void *python;
    arrange(record, call, made, given, items, lists);
    if (on_gpu && TVMFFIEnvSetStream(kDLCUDA, call->device.device_id, call->stream, &before)) return 0;
    python = PyEval_SaveThread();
    failed = TVMFFIFunctionCall(record->run, given, record->arguments, &result);
    PyEval_RestoreThread(python);
    if (on_gpu && before != call->stream) TVMFFIEnvSetStream(kDLCUDA, call->device.device_id, before, NULL);
    if (failed) {
        TVMFFIObjectHandle error = NULL;
        TVMFFIErrorMoveFromRaised(&error);
        if (error) TVMFFIObjectDecRef(error);
        PyErr_Clear();
    }
    if (result.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(result.v_obj);
    return !failed;
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

/* The results of a call, or None. */
static Object *take(Object *self, Object *const *given, Size count) {
    Again *again = PyCapsule_GetPointer(self, NAME);
    Object *made[MADE], *found = NULL;
    DLTensor tensors[MADE];
    Record *record;
    Call call;
    if (!look(again, given, count, &call)) return none();
    record = find(again, &call, given);
    if (record == NULL || record->refused) return none();
    ++record->users;
    if (allocate(record, made, tensors)) {
        if (launch(record, &call, tensors))
            found = results(record, given, made);
        else
            record->refused = 1;
        drop(made, record->made);
    }
    leave(record);
    return found ? found : none();
}

static int has_elements(const DLTensor *t) {
    for (int d = 0; d < t->ndim; ++d)
        if (t->shape[d] == 0) return 0;
    return 1;
}

/* Is it a call that may be remembered, has it been asked for before, and is it not known? */
static Object *wants(Object *self, Object *const *given, Size count) {
    Again *again = PyCapsule_GetPointer(self, NAME);
    uint64_t *missed;
    Call call;
    int found;
    if (!look(again, given, count, &call) || find(again, &call, given)) return PyBool_FromLong(0);
    for (int i = 0; i < count; ++i)
        if (call.tensors >> i & 1 && !has_elements(&call.tensor[i])) return PyBool_FromLong(0); /* none is launched */
    missed = &again->missed[call.hash % MISSED];
    found = *missed == call.hash;
    *missed = call.hash;
    return PyBool_FromLong(found);
}

/* ---- what again.py calls, by ctypes ---- */

static long long item(Object *tuple, Size i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple, i)); }

static Question question(Object *function) {
    Question found = {function == torch.none ? NULL : function, NULL, NULL};
    Py_IncRef(function);
    if (found.object && PyCFunction_GetFlags(function) == NO_ARGUMENTS) {
        found.direct = PyCFunction_GetFunction(function);
        found.self = PyCFunction_GetSelf(function);
    }
    PyErr_Clear();
    return found;
}

/* things: (None, False, Tensor, Parameter, "requires_grad", a module's names, "_current_level", makes a tensor on the
 * CPU, on CUDA's device, five questions, the current device's or None, DLPack's table). 0 where that is none of ours. */
int tkq_prepare(Object *things) {
    Object **places[] = {&torch.none, &torch.no, &torch.tensor, &torch.parameter, &torch.needs_grad, &torch.levels,
                         &torch.level, &torch.make[kDLCPU], &torch.make[kDLCUDA]};
    Question *questions[] = {&torch.modes, &torch.functorch, &torch.grad, &torch.filling, &torch.captures,
                             &torch.device};
    int n = sizeof places / sizeof *places, m = sizeof questions / sizeof *questions;
    if (PyTuple_Size(things) != n + m + 1) return 0;
    torch.dlpack = PyCapsule_GetPointer(PyTuple_GetItem(things, n + m), "dlpack_exchange_api");
    if (torch.dlpack == NULL) PyErr_Clear();
    if (torch.dlpack == NULL || torch.dlpack->header.version.major != DLPACK_MAJOR_VERSION ||
        torch.dlpack->dltensor_from_py_object_no_sync == NULL)
        return 0;
    for (int i = 0; i < n; ++i) Py_IncRef(*places[i] = PyTuple_GetItem(things, i));
    for (int i = 0; i < m; ++i) *questions[i] = question(PyTuple_GetItem(things, n + i));
    return 1;
}

static void gone(Object *capsule) {
    Again *again = PyCapsule_GetPointer(capsule, NAME);
    for (int i = 0; i < SETS * WAYS; ++i) leave(again->record[i / WAYS][i % WAYS]);
    free(again);
}

/* A capsule with nothing in it yet. */
Object *tkq_new(int by_stream) {
    Again *again = calloc(1, sizeof *again);
    if (again == NULL) return none();
    again->by_stream = by_stream;
    return PyCapsule_New(again, NAME, gone);
}

/* (take, wants) of a capsule. */
Object *tkq_functions(Object *capsule) {
    static Method methods[] = {{"take", (void *)take, FAST_CALL, "The results of a call that is known, or None."},
                               {"wants", (void *)wants, FAST_CALL, "Is it a call to be added?"}};
    Object *found = PyTuple_New(2);
    for (int i = 0; found && i < 2; ++i) PyTuple_SetItem(found, i, PyCFunction_NewEx(&methods[i], capsule, NULL));
    return found;
}

static void keep_given(Record *record, const Call *call, Object *given) {
    record->givens = call->count;
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
        memcpy(to->sizes, t->shape, (size_t)t->ndim * sizeof *t->shape);
        memcpy(to->strides, t->strides, (size_t)t->ndim * sizeof *t->strides);
    }
}

/* 0 where a part is beyond what was given. */
static int keep_part(Part *part, Object *pair) {
    Object *what = PyTuple_GetItem(pair, 1);
    part->kind = (int32_t)item(pair, 0);
    if (part->kind == OF_FLOAT) {
        part->real = PyFloat_AsDouble(what);
    } else if (part->kind == OF_KEPT) {
        if (torch.dlpack->dltensor_from_py_object_no_sync(what, &part->tensor)) return 0;
        Py_IncRef(part->kept = what);
    } else if (part->kind == OF_INT) {
        part->integer = PyLong_AsLongLong(what);
    } else if (part->kind != OF_NONE) {
        part->place = (int32_t)PyLong_AsLongLong(what);
    }
    return 1;
}

/* given: of the call. make: for each new tensor the arguments of torch's function. run: of tvm-ffi, its handle. parts:
 * pairs (kind, what), in turn; a list's after it. results: places. Whether that was kept. */
int tkq_add(Object *capsule, Object *given, Object *make, void *run, Object *parts, Object *results, int is_tuple) {
    Again *again = PyCapsule_GetPointer(capsule, NAME);
    Object *places[GIVENS];
    Size count = PyTuple_Size(given), made = PyTuple_Size(make), n = PyTuple_Size(parts), m = PyTuple_Size(results);
    Record *record, **set;
    Call call;
    int lists = 0, inside = 0, whole = 1;
    if (count > GIVENS || made > MADE || n > PARTS || m > RESULTS) return 0;
    for (int i = 0; i < count; ++i) places[i] = PyTuple_GetItem(given, i);
    if (!look(again, places, count, &call) || (record = calloc(1, sizeof *record)) == NULL) return 0;
    record->users = 1;
    record->hash = call.hash;
    record->stream = call.stream;
    record->device = call.device;
    TVMFFIObjectIncRef(record->run = run);
    keep_given(record, &call, given);
    for (record->made = 0; record->made < made; ++record->made)
        Py_IncRef(record->make[record->made] = PyTuple_GetItem(make, record->made));
    for (; whole && record->parts < n; ++record->parts) {
        Part *part = &record->part[record->parts];
        whole = keep_part(part, PyTuple_GetItem(parts, record->parts));
        record->arguments += inside == 0;
        inside -= inside > 0;
        if (whole && part->kind == OF_LIST) {
            inside = part->place;
            whole = ++lists <= LISTS;
        }
    }
    for (record->results = 0; record->results < m; ++record->results)
        record->result[record->results] = (int)item(results, record->results);
    record->is_tuple = is_tuple;
    if (!whole || find(again, &call, places)) {
        PyErr_Clear();
        leave(record);
        return 0;
    }
    set = again->record[call.hash % SETS];
    count = again->turn++ % WAYS; /* the place of another, where all are taken */
    for (int i = 0; i < WAYS; ++i)
        if (set[i] == NULL) count = i;
    leave(set[count]);
    set[count] = record;
    return 1;
}
