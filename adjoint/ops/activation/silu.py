"""SiLU.   y = x·σ(x),   σ(x) = 1 / (1 + e^−x)

Adjoint, given dy:   dx = dy·σ(x)·(1 + x·(1 − σ(x)))

Saves x. Exact 0 at 0, finite for every finite x, right down to the smallest subnormal.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.activation import plans
from adjoint.ops.activation.reuse import apart, check_reusable, claim_saved, mark_overwritten


def _check(x: Tensor) -> None:
    require_floating("silu", "x", x)


def _check_backward(dy: Tensor, x: Tensor) -> None:
    _check(x)
    require_like("silu", "dy", dy, "x", x)


def _check_reuse(dy: Tensor, x: Tensor) -> None:
    _check_backward(dy, x)
    check_reusable("silu", x=x)


def _describe(x: Tensor) -> Problem:
    layout = "rows" if x.is_contiguous() else plans.layout_of([x, torch.empty_like(x, device="meta")])
    return Problem("silu", x.device, (x.dtype,), layout)


def _describe_backward(dy: Tensor, x: Tensor) -> Problem:
    dx = torch.empty_like(x, device="meta")
    return Problem("silu_backward", x.device, (x.dtype,), plans.layout_of([dy, x, dx]))


def _describe_reuse(dy: Tensor, x: Tensor) -> Problem:
    return Problem("silu_backward_reuse", x.device, (x.dtype,), plans.layout_of([dy, x]))


_silu = define(
    "silu",
    "Tensor x",
    "Tensor",
    outputs=("y",),
    tensors=("x",),
    check=_check,
    allocate=lambda x: (torch.empty_like(x),),
    describe=_describe,
    candidates=lambda: plans.SILU,
)
_silu_backward = define(
    "silu_backward",
    "Tensor dy, Tensor x",
    "Tensor",
    outputs=("dx",),
    tensors=("dy", "x"),
    check=_check_backward,
    allocate=lambda dy, x: (torch.empty_like(x),),
    describe=_describe_backward,
    candidates=lambda: plans.SILU_BACKWARD,
)
_silu_backward_reuse = define(
    "silu_backward_reuse",
    "Tensor dy, Tensor(a!) x",
    "()",
    outputs=("dx",),
    tensors=("dy", "x"),
    check=_check_reuse,
    allocate=lambda dy, x: (),
    describe=_describe_reuse,
    candidates=lambda: plans.SILU_BACKWARD_REUSE,
)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, preference: str, reuse_inputs: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.preference, ctx.reuse_inputs = preference, reuse_inputs
        return _silu(x, preference)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative("silu")
        if ctx.reuse_inputs:
            (x,) = claim_saved("silu", ctx)
            _silu_backward_reuse(apart(dy, x), x, ctx.preference)
            mark_overwritten(x)
            return x.detach(), None, None
        (x,) = ctx.saved_tensors
        return _silu_backward(dy, x, ctx.preference), None, None


def silu(
    x: Float[Tensor, "*shape"], *, reuse_inputs: bool = False, preference: Preference | None = None
) -> Float[Tensor, "*shape"]:
    """y = x·σ(x), elementwise.

    Args:
        x: any shape, any strides; float64, float32, bfloat16 or float16, kept by the result.
        reuse_inputs: the backward writes the gradient over `x` instead of into new memory. `x` is
            lost after backward, and a second backward raises.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: `x` is not a floating tensor on the CPU or a CUDA device.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> silu(torch.tensor([-90.0, 0.0, 1.0]))
    tensor([-7.3746e-38,  0.0000e+00,  7.3106e-01])
    """
    _check(x)
    text = resolve(preference)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _silu(x, text)
    if reuse_inputs:
        check_reusable("silu", x=x)
    return _Silu.apply(x, text, reuse_inputs)  # type: ignore[no-any-return]


def _bind(x: Tensor, *, reuse_inputs: bool = False) -> Call:
    _check(x)
    adjoint = _silu_backward_reuse if reuse_inputs else _silu_backward
    return Call(_silu, (x,), adjoint, lambda upstream, outputs: (*upstream, x))


publish(silu, _bind)
