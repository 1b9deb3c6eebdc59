"""How the kernels of the expert layer are cut and compiled: tiles, and the variants of each direction."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.problem import Problem
from adjoint.ops.moe.experts_eager import NEED_DOWN, NEED_GATE_UP, NEED_WEIGHTS, NEED_X, wide
from adjoint.ops.moe.experts_plans import DEPTH, HIDDEN_COLUMNS

MAX_CHUNK = 512
"""Columns of a product over rows that are in memory at once."""

MAX_GROUP = 64
"""Tiles of rows that share columns of weights; the number of slots is a multiple of it."""

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Shared memory a program may have, by target; others have 64 KiB."""

BLOCK = 256
"""Rows, entries or slots of one program that only looks after them."""

_UNROLL = 4
"""Slots whose rows one program reads at once."""


def summed_tokens() -> int:
    """Tokens a program sums the slots of; the interpreter wants few programs."""
    return 32 if kernels.interpreting() else 1


# ---------------------------------------------------------------------------------------------- tiles


class Tile(NamedTuple):
    """How a program cuts a product: rows and columns of its output, terms of a step, and its launch shape."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, "GROUP": self.group}


_WIDE_ROWS = {torch.float64: 32, torch.float32: 64}
"""Rows, and columns, of a tile of the types without matrix instructions. Their sums within a row follow the layout
of a tile, so they have one tile, whatever the schedule."""

MAX_TILE = 128 * 256
"""Elements of a 16-bit product's tile: more would not fit in a program's registers."""


_UNALIGNED_EDGE, _UNALIGNED_WARPS = 128, 8
"""Rows and columns of a tile whose operands go through registers, because they cannot be copied 16 bytes at a time."""


def tile(part: str, schedule: Mapping[str, int], element: torch.dtype, shared_bytes: int, aligned: bool = True) -> Tile:
    """The tile of a product, as near to the schedule as a GPU allows."""
    depth, group = DEPTH[element], min(schedule[f"{part}_group"], MAX_GROUP)
    sides = 2 if part == "up" else 1  # gate and up side by side
    hidden = part == "hidden"
    if element in _WIDE_ROWS and not kernels.interpreting():
        edge = _WIDE_ROWS[element]
        return Tile(edge, HIDDEN_COLUMNS[element] if hidden else edge // sides, depth, group, 4, 2)
    if not (aligned or kernels.interpreting()):
        if hidden:
            return Tile(_UNALIGNED_EDGE // 2, HIDDEN_COLUMNS[element], depth, group, _UNALIGNED_WARPS, 1)
        return Tile(_UNALIGNED_EDGE, _UNALIGNED_EDGE // sides, depth, group, _UNALIGNED_WARPS, 1)
    rows = schedule[f"{part}_rows"]
    columns = HIDDEN_COLUMNS[element] if hidden else schedule[f"{part}_columns"]
    if kernels.interpreting():
        return Tile(max(16, rows), max(16, columns), depth, group, 4, 1)
    rows = min(max(64, rows), 128 if hidden else 256)
    columns = min(max(16, columns), MAX_TILE // rows // sides)
    warps = rows // 16 if hidden else min(max(4, schedule[f"{part}_warps"], rows * columns * sides // 4096), 16)
    stage = (rows + sides * columns) * depth * element.itemsize
    return Tile(rows, columns, depth, group, warps, max(1, min(schedule[f"{part}_stages"], shared_bytes // stage)))


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory a program may have on a device."""
    if device.type != "cuda":
        return SHARED_BYTES["sm_90"]
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def chunk_width(hidden: int) -> int:
    """Columns of a product over rows that are in memory at once."""
    return min(MAX_CHUNK, -(-hidden // 16) * 16)


def slot_count(rows: int, experts: int, tile_rows: int, group: int = MAX_GROUP) -> int:
    """Slots for tiles of rows, a multiple of a group, or of every one."""
    return -(-(rows // tile_rows + experts) // group) * group


# ------------------------------------------------------------------------------------------- variants

_ELEMENTS = frozenset(
    ("x", "gate_up", "down", "dy", "gu", "h", "rows", "weight", "out", "dgu", "scaled", "left", "right")
)
_WIDE = frozenset(("row_weights", "partials"))
_INTEGERS = frozenset(("tokens", "tile_expert", "tile_begin", "tile_end", "offsets", "inverse", "permutation"))


class Kinds(NamedTuple):
    """What the variants of a plan's kernels have in common."""

    element: torch.dtype
    weights: torch.dtype
    hidden: int
    experts: int
    inner: int
    slots: int
    shared_bytes: int


def variant(
    kernel: str,
    kinds: Kinds,
    constants: Mapping[str, Any],
    warps: int = 4,
    stages: int = 1,
    aligned: bool = True,
    out: torch.dtype | None = None,
) -> Variant:
    """A kernel as it is compiled; `aligned` when every tensor begins at a multiple of 16 bytes."""
    from adjoint.ops.moe import experts_kernels as _  # noqa: F401  (registers them)

    described = kernels.registered()[kernel]
    types = {}
    for name in described.parameters:
        if name.isupper():
            continue
        if name in _INTEGERS:
            types[name] = "*i32"
        elif name == "weights":
            types[name] = f"*{TRITON_TYPES[kinds.weights]}"
        elif name == "out" and out is not None:
            types[name] = f"*{TRITON_TYPES[out]}"
        elif name in _ELEMENTS:
            types[name] = f"*{TRITON_TYPES[kinds.element]}"
        elif name in _WIDE:
            types[name] = f"*{TRITON_TYPES[wide(kinds.element)]}"
        else:
            types[name] = "i64" if name.endswith("_stride") else "i32"
    return described.variant(
        types,
        {name: constants[name] for name in described.parameters if name.isupper()},
        [name for name in types if name in _ELEMENTS] if aligned else (),
        num_warps=warps,
        num_stages=stages,
    )


def variants(op: str, kinds: Kinds, schedule: Mapping[str, int], options: int) -> dict[Any, Variant]:
    """What a direction compiles, by the key it is launched with.

    `options` is whether a forward keeps g and u, and which gradients a backward needs.
    """
    width, hidden, inner = chunk_width(kinds.hidden), kinds.hidden, kinds.inner
    sum_block = 1 << (width - 1).bit_length()  # one program has all columns of a chunk
    forward = op == "moe_experts"

    def cut(part: str, aligned: bool) -> Tile:
        return tile(part, schedule, kinds.element, kinds.shared_bytes, aligned)

    def described(kernel: str, part: str, aligned: bool, **constants: Any) -> Variant:
        own = cut(part, aligned)
        return variant(kernel, kinds, constants | own.constants, own.warps, own.stages, aligned)

    listed: dict[Any, Variant] = {
        "rows": variant("moe_experts_rows", kinds, {"SLOTS": kinds.slots, "WEIGHTED": not forward, "BLOCK": BLOCK})
    }
    for part in ("up", "down") if forward else ("hidden", "dx"):
        for aligned in (True, False):
            rows = cut(part, aligned).rows
            listed["tiles", rows] = variant("moe_experts_tiles", kinds, {"ROWS": rows, "BLOCK": BLOCK})
    for aligned in (True, False):
        total = {
            "SLOTS": kinds.slots,
            "N": hidden,
            "WIDTH": width,
            "WEIGHTED": forward,
            "TOKENS": summed_tokens(),
            "BLOCK": sum_block,
            "UNROLL": _UNROLL,
        }
        warps = max(1, min(2, sum_block // 256))
        if forward:
            listed["up", aligned] = described(
                "moe_experts_up", "up", aligned, D=hidden, INNER=inner, KEEP=bool(options)
            )  # fmt: skip
            listed["down", aligned] = described(
                "moe_experts_product", "down", aligned, K=inner, N=hidden, WIDTH=width, BY_COLUMN=True
            )
        else:
            listed["hidden", aligned] = described(
                "moe_experts_down_adjoint", "hidden", aligned, D=hidden, INNER=inner,
                HIDDEN=bool(options & (NEED_X | NEED_GATE_UP)), SCALED=bool(options & NEED_DOWN),
                WEIGHTS=bool(options & NEED_WEIGHTS),
                LEVELS=(HIDDEN_COLUMNS[kinds.element] // 4).bit_length() - 1,
            )  # fmt: skip
            if options & NEED_X:
                listed["dx", aligned] = described(
                    "moe_experts_product", "dx", aligned, K=2 * inner, N=hidden, WIDTH=width, BY_COLUMN=False
                )
            if options & NEED_GATE_UP:
                listed["dgate_up", aligned] = described(
                    "moe_experts_outer",
                    "outer",
                    aligned,
                    M=2 * inner,
                    N=hidden,
                    LEFT_BY_TOKEN=False,
                    RIGHT_BY_TOKEN=True,
                )
            if options & NEED_DOWN:
                listed["ddown", aligned] = described(
                    "moe_experts_outer", "outer", aligned, M=hidden, N=inner, LEFT_BY_TOKEN=True, RIGHT_BY_TOKEN=False
                )
        if forward or options & NEED_X:
            listed["sum", aligned] = variant("moe_experts_sum_slots", kinds, total, warps, aligned=aligned)
    if not forward and options & NEED_WEIGHTS:
        listed["dweights"] = variant(
            "moe_experts_sum_partials", kinds, {"BLOCK": BLOCK}, aligned=False, out=kinds.weights
        )  # fmt: skip
    return listed


def kinds_of(problem: Problem) -> Kinds:
    _, hidden, experts, inner, slots = problem.sizes
    element, weights = problem.dtypes[0], problem.dtypes[-1]
    return Kinds(element, weights, hidden, experts, inner, slots, shared_bytes_of(problem.device))
