"""The backward of embedding and of bags on Triton: what it needs, and the kernels it launches, in order.

group the ids  →  tiles of hot rows, level by level  →  the rows
"""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.device import grouping
from adjoint.device.sums import wide
from adjoint.ops.embedding.eager import group
from adjoint.ops.embedding.launch import Kinds, Sums, level_slots, terms_of
from adjoint.ops.embedding.plans import SEQUENTIAL


def regions(problem: Problem, tile: int) -> Regions:
    """The workspace of a backward."""
    (element, ids), (count, rows, columns) = problem.dtypes[:2], problem.sizes[:3]
    listed = problem.op.endswith(("_into", "_sparse"))
    held = grouping.regions(count) | (grouping.list_regions(count) if listed else grouping.mark_regions(rows))
    if tile < SEQUENTIAL:
        held["partials"] = (wide(element), sum(level_slots(count)) * columns)
    if "ids" in problem.layout:
        held["ids"] = (ids, count)
    if "gradient" in problem.layout:
        held["gradient"] = (element, count * columns)
    return Regions(**held)


def sums(plan: Plan, tile: int) -> Sums:
    """The kernels of a plan."""
    element, ids = plan.problem.dtypes[:2]
    listed = plan.problem.op.endswith(("_into", "_sparse"))
    kinds = Kinds(
        element,
        ids,
        plan.problem.dtypes[2] if plan.problem.op.endswith("_into") else element,
        plan.problem.sizes[2],
        listed=listed,
        into=plan.problem.op.endswith("_into"),
    )
    return Sums(plan, kinds, tile)


class _Grouped:
    """Ids grouped in a workspace, and the gradient as kernels walk it."""

    def __init__(self, plan: Plan, tile: int, gradient: Tensor, ids: Tensor, padding: int, workspace: Tensor | None):
        self.count, self.rows, self.columns = plan.problem.sizes[:3]
        self.held = plan.memo.get("regions") or plan.memo.setdefault("regions", regions(plan.problem, tile))
        if workspace is None:
            workspace = self.held.allocate(plan.problem.device)
        self.memory = self.held.pointers(workspace)
        if plan.problem.layout:
            views = self.held.tensors(workspace)
            if "ids" in views:
                ids = views["ids"].view(ids.shape).copy_(ids)
            if "gradient" in views:
                gradient = views["gradient"].view(gradient.shape).copy_(gradient)
        self.workspace = workspace  # addresses keep nothing alive
        self.gradient = gradient
        self.sums = sums(plan, tile)
        self.keys, self.positions = grouping.sort(
            self.sums.group, self.memory, ids, self.count, self.rows, padding, mark=not self.sums.kinds.listed
        )


def dense(plan: Plan, tile: int, arguments: tuple[Any, ...], out: Tensor, workspace: Tensor | None) -> None:
    """The gradient of the whole table."""
    gradient, ids, _, padding = arguments
    if out.numel() == 0:
        return
    grouped = _Grouped(plan, tile, gradient, ids, padding, workspace)
    grouping.mark_groups(grouped.sums.group, grouped.memory, grouped.keys, grouped.count, grouped.rows)
    terms = terms_of(grouped.gradient, out, grouped.columns)
    grouped.sums.run(terms, grouped.memory, grouped.positions, grouped.keys, grouped.count, grouped.rows, out)


def into(plan: Plan, tile: int, arguments: tuple[Any, ...], workspace: Tensor | None) -> None:
    """Adds the gradient to the rows of a buffer that occur, and touches no other."""
    gradient, ids, buffer, padding = arguments
    if gradient.numel() == 0:
        return
    grouped = _Grouped(plan, tile, gradient, ids, padding, workspace)
    grouping.list_groups(grouped.sums.group, grouped.memory, grouped.keys, grouped.count, grouped.rows)
    terms = terms_of(grouped.gradient, buffer, grouped.columns)
    grouped.sums.run(
        terms, grouped.memory, grouped.positions, grouped.memory["segment_of"], grouped.count, grouped.count, buffer
    )
    if not buffer.is_inference():
        torch.autograd.graph.increment_version(buffer)


def sparse(plan: Plan, tile: int, arguments: tuple[Any, ...], workspace: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients.

    Waits for the device once, at the end, where their number is read: until then there is room for as many
    rows as tokens, and what is returned is the beginning of it.
    """
    gradient, ids, _, padding = arguments
    count, rows, columns = plan.problem.sizes
    if count == 0 or columns == 0:
        _, _, found = group(ids, rows, padding)
        return found, gradient.new_empty(len(found), columns)
    values = gradient.new_empty(count, columns)
    grouped = _Grouped(plan, tile, gradient, ids, padding, workspace)
    grouping.list_groups(grouped.sums.group, grouped.memory, grouped.keys, count, grouped.rows)
    terms = terms_of(grouped.gradient, values, columns)
    grouped.sums.run(terms, grouped.memory, grouped.positions, grouped.memory["segment_of"], count, count, values)
    number = int(grouped.held.tensor(grouped.workspace, "listed_count"))
    return grouped.held.tensor(grouped.workspace, "listed")[:number].to(torch.int64), values[:number]
