"""Gradients of captured tensors: from torch tensors to the launch."""
from __future__ import annotations

import warnings

import torch

from tkq.attention.flex.backward.launch import Asked, given_of, launcher, operands_of, views_of, workspace
from tkq.attention.flex.backward.plan import capture_plan, capture_recipe
from tkq.attention.flex.backward.spec import CaptureSpec
from tkq.attention.flex.functions.derive import capture_slopes_of
from tkq.attention.flex.functions.graph import Graph
from tkq.attention.flex.launch import Call, captured, readable, viewed
from tkq.attention.flex.operands import CaptureOperands, FlexScalars, Functions
from tkq.runtime.call.replay import CallCache, Launch, Launched, View

OP = "flex_attention"
calls = CallCache(compared=(Graph,))  # by ``given_of``, and what is added to


def refuse_if_deterministic() -> None:
    """Sums by atomic additions are not the same in every run."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    what = (f"{OP}: score_mod: the gradient of a captured tensor is added up in any order, which "
            "torch.use_deterministic_algorithms")
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise NotImplementedError(f"{what} does not allow; detach() the tensor")
    warnings.warn(f"{what} warns of", stacklevel=3)


def capture_gradients(call: Call, rows: tuple, slots: tuple, config=None) -> list:
    """Of the score function's captured tensors in ``slots``, each of its dtype, added up in fp32. rows: as of
    ``gradients``, of CUDA tensors."""
    refuse_if_deterministic()
    q, k, v, score = *call[:3], call.score
    learned = [score.tensors[i] for i in slots]
    found = [torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in learned]
    given = given_of(call, rows, slots) if config is None else None
    given = given and (*given, *found)
    if not (given and calls.take(*given)):
        slopes = capture_slopes_of(score, slots)
        if q.numel() and k.numel() and slopes.derivatives.loads:
            dense = call._replace(q=readable(q), k=readable(k), v=readable(v))
            launch, traced = run(dense, rows, slopes, [x if x.dim() else x.view(1) for x in found], config)
            if given is not None:
                calls.add_launched(given, lambda: _launched(call, rows, tuple(found), launch, traced))
    return [x.to(like.dtype) for x, like in zip(found, learned)]


def _launched(call, rows, found, launch, traced):
    """A launch by what it takes of which tensor of the call."""
    operands, space, lists, captures, numbers = launch.arguments
    operands, lists = views_of(call, rows, operands, lists)
    functions, slopes, gradients = captures
    captures = CaptureOperands(Functions(*map(viewed, traced, functions)), viewed(traced[2], slopes),
                               tuple(map(View, found, gradients)))
    return Launched((Launch(launch.run, (operands, space, lists, captures, numbers)),), found, between=(space,))


def run(call: Call, rows, slopes, into, config=None):
    """Launch the kernel, which adds to ``into``; (the `Launch`, the functions whose captures it takes)."""
    asked = Asked.of(call, rows, False, None)
    config = config or capture_plan(asked.spec().width)
    spec = CaptureSpec(asked.spec(config), slopes.derivatives, tuple(x.dim() for x in into))
    kernel, num_sms = launcher(call.q.device, spec, config, capture_recipe)
    traced = call.score, call.mask, slopes.traced
    functions = Functions(*map(captured, traced[:2]))
    arguments = (operands_of(call, rows), workspace(call, spec.of, config), asked.lists,
                 CaptureOperands(functions, captured(slopes.traced), tuple(into)), FlexScalars(call.scale, num_sms))
    kernel(*arguments)
    return Launch(kernel, arguments), traced
