"""Causal attention of packed sequences on the CPU as an operator in each direction, for compilers.

A compiler cannot trace a loop over lengths that it does not know, some of which may be 0. These operators are no op of
the library: torch's attention computes, in the calls that torch makes outside of a compiler, so with the same bits.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.core.op.operator import register_as_one
from adjoint.device.sequences import check_bounds


def parts_of(bounds: list[int]) -> Iterator[slice]:
    """The tokens of each sequence that has any."""
    return (slice(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Causal attention of each sequence in the only row of q, k and v, [1, time, heads, size]."""
    return _PackedAttention.apply(q, k, v, cu_seqlens)  # type: ignore[no-any-return]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        y, sums = FORWARD(q, k, v, cu_seqlens)
        ctx.save_for_backward(q, k, v, cu_seqlens, y, sums)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*BACKWARD(gradients[0], *ctx.saved_tensors), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs, and the logarithms of the sums of exponentials, [1, time, heads]."""
    bounds = cu_seqlens.tolist()
    check_bounds("GatedAttention", bounds, q.shape[1])
    y, sums = _empty(q)
    for part in parts_of(bounds):
        y[:, part], sums[:, part] = (
            x.transpose(1, 2)
            for x in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(x[:, part].transpose(1, 2) for x in (q, k, v)), is_causal=True
            )
        )
    return y, sums


def _backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _zeros_like(q, k, v)
    for part in parts_of(cu_seqlens.tolist()):
        of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x[:, part].transpose(1, 2) for x in (dy, q, k, v, y, sums)), 0.0, True
        )
        for gradient, result in zip(gradients, of_part, strict=True):
            gradient[:, part] = result.transpose(1, 2)
    return gradients


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _zeros_like(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


FORWARD = register_as_one(
    "packed_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens) -> (Tensor, Tensor)",
    _forward,
    lambda q, k, v, cu_seqlens: _empty(q),
)
BACKWARD = register_as_one(
    "packed_attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor y, Tensor sums) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda dy, q, k, v, cu_seqlens, y, sums: _zeros_like(q, k, v),
)
