"""tkq.check_plan: what the GPU noted in a plan."""
import torch
from torch import Tensor

from tkq.attention.decode import words
from tkq.runtime import arguments
from tkq.runtime.call import check

_check_plan = arguments.checker("check_plan", "plan")
_FOUND = {words.BAD_LENGTH: "cache_seqlens or cu_seqlens_q: a length is negative, or more keys or queries than a plan "
                            "can count",
          words.BEYOND_CACHE: "cache_seqlens or topk_length: a length is negative, beyond the cache or the indices, or "
                              "not the one planned for",
          words.BAD_PAGE: "block_table or indices: a page or a row is neither -1 nor one of the cache's",
          words.OTHER_CALL: "plan: was made for another call: other sizes, another window or batch_invariant"}


def check_plan(plan: Tensor) -> None:
    """What the GPU found wrong with the calls that had this plan, since it was made. Waits for the GPU.

    Args:
        plan: of ``plan_decode``.

    Raises:
        TypeError: plan is no dense tensor of int32.
        ValueError: plan is none of ``plan_decode``, or on meta; a length, a page or an index is not in the cache, a
            length is not the one that was planned for, or the plan was made for another call.

    Example::

        lengths = torch.tensor([500, 17], device="cuda", dtype=torch.int32)
        tkq.check_plan(tkq.plan_decode(lengths, 8, 2, 128))  # nothing wrong
    """
    _check_plan(plan)
    check.rank("check_plan: plan", plan, 1)
    if plan.is_meta:
        raise ValueError("check_plan: plan: is on meta, where it has no numbers; allowed are plans on a GPU or the CPU")
    if not torch.compiler.is_dynamo_compiling() and plan._is_zerotensor():
        plan = plan.clone()  # zeros in memory, which are no plan
    header = plan[:words.HEADER].tolist()
    if len(header) < words.HEADER or header[words.MAGIC] != words.NUMBER:
        raise ValueError("check_plan: plan: is none of tkq.plan_decode")
    found = [said for place, said in _FOUND.items() if header[place]]
    if found:
        raise ValueError(f"check_plan: {'; '.join(found)}")
