"""The plans of `sigmoid_gate`: those of swiglu, with x in the place of up and σ in the place of silu."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, ErrorStatement
from adjoint.ops.activation.plans import NEED_GATE, NEED_UP, Activation, Function, candidates
from adjoint.ops.activation.sigmoid_gate import bounds, eager, in_float32

DOMAIN = "every gate, finite x and dy; finite wherever the exact result is in range"
SPECIAL_VALUES = (
    "σ(−∞) = 0, σ(+∞) = 1, σ'(±∞) = 0, NaN gives NaN; products with x and the upstream gradient are IEEE products, in "
    "which a value below the range of the arithmetic's type (float32: σ of gates below about −174, σ' of those above "
    "174 as well) counts as 0"
)
DOMAIN_IN_FLOAT32 = "every gate, of which those past ±87 may count as ±∞, " + DOMAIN.partition(", ")[2]
SPECIAL_VALUES_IN_FLOAT32 = (
    "σ(−∞) = 0, σ(+∞) = 1, σ'(±∞) = 0, NaN gives NaN; products with x and the upstream gradient are IEEE products, in "
    "which σ of gates below −87, and σ' of those above 87 as well, may be 0"
)
NEED_X_OF_OP, NEED_GATE_OF_OP = 1, 2
"""The bits of the gradients in the operator's mask, in the order of its inputs, x and gate."""


def _errors(of: Activation, used: str, dtype: torch.dtype, options: tuple[Any, ...]) -> dict[str, ErrorStatement]:
    costs = bounds.arithmetic(used, dtype)
    bound = bounds.SigmoidBounds(costs, dtype)

    def y(x: Tensor, gate: Tensor) -> Tensor:
        return bound.value(gate, x)

    def dx(dy: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return bound.value(gate, dy)

    def dgate(dy: Tensor, x: Tensor, gate: Tensor) -> Tensor:
        return bound.slope(dy, gate, x)

    outputs = {"y": y} if of.is_forward else {"dx": dx, "dgate": dgate}
    return {name: Derived(bounds.in_words(costs, dtype, name), function) for name, function in outputs.items()}


_SIGMOID = Function(
    True, eager, in_float32, bounds.arithmetic, _errors,
    DOMAIN, SPECIAL_VALUES, DOMAIN_IN_FLOAT32, SPECIAL_VALUES_IN_FLOAT32,
)  # fmt: skip


def _need(mask: int) -> int:
    """Converts a mask of the gradients of x and gate to one of the gradients of gate and up."""
    return NEED_UP * bool(mask & NEED_X_OF_OP) | NEED_GATE * bool(mask & NEED_GATE_OF_OP)


SIGMOID_GATE = candidates(Activation(True, lambda a, out: (a[1], a[0], out[0]), _SIGMOID))
SIGMOID_GATE_BACKWARD = candidates(
    Activation(False, lambda a, out: (a[0], a[2], a[1], out[1], out[0], _need(a[3])), _SIGMOID)
)
SIGMOID_GATE_REUSE = candidates(Activation(False, lambda a, out: (a[0], a[2], a[1], a[2], a[1], _need(a[3])), _SIGMOID))
