"""Launches the kernels of the embedding family: variants, workspaces, and the sequence of one backward."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Plan
from adjoint.core.workspace import Regions
from adjoint.device import grouping
from adjoint.device.sums import wide
from adjoint.ops.embedding.faults import ID_OUT_OF_RANGE
from adjoint.ops.embedding.kernels import LEVELS
from adjoint.ops.embedding.plans import SEQUENTIAL, TILE_BITS

ACCESSES = ("aligned", "unaligned", "strided")
"""How a variant reads and writes: 16 bytes at a time, adjacent elements, or any strides."""

# ------------------------------------------------------------------------------------------- variants


class Kinds(NamedTuple):
    """What the variants of a plan's kernels have in common."""

    element: torch.dtype
    ids: torch.dtype
    out: torch.dtype
    columns: int
    bagged: bool = False
    scaled: bool = False
    chosen: bool = False
    offsets: torch.dtype | None = None
    mode: int = 0
    listed: bool = False
    into: bool = False
    raises: bool = False


_TYPED = {
    "ids": lambda k: k.ids,
    "weight": lambda k: k.element,
    "gradient": lambda k: k.element,
    "per_sample_weights": lambda k: k.element,
    "out": lambda k: k.out,
    "partials": lambda k: wide(k.element),
    "factors": lambda k: wide(k.element),
    "offsets": lambda k: k.offsets or torch.int64,
    "status_word": lambda k: torch.int64,
} | {
    name: lambda k: torch.int32
    for name in (
        "positions", "bag_of", "winners", "starts", "ends", "listed", "segment_of", "counted", "keys",
    )
}  # fmt: skip
_WIDE_SCALARS = frozenset(
    (
        "row_stride", "column_stride", "inner_stride", "outer_stride", "out_row_stride", "out_column_stride",
        "gradient_row_stride", "gradient_column_stride",
    )
)  # fmt: skip
_MULTIPLES = frozenset(
    ("weight", "out", "gradient", "partials", "columns", "row_stride", "inner_stride", "out_row_stride",
     "gradient_row_stride", "winners")
)  # fmt: skip
"""Arguments that are multiples of 16 (bytes for pointers, elements for numbers) where accesses are aligned."""


def tile_shape(schedule: Mapping[str, int], part: str, columns: int) -> tuple[int, int]:
    """Rows and columns a program takes: short rows share one."""
    block = max(16, min(schedule[f"{part}_block"], 1 << (columns - 1).bit_length() if columns else 1))
    return max(1, schedule.get(f"{part}_elements", block) // block), block


def variant(kernel: str, kinds: Kinds, schedule: Mapping[str, int], part: str, access: str) -> Variant:
    """A kernel of the family as it is compiled for an access and the part of a schedule."""
    from adjoint.ops.embedding import bag_kernels as _bag_kernels  # noqa: F401  (registers them)
    from adjoint.ops.embedding import kernels as _kernels  # noqa: F401

    described = kernels.registered()[kernel]
    rows, block = tile_shape(schedule, part, kinds.columns)
    values = {
        "DOUBLE": kinds.element == torch.float64,
        "SPLIT": access == "strided" and not kinds.bagged,
        "UNIT": access != "strided",
        "BAGGED": kinds.bagged,
        "SCALED": kinds.scaled,
        "CHOSEN": kinds.chosen,
        "OFFSETS": kinds.offsets is not None,
        "MODE": kinds.mode,
        "INTO": kinds.into,
        "RAISE": kinds.raises,
        "UNROLL": schedule.get(f"{part}_unroll", 1),
        "ROWS": rows,
        "BLOCK": block,
    }
    runtime = [name for name in described.parameters if not name.isupper()]
    types = {
        name: f"*{TRITON_TYPES[_TYPED[name](kinds)]}" if name in _TYPED else "i64" if name in _WIDE_SCALARS else "i32"
        for name in runtime
    }
    return described.variant(
        types,
        {name: values[name] for name in described.parameters if name.isupper()},
        [name for name in runtime if name in _MULTIPLES] if access == "aligned" else (),
        num_warps=min(schedule[f"{part}_warps"], max(1, rows * block // 256)),  # none without work
        num_stages=1,
    )


def launcher(plan: Plan, key: Any, describe: Callable[[], Variant]) -> Callable[..., None]:
    """What launches a variant of a plan, compiled on first use."""
    compiled = plan.memo.get(key)
    if compiled is None:
        compiled = plan.memo[key] = describe().prepare(plan.problem.device)
    return compiled


def is_multiple(*values: Any) -> bool:
    """Whether tensors begin at, and numbers are, multiples of 16."""
    return all((v.data_ptr() if isinstance(v, Tensor) else v) % 16 == 0 for v in values)


# -------------------------------------------------------------------------------------------- forward


def forward_kinds(plan: Plan) -> Kinds:
    element, ids = plan.problem.dtypes
    (columns,) = plan.problem.sizes[-1:]
    return Kinds(element, ids, element, columns, raises=plan.problem.options[0] == "raise")


def gather(plan: Plan, ids: Tensor, weight: Tensor, out: Tensor, workspace: Tensor | None) -> None:
    """out = weight[ids]."""
    device, (rows, columns) = plan.problem.device, weight.shape
    count = ids.numel()
    if count == 0 or columns == 0:
        return
    ids = contiguous_ids(plan, ids, workspace)
    row_stride, column_stride = weight.stride()
    access = "strided" if column_stride != 1 and columns > 1 else "unaligned"
    if access != "strided" and is_multiple(weight, out, columns, row_stride):
        access = "aligned"
    tokens, block = tile_shape(plan.schedule, "gather", columns)
    _gather_launcher(plan, access)(
        (-(-count // tokens), -(-columns // block), 1), ids, weight, out, status_word(device), ID_OUT_OF_RANGE.row,
        count, rows, columns, row_stride, column_stride,
    )  # fmt: skip
    if device.type == "cpu":
        check()


def prepare_gather(plan: Plan) -> None:
    status_word(plan.problem.device)
    for access in ACCESSES:
        _gather_launcher(plan, access)


def _gather_launcher(plan: Plan, access: str) -> Callable[..., None]:
    return launcher(
        plan, access, lambda: variant("embedding_gather", forward_kinds(plan), plan.schedule, "gather", access)
    )


def contiguous_ids(plan: Plan, ids: Tensor, workspace: Tensor | None) -> Tensor:
    """The ids, one after the other; in the workspace, where they are not that already."""
    if ids.is_contiguous():
        return ids
    regions = copied_ids(plan.problem.sizes[0], ids.dtype)
    if workspace is None:
        workspace = regions.allocate(ids.device)
    copy = regions.tensors(workspace)["ids"].view(ids.shape)
    return copy.copy_(ids)


def copied_ids(count: int, dtype: torch.dtype) -> Regions:
    return Regions(ids=(dtype, count))


# ----------------------------------------------------------------------------------- sums over groups


def level_slots(count: int) -> list[int]:
    """Slots of each level of partial sums that a group of all tokens would have; see `kernels`."""
    levels = range(1, LEVELS + 1)
    return [2 * (((count - 1) >> TILE_BITS * level) + 1) for level in levels if count > 1 << TILE_BITS * level]


class Terms(NamedTuple):
    """What is summed: the gradient's rows as a kernel walks them, and what belongs to bags."""

    gradient: Tensor
    inner: int
    outer_stride: int
    inner_stride: int
    column_stride: int
    access: str
    bag_of: Any = None
    factors: Any = None
    winners: Any = None


def terms_of(gradient: Tensor, out: Tensor, columns: int) -> Terms:
    """How to walk a gradient [..., columns] whose leading axes merge into at most two."""
    axes = leading_axes(gradient)
    assert axes is not None
    inner, outer_stride, inner_stride = axes
    strides = gradient.stride(-1), out.stride(-1)
    access = "unaligned"
    if outer_stride or (columns > 1 and any(stride != 1 for stride in strides)):
        access = "strided"
    elif is_multiple(gradient, out, columns, inner_stride, out.stride(0)):
        access = "aligned"
    return Terms(gradient, inner, outer_stride, inner_stride, strides[0], access)


class Sums(NamedTuple):
    """One backward: a plan, the kinds of its kernels, and the tile, which decides about bits."""

    plan: Plan
    kinds: Kinds
    tile: int

    def launch(self, kernel: str, part: str, access: str) -> Callable[..., None]:
        key = (kernel, access)
        return launcher(self.plan, key, lambda: variant(kernel, self.kinds, self.plan.schedule, part, access))

    @property
    def group(self) -> grouping.Launch:
        """Starts a kernel of the sort."""
        return grouping.launcher(self.plan.memo, self.kinds.ids, self.plan.problem.device)

    def prepare(self) -> None:
        """Compiles everything a backward may launch."""
        grouping.launcher(self.plan.memo, self.kinds.ids, self.plan.problem.device)
        for access in ACCESSES:
            self._compile(access)

    def _compile(self, access: str) -> None:
        self.launch("embedding_sum_tiles", "tiles", access)
        self.launch("embedding_sum_partials", "partials", _flat(access))
        self.launch("embedding_write_groups", "groups", access)
        if not self.kinds.listed:
            self.launch("embedding_write_zeros", "zeros", access)

    def run(
        self,
        terms: Terms,
        memory: Mapping[str, Any],
        positions: Any,
        segment_of: Any,
        count: int,
        segments: int,
        out: Tensor,
    ) -> None:
        """Writes the sum of each segment to its row of out, or adds it there."""
        schedule, columns, listed = self.plan.schedule, self.kinds.columns, self.kinds.listed
        compiled = ("sums", terms.access)
        if compiled not in self.plan.memo:
            key = (*compiled, self.kinds, tuple(schedule.items()), self.plan.problem.device)
            kernels.compile_together(key, lambda: self._compile(terms.access))
            self.plan.memo[compiled] = True
        absent = positions  # stands for a pointer that no variant reads
        bags = tuple(absent if p is None else p for p in (terms.bag_of, terms.factors, terms.winners))
        walk = (terms.inner, terms.outer_stride, terms.inner_stride, terms.column_stride)
        bounds = (segment_of, memory["starts"], memory["ends"])
        partials = memory.get("partials", absent)
        slots = level_slots(count) if self.tile < SEQUENTIAL else []
        levels = [sum(slots[:level]) for level in range(LEVELS)]
        limit = grouping.MAX_GROUPS if listed else segments
        for level, number in enumerate(slots):
            if level == 0:
                _, block = tile_shape(schedule, "tiles", columns)
                self.launch("embedding_sum_tiles", "tiles", terms.access)(
                    (number, -(-columns // block), 1), terms.gradient, positions, *bags, *bounds, partials, count,
                    limit, columns, *walk,
                )  # fmt: skip
            else:
                _, block = tile_shape(schedule, "partials", columns)
                self.launch("embedding_sum_partials", "partials", _flat(terms.access))(
                    (number, -(-columns // block), 1), partials, *bounds, count, limit, columns,
                    TILE_BITS * (level + 1), levels[level - 1], levels[level],
                )  # fmt: skip
        if count:
            rows, block = tile_shape(schedule, "groups", columns)
            self.launch("embedding_write_groups", "groups", terms.access)(
                (-(-count // rows), -(-columns // block), 1), terms.gradient, positions, *bags, segment_of,
                memory["ends"], memory.get("listed", absent), partials, out, count, limit, columns, self.tile,
                *levels[1:], *walk, *out.stride(),
            )  # fmt: skip
        if not listed:
            rows, block = tile_shape(schedule, "zeros", columns)
            self.launch("embedding_write_zeros", "zeros", terms.access)(
                (-(-segments // rows), -(-columns // block), 1), memory["starts"], out, segments, columns,
                *out.stride(),
            )  # fmt: skip


def _flat(access: str) -> str:
    """The access of partial sums, which have no strides."""
    return "unaligned" if access == "strided" else access
