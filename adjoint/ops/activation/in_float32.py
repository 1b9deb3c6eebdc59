"""The activations by torch's own functions, in float32 arithmetic, on the CPU.

Torch computes silu(x) as x / (1 + e^−x) and σ(x) as 1 / (1 + e^−x). Both are right for finite x that are not far below
0. For x below LOWEST, e^−x overflows sooner or later, and the result is 0. A search for such x would take another pass
over memory, so there is none, and the plan's statements say where such x begin.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LOWEST = -87.0
"""For x from here on, 1 + e^−x and its quotients are normal numbers of float32."""

_silu: Any = torch._C._nn.silu  # F.silu calls this function
_silu_backward: Any = torch.ops.aten.silu_backward.grad_input


def forward(gate: Tensor, up: Tensor | None, y: Tensor | None) -> Tensor:
    """silu(gate)·up, or silu(gate) without an up; in y, or if that is None, in new memory with the layout of gate."""
    if y is None:
        value = _silu(gate)
        return value if up is None else torch.mul(value, up, out=_beside(value))
    gate = gate if _has_rows(gate) else y.copy_(gate)
    return _silu(gate, out=y) if up is None else torch.mul(_silu(gate, out=_beside(y)), up, out=y)


def _beside(product: Tensor) -> Tensor:
    """Memory for a factor of a product. It is that of the product, except for bfloat16, in which torch takes a third
    longer in place."""
    return torch.empty_like(product) if product.dtype == torch.bfloat16 else product


Gradients = Callable[..., None]
"""Computes dgate and dup from `(dy, gate, up, dgate, dup)`, each unless its tensor is None."""


def backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None,
    differentiate: Gradients | None = None,
) -> None:  # fmt: skip
    """Computes dgate = dy·up·silu'(gate) and dup = dy·silu(gate), or the results of another `differentiate`.

    The outputs may be the inputs, and this does not change their bits. Torch computes the last few elements of a loop
    with other instructions than the rest, so here only the layout of the inputs decides how its loops run.
    """
    differentiate = differentiate or _differentiate
    reuses_gate = dgate is not None and dgate.data_ptr() == gate.data_ptr()  # otherwise dgate has its own memory
    reuses = reuses_gate or (dup is not None and up is not None and dup.data_ptr() == up.data_ptr())
    if not reuses and _are_contiguous(dy, gate, up, dgate, dup):
        differentiate(dy, gate, up, dgate, dup)
        return
    outputs = [x for x in (dgate, dup) if x is not None]
    if gate.numel() == 0 or not outputs:
        return
    in_rows = not gate.is_contiguous() and _has_rows(gate) and (up is None or _has_rows(up))
    if in_rows:
        dy = dy if _has_rows(dy) else dy.contiguous()
    elif not _lie_alike(dy, gate, up):
        dy, gate, up = dy.contiguous(), gate.contiguous(), None if up is None else up.contiguous()
    if not reuses and (all(map(_has_rows, outputs)) if in_rows else _lie_alike(gate, *outputs)):
        differentiate(dy, gate, up, dgate, dup)
        return
    results = [None if x is None else torch.empty_like(gate) for x in (dgate, dup)]
    differentiate(dy, gate, up, *results)
    for output, result in zip(outputs, (x for x in results if x is not None), strict=True):
        output.copy_(result)


def _differentiate(dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None) -> None:
    """`backward` for outputs that share no memory with the inputs."""
    if dup is not None:
        torch.mul(_silu(gate, out=_beside(dup)), dy, out=dup)
    if dgate is not None:
        if up is None:
            _silu_backward(dy, gate, grad_input=dgate)
        elif dgate.dtype == torch.float16:
            _slope_in_float16(dy, gate, up, dgate)
        else:
            torch.mul(_silu_backward(dy, gate, grad_input=_beside(dgate)), up, out=dgate)


def _slope_in_float16(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor) -> None:
    """dgate, from dy·up in float16.

    float16 has few exponents: dy·silu' is subnormal where dy is small, as it is without a loss scale, and a large up
    would carry that error into a dgate that is not small. dy·up has no such error, but may overflow where dgate does
    not. Then all of dgate is computed in float32 and rounded once.
    """
    _silu_backward(torch.mul(dy, up, out=dgate), gate, grad_input=dgate)
    if dgate.numel() and not all(extreme.isfinite() for extreme in dgate.aminmax()):
        wide = dy.float()
        dgate.copy_(_silu_backward(wide, gate.float(), grad_input=wide).mul_(up))


def _has_rows(x: Tensor) -> bool:
    """Whether a tensor has rows of adjacent elements whose length leaves torch's vector loops no remainder.

    Then the bits are those for contiguous memory.
    """
    in_order = x.dim() > 1 and x.stride(-1) == 1 and all(x.stride(i) >= x.stride(i + 1) for i in range(x.dim() - 1))
    return in_order and x.shape[-1] % 64 == 0


def _are_contiguous(*tensors: Tensor | None) -> bool:
    for x in tensors:  # noqa: SIM110  (a generator costs as much as the whole loop)
        if x is not None and not x.is_contiguous():
            return False
    return True


def _lie_alike(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the tensors fill their memory in the same order, so that torch runs a single loop over them."""
    if _are_contiguous(first, *others):
        return True
    alike = all(x is None or x.stride() == first.stride() for x in others)
    return alike and torch.ops.aten.is_non_overlapping_and_dense(first)
