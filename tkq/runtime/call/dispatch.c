/* Takes a call to one of several kernels, by what its arguments are, and makes tensors of any number of dimensions
 * matrices on the way: see dispatch.py, which has the same in Python. Past tvm-ffi's C interface nothing is used.
 *
 * A dispatcher never changes once it is made, for calls run without Python's lock: `added` makes a new one. */
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

enum { ARGUMENTS = 16, DIMENSIONS = 4, ENTRIES = 256, MOST = 1 << 30 };
enum { NOTHING = -1, CONSTANT = -2 }; /* in the place of an argument */
enum { TRAILING = 7, AS_IT_IS = 8, RESULT = 16, COLUMNS = 32, FEWEST = 64 }; /* of a way: see dispatch.py */

typedef struct {
    int64_t kind;    /* no tensor: -1 for None, 0; else type and, for one that stays as it is, dimensions */
    int64_t columns; /* the last dimension of a tensor, where that counts; else 0 */
} Look;

typedef struct {
    TVMFFIObjectHandle run;
    int64_t constant;
    int32_t taken, places[ARGUMENTS]; /* what run takes: places in the call, NOTHING or CONSTANT */
    int32_t device, ways[ARGUMENTS];  /* of the call's arguments, as are looks */
    Look looks[ARGUMENTS];
} Entry;

typedef struct {
    int32_t count, entries; /* a call's arguments; kernels */
    Entry entry[];
} Dispatcher;

typedef struct {
    DLTensor tensor;
    int64_t shape[DIMENSIONS], strides[DIMENSIONS];
} View;

/* Without a backtrace, for which all loaded objects would be searched: a call that is not known is no mistake. */
static int refuse(const char *why) {
    const TVMFFIByteArray kind = {"ValueError", sizeof "ValueError" - 1}, message = {why, strlen(why)}, none = {"", 0};
    TVMFFIObjectHandle error = NULL;
    if (TVMFFIErrorCreate(&kind, &message, &none, &error)) {
        TVMFFIErrorSetRaisedFromCStr("ValueError", why);
        return -1;
    }
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
    return -1;
}

/* A tensor comes as a pointer to what the caller has, or as an object with that behind its header. */
static const DLTensor *tensor_of(const TVMFFIAny *given) {
    if (given->type_index == kTVMFFIDLTensorPtr) return given->v_ptr;
    return given->type_index == kTVMFFITensor ? (const DLTensor *)(given->v_obj + 1) : NULL;
}

static Look look(const TVMFFIAny *given, int way) {
    const DLTensor *t = tensor_of(given);
    Look found = {given->type_index == kTVMFFINone ? -1 : 0, 0};
    if (t == NULL) return found;
    found.kind = 1 + t->dtype.code + ((int64_t)t->dtype.bits << 8) + ((int64_t)t->dtype.lanes << 16);
    if (way & AS_IT_IS) found.kind += (int64_t)t->ndim << 32;
    if (way & COLUMNS && t->ndim) found.columns = t->shape[t->ndim - 1];
    return found;
}

static int looks_so(const Entry *entry, const TVMFFIAny *args, int count) {
    for (int i = 0; i < count; ++i) {
        Look found = look(&args[i], entry->ways[i]);
        if (found.kind != entry->looks[i].kind || found.columns != entry->looks[i].columns) return 0;
    }
    return 1;
}

/* 1 to MOST elements: none are not launched, and more may need several launches. */
static int countable(const DLTensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; ++i) {
        if (t->shape[i] < 1 || t->shape[i] > MOST / n) return 0;
        n *= t->shape[i];
    }
    return 1;
}

/* The leading dimensions as one; 0 where no stride describes that one. */
static int join(const DLTensor *t, int leading, View *view) {
    int trailing = t->ndim - leading;
    int64_t size = 1, step = 1;
    if (trailing + 1 > DIMENSIONS || t->strides == NULL) return 0;
    for (int i = leading; i < t->ndim; ++i) {
        view->shape[i - leading + 1] = t->shape[i];
        view->strides[i - leading + 1] = t->strides[i];
        step *= t->shape[i]; /* of a dimension of one element: as if all were contiguous */
    }
    for (int i = leading - 1; i >= 0; --i) {
        if (t->shape[i] == 1) continue;
        if (size == 1)
            step = t->strides[i];
        else if (t->strides[i] != size * step)
            return 0;
        size *= t->shape[i];
    }
    view->shape[0] = size;
    view->strides[0] = step;
    view->tensor = *t;
    view->tensor.ndim = trailing + 1;
    view->tensor.shape = view->shape;
    view->tensor.strides = view->strides;
    return 1;
}

/* What run takes of a call's arguments; 0 where the leading dimensions differ or cannot be joined, or where one more
 * could be in all tensors that are to keep the fewest. */
static int arranged(const Entry *entry, const TVMFFIAny *args, int count, TVMFFIAny *given, View *views) {
    TVMFFIAny seen[ARGUMENTS];
    const DLTensor *first = NULL;
    int lead = 0, fewest = 0, joined = 0;
    for (int i = 0; i < count; ++i) {
        const DLTensor *t = tensor_of(&args[i]);
        int way = entry->ways[i], leading;
        seen[i] = args[i];
        if (way & AS_IT_IS || t == NULL) continue;
        leading = t->ndim - (way & TRAILING);
        if (leading < 0) return 0;
        if (way & FEWEST) {
            ++fewest;
            joined += join(t, leading + 1, &views[i]);
        }
        if (!(way & RESULT)) {
            if (first == NULL) {
                first = t;
                lead = leading;
            } else if (leading != lead || memcmp(first->shape, t->shape, lead * sizeof *t->shape)) {
                return 0;
            }
        }
        if (leading == 1) continue;
        if (!join(t, leading, &views[i])) return 0;
        seen[i].type_index = kTVMFFIDLTensorPtr;
        seen[i].v_ptr = &views[i].tensor;
    }
    if (fewest && joined == fewest) return 0;
    for (int i = 0; i < entry->taken; ++i) {
        int place = entry->places[i];
        if (place >= 0) {
            given[i] = seen[place];
        } else {
            given[i].type_index = place == CONSTANT ? kTVMFFIInt : kTVMFFINone;
            given[i].zero_padding = 0;
            given[i].v_int64 = place == CONSTANT ? entry->constant : 0;
        }
    }
    return 1;
}

static int call(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    const Dispatcher *dispatcher = self;
    const DLTensor *first = count ? tensor_of(&args[0]) : NULL;
    TVMFFIAny given[ARGUMENTS];
    View views[ARGUMENTS];
    if (count == 0) { /* asked by `added` */
        result->type_index = kTVMFFIOpaquePtr;
        result->v_ptr = self;
        return 0;
    }
    if (count != dispatcher->count || first == NULL || !countable(first)) return refuse("dispatcher: no such call");
    for (const Entry *entry = dispatcher->entry; entry < dispatcher->entry + dispatcher->entries; ++entry)
        if (first->device.device_id == entry->device && looks_so(entry, args, count) &&
            arranged(entry, args, count, given, views))
            return TVMFFIFunctionCall(entry->run, given, entry->taken, result);
    return refuse("dispatcher: nothing is known of such a call");
}

static void forget(void *self) {
    Dispatcher *dispatcher = self;
    for (int i = 0; i < dispatcher->entries; ++i) TVMFFIObjectDecRef(dispatcher->entry[i].run);
    free(dispatcher);
}

static int same(const Entry *a, const Entry *b, int count) {
    return a->device == b->device && !memcmp(a->ways, b->ways, count * sizeof *a->ways) &&
           !memcmp(a->looks, b->looks, count * sizeof *a->looks);
}

/* (dispatcher or None, run, constant, count, taken, places of what it takes..., ways..., the call's arguments...) -> a
 * dispatcher that knows the call too. Of two that a call fits, the one that keeps fewer dimensions of the first comes
 * first. */
TVM_FFI_DLL_EXPORT int __tvm_ffi_added(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
    const Dispatcher *before = NULL;
    const DLTensor *first;
    TVMFFIObjectHandle made = NULL;
    TVMFFIAny found = {.type_index = kTVMFFINone};
    Entry entry;
    int count, at = 0, placed = 0;
    (void)self;
    memset(&entry, 0, sizeof entry);
    if (n < 5 || args[1].type_index != kTVMFFIFunction) return refuse("dispatcher: got no function");
    count = (int)args[3].v_int64;
    entry.taken = (int32_t)args[4].v_int64;
    if (count < 1 || count > ARGUMENTS || entry.taken > ARGUMENTS || n != 5 + entry.taken + 2 * count)
        return refuse("dispatcher: got another number of arguments");
    entry.run = args[1].v_obj;
    entry.constant = args[2].v_int64;
    for (int i = 0; i < entry.taken; ++i) entry.places[i] = (int32_t)args[5 + i].v_int64;
    args += 5 + entry.taken;
    for (int i = 0; i < count; ++i) {
        entry.ways[i] = (int32_t)args[i].v_int64;
        entry.looks[i] = look(&args[count + i], entry.ways[i]);
    }
    first = tensor_of(&args[count]);
    if (first == NULL) return refuse("dispatcher: the first argument is no tensor");
    entry.device = first->device.device_id;
    args -= 5 + entry.taken;
    if (args[0].type_index == kTVMFFIFunction) {
        if (TVMFFIFunctionCall(args[0].v_obj, NULL, 0, &found)) return -1;
        before = found.v_ptr;
        if (before->count != count) return refuse("dispatcher: got another number of arguments");
        if (before->entries >= ENTRIES) before = NULL; /* shapes that change all the time must not fill the memory */
    }
    Dispatcher *dispatcher = malloc(sizeof *dispatcher + (1 + (before ? before->entries : 0)) * sizeof entry);
    if (dispatcher == NULL) return refuse("dispatcher: no memory");
    dispatcher->count = count;
    for (int i = 0; before && i < before->entries; ++i) {
        const Entry *other = &before->entry[i];
        if (same(other, &entry, count)) continue;
        if (!placed && (other->ways[0] & TRAILING) > (entry.ways[0] & TRAILING)) {
            dispatcher->entry[at++] = entry;
            placed = 1;
        }
        dispatcher->entry[at++] = *other;
    }
    if (!placed) dispatcher->entry[at++] = entry;
    dispatcher->entries = at;
    for (int i = 0; i < at; ++i) TVMFFIObjectIncRef(dispatcher->entry[i].run);
    if (TVMFFIFunctionCreate(dispatcher, call, forget, &made)) {
        forget(dispatcher);
        return -1;
    }
    result->type_index = kTVMFFIFunction;
    result->zero_padding = 0;
    result->v_obj = made;
    return 0;
}
