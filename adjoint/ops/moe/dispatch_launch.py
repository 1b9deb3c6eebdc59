"""Launches dispatch and combine on Triton, both directions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.moe import dispatch_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.moe import layout_launch
from adjoint.ops.moe.dispatch_faults import EXPERT_OUT_OF_RANGE, ROW_OUT_OF_RANGE
from adjoint.ops.moe.dispatch_plans import DOT_WIDTH, NEED_ROWS, NEED_WEIGHTS, sizes_of
from adjoint.ops.moe.layout import Layout

ACCESSES = ("aligned", "unaligned", "strided")
"""How a variant reads and writes: 16 bytes at a time, adjacent elements, or any strides."""

# ------------------------------------------------------------------------------------------- variants

_ELEMENTS = frozenset(("source", "rows", "gradient", "out"))
_WIDE_SCALARS = frozenset(("outer_stride", "inner_stride", "column_stride", "row_stride", "row_column_stride"))
_MULTIPLES = frozenset(("source", "rows", "gradient", "out", "columns", "inner_stride", "row_stride"))
"""Arguments that are multiples of 16 (bytes for pointers, elements for numbers) where accesses are aligned."""


def tile_shape(schedule: Mapping[str, int], part: str, columns: int) -> tuple[int, int]:
    """Tokens and columns a program takes: short rows share one."""
    block = max(16, min(schedule[f"{part}_block"], 1 << (columns - 1).bit_length() if columns else 1))
    return max(1, schedule[f"{part}_elements"] // block), block


def variant(
    kernel: str,
    element: torch.dtype,
    weights: torch.dtype | None,
    columns: int,
    schedule: Mapping[str, int],
    access: str,
    raises: bool = False,
) -> Variant:
    """A kernel as it is compiled for an access and its part of a schedule; `weights` is None where there are none."""
    described = kernels.registered()[kernel]
    part = kernel.removeprefix("moe_")
    if part == "dots":
        rows, block, elements = schedule["dots_entries"], 0, DOT_WIDTH * schedule["dots_entries"]
    else:
        rows, block = tile_shape(schedule, part, columns)
        elements = rows * block
    values = {
        "SCALED": weights is not None,
        "RAISE": raises,
        "DOUBLE": element == torch.float64,
        "SPLIT": access == "strided",
        "UNIT": access != "strided",
        "ROWS": rows,
        "BLOCK": block,
    }

    def type_of(name: str) -> str:
        if name == "weights" or (name == "out" and part == "dots"):
            return f"*{TRITON_TYPES[weights or torch.float32]}"
        if name in _ELEMENTS:
            return f"*{TRITON_TYPES[element]}"
        if name in ("status_word", "order"):
            return "*i64"
        if name in ("inverse", "offsets"):
            return "*i32"
        return "i64" if name in _WIDE_SCALARS else "i32"

    runtime = [name for name in described.parameters if not name.isupper()]
    return described.variant(
        {name: type_of(name) for name in runtime},
        {name: values[name] for name in described.parameters if name.isupper()},
        [name for name in runtime if name in _MULTIPLES] if access == "aligned" else (),
        num_warps=min(schedule[f"{part}_warps"], max(1, elements // 256)),  # none without work
        num_stages=1,
    )


def _launcher(plan: Plan, kernel: str, access: str, raises: bool = False) -> Callable[..., None]:
    """What launches a kernel of a plan, compiled on first use."""
    key = (kernel, access)
    compiled = plan.memo.get(key)
    if compiled is None:
        element, weights, columns = _kinds(plan.problem)
        described = variant(kernel, element, weights, columns, plan.schedule, access, raises)
        compiled = plan.memo[key] = described.prepare(plan.problem.device)
    return compiled


def _kinds(problem: Problem) -> tuple[torch.dtype, torch.dtype | None, int]:
    """The dtype of rows, of weights where there are any, and the columns."""
    weighted = problem.op.startswith("moe_combine") and len(problem.dtypes) > 1
    return problem.dtypes[0], problem.dtypes[1] if weighted else None, problem.sizes[-1]


def _is_multiple(*values: Any) -> bool:
    """Whether tensors begin at, and numbers are, multiples of 16."""
    return all((v.data_ptr() if isinstance(v, Tensor) else v) % 16 == 0 for v in values)


# -------------------------------------------------------------------------------------------- memory


def copied(problem: Problem) -> dict[str, tuple[torch.dtype, int]]:
    """Regions for arguments that kernels cannot walk as they lie."""
    sizes = sizes_of(problem)
    return {name: sizes[name] for name in problem.layout.split(", ") if name}


def regions(problem: Problem) -> Regions:
    """The workspace of a direction."""
    held = copied(problem)
    if problem.op == "moe_dispatch":
        tokens, slots, experts, _ = problem.sizes
        held |= layout_launch.regions(tokens * slots, experts)
        held["order"] = (torch.int64, max(1, tokens * slots))
    return Regions(**held)


class _Memory:
    """A workspace divided, and arguments copied into it where they must be."""

    def __init__(self, plan: Plan, workspace: Tensor | None) -> None:
        held = regions(plan.problem)
        if workspace is None and held.bytes:
            workspace = held.allocate(plan.problem.device)
        self.workspace = workspace  # addresses keep nothing alive
        self.pointers = held.pointers(workspace) if workspace is not None else {}
        self._views = held.tensors(workspace) if workspace is not None and plan.problem.layout else {}

    def walkable(self, name: str, tensor: Any) -> Any:
        """The tensor, or its copy in the workspace; None for an argument that is not given."""
        if tensor is None or name not in self._views:
            return tensor
        return self._views[name].view(tensor.shape).copy_(tensor)


# -------------------------------------------------------------------------------------------- kernels


def _walk(tensor: Tensor) -> tuple[int, int, int, int]:
    """How to walk the tokens of a tensor [..., columns], and its columns."""
    axes = leading_axes(tensor)
    assert axes is not None
    return (*axes, tensor.stride(-1))


def _access(columns: int, walks: bool, strides: tuple[int, ...], multiples: tuple[Any, ...]) -> str:
    if not walks or (columns > 1 and any(stride != 1 for stride in strides)):
        return "strided"
    return "aligned" if _is_multiple(*multiples, columns) else "unaligned"


def _gather(plan: Plan, source: Tensor, order: Any, out: Tensor) -> None:
    tokens, slots, _, columns = plan.problem.sizes
    if out.numel() == 0:
        return
    walk = _walk(source)
    access = _access(columns, walk[1] == 0, walk[3:], (source, out, walk[2]))
    rows, block = tile_shape(plan.schedule, "gather", columns)
    _launcher(plan, "moe_gather", access)(
        (-(-tokens * slots // rows), -(-columns // block), 1), source, order, out, tokens, slots, columns, *walk
    )


def _scatter(plan: Plan, source: Tensor, weights: Any, inverse: Any, offsets: Any, out: Tensor) -> None:
    tokens, slots, experts, columns = plan.problem.sizes
    if out.numel() == 0:
        return
    walk = _walk(source)
    access = _access(columns, walk[1] == 0, walk[3:], (source, out, walk[2]))
    rows, block = tile_shape(plan.schedule, "scatter", columns)
    _launcher(plan, "moe_scatter", access)(
        (-(-tokens // rows), -(-columns // block), 1), source, inverse if weights is None else weights, inverse,
        offsets, out, tokens, slots, experts, columns, *walk,
    )  # fmt: skip


def _sum(plan: Plan, rows: Tensor, weights: Any, inverse: Any, offsets: Any, out: Tensor, raises: bool) -> None:
    tokens, slots, experts, columns = plan.problem.sizes
    if out.numel() == 0:
        return
    strides = rows.stride()
    access = _access(columns, True, strides[1:], (rows, out, strides[0]))
    each, block = tile_shape(plan.schedule, "sum", columns)
    _launcher(plan, "moe_sum", access, raises)(
        (-(-tokens // each), -(-columns // block), 1), rows, inverse if weights is None else weights, inverse,
        offsets, status_word(plan.problem.device), ROW_OUT_OF_RANGE.row, out, tokens, slots, experts, columns,
        *strides,
    )  # fmt: skip


def _dots(plan: Plan, gradient: Tensor, rows: Tensor, inverse: Any, offsets: Any, out: Tensor) -> None:
    tokens, slots, experts, columns = plan.problem.sizes
    if out.numel() == 0:
        return
    walk, strides = _walk(gradient), rows.stride()
    multiples = (gradient, rows, out, walk[2], strides[0])
    access = _access(columns, walk[1] == 0, (walk[3], strides[1]), multiples)
    _launcher(plan, "moe_dots", access)(
        (-(-tokens * slots // plan.schedule["dots_entries"]), 1, 1), gradient, rows, inverse, offsets, out,
        tokens, slots, experts, columns, *walk, *strides,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- directions


def chunk_spans(schedule: Mapping[str, int], element: torch.dtype) -> int:
    """Spans of entries whose rows are filled together: as many bytes of tokens as the cache keeps meanwhile."""
    return max(1, schedule["gather_chunk"] * 2 // element.itemsize // layout_launch.span())


def _layout_launcher(plan: Plan, key: str) -> Callable[..., None]:
    compiled = plan.memo.get(key)
    if compiled is None:
        described = layout_launch.variants(plan.problem.dtypes[1], plan.problem.sizes[2], ordered=True)[key]
        compiled = plan.memo[key] = described.prepare(plan.problem.device)
    return compiled


def dispatch(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    x, indices, num_experts = arguments
    rows, layout = outputs[0], Layout(*outputs[1:])
    memory = _Memory(plan, workspace)
    indices = memory.walkable("indices", indices)
    layout_launch.write(
        lambda key, grid, *rest: _layout_launcher(plan, key)((*grid, 1, 1)[:3], *rest),
        memory.pointers, indices, layout, num_experts, EXPERT_OUT_OF_RANGE, chunk_spans(plan.schedule, x.dtype),
    )  # fmt: skip
    _gather(plan, memory.walkable("x", x), memory.pointers["order"], rows)
    if plan.problem.device.type == "cpu":
        check()


def dispatch_backward(
    plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None
) -> None:
    drows, inverse, offsets = arguments
    memory = _Memory(plan, workspace)
    inverse, offsets = memory.walkable("inverse", inverse), memory.walkable("offsets", offsets)
    _sum(plan, drows, None, inverse, offsets, outputs[0], raises=False)


def combine(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    rows, *rest = arguments
    memory = _Memory(plan, workspace)
    weights, inverse, offsets = (
        memory.walkable(name, tensor) for name, tensor in zip(("weights", "inverse", "offsets"), rest, strict=True)
    )
    _sum(plan, rows, weights, inverse, offsets, outputs[0], raises=True)
    if plan.problem.device.type == "cpu":
        check()


def combine_backward(
    plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None
) -> None:
    dy, rows, *rest, need = arguments
    memory = _Memory(plan, workspace)
    weights, inverse, offsets = (
        memory.walkable(name, tensor) for name, tensor in zip(("weights", "inverse", "offsets"), rest, strict=True)
    )
    dy = memory.walkable("dy", dy)
    drows, dweights = outputs
    if need & NEED_ROWS:
        _scatter(plan, dy, weights, inverse, offsets, drows)
    if need & NEED_WEIGHTS:
        _dots(plan, dy, rows, inverse, offsets, dweights)


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch."""
    op, need = plan.problem.op, plan.problem.options[-1] if plan.problem.options else 0
    status_word(plan.problem.device)
    if op == "moe_dispatch":
        for key in layout_launch.variants(plan.problem.dtypes[1], plan.problem.sizes[2]):
            _layout_launcher(plan, key)
    for access in ACCESSES:
        if op == "moe_dispatch":
            _launcher(plan, "moe_gather", access)
        if op == "moe_combine_backward" and need & NEED_ROWS:
            _launcher(plan, "moe_scatter", access)
        if op in ("moe_dispatch_backward", "moe_combine"):
            _launcher(plan, "moe_sum", access, raises=op == "moe_combine")
        if op == "moe_combine_backward" and need & NEED_WEIGHTS:
            _launcher(plan, "moe_dots", access)
