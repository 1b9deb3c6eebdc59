"""SwiGLU.   y = silu(gate)·up,   silu(t) = t·σ(t)

Adjoint, given dy:   dup   = dy·silu(gate)
                     dgate = dy·up·σ(gate)·(1 + gate·(1 − σ(gate)))

Saves gate and up, or the one tensor that holds both. A packed tensor is read and its gradient
written in place: nothing is copied in any of the three orders.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import alike, require_floating, require_like, reuse_form
from adjoint.core.errors import ArgumentError
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.activation import plans
from adjoint.ops.activation.packing import ORDERS

Order = Literal["gate_up", "up_gate", "interleaved"]


def _check(gate: Tensor, up: Tensor) -> None:
    if not alike(gate, up):
        require_floating("swiglu", "gate", gate)
        require_like("swiglu", "up", up, "gate", gate)


_swiglu = Op(
    "swiglu",
    inputs=("gate", "up"),
    outputs=("y",),
    check=_check,
    allocate=lambda gate, up: (torch.empty_like(gate),),
    gradient=torch.empty_like,
    describe=lambda gate, up: plans.describe((gate, up), like=(gate,)),
    forward=lambda: plans.SWIGLU,
    adjoint=Adjoint(
        lambda: plans.SWIGLU_BACKWARD, lambda dy, gate, up, need: plans.describe((dy, gate, up), like=(gate, up))
    ),
    alternatives=plans.reuse(lambda: plans.SWIGLU_REUSE),
)


def _check_packed(packed: Tensor, order: str) -> None:
    require_floating("swiglu", "packed", packed)
    if order not in ORDERS:
        raise ArgumentError(f"swiglu: order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    if packed.dim() == 0 or packed.shape[-1] % 2:
        width = f"last axis of {packed.shape[-1]}" if packed.dim() else "no axes"
        content = "gate and up along a last axis of even length"
        raise ArgumentError(f"swiglu: packed must hold {content}, got a tensor with {width}")


def _half(packed: Tensor, device: str | None = None) -> Tensor:
    """An empty, contiguous tensor of the output's shape."""
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2), device=device or packed.device)


def _describe_packed(tensors: list[Tensor], packed: list[Tensor], order: str) -> Facts:
    return Facts((packed[0].dtype,), plans.packed_layout_of(tensors, packed, order))


_packed = Op(
    "swiglu_packed",
    label="swiglu",
    inputs=("packed",),
    options="str order",
    outputs=("y",),
    check=_check_packed,
    allocate=lambda packed, order: (_half(packed),),
    gradient=torch.empty_like,
    describe=lambda packed, order: _describe_packed([_half(packed, "meta")], [packed], order),
    forward=lambda: plans.SWIGLU_PACKED,
    adjoint=Adjoint(
        lambda: plans.SWIGLU_PACKED_BACKWARD,
        lambda dy, x, order: _describe_packed([dy], [x, torch.empty_like(x, device="meta")], order),
    ),
    alternatives=plans.reuse(
        lambda: plans.SWIGLU_PACKED_REUSE, lambda dy, x, order: _describe_packed([dy], [x], order)
    ),
)


@_swiglu.public
def swiglu(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"] | None = None, *, order: Order | None = None,
    reuse_inputs: bool = False, preference: Preference | None = None,
) -> Float[Tensor, "*shape"]:  # fmt: skip
    """y = silu(gate)·up, elementwise, from two tensors or from one packed tensor.

    Args:
        gate: any shape, any strides; float64, float32, bfloat16 or float16, kept by the result.
            Without `up`, this is a packed tensor with gate and up along its last axis, of even length.
        up: like `gate`, with strides of its own.
        order: the order of both in a packed tensor: "gate_up" (the default, in which the gate is the first half),
            "up_gate", or "interleaved" (the gate is at even positions).
        reuse_inputs: whether the backward writes the gradients over the inputs instead of into new memory. The inputs
            are lost after backward, and a second backward raises.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes or devices differ, a dtype is not floating, the packed width
            is odd, or the order is unknown.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> swiglu(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([2.1932, 7.0464])
    >>> swiglu(torch.tensor([1.0, 2.0, 3.0, 4.0]), order="gate_up")
    tensor([2.1932, 7.0464])
    """
    form = "" if reuse_inputs is False else reuse_form("swiglu", reuse_inputs)
    if up is None:
        order = "gate_up" if order is None else order
        return _packed.call(gate, order, preference=preference, form=form)  # type: ignore[no-any-return]
    if order is not None:
        raise ArgumentError(f"swiglu: order={order!r} describes one packed tensor, but up is given as well")
    return _swiglu.call(gate, up, preference=preference, form=form)  # type: ignore[no-any-return]
