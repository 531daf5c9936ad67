"""Two facts that torch has no cheap question for, as replay.c reads them: is a program traced by torch.jit, and has a
tensor a negation or a conjugation pending (`torch._neg_view`, the imaginary part of a conjugated tensor), or no memory?

To ask torch is a call of Python for each tensor, in the shortest way that there is. Where the answers lie is found out
by looking for those that torch itself gives, of tensors of several kinds: a place that is the same for all is the
place; where there is none, calls take the long way.
"""
from __future__ import annotations

import ctypes
import pathlib

import torch
from torch import Tensor
from torch.nn import Parameter

_SYMBOL = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"  # bool c10::impl::..(DispatchKey)
_PENDING = ("Negative", "Conjugate", "ZeroTensor")
_IMPL_BYTES = 208  # of a TensorImpl: what torch asserts when it is built


def tracing() -> tuple[int, int]:
    """(the address of c10's question whether a dispatch key is included in this thread, the tracer's key): 0 where it
    is not found, or does not answer as torch does."""
    key = torch._C._dispatch_key_parse("Tracer")
    try:
        c10 = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libc10.so"))
        question = c10[_SYMBOL]
    except (OSError, AttributeError):
        return 0, int(key)
    question.restype, question.argtypes = ctypes.c_bool, [ctypes.c_uint16]
    before = question(int(key))
    with torch._C._IncludeDispatchKeyGuard(key):
        inside = question(int(key))
    known = inside and not before
    return ctypes.cast(question, ctypes.c_void_p).value if known else 0, int(key)


def keys() -> tuple[int, int, int]:
    """(where a tensor's object has its TensorImpl, where that has its set of dispatch keys, the keys of tensors whose
    numbers are not what lies in memory).

    Raises:
        RuntimeError: no place is the same for all.
    """
    x = torch.zeros(3, 4, device="cpu")
    nowhere = torch._efficientzerotensor((3, 4), device="cpu")
    kinds = x, Parameter(x), torch._neg_view(x), nowhere, x.to("meta"), x.to_sparse()
    impl = _place(((id(t), Tensor.__basicsize__), t._cdata) for t in kinds)
    sets = _place(((t._cdata, _IMPL_BYTES), torch._C._dispatch_keys(t).raw_repr()) for t in kinds)
    pending = 0
    for name in _PENDING:
        pending |= torch._C.DispatchKeySet(torch._C._dispatch_key_parse(name)).raw_repr()
    return impl, sets, pending


def _place(looked) -> int:
    """The only offset at which the memory of each has the word that it is to have. looked: ((address, bytes), word)."""
    places = None
    for (address, size), word in looked:
        memory = ctypes.string_at(address, size)
        found = {i for i in range(0, size - 7, 8) if int.from_bytes(memory[i:i + 8], "little") == word}
        places = found if places is None else places & found
    if len(places) != 1:
        raise RuntimeError("a tensor's dispatch keys are not where they were expected")
    return places.pop()
