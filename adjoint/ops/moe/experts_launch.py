"""Launches the kernels of the expert layer: workspaces, and the sequence of each direction.

forward    lay out the rows  →  up  →  [product with down, sum of slots] for some columns at a time
backward   down_adjoint  →  outer (ddown)  →  [product with gate_up, sum of slots] …  →  outer (dgate_up)

Products over rows are D columns wide and N = T·k rows long: more than anything else. They are made, and summed into
tokens, WIDTH columns at a time, in the same memory; which columns go together changes no bit.
"""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.moe import layout_launch
from adjoint.ops.moe.experts_eager import NEED_DOWN, NEED_GATE_UP, NEED_WEIGHTS, NEED_X, wide
from adjoint.ops.moe.experts_faults import INDEX_OUT_OF_RANGE
from adjoint.ops.moe.experts_plans import HIDDEN_COLUMNS, lay_out
from adjoint.ops.moe.experts_variants import (
    BLOCK,
    Tile,
    chunk_width,
    kinds_of,
    shared_bytes_of,
    slot_count,
    summed_tokens,
    tile,
    variants,
)
from adjoint.ops.moe.layout import Layout

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
            "rows", (-(-self.rows // BLOCK),), permutation, weights, self.memory["tokens"], row_weights,
            self.rows, *weights.stride(),
        )  # fmt: skip

    def cut(self, part: str, number: int, offsets: Tensor) -> tuple[Any, ...]:
        """The tiles of a product over rows, as its kernel takes them."""
        tables = tuple(self.memory[f"tile_{name}_{number}"] for name in ("expert", "begin", "end"))
        rows = self.tile(part).rows
        slots = slot_count(self.rows, self.experts, rows)
        steps = self.experts.bit_length()
        self.launch(
            ("tiles", rows), (-(-slots // BLOCK),), offsets, *tables, self.experts, steps, slots
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
        width, programs = chunk_width(self.hidden), -(-self.tokens // summed_tokens())
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
            "dweights", (-(-run.rows // BLOCK),), partials, layout.inverse, layout.offsets, dweights, run.rows,
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
