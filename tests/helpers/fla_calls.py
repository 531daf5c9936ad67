"""fla's functions as tkq.integrations.fla has them, and what each means in float64: for tests on a CPU and a GPU."""
import torch
import torch.nn.functional as F

import tkq.integrations.fla as tkq_fla
from tkq.reference.linear_attention import linear_attn as recurrence

STATES = "scale", "initial_state", "output_final_state"
LINEAR = ("q", "k", "v", *STATES)
GATES = "use_gate_in_kernel", "A_log", "dt_bias"
SIGMOID = "use_beta_sigmoid_in_kernel", "allow_neg_eigval"
L2 = "use_qk_l2norm_in_kernel"
# As flash-linear-attention 0.6 has them: what may be given by position, and by its name alone.
SIGNATURES = {
    "chunk_simple_gla": ("q", "k", "v", "g", "g_gamma", *STATES, "state_v_first", "cu_seqlens", "cu_seqlens_cpu"),
    "fused_chunk_simple_gla": ("q", "k", "v", "g", "g_gamma", *STATES, "cu_seqlens"),
    "fused_recurrent_simple_gla": ("q", "k", "v", "g", "g_gamma", *STATES, "reverse", "state_v_first", "cu_seqlens"),
    "parallel_simple_gla": ("q", "k", "v", "g", "scale", "output_attentions", "cu_seqlens", "cu_seqlens_cpu"),
    "chunk_gla": ("q", "k", "v", "g", *STATES, "state_v_first", "cu_seqlens", "cu_seqlens_cpu"),
    "fused_recurrent_gla": ("q", "k", "v", "gk", "gv", *STATES, "reverse", "state_v_first", "cu_seqlens"),
    "chunk_retention": (*LINEAR, "cu_seqlens"),
    "fused_chunk_retention": (*LINEAR, "cu_seqlens"),
    "fused_recurrent_retention": (*LINEAR, "reverse", "state_v_first", "cu_seqlens"),
    "parallel_retention": ("q", "k", "v", "scale", "output_attentions", "cu_seqlens"),
    "chunk_lightning_attn": ("q", "k", "v", "layer_idx", "num_layers", *STATES, "cu_seqlens"),
    "fused_recurrent_lightning_attn": ("q", "k", "v", "layer_idx", "num_layers", *STATES, "reverse", "cu_seqlens"),
    "chunk_linear_attn": (*LINEAR, "normalize", "cu_seqlens"),
    "fused_chunk_linear_attn": (*LINEAR, "normalize", "cu_seqlens"),
    "fused_recurrent_linear_attn": (*LINEAR, "reverse", "normalize", "cu_seqlens"),
    "chunk_gated_delta_rule": ("q", "k", "v", "g", "beta", *STATES, L2, *SIGMOID, "state_v_first", "cu_seqlens",
                               "cu_seqlens_cpu", "chunk_indices", "cp_context"),
    "fused_recurrent_gated_delta_rule": ("q", "k", "v", "g", "gk", "gv", "beta", *STATES, L2, *GATES, *SIGMOID,
                                         "state_v_first", "cu_seqlens"),
    "chunk_kda": ("q", "k", "v", "g", "beta", *STATES, L2, "use_gate_in_kernel", *SIGMOID, "safe_gate", "lower_bound",
                  "disable_recompute", "return_intermediate_states", "state_v_first", "cu_seqlens", "cu_seqlens_cpu",
                  "cp_context", "use_graph", "max_num_seqs"),
    "fused_recurrent_kda": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", *STATES, L2, "use_gate_in_kernel", *SIGMOID,
                            "lower_bound", "state_v_first", "cu_seqlens"),
    "chunk_delta_rule": ("q", "k", "v", "beta", *STATES, L2, "cu_seqlens", "cu_seqlens_cpu"),
    "fused_recurrent_delta_rule": ("q", "k", "v", "beta", *STATES, L2, "cu_seqlens"),
}
BY_NAME = {name: ("chunk_size",) for name in SIGNATURES
           if name.startswith("chunk") and name not in ("chunk_linear_attn", "chunk_gla")} | {
    "chunk_gated_delta_rule": (*GATES, "chunk_size"), "chunk_kda": (*GATES[1:], "chunk_size")}
ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule"}
BASED = {"fused_chunk_based", "parallel_based"}  # that have no states
COLUMNS = "chunk_gla", "fused_recurrent_gla", "chunk_kda", "fused_recurrent_kda"  # gates of each column of k
REFUSED = {"return_intermediate_states": True, "reverse": True, "cp_context": object(), "output_attentions": True,
           "gk": torch.zeros(2), "gv": torch.zeros(2)}


def inputs(name, S=9, K=32, V=48, device="cpu") -> dict:
    """What a call of the function may have, by name: all that changes its result, of two sequences."""
    torch.manual_seed(0)
    names = SIGNATURES[name] + BY_NAME.get(name, ())
    q, k = (torch.randn(2, S, 2, K, device=device).bfloat16() for _ in range(2))
    if "normalize" in names:
        q, k = q.abs(), k.abs()
    elif L2 not in names:
        q, k = (F.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    heads = 4 if L2 in names or "g" in names or name in COLUMNS else 2
    gates = (torch.randn(2, S, heads, device=device) for _ in range(2))
    known = dict(q=q, k=k, v=torch.randn(2, S, heads, V, device=device).bfloat16(), layer_idx=3, num_layers=8,
                 scale=0.3, initial_state=torch.randn(2, heads, K, V, device=device), output_final_state=True,
                 normalize=True, use_gate_in_kernel=True, A_log=torch.rand(heads, device=device),
                 dt_bias=torch.rand(heads, device=device), use_qk_l2norm_in_kernel=True,
                 use_beta_sigmoid_in_kernel="A_log" in names, allow_neg_eigval="A_log" in names)
    known["g"], known["beta"] = (x.bfloat16() for x in gates)
    if name in COLUMNS:
        known["g"] = torch.randn(2, S, heads, K, device=device).bfloat16()
        known["dt_bias"] = torch.rand(heads * K, device=device)
    if "A_log" not in names:
        known |= dict(g=-known["g"].abs(), beta=known["beta"].sigmoid(), use_gate_in_kernel=False)
    if known["normalize"] and "normalize" in names:
        known["initial_state"] = known["initial_state"], torch.rand(2, 1, 2, K, device=device)
    if name == "fused_recurrent_gla":
        known["gk"] = known["g"]
    return {argument: known[argument] for argument in names if argument in known}


def exact(name, given):
    """(o, state) in float64 of such a call."""
    w = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    q, k, v, state, z = w["q"], w["k"], w["v"], w.get("initial_state"), None
    h = torch.arange(q.shape[2], dtype=torch.float64, device=q.device)
    g, beta = w.get("g", w.get("gk")), w.get("beta")
    if w.get(L2):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if "retention" in name:
        g = (1 - 2.0**(-5 - h)).log()
    if "lightning" in name:
        g = -8 * h / len(h) * (1 - w["layer_idx"] / w["num_layers"])
    if w.get("use_gate_in_kernel"):
        A, bias = (x.view(len(w["A_log"]), *(-1,) * (g.dim() - 3)) for x in (w["A_log"].exp(), w["dt_bias"]))
        low = w.get("lower_bound")
        g = -A * F.softplus(g + bias) if low is None else low * (A * (g + bias)).sigmoid()
        beta = 2 * beta.sigmoid()
    if w.get("normalize"):
        state, z = state[0].double(), state[1].double()
    o, last = recurrence(q, k, v, g, w["scale"], state, beta=beta)
    if z is None:
        return o, last
    sums = k.cumsum(1) + z
    return o / (w["scale"] * (q * sums).sum(-1, keepdim=True) + 1e-10), (last, sums[:, -1:])


def call(name, given, positions=True):
    """By position as far as there is a value for each argument, or by name."""
    function = getattr(tkq_fla, name)
    if not positions:
        return function(**given)
    places = [given.get(argument) for argument in SIGNATURES[name]]
    flags = ("output_final_state", "state_v_first", "reverse", "safe_gate", "disable_recompute",
             "return_intermediate_states", "use_graph", "output_attentions")
    places = [False if argument in flags and value is None else value
              for argument, value in zip(SIGNATURES[name], places)]
    return function(*places, **{argument: x for argument, x in given.items() if argument not in SIGNATURES[name]})
