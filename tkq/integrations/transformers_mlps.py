"""Gated MLPs of transformers' models: their forwards on tkq."""
import functools

from .. import geglu, swiglu
from .linears import added, changed, together

_TANH = functools.partial(geglu, approximate="tanh")
ACTIVATIONS = {  # by the classes behind transformers' names
    "SiLU": swiglu, "SiLUActivation": swiglu, "GELU": geglu, "GELUActivation": geglu,
    "GELUTanh": _TANH, "PytorchGELUTanh": _TANH, "NewGELUActivation": _TANH,
}


def refuses(module):
    """Why an MLP stays as it is; None: it need not."""
    name = type(_activation(module)).__name__
    return None if name in ACTIVATIONS else f"activation {name}"


def _activation(module):
    return next(getattr(module, name) for name in ("act_fn", "activation_fn", "activation") if hasattr(module, name))


def _gated(activation):
    """tkq's function for an activation and what it gates; None where there is none, or hooks."""
    return None if changed(activation) else ACTIVATIONS.get(type(activation).__name__)


def gated_forward(family, cls):
    def forward(self, x, residual=None):
        """residual: what the result is added to, which its layer may say: see `transformers_modules.layer_forward`."""
        gate, up = together(x, self.gate_proj, self.up_proj)
        gated = _gated(self.act_fn)
        h = self.act_fn(gate) * up if gated is None else gated(gate, up)
        return self.down_proj(h) if residual is None else added(self.down_proj, h, residual)

    return forward


def packed_forward(family, cls):
    """Of Phi-3 and GLM: gate and values are one product."""
    def forward(self, hidden_states, residual=None):
        h, gated = self.gate_up_proj(hidden_states), _gated(self.activation_fn)
        if gated is None:
            gate, up = h.chunk(2, -1)
            h = up * self.activation_fn(gate)
        else:
            h = gated(h)
        return self.down_proj(h) if residual is None else added(self.down_proj, h, residual)

    return forward


def granite_forward(family, cls):
    """Of Granite 4: gate and values are one product."""
    def forward(self, hidden_states):
        h, gated = self.input_linear(hidden_states), _gated(self.activation)
        if gated is not None:
            return self.output_linear(gated(h))
        gate, up = h.chunk(2, -1)
        return self.output_linear(self.activation(gate) * up)

    return forward
