/* Calls a kernel that knows matrices with tensors of any number of dimensions: see joined.py, which has the same in
 * Python. Views of torch would cost as much as the rest of such a call. Past tvm-ffi's C interface nothing is used. */
#include <stdlib.h>
#include <tvm/ffi/c_api.h>

enum { ARGUMENTS = 16, DIMENSIONS = 4, AS_IT_IS = -1, RESULT = 16, MOST = 1 << 30 };

typedef struct {
    TVMFFIObjectHandle run;
    int32_t count;
    int32_t ways[ARGUMENTS]; /* of each argument: AS_IT_IS, or the dimensions kept, RESULT more for a result */
} Joined;

typedef struct {
    DLTensor tensor;
    int64_t shape[DIMENSIONS], strides[DIMENSIONS];
} View;

static int refuse(const char *why) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", why);
    return -1;
}

/* A tensor comes as a pointer to what the caller has, or as an object with that behind its header. */
static const DLTensor *tensor_of(const TVMFFIAny *given) {
    if (given->type_index == kTVMFFIDLTensorPtr) return given->v_ptr;
    return given->type_index == kTVMFFITensor ? (const DLTensor *)(given->v_obj + 1) : NULL;
}

static int same_leading(const DLTensor *a, const DLTensor *b, int leading) {
    for (int i = 0; i < leading; ++i)
        if (a->shape[i] != b->shape[i]) return 0;
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
    int kept = t->ndim - leading;
    int64_t size = 1, step = 1;
    if (kept + 1 > DIMENSIONS || t->strides == NULL) return 0;
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
    view->tensor.ndim = kept + 1;
    view->tensor.shape = view->shape;
    view->tensor.strides = view->strides;
    return 1;
}

static int call(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    const Joined *joined = self;
    const DLTensor *first = NULL;
    TVMFFIAny given[ARGUMENTS];
    View views[ARGUMENTS];
    int lead = 0;
    if (count != joined->count) return refuse("joined: another number of arguments");
    for (int i = 0; i < count; ++i) {
        const DLTensor *t = tensor_of(&args[i]);
        int way = joined->ways[i];
        given[i] = args[i];
        if (way == AS_IT_IS || t == NULL) continue;
        int leading = t->ndim - way % RESULT;
        if (leading < 0) return refuse("joined: too few dimensions");
        if (way < RESULT) {
            if (first == NULL) {
                if (!countable(t)) return refuse("joined: nothing, or more than one launch takes");
                first = t;
                lead = leading;
            } else if (leading != lead || !same_leading(first, t, lead)) {
                return refuse("joined: leading dimensions differ");
            }
        }
        if (leading == 1) continue;
        if (!join(t, leading, &views[i])) return refuse("joined: no stride describes the leading dimensions as one");
        given[i].type_index = kTVMFFIDLTensorPtr;
        given[i].v_ptr = &views[i].tensor;
    }
    return TVMFFIFunctionCall(joined->run, given, count, result);
}

static void forget(void *self) {
    TVMFFIObjectDecRef(((Joined *)self)->run);
    free(self);
}

/* joined(run, way of each argument...) -> a function that is called as run */
TVM_FFI_DLL_EXPORT int __tvm_ffi_joined(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
    TVMFFIObjectHandle made = NULL;
    (void)self;
    if (count < 1 || count > ARGUMENTS + 1 || args[0].type_index != kTVMFFIFunction)
        return refuse("joined: got no function, or too many arguments");
    Joined *joined = malloc(sizeof *joined);
    if (joined == NULL) return refuse("joined: no memory");
    joined->run = args[0].v_obj;
    joined->count = count - 1;
    for (int i = 1; i < count; ++i) joined->ways[i - 1] = (int32_t)args[i].v_int64;
    TVMFFIObjectIncRef(joined->run);
    if (TVMFFIFunctionCreate(joined, call, forget, &made)) {
        forget(joined);
        return -1;
    }
    result->type_index = kTVMFFIFunction;
    result->zero_padding = 0;
    result->v_obj = made;
    return 0;
}
