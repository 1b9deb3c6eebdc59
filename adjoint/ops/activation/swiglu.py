"""SwiGLU.   y = silu(gate)·up,   silu(t) = t·σ(t)

Adjoint, given dy:   dup   = dy·silu(gate)
                     dgate = dy·up·σ(gate)·(1 + gate·(1 − σ(gate)))

Saves gate and up, or the one tensor that holds both. A packed tensor is read and its gradient
written in place: nothing is copied in any of the three orders.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import alike, require_floating, require_like
from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.activation import plans
from adjoint.ops.activation.packing import ORDERS
from adjoint.ops.activation.plans import NEED_GATE, NEED_UP
from adjoint.ops.activation.reuse import apart, check_reusable, claim_saved, mark_overwritten

Order = Literal["gate_up", "up_gate", "interleaved"]


def _check(gate: Tensor, up: Tensor) -> None:
    if alike(gate, up):
        return
    require_floating("swiglu", "gate", gate)
    require_like("swiglu", "up", up, "gate", gate)


def _check_backward(dy: Tensor, gate: Tensor, up: Tensor, need: int = 3) -> None:
    _check(gate, up)
    require_like("swiglu", "dy", dy, "gate", gate)


def _check_reuse(dy: Tensor, gate: Tensor, up: Tensor, need: int) -> None:
    _check_backward(dy, gate, up)
    check_reusable("swiglu", gate=gate, up=up)


def _check_packed(packed: Tensor, order: str) -> None:
    require_floating("swiglu", "packed", packed)
    if order not in ORDERS:
        raise ArgumentError(f"swiglu: order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
    if packed.dim() == 0 or packed.shape[-1] % 2:
        width = f"last axis of {packed.shape[-1]}" if packed.dim() else "no axes"
        raise ArgumentError(
            f"swiglu: packed must hold gate and up along a last axis of even length, got a tensor with {width}"
        )


def _check_packed_backward(dy: Tensor, packed: Tensor, order: str) -> None:
    _check_packed(packed, order)
    require_like("swiglu", "dy", dy, "packed", packed, _half_shape(packed))


def _check_packed_reuse(dy: Tensor, packed: Tensor, order: str) -> None:
    _check_packed_backward(dy, packed, order)
    check_reusable("swiglu", packed=packed)


def _half_shape(packed: Tensor) -> tuple[int, ...]:
    return (*packed.shape[:-1], packed.shape[-1] // 2)


def _half(packed: Tensor, device: str | None = None) -> Tensor:
    """An empty tensor of the output's shape: contiguous."""
    return packed.new_empty(_half_shape(packed), device=device or packed.device)


def _describe(gate: Tensor, up: Tensor) -> Problem:
    if gate.is_contiguous() and up.is_contiguous():
        return Problem("swiglu", gate.device, (gate.dtype,), "rows")
    y = torch.empty_like(gate, device="meta")
    return Problem("swiglu", gate.device, (gate.dtype,), plans.layout_of([gate, up, y]))


def _describe_backward(dy: Tensor, gate: Tensor, up: Tensor, need: int) -> Problem:
    layout = plans.layout_of([dy, gate, up, *(torch.empty_like(t, device="meta") for t in (gate, up))])
    return Problem("swiglu_backward", gate.device, (gate.dtype,), layout, options=(need,))


def _describe_reuse(dy: Tensor, gate: Tensor, up: Tensor, need: int) -> Problem:
    layout = plans.layout_of([dy, gate, up])
    return Problem("swiglu_backward_reuse", gate.device, (gate.dtype,), layout, options=(need,))


def _describe_packed(packed: Tensor, order: str) -> Problem:
    layout = plans.packed_layout_of([_half(packed, "meta")], [packed], order)
    return Problem("swiglu_packed", packed.device, (packed.dtype,), layout, options=(order,))


def _describe_packed_backward(dy: Tensor, packed: Tensor, order: str) -> Problem:
    layout = plans.packed_layout_of([dy], [packed, torch.empty_like(packed, device="meta")], order)
    return Problem("swiglu_packed_backward", packed.device, (packed.dtype,), layout, options=(order,))


def _describe_packed_reuse(dy: Tensor, packed: Tensor, order: str) -> Problem:
    layout = plans.packed_layout_of([dy], [packed], order)
    return Problem("swiglu_packed_backward_reuse", packed.device, (packed.dtype,), layout, options=(order,))


def _allocate_backward(dy: Tensor, gate: Tensor, up: Tensor, need: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(gate) if need & NEED_GATE else gate.new_empty(0),
        torch.empty_like(up) if need & NEED_UP else up.new_empty(0),
    )


_swiglu = define(
    "swiglu",
    "Tensor gate, Tensor up",
    "Tensor",
    outputs=("y",),
    tensors=("gate", "up"),
    check=_check,
    allocate=lambda gate, up: (torch.empty_like(gate),),
    describe=_describe,
    candidates=lambda: plans.SWIGLU,
)
_swiglu_backward = define(
    "swiglu_backward",
    "Tensor dy, Tensor gate, Tensor up, int need",
    "(Tensor, Tensor)",
    outputs=("dgate", "dup"),
    tensors=("dy", "gate", "up"),
    check=_check_backward,
    allocate=_allocate_backward,
    describe=_describe_backward,
    candidates=lambda: plans.SWIGLU_BACKWARD,
)
_swiglu_backward_reuse = define(
    "swiglu_backward_reuse",
    "Tensor dy, Tensor(a!) gate, Tensor(b!) up, int need",
    "()",
    outputs=("dgate", "dup"),
    tensors=("dy", "gate", "up"),
    check=_check_reuse,
    allocate=lambda dy, gate, up, need: (),
    describe=_describe_reuse,
    candidates=lambda: plans.SWIGLU_BACKWARD_REUSE,
)
_swiglu_packed = define(
    "swiglu_packed",
    "Tensor packed, str order",
    "Tensor",
    outputs=("y",),
    tensors=("packed",),
    check=_check_packed,
    allocate=lambda packed, order: (_half(packed),),
    describe=_describe_packed,
    candidates=lambda: plans.SWIGLU_PACKED,
)
_swiglu_packed_backward = define(
    "swiglu_packed_backward",
    "Tensor dy, Tensor packed, str order",
    "Tensor",
    outputs=("dpacked",),
    tensors=("dy", "packed"),
    check=_check_packed_backward,
    allocate=lambda dy, packed, order: (torch.empty_like(packed),),
    describe=_describe_packed_backward,
    candidates=lambda: plans.SWIGLU_PACKED_BACKWARD,
)
_swiglu_packed_backward_reuse = define(
    "swiglu_packed_backward_reuse",
    "Tensor dy, Tensor(a!) packed, str order",
    "()",
    outputs=("dpacked",),
    tensors=("dy", "packed"),
    check=_check_packed_reuse,
    allocate=lambda dy, packed, order: (),
    describe=_describe_packed_reuse,
    candidates=lambda: plans.SWIGLU_PACKED_BACKWARD_REUSE,
)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, preference: str, reuse_inputs: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.preference, ctx.reuse_inputs = preference, reuse_inputs
        return _swiglu(gate, up, preference)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative("swiglu")
        needs_gate, needs_up = ctx.needs_input_grad[:2]
        need = NEED_GATE * needs_gate + NEED_UP * needs_up
        if ctx.reuse_inputs:
            gate, up = claim_saved("swiglu", ctx)
            _swiglu_backward_reuse(apart(dy, gate, up), gate, up, need, ctx.preference)
            mark_overwritten(*(tensor for tensor, needed in ((gate, needs_gate), (up, needs_up)) if needed))
            dgate, dup = gate.detach(), up.detach()
        else:
            gate, up = ctx.saved_tensors
            dgate, dup = _swiglu_backward(dy, gate, up, need, ctx.preference)
        return dgate if needs_gate else None, dup if needs_up else None, None, None


class _SwigluPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, order: str, preference: str, reuse_inputs: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(packed)
        ctx.order, ctx.preference, ctx.reuse_inputs = order, preference, reuse_inputs
        return _swiglu_packed(packed, order, preference)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative("swiglu")
        if ctx.reuse_inputs:
            (packed,) = claim_saved("swiglu", ctx)
            _swiglu_packed_backward_reuse(apart(dy, packed), packed, ctx.order, ctx.preference)
            mark_overwritten(packed)
            return packed.detach(), None, None, None
        (packed,) = ctx.saved_tensors
        return _swiglu_packed_backward(dy, packed, ctx.order, ctx.preference), None, None, None


def swiglu(
    gate: Float[Tensor, "*shape"],
    up: Float[Tensor, "*shape"] | None = None,
    *,
    order: Order | None = None,
    reuse_inputs: bool = False,
    preference: Preference | None = None,
) -> Float[Tensor, "*shape"]:
    """y = silu(gate)·up, elementwise, from two tensors or from one that holds both.

    Args:
        gate: any shape, any strides; float64, float32, bfloat16 or float16, kept by the result.
            Without `up`, a packed tensor: gate and up along its last axis, of even length.
        up: like `gate`, with strides of its own.
        order: how a packed tensor holds them: "gate_up" (the default: first half gate),
            "up_gate", or "interleaved" (gate at even positions).
        reuse_inputs: the backward writes the gradients over the inputs instead of into new memory.
            The inputs are lost after backward, and a second backward raises.
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
    if up is None:
        return _packed(gate, "gate_up" if order is None else order, reuse_inputs, preference)
    _check(gate, up)
    if order is not None:
        raise ArgumentError(f"swiglu: order={order!r} describes one packed tensor, but up is given as well")
    text = resolve(preference)
    if not ((gate.requires_grad or up.requires_grad) and torch.is_grad_enabled()):
        return _swiglu(gate, up, text)
    if reuse_inputs:
        check_reusable("swiglu", gate=gate, up=up)
    return _Swiglu.apply(gate, up, text, reuse_inputs)  # type: ignore[no-any-return]


def _packed(packed: Tensor, order: str, reuse_inputs: bool, preference: Preference | None) -> Tensor:
    _check_packed(packed, order)
    text = resolve(preference)
    if not (packed.requires_grad and torch.is_grad_enabled()):
        return _swiglu_packed(packed, order, text)
    if reuse_inputs:
        check_reusable("swiglu", packed=packed)
    return _SwigluPacked.apply(packed, order, text, reuse_inputs)  # type: ignore[no-any-return]


def _bind(gate: Tensor, up: Tensor | None = None, *, order: str | None = None, reuse_inputs: bool = False) -> Call:
    if up is None:
        order = "gate_up" if order is None else order
        _check_packed(gate, order)
        adjoint = _swiglu_packed_backward_reuse if reuse_inputs else _swiglu_packed_backward
        return Call(_swiglu_packed, (gate, order), adjoint, lambda upstream, outputs: (*upstream, gate, order))
    if order is not None:
        raise ArgumentError(f"swiglu: order={order!r} describes one packed tensor, but up is given as well")
    _check(gate, up)
    adjoint = _swiglu_backward_reuse if reuse_inputs else _swiglu_backward
    need = NEED_GATE | NEED_UP
    return Call(_swiglu, (gate, up), adjoint, lambda upstream, outputs: (*upstream, gate, up, need))


publish(swiglu, _bind)
