"""The expert layer in plain PyTorch, on any device: a matrix product per expert, rows grouped as kernels group them.

Grouped products of another library can replace these products (`Products`); the rest stays the same.

It rounds and saves the same numbers as the kernels: g and u, h = silu(g)·u, and each row's result.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.layout import begins_as_allocated
from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.token_rows.eager import sum_rows


def _counts(offsets: Tensor, rows: int) -> list[int]:
    """The number of rows of each expert, and last the number of rows of no expert.

    This is for the CPU, where counting does not wait for a device.
    """
    return [end - begin for begin, end in pairwise((*offsets.tolist(), rows))]


def _masks(offsets: Tensor, rows: int) -> list[Tensor]:
    """A mask of the rows of each expert."""
    place = torch.arange(rows, device=offsets.device)
    owner = torch.searchsorted(offsets[1:].contiguous(), place, right=True)
    return [(owner == e)[:, None] for e in range(len(offsets) - 1)]


@cache
def multiplies_directly(dtype: torch.dtype) -> bool:
    """Whether torch's product of matrices on the CPU adds in the wide type and rounds once, so that it serves directly.

    This is found by trying. For bfloat16 it does so in every build that we know, and is several times as fast on
    processors with instructions for it. For float16 sums in float32 are faster.
    """
    if dtype == wide_dtype(dtype):
        return True
    if dtype != torch.bfloat16:
        return False
    left = torch.ones(33, 2048, dtype=dtype, device="cpu")
    right = torch.full((2048, 65), 2.0**-4, dtype=dtype, device="cpu")
    right[0] = 256.0  # in bfloat16 the other terms cannot be added to it
    return torch.equal(left @ right, (left.float() @ right.float()).to(dtype))


def _product(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows[r] @ matrices[expert of r], rounded once; rows of no expert are zero."""
    kind = wide_dtype(rows.dtype)
    if not rows.is_cpu:
        out = rows.new_zeros(rows.shape[0], matrices.shape[2])
        for matrix, mask in zip(matrices, _masks(offsets, rows.shape[0]), strict=True):
            out = torch.where(mask, (rows.to(kind) @ matrix.to(kind)).to(out.dtype), out)
        return out
    out, counts = rows.new_empty(rows.shape[0], matrices.shape[2]), _counts(offsets, rows.shape[0])
    *results, rest = out.split(counts)
    *operands, _ = rows.split(counts)
    directly = rows.dtype == matrices.dtype and multiplies_directly(rows.dtype)
    for count, some, matrix, result in zip(counts, operands, matrices.unbind(), results, strict=False):
        if not count:
            continue
        if directly:
            torch.mm(some, matrix, out=result)
        else:
            result.copy_(some.to(kind) @ matrix.to(kind))
    rest.zero_()
    return out


def _outer(left: Tensor, right: Tensor, offsets: Tensor, out: Tensor) -> None:
    """out[e] = Σ left[r]ᵀ · right[r] over the rows of expert e, rounded once.

    Results in the caller's memory that does not begin as torch's memory does are copied there, because equal calls must
    have equal bits.
    """
    if out.device.type == "cpu" and not begins_as_allocated(out):
        own = torch.empty_like(out, memory_format=torch.contiguous_format)
        _outer(left, right, offsets, own)
        out.copy_(own)
        return
    kind, rows = wide_dtype(left.dtype), left.shape[0]
    if not left.is_cpu:
        for result, mask in zip(out, _masks(offsets, rows), strict=True):
            result.copy_(torch.where(mask, left, 0).to(kind).T @ torch.where(mask, right, 0).to(kind))
        return
    counts = _counts(offsets, rows)
    *of_left, _ = left.T.split(counts, 1)
    *of_right, _ = right.split(counts)
    directly = left.dtype == right.dtype == out.dtype and multiplies_directly(left.dtype)
    for count, columns, some, result in zip(counts, of_left, of_right, out.unbind(), strict=False):
        if not count:
            result.zero_()
        elif directly:
            torch.mm(columns, some, out=result)
        else:
            result.copy_(columns.to(kind) @ some.to(kind))


class Products(NamedTuple):
    """The layer's two products over grouped rows, as `_product` and `_outer` define them."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor]
    outer: Callable[[Tensor, Tensor, Tensor, Tensor], None]


PER_EXPERT = Products(_product, _outer)


def forward(
    layer: tuple[Tensor, ...], layout: Layout, y: Tensor, gu: Tensor | None, products: Products = PER_EXPERT
) -> None:
    """Writes the layer's output, and g and u of each row if there is a tensor for them."""
    x, gate_up, down, weights = layer
    token = layout.permutation // layout.inverse.shape[1]
    both = products.product(x.index_select(0, token), gate_up.transpose(1, 2), layout.offsets)
    if gu is not None:
        gu.copy_(both)
    kind, inner = wide_dtype(both.dtype), down.shape[2]
    h = F.silu(both[:, :inner].to(kind)).mul_(both[:, inner:])
    rows = products.product(h.to(x.dtype), down.transpose(1, 2), layout.offsets)
    sum_rows(rows, weights, layout.inverse, layout.offsets, y)


def backward(
    saved: tuple[Tensor, ...], layout: Layout, outputs: tuple[Tensor, ...], products: Products = PER_EXPERT
) -> None:
    """Writes the gradients dx, dgate_up, ddown and dweights. A gradient without elements is not needed."""
    dy, x, gate_up, down, weights, gu = saved
    dx, dgate_up, ddown, dweights = outputs
    kind, inner = wide_dtype(x.dtype), down.shape[2]
    token = layout.permutation // layout.inverse.shape[1]
    weight = weights.reshape(-1, 1).index_select(0, layout.permutation).to(kind)
    upstream = dy.index_select(0, token)
    g, u = gu[:, :inner].to(kind), gu[:, inner:].to(kind)
    sigma = torch.sigmoid(g)
    silu = g * sigma
    h = silu * u
    if ddown.numel():
        products.outer(upstream, (weight * h).to(x.dtype), layout.offsets, ddown)
    if not (dx.numel() or dgate_up.numel() or dweights.numel()):
        return
    dh = products.product(upstream.to(kind), down, layout.offsets)
    if dweights.numel():
        valid = layout.inverse.view(-1) < layout.offsets[-1]
        sums = h.mul_(dh).sum(1).index_select(0, layout.inverse.view(-1))
        dweights.copy_(torch.where(valid, sums, 0).view(dweights.shape))
    dh = dh.to(kind).mul_(weight)
    slope = torch.rsub(sigma, 1).mul_(g).add_(1).mul_(sigma)
    dboth = torch.empty_like(gu)
    dboth[:, :inner] = slope.mul_(u).mul_(dh)
    dboth[:, inner:] = silu.mul_(dh)
    if dx.numel():
        sum_rows(products.product(dboth, gate_up, layout.offsets), None, layout.inverse, layout.offsets, dx)
    if dgate_up.numel():
        products.outer(dboth, x.index_select(0, token), layout.offsets, dgate_up)
