"""Every op (tests/helpers/ops/every_op.py) on DTensors and in modules that FSDP2 shards: on the ranks that there
are."""
import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import tkq.nn
from tests.helpers.ops.every_op import CASES, F8, Case, assert_same, incoming, results, run

# Where the rules let a dimension of the first tensor stay sharded; elsewhere all is gathered.
STAY = {"rmsnorm": (0,), "rmsnorm, with a residual": (0,), "rmsnorm, of heads": (0, 1), "layernorm": (0,),
        "rmsnorm_quant": (0,), "softmax": (0,), "log_softmax": (0,), "cross_entropy, of each row": (0,),
        "swiglu": (0, 1), "geglu": (0,), "rope": (0, 2), "rope, of packed sequences": (1,), "rope_qk": (0,),
        "flash_attn": (0, 2), "flash_attn, with sinks": (0,), "flash_attn_varlen": (1,), "linear_attn": (0, 2),
        "flash_attn_fp8": (0,), "flash_attn_fp8_varlen": (1,), "quantize_qkv": (0,),
        "linear_attn, with states": (0,), "gated_delta_rule": (0, 2), "gated_delta_rule, with states": (0,),
        "linear_attn, of packed sequences": (2,), "gated_delta_rule, of packed sequences": (2,),
        "linear_attn, with packed gates of columns": (2,), "gated_delta_rule, with packed gates of columns": (2,),
        "mamba2_ssd, of packed sequences": (2,),
        "mamba2_ssd": (0, 2), "mamba2_ssd, with states": (0,), "hedgehog": (0, 2), "based": (0, 2), "gemm": (0,),
        "causal_conv1d": (0, 2), "causal_conv1d, of contiguous tokens": (0, 1),
        "causal_conv1d, of packed sequences": (2,), "fft_conv": (0, 1),
        "scan": (0, 2), "scan, of contiguous tokens": (0, 1),
        "fp8_gemm": (0,),
        "gemm, with an epilogue": (0,)}
TURNED = {"causal_conv1d, of contiguous tokens", "scan, of contiguous tokens"}  # last dimensions, by the call


@contextlib.contextmanager
def one_rank(device):
    """The mesh of a process group of this process alone."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


def on_dtensors(case: Case, mesh, device, dimension=None):
    """dimension: by which those tensors are sharded whose dimension it is one of the rows, heads or columns that the
    first tensor has there; others are replicated, as all are for None. Results and gradients are as without."""
    def place(name, x):
        size = None if dimension is None else inputs[first].shape[dimension]
        sharded = size is not None and x.dim() > dimension and x.shape[dimension] == size
        made = distribute(x.detach(), mesh, Shard(dimension) if sharded else Replicate())
        return made.requires_grad_(x.requires_grad)

    inputs = case.inputs(device, grad=True)
    first = next(iter(inputs))
    given = {name: place(name, x) for name, x in inputs.items()}
    found = results(case.call(*given.values()))
    assert all(type(t) is DTensor for t in found)
    recorded = [t for t in found if t.requires_grad]
    if recorded:
        _, gradients = incoming([t.full_tensor() for t in recorded])
        torch.autograd.backward(recorded, [distribute(g, mesh, Replicate()) for g in gradients])
    whole = [whole_of(t.detach()) for t in found] + [given[name].grad.full_tensor() for name in case.leaves]
    assert_same(whole, run(case, inputs), case.exact and mesh.size() == 1, f"{case.name} sharded by {dimension}")
    return found


def distribute(x, mesh, placement):
    """distribute_tensor, of float8 too, which no process group sends."""
    if x.dtype != F8:
        return distribute_tensor(x, mesh, [placement])
    local = x.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()] if placement.is_shard() else x
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def whole_of(t):
    if t.dtype != F8:
        return t.full_tensor()
    bits = DTensor.from_local(t.to_local().view(torch.uint8), t.device_mesh, t.placements, run_check=False)
    return bits.full_tensor().view(F8)


class Layer(nn.Module):
    """A call with parameters of these names."""

    def __init__(self, call, names, inputs: dict):
        super().__init__()
        self.call, self.order = call, tuple(inputs)
        for name in names:
            self.register_parameter(name, nn.Parameter(inputs[name].detach().clone()))

    def forward(self, _, **others):  # something has to come by position, on a GPU before torch 2.12
        return self.call(*(others[name] if name in others else getattr(self, name) for name in self.order))


def fully_sharded(case: Case, mesh, device):
    """FSDP2 around it: the parameters are gathered for the call, and their gradients are scattered."""
    inputs = case.inputs(device, grad=True)
    names = [name for name in case.leaves if inputs[name].dtype == inputs[case.leaves[0]].dtype]  # as FSDP2 wants them
    layer = fully_shard(Layer(case.call, names, inputs), mesh=mesh)
    for _ in range(2):
        layer.zero_grad()
        found = results(layer(0, **{name: x.detach() for name, x in inputs.items() if name not in names}))
        torch.autograd.backward(*incoming(found))
    gradients = [getattr(layer, name).grad.full_tensor() for name in names]
    whole = [t.detach() for t in found] + gradients
    assert_same(whole, run(case, inputs)[:len(whole)], case.exact, f"{case.name}, fully sharded")


def of_two_ranks(rank, address, device):
    """What each of two processes does: all of it, where sharded means something. On GPUs, each has one of its own."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=address, rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,))
    for case in CASES.values():
        for dimension in (None, *STAY.get(case.name, ())):
            on_dtensors(case, mesh, device, dimension)
        if case.leaves:
            fully_sharded(case, mesh, device)
    tensor_parallel(mesh, device)
    dist.destroy_process_group()


class GatedMLP(nn.Module):
    """Of tkq's modules: rows shared among ranks before and after it, columns within it."""

    def __init__(self, device):
        super().__init__()
        kind = dict(device=device, dtype=torch.bfloat16)
        self.norm = tkq.nn.RMSNorm(64, **kind)
        self.gate, self.up = tkq.nn.Linear(64, 128, **kind), tkq.nn.Linear(64, 128, **kind)
        self.down, self.act = tkq.nn.Linear(128, 64, **kind), tkq.nn.SwiGLU()

    def forward(self, x):
        h = self.norm(x)
        return self.down(self.act(self.gate(h), self.up(h)))


PLAN = {"norm": SequenceParallel(), "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}


def tensor_parallel(mesh, device):
    """torch's parallelize_module on tkq's modules: forward and backward as without."""
    torch.manual_seed(0)
    plain = GatedMLP(device)
    spread = parallelize_module(copy.deepcopy(plain), mesh, PLAN)
    x = torch.randn(2, 24, 64).bfloat16().to(device)
    part = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
    x.requires_grad_()
    y, wanted = spread(part), plain(x)
    dy = torch.randn(y.shape[0], 24, 64).bfloat16().to(device)
    y.backward(dy.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    wanted.backward(dy)
    found = [spread.get_parameter(name).grad.full_tensor() for name, _ in plain.named_parameters()]
    assert_same(found, [p.grad for p in plain.parameters()], False, "parameters' gradients")
    mine = [t.chunk(mesh.size(), 1)[mesh.get_local_rank()] for t in (wanted.detach(), x.grad)]
    assert_same([y.detach(), part.grad], mine, False, "tensor parallel")
