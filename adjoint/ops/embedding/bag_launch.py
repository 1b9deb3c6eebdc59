"""Launches `embedding_bag` on Triton, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.device import grouping
from adjoint.device.sums import wide
from adjoint.ops.embedding.bag_kernels import MAX, MEAN, SUM
from adjoint.ops.embedding.bag_plans import mode_of
from adjoint.ops.embedding.faults import BAG_ID_OUT_OF_RANGE, OFFSETS_OUT_OF_ORDER
from adjoint.ops.embedding.launch import (
    ACCESSES,
    Kinds,
    Sums,
    is_multiple,
    launcher,
    level_slots,
    terms_of,
    tile_shape,
    variant,
)
from adjoint.ops.embedding.plans import NEED_WEIGHT, NEED_WEIGHTS, TILE, WEIGHTS_BLOCK

MODES = {"sum": SUM, "mean": MEAN, "max": MAX}
_ENTRIES = 256  # entries a program reads


def _kinds(problem: Problem, scaled: bool, raises: bool) -> Kinds:
    element, ids, *offsets = problem.dtypes
    return Kinds(
        element,
        ids,
        element,
        problem.sizes[2],
        scaled=scaled,
        offsets=offsets[0] if offsets else None,
        mode=MODES[mode_of(problem)],
        raises=raises,
    )


def copied(problem: Problem) -> dict[str, tuple[torch.dtype, int]]:
    """Regions for arguments that are not contiguous."""
    element, ids, *offsets = problem.dtypes
    count, bags = problem.sizes[0], problem.sizes[3]
    sizes = {
        "ids": (ids, count),
        "offsets": (offsets[0] if offsets else ids, bags + 1),
        "per_sample_weights": (element, count),
    }
    return {name: size for name, size in sizes.items() if name in problem.layout.split(", ")}


class _Memory:
    """A workspace divided, and arguments made contiguous in it."""

    def __init__(self, plan: Plan, regions: Regions, workspace: Tensor | None) -> None:
        if workspace is None and regions.bytes:
            workspace = regions.allocate(plan.problem.device)
        self.workspace = workspace
        self.pointers = regions.pointers(workspace) if workspace is not None else {}
        self._views = regions.tensors(workspace) if workspace is not None and plan.problem.layout else {}

    def contiguous(self, name: str, tensor: Any) -> Any:
        """The tensor, or a copy in the workspace; None for an argument that is not given."""
        if tensor is None or tensor.is_contiguous():
            return tensor
        return self._views[name][: tensor.numel()].view(tensor.shape).copy_(tensor)


def _bounds(problem: Problem, ids: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    """bags, offset_count, width, count: where bags lie, as kernels take it."""
    count, bags = problem.sizes[0], problem.sizes[3]
    if offsets is None:
        return bags, 0, ids.shape[1], count
    return bags, offsets.numel(), 0, count


# -------------------------------------------------------------------------------------------- forward


def forward_regions(problem: Problem) -> Regions:
    return Regions(**copied(problem))


def prepare_forward(plan: Plan) -> None:
    status_word(plan.problem.device)
    for access in ACCESSES:
        for scaled in (False, True) if mode_of(plan.problem) == "sum" else (False,):
            _forward_launcher(plan, scaled, access)


def _forward_launcher(plan: Plan, scaled: bool, access: str) -> Any:
    return launcher(
        plan,
        (scaled, access),
        lambda: variant("embedding_bag_forward", _kinds(plan.problem, scaled, True), plan.schedule, "bags", access),
    )


def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    ids, weight, offsets, per_sample_weights, _, padding, _ = arguments
    out, extra = outputs
    _, rows, columns, bags = plan.problem.sizes
    memory = _Memory(plan, forward_regions(plan.problem), workspace)
    ids = memory.contiguous("ids", ids)
    offsets = memory.contiguous("offsets", offsets)
    per_sample_weights = memory.contiguous("per_sample_weights", per_sample_weights)
    if bags == 0 and (offsets is None or offsets.numel() == 0):
        return
    row_stride, column_stride = weight.stride()
    access = "strided" if column_stride != 1 and columns > 1 else "unaligned"
    if access != "strided" and columns and is_multiple(weight, out, extra, columns, row_stride):
        access = "aligned"
    bags_each, block = tile_shape(plan.schedule, "bags", columns)
    device = plan.problem.device
    _forward_launcher(plan, per_sample_weights is not None, access)(
        (max(1, -(-bags // bags_each)), max(1, -(-columns // block)), 1), ids, weight,
        ids if offsets is None else offsets, weight if per_sample_weights is None else per_sample_weights, out,
        extra, extra, status_word(device), BAG_ID_OUT_OF_RANGE.row, OFFSETS_OUT_OF_ORDER.row,
        *_bounds(plan.problem, ids, offsets), rows, padding, columns, row_stride, column_stride,
    )  # fmt: skip
    if device.type == "cpu":
        check()


# ------------------------------------------------------------------------------------------- backward


def backward_regions(problem: Problem) -> Regions:
    count, rows, columns, _ = problem.sizes
    element, need = problem.dtypes[0], problem.options[-1]
    held = {"entry_keys": (torch.int32, count), "bag_of": (torch.int32, count), "factors": (wide(element), count)}
    if need & NEED_WEIGHT:
        held |= grouping.regions(count) | grouping.mark_regions(rows)
        held["partials"] = (wide(element), sum(level_slots(count)) * columns)
    return Regions(**held, **copied(problem))


def _sums(plan: Plan, scaled: bool) -> Sums:
    element, mode = plan.problem.dtypes[0], mode_of(plan.problem)
    kinds = Kinds(
        element,
        torch.int32,
        element,
        plan.problem.sizes[2],
        bagged=True,
        scaled=scaled or mode == "mean",
        chosen=mode == "max",
    )
    return Sums(plan, kinds, TILE)


def _entries_launcher(plan: Plan, scaled: bool) -> Any:
    kinds = _kinds(plan.problem, scaled, False)._replace(columns=_ENTRIES)
    schedule = {"entries_block": _ENTRIES, "entries_elements": _ENTRIES, "entries_warps": 4}
    return launcher(
        plan, ("entries", scaled), lambda: variant("embedding_bag_entries", kinds, schedule, "entries", "unaligned")
    )


def _weights_launcher(plan: Plan, access: str) -> Any:
    kinds = _kinds(plan.problem, False, False)._replace(columns=WEIGHTS_BLOCK)
    schedule = dict(plan.schedule) | {"weights_block": WEIGHTS_BLOCK}
    return launcher(
        plan, ("weights", access), lambda: variant("embedding_bag_weights", kinds, schedule, "weights", access)
    )


def prepare_backward(plan: Plan) -> None:
    need = plan.problem.options[-1]
    for scaled in (False, True) if mode_of(plan.problem) == "sum" else (False,):
        _entries_launcher(plan, scaled)
        if need & NEED_WEIGHT:
            _sums(plan, scaled).prepare()
    if need & NEED_WEIGHTS:
        for access in ACCESSES:
            _weights_launcher(plan, access)


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    dout, ids, weight, offsets, per_sample_weights, extra, _, _, padding, _, need = arguments
    dweight, dweights = outputs
    count, rows, columns, _ = plan.problem.sizes
    memory = _Memory(plan, backward_regions(plan.problem), workspace)
    pointers = memory.pointers
    ids = memory.contiguous("ids", ids)
    offsets = memory.contiguous("offsets", offsets)
    per_sample_weights = memory.contiguous("per_sample_weights", per_sample_weights)
    scaled = per_sample_weights is not None
    if count:
        bounds = _bounds(plan.problem, ids, offsets)
        _entries_launcher(plan, scaled)(
            (-(-count // _ENTRIES), 1, 1), ids, ids if offsets is None else offsets,
            extra if per_sample_weights is None else per_sample_weights, extra, pointers["entry_keys"],
            pointers["bag_of"], pointers["factors"], *bounds, rows, padding, bounds[1].bit_length(),
        )  # fmt: skip
    if need & NEED_WEIGHT and dweight.numel():
        sums = _sums(plan, scaled)
        entry_keys = pointers.get("entry_keys", ids)
        keys, positions = grouping.sort(sums.group, pointers, entry_keys, count, rows, -1, mark=True)
        grouping.mark_groups(sums.group, pointers, keys, count, rows)
        terms = terms_of(dout, dweight, columns)._replace(
            bag_of=pointers.get("bag_of"), factors=pointers.get("factors"), winners=extra
        )
        if terms.access == "aligned" and not is_multiple(extra):
            terms = terms._replace(access="unaligned")
        sums.run(terms, pointers, positions, keys, count, rows, dweight)
    if need & NEED_WEIGHTS and count:
        strides = (*dout.stride(), *weight.stride())
        access = "strided" if columns > 1 and (strides[1] != 1 or strides[3] != 1) else "unaligned"
        if access != "strided" and is_multiple(dout, weight, dweights, columns, strides[0], strides[2]):
            access = "aligned"
        entries, _ = tile_shape(dict(plan.schedule) | {"weights_block": WEIGHTS_BLOCK}, "weights", WEIGHTS_BLOCK)
        _weights_launcher(plan, access)(
            (-(-count // entries), 1, 1), dout, weight, pointers["bag_of"], pointers["entry_keys"], dweights,
            count, rows, columns, *strides,
        )  # fmt: skip
