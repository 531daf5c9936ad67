"""What can be wrong with a call of a loss. Each error names the argument, what came and what is allowed."""
import torch
from torch import Tensor

from ..reference.losses import Terms
from ..rows.one_pass import plan
from ..runtime import arguments
from ..runtime.call import check
from .spec import MAX_V, TARGETS

_NUMBERS = arguments.checker("cross_entropy", "ignore_index", "reduction", "label_smoothing", "z_loss")
_SOFTCAP = arguments.checker("cross_entropy", "softcap")


def check_call(logits: Tensor, target: Tensor, terms: Terms) -> None:
    """Everything that ``tkq.cross_entropy`` promises to refuse."""
    check.dtype("logits", logits, tuple(plan.WIDTH))
    if logits.dim() == 0 or logits.shape[-1] < 1:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, allowed are (..., V) with V of 1 and more")
    check.last_dim_contiguous("logits", logits)
    check_classes(logits.shape[-1], logits.shape[:-1], target, terms)
    check.same_device(logits=logits, target=target, weight=terms.weight)


def check_classes(V: int, rows: tuple, target: Tensor, terms: Terms, names: tuple = ("logits", "weight")) -> None:
    """The part that does not see logits: V classes, targets of shape `rows`. names: what the caller calls the argument
    that has V classes, and the one with their weights."""
    of_classes, of_weights = names
    if V > MAX_V:
        raise NotImplementedError(f"{of_classes}: got V = {V} classes, allowed are 1 to {MAX_V}")
    check.tensor("target", target)
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: dtype is {target.dtype}, allowed are {', '.join(TARGETS)}; probabilities are not "
                        "supported")
    check.shape("target", target, tuple(rows))
    if terms.weight is not None:
        check.dtype(of_weights, terms.weight, tuple(plan.WIDTH))
        check.shape(of_weights, terms.weight, (V,))
        check.last_dim_contiguous(of_weights, terms.weight)
    check_numbers(terms)


def check_numbers(terms: Terms) -> None:
    """The options."""
    _NUMBERS(terms.ignore_index, terms.reduction, terms.label_smoothing, terms.z_loss)
    if terms.softcap != 0.0:  # which is none
        _SOFTCAP(terms.softcap)


def check_targets(target: Tensor, V: int, ignore_index: int) -> None:
    """IndexError where a target is neither a class nor ignore_index. Waits for the GPU."""
    bad = ((target < 0) | (target >= V)) & (target.long() != ignore_index)  # which may be beyond 32 bits
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise IndexError(f"target: {target[at].item()} at {at}, allowed are 0 to {V - 1} and ignore_index = "
                         f"{ignore_index}")
