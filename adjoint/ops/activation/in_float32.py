"""The activations by torch's own functions, in float32 arithmetic, on the CPU.

torch computes silu(x) as x / (1 + e^−x) and σ(x) as 1 / (1 + e^−x). Both are right for finite x that are not far below
0. The others are looked for first, which also brings x into the cache: there are hardly ever any, and `eager` computes
them again, in float64. So an element's result does not depend on the values of the others.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.ops.activation import eager

LOWEST = -87.0
"""From here on 1 + e^−x and its quotients are normal numbers of float32."""


def forward(gate: Tensor, up: Tensor | None, y: Tensor | None) -> Tensor:
    """silu(gate)·up, or silu(gate) without an up; into y, or without one into new memory laid out like gate."""
    source = gate if y is None or gate.stride() == y.stride() else y.copy_(gate)
    is_usual = source.numel() == 0 or smallest(source) >= LOWEST
    y = F.silu(source) if y is None else torch.ops.aten.silu.out(source, out=y)
    if up is not None:
        y.mul_(up)
    if not is_usual:
        others = (~(gate >= LOWEST)).nonzero(as_tuple=True)
        y[others] = eager.forward(gate[others], None if up is None else up[others], None)
    return y


Gradients = Callable[..., None]
"""Computes dgate and dup, each where a tensor is given for it: `(dy, gate, up, dgate, dup)`."""


def backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None,
    differentiate: Gradients | None = None,
) -> None:  # fmt: skip
    """dgate = dy·up·silu'(gate) and dup = dy·silu(gate), or what another function differentiates.

    The outputs may be the inputs, and get the bits that others would: torch computes the last few elements of a loop in
    other instructions than the rest, and here the inputs alone decide how its loops run.
    """
    differentiate = differentiate or _differentiate
    outputs = [x for x in (dgate, dup) if x is not None]
    if gate.numel() == 0 or not outputs:
        return
    if not _lie_alike(*(x for x in (dy, gate, up) if x is not None)):
        dy, gate, up = dy.contiguous(), gate.contiguous(), None if up is None else up.contiguous()
    storages = {x.untyped_storage().data_ptr() for x in (dy, gate, up) if x is not None}
    overlap = any(x.untyped_storage().data_ptr() in storages for x in outputs)
    if not overlap and _lie_alike(gate, *outputs):
        differentiate(dy, gate, up, dgate, dup)
        return
    results = [None if x is None else torch.empty_like(gate) for x in (dgate, dup)]
    differentiate(dy, gate, up, *results)
    for output, result in zip(outputs, (x for x in results if x is not None), strict=True):
        output.copy_(result)


def _differentiate(dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None) -> None:
    """`backward`, into memory that is no input's."""
    smallest, largest = gate.aminmax()
    if dup is not None:
        torch.ops.aten.silu.out(gate, out=dup).mul_(dy)
    if dgate is not None:
        torch.ops.aten.silu_backward.grad_input(dy, gate, grad_input=dgate)
        if up is not None:
            dgate.mul_(up)
    if not (smallest.item() >= LOWEST and largest.item() < torch.inf):
        others = (~((gate >= LOWEST) & (gate < torch.inf))).nonzero(as_tuple=True)
        replace(others, eager.backward, (dy, gate, up), (dgate, dup))


def replace(
    others: tuple[Tensor, ...], differentiate: Gradients, inputs: tuple[Tensor, Tensor, Tensor | None],
    gradients: tuple[Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """Computes the gradients of a few elements once more, in another way."""
    few = [None if x is None else x[others] for x in (*inputs, *gradients)]
    differentiate(*few)  # type: ignore[arg-type]
    for output, result in zip(gradients, few[3:], strict=True):
        if output is not None and result is not None:
            output[others] = result


def smallest(x: Tensor) -> float:
    """The smallest element, or NaN if there is one. torch has two functions, each the faster one for some types."""
    return (x.amin() if x.dtype == torch.float32 else x.min()).item()


def _lie_alike(*tensors: Tensor) -> bool:
    """Whether the tensors fill their memory in one order, which makes torch's loops over them one loop."""
    first = tensors[0]
    return torch.ops.aten.is_non_overlapping_and_dense(first) and all(x.stride() == first.stride() for x in tensors)
