"""Launches the kernels of the expert layer: tiles, variants, workspaces, and the sequence of each direction.

forward    lay out the rows  →  up  →  [product with down, sum of slots] for some columns at a time
backward   down_adjoint  →  outer (ddown)  →  [product with gate_up, sum of slots] …  →  outer (dgate_up)

Products over rows are D columns wide and N = T·k rows long: more than anything else. They are made, and summed into
tokens, WIDTH columns at a time, in the same memory; which columns go together changes no bit.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.moe import layout_launch
from adjoint.ops.moe.experts_eager import NEED_DOWN, NEED_GATE_UP, NEED_WEIGHTS, NEED_X, wide
from adjoint.ops.moe.experts_faults import INDEX_OUT_OF_RANGE
from adjoint.ops.moe.experts_kernels import KERNELS
from adjoint.ops.moe.experts_plans import DEPTH, HIDDEN_COLUMNS, lay_out
from adjoint.ops.moe.layout import Layout

MAX_CHUNK = 512
"""Columns of a product over rows that are in memory at once."""

MAX_GROUP = 64
"""Tiles of rows that share columns of weights; the number of slots is a multiple of it."""

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Shared memory a program may have, by target; others have 64 KiB."""

_BLOCK = 256
_UNROLL = 4
"""Slots whose rows one program reads at once."""


def _summed_tokens() -> int:
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
        precision = "tf32" if self.depth == DEPTH[torch.bfloat16] else "ieee"  # 16-bit operands know neither
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "GROUP": self.group,
            "PRECISION": precision,
        }


_WIDE_ROWS = {torch.float64: 32, torch.float32: 64}
"""Rows, and columns, of a tile of the types without matrix instructions. Their sums within a row follow the layout
of a tile, so they have one tile, whatever the schedule."""

MAX_TILE = 128 * 256
"""Elements of a 16-bit product's tile: more would not fit in a program's registers."""


_UNALIGNED_EDGE, _UNALIGNED_WARPS = 128, 8
"""Rows and columns of a tile whose operands go through registers: 16 bytes at a time they cannot be copied."""


def tile(part: str, schedule: Mapping[str, int], element: torch.dtype, shared_bytes: int, aligned: bool = True) -> Tile:
    """The tile of a product, as near to the schedule as a GPU allows."""
    depth, group = DEPTH[element], min(schedule[f"{part}_group"], MAX_GROUP)
    sides = 2 if part == "up" else 1  # gate and up side by side
    hidden = part == "hidden"
    if element in _WIDE_ROWS and not kernels.interpreting():
        edge = _WIDE_ROWS[element]
        return Tile(edge, HIDDEN_COLUMNS[element] if hidden else edge // sides, depth, group, 4, 2)
    if not (aligned or kernels.interpreting()):
        columns = HIDDEN_COLUMNS[element] if hidden else _UNALIGNED_EDGE // sides
        return Tile(_UNALIGNED_EDGE, columns, depth, group, _UNALIGNED_WARPS, 1)
    rows = schedule[f"{part}_rows"]
    columns = HIDDEN_COLUMNS[element] if hidden else schedule[f"{part}_columns"]
    if kernels.interpreting():
        return Tile(max(16, rows), max(16, columns), depth, group, 4, 1)
    rows = min(max(64, rows), 128 if hidden else 256)
    columns = min(max(16, columns), MAX_TILE // rows // sides)
    # A warp has 16 whole rows of `hidden`, so that sums over a row have one order.
    warps = rows // 16 if hidden else min(max(4, schedule[f"{part}_warps"], rows * columns * sides // 4096), 16)
    stage = (rows + sides * columns) * depth * element.itemsize
    return Tile(rows, columns, depth, group, warps, max(1, min(schedule[f"{part}_stages"], shared_bytes // stage)))


def shared_bytes_of(device: torch.device) -> int:
    """Shared memory a program may have on a device."""
    if device.type != "cuda":
        return SHARED_BYTES["sm_90"]
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


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
_KERNELS = {kernel.name: kernel for kernel in KERNELS}


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
    described = _KERNELS[kernel]
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
        "rows": variant("moe_experts_rows", kinds, {"SLOTS": kinds.slots, "WEIGHTED": not forward, "BLOCK": _BLOCK})
    }
    for part in ("up", "down") if forward else ("hidden", "dx"):
        for aligned in (True, False):
            rows = cut(part, aligned).rows
            listed["tiles", rows] = variant("moe_experts_tiles", kinds, {"ROWS": rows, "BLOCK": _BLOCK})
    for aligned in (True, False):
        total = {
            "SLOTS": kinds.slots,
            "N": hidden,
            "WIDTH": width,
            "WEIGHTED": forward,
            "TOKENS": _summed_tokens(),
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
            "moe_experts_sum_partials", kinds, {"BLOCK": _BLOCK}, aligned=False, out=kinds.weights
        )  # fmt: skip
    return listed


def kinds_of(problem: Problem) -> Kinds:
    _, hidden, experts, inner, slots = problem.sizes
    element, weights = problem.dtypes[0], problem.dtypes[-1]
    return Kinds(element, weights, hidden, experts, inner, slots, shared_bytes_of(problem.device))


# ------------------------------------------------------------------------------------------ workspaces


def regions(problem: Problem) -> Regions:
    """The workspace of a direction."""
    tokens, hidden, experts, inner, slots = problem.sizes
    element, rows, width = problem.dtypes[0], tokens * slots, chunk_width(hidden)
    if is_empty(problem):
        return Regions()
    held: dict[str, tuple[torch.dtype, int]] = {"tokens": (torch.int32, rows)}
    for part in range(2):
        for name in ("expert", "begin", "end"):
            held[f"tile_{name}_{part}"] = (torch.int32, slot_count(rows, experts, 16))
    if problem.op == "moe_experts":
        held |= layout_launch.regions(rows, experts)
        held |= {"h": (element, rows * inner), "rows": (element, rows * width)}
    else:
        (need,) = problem.options
        held["row_weights"] = (wide(element), rows)
        if need & (NEED_X | NEED_GATE_UP):
            held["dgu"] = (element, rows * 2 * inner)
        # w·h is not needed any more when the first columns of dx are made.
        shared = max(inner if need & NEED_DOWN else 0, width if need & NEED_X else 0)
        held["shared"] = (element, rows * shared)
        if need & NEED_WEIGHTS:
            held["partials"] = (wide(element), rows * -(-inner // HIDDEN_COLUMNS[element]))
    sizes = {
        "x": tokens * hidden,
        "dy": tokens * hidden,
        "gate_up": experts * 2 * inner * hidden,
        "down": experts * hidden * inner,
        "gu": rows * 2 * inner,
        "indices": rows,
    }
    for name, size in sizes.items():
        if name in problem.layout.split():
            held[f"copied_{name}"] = (problem.dtypes[1] if name == "indices" else element, size)
    return Regions(**held)


def is_empty(problem: Problem) -> bool:
    """Whether there is nothing to multiply: no rows, no experts, or no columns."""
    return 0 in problem.sizes


class _Direction:
    """One direction of one call: its plan, its memory, and what launches its kernels."""

    def __init__(self, plan: Plan, workspace: Tensor | None, tensors: tuple[Tensor, ...]) -> None:
        self.plan, self.problem = plan, plan.problem
        self.tokens, self.hidden, self.experts, self.inner, self.slots = plan.problem.sizes
        self.rows = self.tokens * self.slots
        self.held = regions(plan.problem)
        if workspace is None:
            workspace = self.held.allocate(plan.problem.device)
        self.workspace = workspace  # addresses keep nothing alive
        self.memory = self.held.pointers(workspace)
        self.aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)

    def contiguous(self, **tensors: Tensor) -> list[Tensor]:
        """Tensors in their natural order; copies of those that are not."""
        return [
            tensor
            if tensor.is_contiguous()
            else self.held.tensor(self.workspace, f"copied_{name}").view(tensor.shape).copy_(tensor)
            for name, tensor in tensors.items()
        ]

    def tile(self, part: str) -> Tile:
        key = ("tile", part, self.aligned)
        found = self.plan.memo.get(key)
        if found is None:
            shared_bytes = shared_bytes_of(self.problem.device)
            found = tile(part, self.plan.schedule, self.problem.dtypes[0], shared_bytes, self.aligned)
            self.plan.memo[key] = found
        return found

    def launch(self, key: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        launchers = self.plan.memo.get("launchers")
        if launchers is None:
            launchers = self.plan.memo["launchers"] = _listed(self.plan)
        launcher = launchers[key]
        if isinstance(launcher, Variant):
            launcher = launchers[key] = launcher.prepare(self.problem.device)
        launcher((*grid, 1, 1)[:3], *arguments)

    def start(self, permutation: Tensor, weights: Tensor) -> None:
        """Who is where: the token, and the weight, of each row."""
        row_weights = self.memory.get("row_weights", self.memory["tokens"])
        self.launch(
            "rows", (-(-self.rows // _BLOCK),), permutation, weights, self.memory["tokens"], row_weights,
            self.rows, *weights.stride(),
        )  # fmt: skip

    def cut(self, part: str, number: int, offsets: Tensor) -> tuple[Any, ...]:
        """The tiles of a product over rows, as its kernel takes them."""
        tables = tuple(self.memory[f"tile_{name}_{number}"] for name in ("expert", "begin", "end"))
        rows = self.tile(part).rows
        slots = slot_count(self.rows, self.experts, rows)
        steps = self.experts.bit_length()
        self.launch(
            ("tiles", rows), (-(-slots // _BLOCK),), offsets, *tables, self.experts, steps, slots
        )  # fmt: skip
        return tables

    def grid(self, part: str, columns: int) -> tuple[int]:
        own = self.tile(part)
        return (slot_count(self.rows, self.experts, own.rows, own.group) * -(-columns // own.columns),)

    def reduce(
        self, part: str, rows: Any, weight: Tensor, tiles: tuple[Any, ...], memory: Any,
        weights: Tensor, layout: Layout, out: Tensor,
    ) -> None:  # fmt: skip
        """out[t] = Σ over slots of a product over rows, some columns at a time."""
        width, programs = chunk_width(self.hidden), -(-self.tokens // _summed_tokens())
        for chunk in range(-(-self.hidden // width)):
            self.launch((part, self.aligned), self.grid(part, width), rows, weight, *tiles, memory, chunk)
            self.launch(
                ("sum", self.aligned), (programs,), memory, layout.inverse, weights, layout.offsets,
                out, self.tokens, self.experts, chunk, *weights.stride(),
            )  # fmt: skip


def _listed(plan: Plan) -> dict[Any, Any]:
    """Every variant of a plan, by the key it is launched with; compiled on first use."""
    (options,) = plan.problem.options
    listed: dict[Any, Any] = variants(plan.problem.op, kinds_of(plan.problem), plan.schedule, int(options))
    if plan.problem.op == "moe_experts":
        listed |= layout_launch.variants(plan.problem.dtypes[1], plan.problem.sizes[2])
    return listed


def prepare(plan: Plan) -> None:
    """Compiles everything a direction may launch."""
    if is_empty(plan.problem):
        return
    status_word(plan.problem.device)
    plan.memo["launchers"] = {key: listed.prepare(plan.problem.device) for key, listed in _listed(plan).items()}


# -------------------------------------------------------------------------------------------- the calls


def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    """y, and what the backward needs: g and u of each row, and the layout."""
    x, gate_up, down, indices, weights, keep = arguments
    y, gu, *laid = outputs
    if is_empty(plan.problem):
        lay_out(arguments, outputs)
        y.zero_()
        gu.zero_()
        return
    layout = Layout(*laid)
    run = _Direction(plan, workspace, (x, gate_up, down, y, gu) if keep else (x, gate_up, down, y))
    x, gate_up, down, indices = run.contiguous(x=x, gate_up=gate_up, down=down, indices=indices)
    layout_launch.write(run.launch, run.memory, indices, layout, run.experts, INDEX_OUT_OF_RANGE)
    if plan.problem.device.type == "cpu":
        check()
    run.start(layout.permutation, weights)
    memory, tiles = run.memory, run.cut("up", 0, layout.offsets)
    run.launch(
        ("up", run.aligned), run.grid("up", run.inner), x, gate_up, memory["tokens"], *tiles, gu, memory["h"]
    )  # fmt: skip
    if run.tile("down").rows != run.tile("up").rows:
        tiles = run.cut("down", 1, layout.offsets)
    run.reduce("down", memory["h"], down, tiles, memory["rows"], weights, layout, y)


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    """The gradients that are needed."""
    dy, x, gate_up, down, weights, gu, *laid, need = arguments
    dx, dgate_up, ddown, dweights = outputs
    if is_empty(plan.problem):
        for gradient in outputs:
            gradient.zero_()
        return
    if need == 0:
        return
    layout = Layout(*laid)
    run = _Direction(plan, workspace, (dy, x, gate_up, down, gu, dx, dgate_up, ddown))
    dy, x, gate_up, down, gu = run.contiguous(dy=dy, x=x, gate_up=gate_up, down=down, gu=gu)
    run.start(layout.permutation, weights)
    memory, tiles = run.memory, run.cut("hidden", 0, layout.offsets)
    absent = memory["tokens"]  # stands for a pointer that no variant reads
    dgu, shared, partials = (memory.get(name, absent) for name in ("dgu", "shared", "partials"))
    run.launch(
        ("hidden", run.aligned), run.grid("hidden", run.inner), dy, down, gu, memory["tokens"], memory["row_weights"],
        *tiles, dgu, shared, partials, run.rows,
    )  # fmt: skip
    if need & NEED_WEIGHTS:
        count = -(-run.inner // run.tile("hidden").columns)
        run.launch(
            "dweights", (-(-run.rows // _BLOCK),), partials, layout.inverse, layout.offsets, dweights, run.rows,
            run.experts, count,
        )  # fmt: skip
    outer = run.tile("outer")

    def launch_outer(key: str, left: Any, right: Any, out: Tensor) -> None:
        tiles_of_expert = -(-out.shape[1] // outer.rows) * -(-out.shape[2] // outer.columns)
        run.launch((key, run.aligned), (run.experts * tiles_of_expert,), left, right, absent, layout.offsets, out)

    if need & NEED_DOWN:
        launch_outer("ddown", dy, shared, ddown)
    if need & NEED_X:
        if run.tile("dx").rows != run.tile("hidden").rows:
            tiles = run.cut("dx", 1, layout.offsets)
        run.reduce("dx", dgu, gate_up, tiles, shared, weights, layout, dx)
    if need & NEED_GATE_UP:
        launch_outer("dgate_up", dgu, x, dgate_up)
