/* Tensors of a call that lie between each other, or share memory: what is read may be what is written. */
#include "replay.h"

/* Behind a tensor's last element; where it begins of one without elements. */
static const char *end_of(const DLTensor *t) {
    int64_t last = 0;
    for (int d = 0; d < t->ndim; ++d) {
        if (t->shape[d] == 0) return t->data;
        last += (t->shape[d] - 1) * t->strides[d];
    }
    return (const char *)t->data + (last + 1) * ((t->dtype.bits * t->dtype.lanes + 7) / 8);
}

int find_overlaps(Call *call) {
    const char *end[GIVENS];
    int places[GIVENS], tensors = 0;
    call->overlaps = 0;
    for (int i = 0; i < call->count; ++i) {
        if (!(call->tensors >> i & 1) || call->same[i] != i) continue;
        end[tensors] = end_of(&call->tensor[i]);
        for (int j = 0; j < tensors; ++j) {
            const DLTensor *one = &call->tensor[places[j]], *other = &call->tensor[i];
            if ((const char *)one->data >= end[tensors] || (const char *)other->data >= end[j]) continue;
            if (call->overlaps == OVERLAPS) return 0;
            call->overlap[call->overlaps++] = (Overlap){(int16_t)places[j], (int16_t)i};
        }
        places[tensors++] = i;
    }
    return 1;
}

/* How far a tensor's first element is behind another's. */
static Size apart(const void *one, const void *other) { return (Size)((uintptr_t)one - (uintptr_t)other); }

int same_overlaps(const Record *record, const Call *call) {
    if (record->overlaps != call->overlaps) return 0;
    for (int i = 0; i < call->overlaps; ++i) {
        int one = call->overlap[i].one, other = call->overlap[i].other;
        if (apart(call->tensor[one].data, call->tensor[other].data) !=
            apart(record->given[one].first, record->given[other].first))
            return 0;
    }
    return 1;
}
