"""The gates of the rule from a layer's projections.   g = −e^{A_log}·softplus(a + dt_bias),   β = σ(b)

Adjoint, with t = a + dt_bias:

    da = −dg·e^{A_log}·σ(t),   db = dβ·β·(1 − β),   dA_log = Σ dg·g,   ddt_bias = Σ da

A token whose dg is 0 adds 0 to every gradient, where g is −inf too: the state is reset there, and the rule's dg is 0.

In plain PyTorch computed in float64 and rounded once, the sums over all tokens too; by kernels in float32. Under
autocast nothing is cast.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.stages.gate import plans
from adjoint.ops.gated_delta.stages.rows import describe


def _check(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    require_floating("gate", "a", a)
    require_like("gate", "b", b, "a", a)
    if a.dim() == 0:
        raise ArgumentError("gate: a must have at least one axis, the value heads, got shape ()")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_floating("gate", name, value)
        metadata.require_shape("gate", name, value, (a.shape[-1],), "one for each head, the last axis of a")
        metadata.require_device("gate", name, value, "a", a)


def _allocate(a: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return tuple(a.new_empty(a.shape, dtype=wide_dtype(a.dtype)) for _ in range(2))


def _describe(*inputs: Tensor) -> Facts:
    a, b, _, _ = inputs
    return Facts(tuple(x.dtype for x in inputs), *describe(a=a, b=b))


def _describe_backward(dg: Any, dbeta: Any, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, need: int) -> Facts:
    return Facts((a.dtype, b.dtype, A_log.dtype, dt_bias.dtype), *describe(a=a, b=b, dg=dg, dbeta=dbeta))


_gate = Op(
    "gate",
    inputs=("a", "b", "A_log", "dt_bias"),
    outputs=("g", "beta"),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.GATE,
    adjoint=Adjoint(lambda: plans.GATE_BACKWARD, _describe_backward),
)


@_gate.public
def gate(
    a: Float[Tensor, "*shape value_heads"],
    b: Float[Tensor, "*shape value_heads"],
    A_log: Float[Tensor, " value_heads"],
    dt_bias: Float[Tensor, " value_heads"],
    *,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "*shape value_heads"], Float[Tensor, "*shape value_heads"]]:
    """g = −e^{A_log}·softplus(a + dt_bias) and β = σ(b), in float32 (float64 for float64).

    Args:
        a, b: projections in a layer, of one shape and dtype.
        A_log, dt_bias: parameters with a number for each head, in any floating dtype.

    >>> import torch
    >>> g, beta = gate(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2), torch.zeros(2))
    >>> g, beta
    (tensor([[-0.6931, -0.6931]]), tensor([[0.5000, 0.5000]]))
    """
    return _gate.call(a, b, A_log, dt_bias, preference=preference)  # type: ignore[no-any-return]
