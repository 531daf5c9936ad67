/* What replay.c and replay_add.c share: Python, as far as it is used, torch, and what is remembered of calls. */
#ifndef TKQ_REPLAY_H
#define TKQ_REPLAY_H
#include <dlpack/dlpack.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

/* Python's stable interface, from 3.10 on. */
typedef struct Object Object;
typedef intptr_t Size;
typedef Object *(*Function)(Object *, Object *);
typedef struct {
    const char *name;
    void *function;
    int flags;
    const char *text;
} Method;
enum { ARGUMENTS = 1, NO_ARGUMENTS = 4, FAST_CALL = 0x80 };

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
Object *PyErr_Occurred(void);
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

enum { GIVENS = 40, MADE = 5, PARTS = 64, LISTS = 16, CONSTANTS = 2, RESULTS = 6, DIMENSIONS = 5 };
enum { STEPS = 2, VIEWS = 20 };
enum { SETS = 128, WAYS = 4, MISSED = 4096, EQUAL = 2, OVERLAPS = 32 };
enum { NEW = 2, IN_USE = 4 }; /* how many others have to ask for a record's place until one gets it */
enum { OF_GIVEN, OF_MADE, OF_NONE, OF_INT, OF_FLOAT, OF_ADDRESS, OF_CONSTANT, OF_LIST, OF_VIEW }; /* as replay.py */
#define NAME "tkq.runtime.call.replay"

/* A function of torch. */
typedef struct {
    Object *object, *self;
    Function direct; /* what is behind it where it takes a tuple of arguments, or none; else NULL */
} Callable;

typedef struct {
    const DLPackExchangeAPI *dlpack;
    Object *none, *no, *real, *tensor, *parameter, *needs_grad, *levels, *level, *direct, *record;
    Callable make[3]; /* by the type of a device: makes a tensor there */
    Callable modes, functorch, grad, filling, captures, device, tracing;
    _Bool (*included)(uint16_t); /* c10's: is a dispatch key included in this thread? NULL where it is not found */
    uint16_t tracer;
    size_t impl, keys; /* where a tensor has its TensorImpl, and that its set of dispatch keys */
    uint64_t pending;  /* the keys of tensors whose numbers are not what lies in memory */
} Torch;
extern Torch torch;

typedef struct {
    Object *other; /* NULL for a tensor */
    DLDataType dtype;
    int32_t dimensions;
    int16_t same;     /* the first place where the same tensor is given */
    uint16_t address; /* its last bits, on which it depends how wide an access can be */
    const char *first; /* where its first element was */
    int64_t sizes[DIMENSIONS], strides[DIMENSIONS];
} Given;

/* Memory of a tensor that is given or made, with other sizes, strides or another type: all but the address is known. */
typedef struct {
    int place; /* of what is given, or GIVENS + one of what is made */
    int64_t offset, sizes[DIMENSIONS], strides[DIMENSIONS]; /* offset: in bytes, from the tensor's first element */
    DLTensor tensor;
} View;

typedef struct {
    int32_t kind, place; /* of a list: how many items follow that are its, lists too; of a view: which */
    union {
        int64_t integer;
        double real;
    };
} Part;

/* A launch: the function, and its parts among the record's. */
typedef struct {
    TVMFFIObjectHandle run;
    int first, arguments;
} Step;

typedef struct {
    int64_t users;
    uint64_t hash;
    void *stream;
    int chances; /* left: see NEW */
    int refused; /* a function does not take such calls: they go the long way for good */
    Object *note; /* what `note` was given, or NULL */
    DLDevice device;
    int givens, overlaps, made, constants, views, parts, steps, results, is_tuple;
    Step step[STEPS]; /* one after the other */
    Given given[GIVENS];
    Object *make[MADE], *owner[CONSTANTS];
    DLTensor constant[CONSTANTS];
    View view[VIEWS];
    Part part[PARTS];
    int result[RESULTS]; /* a place of what is given, GIVENS + a place of what is made, or -1 for None */
} Record;

typedef struct {
    int by_stream; /* calls of another stream are other calls, and what a graph captures goes the long way */
    Record *record[SETS][WAYS];
    uint32_t missed[MISSED]; /* of calls that were asked for, half of their hash */
} CallCache;

/* Two tensors, by their places, where one begins before the other ends. */
typedef struct {
    int16_t one, other;
} Overlap;

/* What a call is, and where its tensors lie. */
typedef struct {
    int count, overlaps;
    uint64_t hash;
    DLDevice device;
    void *stream;
    uint64_t tensors; /* a bit for each place */
    int16_t same[GIVENS];
    DLTensor tensor[GIVENS];
    Overlap overlap[OVERLAPS];
} Call;

/* What the call is; 0 where it is none that can be remembered. recorded: a gradient may be. */
int look(const CallCache *cache, Object *const *given, Size count, int recorded, Call *call);
/* Which tensors lie between each other, or share memory. 0 for more than there is room for. */
int find_overlaps(Call *call);
/* Do they as the record's did? */
int same_overlaps(const Record *record, const Call *call);
/* What is known of it, or NULL. */
Record *find(CallCache *cache, const Call *call, Object *const *given);
/* A user of the record less; NULL too. */
void leave(Record *record);
/* route of ops.py for plain eager mode: "direct", "record", or None where it is another, or Python has to say. */
Object *route(Object *self, Object *const *given, Size count);
/* take and known of replay.py, of a capsule with a CallCache. */
Object *take(Object *self, Object *const *given, Size count);
Object *known(Object *self, Object *const *given, Size count);
#endif
