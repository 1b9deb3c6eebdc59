"""The token of each row, the rows of each tile, and how large tiles are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Kernel, Pointer, architecture, kernel
from adjoint.core.launch import Launch, Setup
from adjoint.core.problem import wide_dtype
from adjoint.core.workspace import Memory
from adjoint.ops.moe.experts.plans import DEPTH, EDGE, HIDDEN_COLUMNS

SMALL = Budget(registers=64)
PRODUCT = Budget(registers=255, shared_bytes=232448)


@kernel(budget=SMALL, schedule=("BLOCK",))
@triton.jit
def moe_experts_rows(
    permutation: Pointer.int32, weights: Pointer.weight, tokens: Pointer.int32, row_weights: Pointer.wide,
    count: Int32, token_stride: Int64, slot_stride: Int64,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of each row, and (WEIGHTED) its routing weight."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    entry = tl.load(permutation + row, inside, other=0)
    token = (entry // SLOTS).to(tl.int32)
    tl.store(tokens + row, token, inside)
    if WEIGHTED:
        place = weights + token.to(tl.int64) * token_stride + (entry % SLOTS).to(tl.int64) * slot_stride
        weight = tl.load(place, inside, other=0)
        tl.store(row_weights + row, weight.to(row_weights.dtype.element_ty), inside)


@kernel(budget=SMALL, schedule=("ROWS", "BLOCK"))
@triton.jit
def moe_experts_tiles(
    offsets: Pointer.int32, tile_expert: Pointer.int32, tile_begin: Pointer.int32, tile_end: Pointer.int32,
    experts: Int32, steps: Int32, tiles: Int32,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The expert of each tile, or −1 where it has no rows, and its rows."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The last expert whose first tile is not past this one.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + (experts - 1)
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        fits = tl.load(offsets + middle).to(tl.int32) // ROWS + middle <= tile
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    first = tl.load(offsets + low).to(tl.int32)
    end = tl.load(offsets + low + 1).to(tl.int32)
    begin = first + (tile - first // ROWS - low) * ROWS
    inside = tile < tiles
    tl.store(tile_expert + tile, tl.where(begin < end, low, -1), inside)
    tl.store(tile_begin + tile, begin, inside)
    tl.store(tile_end + tile, tl.minimum(begin + ROWS, end), inside)


# --------------------------------------------------------------------------------------------------- tiles

MAX_GROUP = 64
"""Tiles of rows that share columns of weights; there is room for tiles up to a multiple of it."""

MAX_TILE = 128 * 256
"""Elements of a 16-bit product's tile: more would not fit in a program's registers."""

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Shared memory a program may have, by target."""


class Tile(NamedTuple):
    """How a program cuts a product: rows and columns of its output, terms of a step, and its launch shape."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


def tile_of(setup: Setup, part: str, aligned: bool) -> Tile:
    """The tile of a part of the layer, as near to the schedule as a GPU allows; `aligned` is what 16 bytes copy."""
    schedule, element = setup.schedule, setup.problem.dtypes[0]
    depth, group = DEPTH[element], min(schedule[f"{part}_group"], MAX_GROUP)
    sides = 2 if part == "up" else 1  # gate and up side by side
    hidden = part == "hidden"
    rows, columns = schedule[f"{part}_rows"], HIDDEN_COLUMNS[element] if hidden else schedule[f"{part}_columns"]
    if setup.interpreted:
        return Tile(max(16, rows), max(16, columns), depth, group, 4, 1)
    if element in EDGE:
        return Tile(EDGE[element], EDGE[element] // sides, depth, group, 4, 2)
    if not aligned:
        edge, warps = min(max(64, schedule["unaligned_edge"]), 128), min(max(4, schedule["unaligned_warps"]), 16)
        return Tile(64 if hidden else edge, columns if hidden else edge // sides, depth, group, warps, 1)
    rows = min(max(64, rows), 128 if hidden else 256)
    columns = min(max(16, columns), MAX_TILE // rows // sides)
    warps = rows // 16 if hidden else min(max(4, schedule[f"{part}_warps"], rows * columns * sides // 4096), 16)
    stage = (rows + sides * columns) * depth * element.itemsize
    stages = max(1, min(schedule[f"{part}_stages"], _shared_bytes(setup) // stage))
    return Tile(rows, columns, depth, group, warps, stages)


def _shared_bytes(setup: Setup) -> int:
    """Shared memory a program may have: as the driver says, where the GPU is there and the target not in the table."""
    if setup.target in SHARED_BYTES:
        return SHARED_BYTES[setup.target]
    if not torch.cuda.is_available() or setup.target != architecture(setup.device):
        return 65_536
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(setup.device.index or 0)["max_shared_mem"])


def tile_count(rows: int, experts: int, tile_rows: int, group: int = MAX_GROUP) -> int:
    """How many numbers tiles of rows have, up to a multiple of a group; by default of every group."""
    return -(-(rows // tile_rows + experts) // group) * group


# ------------------------------------------------------------------------------------------------ launches


class Product(NamedTuple):
    """A matrix product as it is launched."""

    kernel: Launch
    tile: Tile
    grid: tuple[int]

    def launch(self, **arguments: Any) -> None:
        self.kernel.launch(self.grid, **arguments)


ByAlignment = dict[bool, Product]
"""A product by whether its tensors begin at multiples of 16 bytes."""


def bind_products(setup: Setup, kernel: Kernel, part: str, tiles: Callable[[Tile], int], **facts: Any) -> ByAlignment:
    """A product, in as many tiles as `tiles` says for one."""
    products = {}
    for aligned in (True, False):
        tile = tile_of(setup, part, aligned)
        bound = setup.kernel(
            kernel, element=setup.problem.dtypes[0], aligned=aligned, ROWS=tile.rows, COLUMNS=tile.columns,
            DEPTH=tile.depth, GROUP=tile.group, num_warps=tile.warps, num_stages=tile.stages, **facts,
        )  # fmt: skip
        products[aligned] = Product(bound, tile, (tiles(tile),))
    return products


def bind_over_rows(setup: Setup, kernel: Kernel, part: str, columns: int, **facts: Any) -> ByAlignment:
    """A product over rows that gives so many columns of each."""
    tokens, _, experts, _, slots = setup.problem.sizes

    def tiles(tile: Tile) -> int:
        return tile_count(tokens * slots, experts, tile.rows, tile.group) * -(-columns // tile.columns)

    return bind_products(setup, kernel, part, tiles, **facts)


class Tiles(NamedTuple):
    """The expert of each tile of rows, or −1, where its rows begin, and where they end: as kernels take them."""

    expert: Any
    begin: Any
    end: Any


class RowTiles:
    """Finds the token of each row, with `weighted` its routing weight too, and cuts rows into the tiles of products.

    The workspace gets the regions "tokens" and "row_weights", and room for two cuts into tiles.
    """

    def __init__(self, setup: Setup, weighted: bool, *products: ByAlignment) -> None:
        tokens, _, self._experts, _, slots = setup.problem.sizes
        element, weight = setup.problem.dtypes[0], setup.problem.dtypes[-1]
        self._count, self._block = tokens * slots, setup.schedule["block"]
        self._rows = setup.kernel(
            moe_experts_rows, weight=weight, wide=wide_dtype(element), SLOTS=slots, WEIGHTED=weighted, BLOCK=self._block
        )
        heights = {product.tile.rows for each in products for product in each.values()}
        self._tiles = {rows: setup.kernel(moe_experts_tiles, ROWS=rows, BLOCK=self._block) for rows in heights}
        setup.scratch(tokens=(torch.int32, self._count))
        if weighted:
            setup.scratch(row_weights=(wide_dtype(element), self._count))
        room = torch.int32, tile_count(self._count, self._experts, 16)
        setup.scratch(**{f"tile_{name}_{cut}": room for cut in range(2) for name in Tiles._fields})

    def find_tokens(self, memory: Memory, permutation: Tensor, weights: Tensor) -> Any:
        """Writes the token of each row, and with `weighted` its routing weight; gives the tokens."""
        token_stride, slot_stride = weights.stride()
        tokens = memory["tokens"]
        self._rows.launch(
            (-(-self._count // self._block),), permutation=permutation, weights=weights, tokens=tokens,
            row_weights=memory.get("row_weights", tokens), count=self._count, token_stride=token_stride,
            slot_stride=slot_stride,
        )  # fmt: skip
        return tokens

    def cut(self, memory: Memory, number: int, rows: int, offsets: Tensor) -> Tiles:
        """Tiles of so many rows; the number says which of two cuts they are."""
        tiles = Tiles(*[memory[f"tile_{name}_{number}"] for name in Tiles._fields])
        count = tile_count(self._count, self._experts, rows)
        self._tiles[rows].launch(
            (-(-count // self._block),), offsets=offsets, tile_expert=tiles.expert, tile_begin=tiles.begin,
            tile_end=tiles.end, experts=self._experts, steps=self._experts.bit_length(), tiles=count,
        )  # fmt: skip
        return tiles
