"""Launches the kernels of taking along an axis: variants, workspaces, and the sequence of a sorted adjoint."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.device import grouping
from adjoint.device.sums import wide
from adjoint.ops.indexing import eager, walks
from adjoint.ops.indexing.faults import INDEX_OUT_OF_RANGE, REPEATED_INDEX
from adjoint.ops.indexing.plans import LARGE, MANY_AXES, MAX_FILLED, MAX_SORTED, TILE_BITS
from adjoint.ops.indexing.walks import MAX_AXES, Lines

# ------------------------------------------------------------------------------------------- variants


class Kinds(NamedTuple):
    """What the variants of a plan's kernels have in common."""

    element: torch.dtype
    index_type: torch.dtype
    many_axes: bool = False
    large: bool = False
    raises: bool = False
    sums: bool = True
    length: int = 1
    entries: int = 1


def kinds_of(problem: Problem) -> Kinds:
    element, index = problem.dtypes
    kinds = Kinds(element, index, MANY_AXES in problem.layout, LARGE in problem.layout)
    if problem.op == "take_along_axis":
        return kinds._replace(raises=problem.options[1] == "raise")
    shape, axis, distinct = problem.options
    return kinds._replace(sums=not distinct, length=shape[axis], entries=problem.sizes[1])


_POINTERS = {
    "x": lambda k: k.element,
    "out": lambda k: k.element,
    "dout": lambda k: k.element,
    "dx": lambda k: k.element,
    "indices": lambda k: k.index_type,
    "partials": lambda k: wide(k.element),
    "status_word": lambda k: torch.int64,
    "order": lambda k: torch.int64 if is_long(k) else torch.int32,
} | {name: lambda k: torch.int32 for name in ("ids", "keys", "positions", "starts", "ends")}


_MULTIPLES = ("dx", "length", "span", "dx_step_0", "dx_step_1", "dx_step_2", "dx_step_3")
"""Arguments that are multiples of 16 (bytes for pointers, elements for numbers) where lines are aligned."""


def _type(name: str, kinds: Kinds) -> str:
    """The Triton type of a run-time parameter: what multiplies to an offset is 64 bits wide."""
    if name in _POINTERS:
        return f"*{TRITON_TYPES[_POINTERS[name](kinds)]}"
    if "_step" in name or name in ("lines", "first_line"):
        return "i64"
    if name == "count" or name.startswith("size_"):
        return "i64" if kinds.large else "i32"
    return "i64" if name.startswith("line_size_") else "i32"


def _power(number: int) -> int:
    """The smallest power of two that is not less, and not 1: a line of one has nothing to sort."""
    return 1 << max(1, number - 1).bit_length()


class Shape(NamedTuple):
    """What a program of the adjoint takes: lines, their entries, and elements of each at once."""

    lines: int
    entries: int
    block: int


_SIDE_BY_SIDE = 32
_COMPARED = 512  # entries a program compares, together


def few_shape(schedule: Mapping[str, int], kinds: Kinds, unit: bool) -> Shape:
    """Short lines share a program, long ones have several; lines that lie side by side are taken together."""
    elements = schedule["few_elements" if kinds.sums else "few_distinct_elements"]
    longest, entries = max(16, _power(kinds.length)), _power(kinds.entries)
    if unit:
        block = min(longest, max(16, elements))
        return Shape(max(1, min(elements // block, _COMPARED // entries)), entries, block)
    lines = min(_SIDE_BY_SIDE, _COMPARED // entries)
    return Shape(lines, entries, min(longest, max(1, elements // lines)))


def line_shape(schedule: Mapping[str, int], kinds: Kinds) -> Shape:
    """As many lines as have a number of entries together."""
    entries = _power(kinds.entries)
    lines = max(1, schedule["lines_entries"] // entries)
    return Shape(lines, entries, max(16, schedule["lines_elements"] // lines))


def variant(kernel: str, kinds: Kinds, schedule: Mapping[str, int], part: str, access: str) -> Variant:
    """A kernel of the family as it is compiled for an access: "aligned", "unit" or "strided" lines, "plain" indices."""
    from adjoint.ops.indexing import kernels as _kernels  # noqa: F401  (registers them)
    from adjoint.ops.indexing import sorting_kernels as _sorting  # noqa: F401

    described = kernels.registered()[kernel]
    unit = access in ("aligned", "unit")
    values: dict[str, Any] = {
        "RAISE": kinds.raises,
        "DOUBLE": kinds.element == torch.float64,
        "SUM": kinds.sums,
        "UNIT": unit,
        "PLAIN": access == "plain",
        "LARGE": kinds.large,
        "AXES": MAX_AXES if kinds.many_axes else 2,
        "LINE_AXES": MAX_AXES if kinds.many_axes else 1 if unit else 2,
        "ENTRY_AXES": MAX_AXES if kinds.many_axes else 1,
    }
    if part in ("few", "lines"):
        shape = line_shape(schedule, kinds) if part == "lines" else few_shape(schedule, kinds, unit)
        values |= {"LINES": shape.lines, "ENTRIES": shape.entries, "BLOCK": shape.block}
        values |= {"FILL": kinds.length <= MAX_FILLED, "LONG": is_long(kinds)}
    else:
        values["BLOCK"] = schedule[f"{part}_block"]
    runtime = [name for name in described.parameters if not name.isupper()]
    multiples = _MULTIPLES if access == "aligned" else ()
    warps = schedule[f"{part}_warps"]
    if part == "few" and access == "strided":  # each element has an address of its own
        warps *= 2
    return described.variant(
        {name: _type(name, kinds) for name in runtime},
        {name: values[name] for name in described.parameters if name.isupper()},
        [name for name in runtime if name in multiples],
        num_warps=warps,
        num_stages=1,
    )


def is_long(kinds: Kinds) -> bool:
    """Whether an index and the number of an entry need more than 32 bits together."""
    return (kinds.length + 1) * _power(kinds.entries) > 2**31


def _launcher(plan: Plan, kernel: str, part: str, access: str = "") -> Callable[..., None]:
    """What launches a variant of a plan, compiled on first use."""
    key = (kernel, access)
    compiled = plan.memo.get(key)
    if compiled is None:
        kinds = kinds_of(plan.problem)
        if kinds.many_axes:  # a batch of one has fewer: it must not compile anew
            variant(kernel, kinds._replace(many_axes=False), plan.schedule, part, access).prepare(plan.problem.device)
        described = variant(kernel, kinds, plan.schedule, part, access)
        compiled = plan.memo[key] = described.prepare(plan.problem.device)
    return compiled


def _blocks(count: int, block: int) -> tuple[int, int, int]:
    return -(-count // block), 1, 1


# -------------------------------------------------------------------------------------------- forward


def take(plan: Plan, arguments: tuple[Any, ...], out: Tensor) -> None:
    """out = the elements of x at the indices."""
    x, indices, axis, _, promise = arguments
    device, count = plan.problem.device, out.numel()
    if promise:
        report_repeats(indices, x.shape[axis], axis)
    if count == 0:
        return
    taking = walks.taking(tuple(x.shape), x.stride(), tuple(indices.shape), indices.stride(), axis)
    _launcher(plan, "take_forward", "take", "plain" if taking.plain else "")(
        _blocks(count, plan.schedule["take_block"]), x, indices, out, status_word(device), INDEX_OUT_OF_RANGE.row,
        count, x.shape[axis], x.stride(axis), *taking.walk.flat,
    )  # fmt: skip
    if device.type == "cpu":
        check()


def prepare_take(plan: Plan) -> None:
    status_word(plan.problem.device)
    for access in ("plain", ""):
        _launcher(plan, "take_forward", "take", access)


def report_repeats(indices: Tensor, length: int, axis: int) -> None:
    """In checking mode: reports the first index that its line has before."""
    if indices.numel():
        report(REPEATED_INDEX, indices, eager.repeats(indices, length, axis))


# -------------------------------------------------------------------------- the adjoint, line by line


def _lines_of(arguments: tuple[Any, ...]) -> Lines:
    dout, indices, shape, axis, _ = arguments
    return walks.lines(tuple(shape), tuple(indices.shape), indices.stride(), dout.stride(), axis)


ACCESSES = ("aligned", "unit", "strided")
"""How a line of dx is written: 16 bytes at a time, adjacent elements, or any distance."""


def _access(found: Lines, length: int, dx: Tensor) -> str:
    if found.axis_step != 1:
        return "strided"
    return "aligned" if dx.data_ptr() % 16 == 0 and length % 16 == 0 else "unit"


def by_comparing(plan: Plan, arguments: tuple[Any, ...], dx: Tensor) -> None:
    """For lines with few entries: those of a line are compared with each other."""
    dout, indices, shape, axis, _ = arguments
    if dx.numel() == 0:
        return
    found, length = _lines_of(arguments), shape[axis]
    taken = few_shape(plan.schedule, kinds_of(plan.problem), found.axis_step == 1)
    span = max(taken.block, plan.schedule["few_span"])
    spans = -(-length // span)
    blocks = -(-found.line_count // taken.lines)
    _launcher(plan, "take_backward_few", "few", _access(found, length, dx))(
        (blocks * spans, 1, 1), dout, indices, dx, found.line_count, found.entry_count, length, found.axis_step,
        spans, span, *found.lines.flat, *found.entries.flat,
    )  # fmt: skip


def prepare_comparing(plan: Plan) -> None:
    for access in ACCESSES:
        _launcher(plan, "take_backward_few", "few", access)


def line_regions(problem: Problem) -> Regions:
    """The workspace of an adjoint line by line: none where nothing is added."""
    kinds = kinds_of(problem)
    if not kinds.sums:
        return Regions()
    entries = _power(kinds.entries)
    count = min(problem.sizes[0], lines_at_once(entries)) * entries
    sums = {"partials": (wide(kinds.element), count)} if entries > 1 << TILE_BITS else {}
    return Regions(order=(torch.int64 if is_long(kinds) else torch.int32, count), **sums)


def _held(plan: Plan, describe: Callable[[Problem], Regions]) -> Regions:
    """A plan's workspace, divided once."""
    held = plan.memo.get("regions")
    if held is None:
        held = plan.memo["regions"] = describe(plan.problem)
    return held


def by_lines(plan: Plan, arguments: tuple[Any, ...], dx: Tensor, workspace: Tensor | None) -> None:
    """For lines whose entries fit a program: every program writes its lines, zeros and all."""
    dout, indices, shape, axis, _ = arguments
    if dx.numel() == 0:
        return
    kinds, found, length = kinds_of(plan.problem), _lines_of(arguments), shape[axis]
    if length > MAX_FILLED:
        dx.zero_()
    memory: Mapping[str, Any] = {}
    if kinds.sums:
        held = _held(plan, line_regions)
        if workspace is None:
            workspace = held.allocate(plan.problem.device)
        memory = held.pointers(workspace)
    scratch = memory.get("order", dx), memory.get("partials", dx)  # dx stands for a pointer that no variant reads
    taken = line_shape(plan.schedule, kinds)
    step = lines_at_once(taken.entries) if kinds.sums else found.line_count
    for first in range(0, found.line_count, step):
        end = min(first + step, found.line_count)
        _launcher(plan, "take_backward_lines", "lines", _access(found, length, dx))(
            _blocks(end - first, taken.lines), dout, indices, dx, *scratch, end, first, found.entry_count, length,
            found.axis_step, *found.lines.flat, *found.entries.flat,
        )  # fmt: skip


def prepare_lines(plan: Plan) -> None:
    for access in ACCESSES:
        _launcher(plan, "take_backward_lines", "lines", access)


def scatter(plan: Plan, arguments: tuple[Any, ...], dx: Tensor) -> None:
    """For many entries that do not repeat: zeros, then every entry to its element."""
    dout, indices, shape, axis, _ = arguments
    dx.zero_()
    if dx.numel() == 0 or dout.numel() == 0:
        return
    found = _lines_of(arguments)
    _launcher(plan, "take_scatter", "scatter", "unit" if found.axis_step == 1 else "strided")(
        _blocks(dout.numel(), plan.schedule["scatter_block"]), dout, indices, dx, found.line_count, found.entry_count,
        shape[axis], found.axis_step, *found.lines.flat, *found.entries.flat,
    )  # fmt: skip


def prepare_scatter(plan: Plan) -> None:
    for access in ("unit", "strided"):
        _launcher(plan, "take_scatter", "scatter", access)


# ---------------------------------------------------------------------------- the adjoint, by sorting


def lines_at_once(size: int) -> int:
    """Lines that are sorted together: as many as keep the workspace within bounds, but one at least."""
    return max(1, MAX_SORTED // max(1, size))


def regions(problem: Problem) -> Regions:
    """The workspace of an adjoint by sorting."""
    shape, axis, _ = problem.options
    lines, entries = problem.sizes
    taken = min(lines, lines_at_once(max(shape[axis], entries)))
    count, groups = taken * entries, taken * shape[axis]
    held = grouping.regions(count) | grouping.mark_regions(groups) | {"ids": (torch.int32, max(1, count))}
    held["partials"] = (wide(problem.dtypes[0]), count if entries > 1 << TILE_BITS else 1)
    return Regions(**held)


def _levels(entries: int) -> Iterator[int]:
    """Bits of the tiles of each level of partial sums that an element with all entries of a line would have."""
    bits = TILE_BITS
    while entries > 1 << bits:
        yield bits
        bits += TILE_BITS


def by_sorting(plan: Plan, arguments: tuple[Any, ...], dx: Tensor, workspace: Tensor | None) -> None:
    """For any number of entries: sorts them by element, then sums."""
    dout, indices, shape, axis, _ = arguments
    if dx.numel() == 0:
        return
    if dout.numel() == 0:
        dx.zero_()
        return
    held, found, length = _held(plan, regions), _lines_of(arguments), shape[axis]
    if workspace is None:
        workspace = held.allocate(plan.problem.device)
    memory = held.pointers(workspace)
    step = lines_at_once(max(length, found.entry_count))
    for first in range(0, found.line_count, step):
        _sort_and_sum(plan, memory, found, length, first, min(step, found.line_count - first), dout, indices, dx)


def _sort_and_sum(
    plan: Plan,
    memory: Mapping[str, Any],
    found: Lines,
    length: int,
    first: int,
    lines: int,
    dout: Tensor,
    indices: Tensor,
    dx: Tensor,
) -> None:
    """The adjoint of some lines."""
    schedule, entries = plan.schedule, found.entry_count
    count, groups = lines * entries, lines * length
    dx_walk, index_walk, dout_walk = (found.lines._replace(steps=(steps,)) for steps in found.lines.steps)
    entry_index, entry_dout = (found.entries._replace(steps=(steps,)) for steps in found.entries.steps)

    access = "unit" if found.lines.axes == 1 else ""

    def launch(kernel: str, part: str, number: int, *given: Any) -> None:
        _launcher(plan, kernel, part, access)(_blocks(number, schedule[f"{part}_block"]), *given)

    launch(
        "take_keys", "keys", count, indices, memory["ids"], count, entries, length, first,
        *index_walk.flat, *entry_index.flat,
    )  # fmt: skip
    sort = grouping.launcher(plan.memo, torch.int32, plan.problem.device)
    keys, positions = grouping.sort(sort, memory, memory["ids"], count, groups, -1, mark=True)
    grouping.mark_groups(sort, memory, keys, count, groups)
    bounds = (memory["starts"], memory["ends"])
    for bits in _levels(entries):
        if bits == TILE_BITS:
            launch(
                "take_sum_tiles", "sums", count, dout, keys, positions, *bounds, memory["partials"], count, groups,
                entries, first, *dout_walk.flat, *entry_dout.flat,
            )  # fmt: skip
        else:
            launch("take_sum_partials", "sums", count, keys, *bounds, memory["partials"], count, groups, bits)
    launch(
        "take_write_sums", "sums", groups, dout, positions, *bounds, memory["partials"], dx, groups, entries, length,
        found.axis_step, first, *dx_walk.flat, *dout_walk.flat[MAX_AXES - 1 :], *entry_dout.flat,
    )  # fmt: skip


def prepare_sorting(plan: Plan) -> None:
    grouping.launcher(plan.memo, torch.int32, plan.problem.device)
    for kernel in ("take_keys", "take_sum_tiles", "take_sum_partials", "take_write_sums"):
        for access in ("unit", ""):
            _launcher(plan, kernel, "keys" if kernel == "take_keys" else "sums", access)
