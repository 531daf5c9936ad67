"""The widest access that the addresses and strides of a call's tensors allow."""


def vector(streams, vectors=()) -> int:
    """Elements of one access: as many as 16 bytes of the widest stream, N, the strides of rows and every base address
    allow."""
    vector = 16 // max(t.element_size() for t in streams)
    while not (all(_fits(t, vector) for t in streams) and all(
            t is None or t.data_ptr() % min(16, vector * t.element_size()) == 0 for t in vectors)):
        vector //= 2
    return vector


def _fits(t, vector):
    return not (t.data_ptr() % (vector * t.element_size()) or t.shape[-1] % vector
                or any(s % vector for s in t.stride()[:-1]))
