"""Rows of q and k divided by their norms, x / sqrt(Σx² + ε), and gradients through that."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Int32, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.core.layout import Rows
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import SMALL
from adjoint.ops.norm.l2_norm.kernels import bind_l2

ROWS = tl.constexpr(16)
"""Rows of a program."""


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


def bind_normalize(setup: Setup, shape: Shape, factors: bool) -> Callable[..., TokenRows]:
    """q or k normalised: `launch(memory, name, tokens)`, into memory for copies, [B, T, key heads, padded K].

    Tokens may be such a copy; what it is padded with stays. Where `factors`, 1 / norm is stored too, for a backward.
    """
    width, rows, heads = pad_to_16(shape.K), shape.tokens * shape.key_heads, shape.key_heads
    normalize = bind_l2(
        setup, shape.element, shape.K, "runs", tile=2048 // max(128, next_power_of_two(shape.K)), num_warps=4,
        y_step=width, save=factors,
    )  # fmt: skip
    if factors:
        setup.scratch(q_factors=(torch.float32, rows), k_factors=(torch.float32, rows))

    def launch(memory: Memory, name: str, x: TokenRows) -> TokenRows:
        out = memory[f"copy_of_{name}"]
        normalize(Rows(x.start, heads, *x.strides), out, rows, EPSILON, memory[f"{name}_factors"] if factors else None)
        return TokenRows(out, heads * width, width)

    return launch


def bind_unnormalize(setup: Setup, shape: Shape) -> Callable[..., None]:
    """The gradient of q or k for one of what was normalised: `launch(memory, name, normalised x, out)`."""
    unnormalize = setup.kernel(
        rule_unnormalize, element=shape.element, SIZE=shape.K, PADDED=pad_to_16(shape.K),
        BLOCK=next_power_of_two(shape.K),
    )  # fmt: skip
    rows = shape.tokens * shape.key_heads

    def launch(memory: Memory, name: str, x: TokenRows, out: Tensor) -> None:
        unnormalize.launch(
            (-(-rows // ROWS.value),), x=x.start, factors=memory[f"{name}_factors"],
            gradient=memory[f"d{name}_normalized"], out=out, rows=rows,
        )  # fmt: skip

    return launch
