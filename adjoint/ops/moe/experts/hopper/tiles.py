"""The tiles of rows that products for Hopper go through, and how they are launched."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Kernel, Pointer, kernel
from adjoint.core.launch import Launch, Setup
from adjoint.core.workspace import Memory
from adjoint.ops.moe.experts.hopper.device import ROWS
from adjoint.ops.moe.experts.triton.tiles import moe_experts_rows

TILE_ROWS = ROWS.value


@kernel(budget=Budget(registers=128, shared_bytes=1024), targets=("sm_90",), schedule=("BLOCK",))
@triton.jit
def moe_experts_row_tiles(
    offsets: Pointer.int32, tile_expert: Pointer.int32, tile_begin: Pointer.int32, tile_end: Pointer.int32,
    tile_count: Pointer.int32, experts: Int32,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tiles of an expert's rows, behind those of the experts before it; the last writes how many there are.

    The order follows from the experts' own numbers of rows, and no tile is empty. EXPERTS is a power of two, and at
    least as many as there are.
    """
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    before = each < expert
    rows = tl.load(offsets + each + 1, before, other=0) - tl.load(offsets + each, before, other=0)
    first = tl.sum((rows + (ROWS - 1)) // ROWS, 0)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    own = (end - begin + (ROWS - 1)) // ROWS
    for start in range(0, own, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < own
        row = begin + tile * ROWS
        tl.store(tile_expert + first + tile, tl.zeros([BLOCK], tl.int32) + expert, inside)
        tl.store(tile_begin + first + tile, row, inside)
        tl.store(tile_end + first + tile, tl.minimum(row + ROWS, end), inside)
    if expert == experts - 1:
        tl.store(tile_count, first + own)


class RowTiles(NamedTuple):
    """Tiles of rows as kernels take them."""

    tile_expert: Any
    tile_begin: Any
    tile_end: Any
    tile_count: Any


class Rows:
    """Finds the token of each row, with `weighted` its routing weight too, and cuts the rows of experts into tiles.

    The workspace gets the regions "tokens", "row_weights" and those of the tiles.
    """

    def __init__(self, setup: Setup, weighted: bool) -> None:
        tokens, _, self._experts, _, slots = setup.problem.sizes
        self._count, self._block = tokens * slots, setup.schedule["block"]
        self._rows = setup.kernel(
            moe_experts_rows, weight=setup.problem.dtypes[-1], wide=torch.float32, SLOTS=slots, WEIGHTED=weighted,
            BLOCK=self._block,
        )  # fmt: skip
        self._tiles = setup.kernel(
            moe_experts_row_tiles, ROWS=TILE_ROWS, EXPERTS=1 << (self._experts - 1).bit_length(), BLOCK=self._block
        )
        self.most_tiles = self._count // TILE_ROWS + min(self._experts, self._count)
        setup.scratch(tokens=(torch.int32, self._count))
        if weighted:
            setup.scratch(row_weights=(torch.float32, self._count))
        setup.scratch(**{name: (torch.int32, self.most_tiles) for name in RowTiles._fields[:3]})
        setup.scratch(tile_count=(torch.int32, 1))

    def find(self, memory: Memory, permutation: Tensor, offsets: Tensor, weights: Tensor) -> RowTiles:
        """Writes the tokens, with `weighted` the routing weights, and the tiles; gives the tiles."""
        token_stride, slot_stride = weights.stride()
        tokens = memory["tokens"]
        self._rows.launch(
            (-(-self._count // self._block),), permutation=permutation, weights=weights, tokens=tokens,
            row_weights=memory.get("row_weights", tokens), count=self._count, token_stride=token_stride,
            slot_stride=slot_stride,
        )  # fmt: skip
        tiles = RowTiles(*[memory[name] for name in RowTiles._fields])
        self._tiles.launch((self._experts,), offsets=offsets, experts=self._experts, **tiles._asdict())
        return tiles


class Persistent:
    """A product whose programs stay: one on every multiprocessor, or one a tile where these are fewer."""

    def __init__(self, setup: Setup, kernel: Kernel, tiles: int, **constants: Any) -> None:
        self._kernel: Launch = setup.kernel(
            kernel, element=setup.problem.dtypes[0], STAGES=setup.schedule["stages"], **constants
        )
        self._setup, self._tiles = setup, tiles

    def launch(self, **arguments: Any) -> None:
        self._kernel.launch((min(self._tiles, self._setup.multiprocessors),), **arguments)
