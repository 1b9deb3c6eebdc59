"""Rows of q and k divided by their norms, x / sqrt(Σx² + ε), and gradients through that."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import SMALL

ROWS = tl.constexpr(16)
"""Rows of a program."""


@kernel(budget=SMALL, targets=NVIDIA)
@triton.jit
def rule_normalize(
    x: Pointer.element, out: Pointer.element, factors: Pointer.float32, rows: Int64, heads: Int32, time: Int32,
    batch_stride: Int64, token_stride: Int64, head_stride: Int64, column_stride: Int64,
    EPSILON: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE numbers, divided by their norm in float32, into rows of PADDED; and 1 / norm, where FACTORS.

    As with the gates, nothing is promised to be aligned: the squares of a row are added in one order.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token = row // heads
    place = x + (token // time) * batch_stride + (token % time) * token_stride + (row % heads) * head_stride
    value = tl.load(place + column.to(tl.int64) * column_stride, (row < rows) & (column < SIZE), other=0)
    value = value.to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, 1) + EPSILON)
    value = (value * norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * PADDED + column, value, (row < rows) & (column < PADDED))
    if FACTORS:
        tl.store(factors + row, norm[:, None], row < rows)


@kernel(budget=SMALL, targets=NVIDIA)
@triton.jit
def rule_unnormalize(
    x: Pointer.element, factors: Pointer.float32, gradient: Pointer.float32, out: Pointer.element, rows: Int32,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient through a norm for whole rows, [rows, SIZE] in float32, which the kernel before had in blocks."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    wide = tl.load(x + row * PADDED + column, inside, other=0).to(tl.float32)
    dy = tl.load(gradient + row * SIZE + column, inside, other=0)
    factor = tl.load(factors + row, row < rows, other=0)
    along = tl.sum(wide * dy, 1)
    tl.store(out + row * SIZE + column, ((dy - wide * along[:, None]) * factor).to(out.dtype.element_ty), inside)


def _sizes(shape: Shape) -> dict[str, Any]:
    return {"SIZE": shape.K, "PADDED": pad_to_16(shape.K), "BLOCK": next_power_of_two(shape.K)}


def bind_normalize(setup: Setup, shape: Shape, factors: bool) -> Callable[[Mapping[str, Any], str, Tensor], TokenRows]:
    """q or k normalised: `launch(memory, name, x)`, into memory for copies, [B, T, key heads, padded K].

    Args:
        factors: whether 1 / norm is stored too, for a backward.
    """
    normalize = setup.kernel(rule_normalize, element=shape.element, EPSILON=EPSILON, FACTORS=factors, **_sizes(shape))
    rows = shape.tokens * shape.key_heads
    strides = (shape.key_heads * pad_to_16(shape.K), pad_to_16(shape.K))
    if factors:
        setup.scratch(q_factors=(torch.float32, rows), k_factors=(torch.float32, rows))

    def launch(memory: Mapping[str, Any], name: str, x: Tensor) -> TokenRows:
        batch, token, head, column = x.stride()
        out = memory[f"copy_of_{name}"]
        normalize.launch(
            (-(-rows // ROWS.value),), x=x, out=out, factors=memory[f"{name}_factors"] if factors else out, rows=rows,
            heads=shape.key_heads, time=shape.time, batch_stride=batch, token_stride=token, head_stride=head,
            column_stride=column,
        )  # fmt: skip
        return TokenRows(out, *strides)

    return launch


def bind_unnormalize(setup: Setup, shape: Shape) -> Callable[[Mapping[str, Any], str, TokenRows, Tensor], None]:
    """The gradient of q or k for one of what was normalised: `launch(memory, name, normalised x, out)`."""
    unnormalize = setup.kernel(rule_unnormalize, element=shape.element, **_sizes(shape))
    rows = shape.tokens * shape.key_heads

    def launch(memory: Mapping[str, Any], name: str, x: TokenRows, out: Tensor) -> None:
        unnormalize.launch(
            (-(-rows // ROWS.value),), x=x.start, factors=memory[f"{name}_factors"],
            gradient=memory[f"d{name}_normalized"], out=out, rows=rows,
        )  # fmt: skip

    return launch
