"""Launches the kernels of the router's losses."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import check, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.moe import losses_kernels as _losses_kernels  # noqa: F401  (registers them)
from adjoint.ops.moe.losses_faults import INDEX_OUT_OF_RANGE
from adjoint.ops.moe.losses_plans import RUN, RUNS
from adjoint.ops.moe.route_launch import LANES, Rows, rows_in
from adjoint.ops.moe.rows import lies_as_rows

COLUMNS = 128
"""Columns a program adds: they are independent of each other."""

_POINTERS = {
    "mask": "*u8", "sums": "*fp32", "sums_above": "*fp32", "counts": "*i32", "counts_above": "*i32", "loss": "*fp32",
    "load": "*fp32", "tokens": "*fp32", "upstream": "*fp32", "status_word": "*i64",
}  # fmt: skip


def variant(
    kernel: str,
    warps: int,
    experts: int = 1,
    k: int = 1,
    element: torch.dtype = torch.float32,
    indices: torch.dtype = torch.int64,
    masked: bool = False,
    split: bool = False,
) -> Variant:
    """A kernel of the losses as it is compiled."""
    described = kernels.registered()[kernel]
    own = {
        "logits": f"*{TRITON_TYPES[element]}",
        "dlogits": f"*{TRITON_TYPES[element]}",
        "indices": f"*{TRITON_TYPES[indices]}",
    } | _POINTERS
    values = {
        "EXPERTS": experts,
        "K": k,
        "MASKED": masked,
        "SPLIT": split,
        "SLICES": -(-experts // LANES),
        "ROWS": warps,
        "BLOCK": COLUMNS,
    }
    types = {
        name: own.get(name, "i64" if name.endswith("stride") else "i32")
        for name in described.parameters
        if not name.isupper()
    }
    constants = {name: values[name] for name in described.parameters if name.isupper()}
    return described.variant(types, constants, (), num_warps=warps, num_stages=1)


def _levels(rows: int) -> list[int]:
    """Runs of tokens, and the sums of each level above, down to one."""
    counts = [-(-rows // RUN)]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // RUNS))
    return counts


def regions(problem: Problem) -> Regions:
    """Partial sums and counts of every level, and copies of what does not lie as rows."""
    experts, rows, k = problem.sizes
    copies = {
        "logits": (problem.dtypes[0], rows * experts),
        "indices": (problem.dtypes[1] if len(problem.dtypes) > 1 else torch.int64, rows * k),
        "mask": (torch.uint8, rows),
    }
    wanted = {name: copies[name] for name in problem.layout.removesuffix(" copied").split(", ") if name}
    if problem.op.endswith("_backward") or rows == 0:
        return Regions(**wanted)
    wide = (experts, experts + 1) if "balancing" in problem.op else (1, 1)
    for level, count in enumerate(_levels(rows)):
        wanted[f"sums_{level}"] = (torch.float32, count * wide[0])
        wanted[f"counts_{level}"] = (torch.int32, count * wide[1])
    return Regions(**wanted)


class _Launch:
    """One launch of an op: its plan, its workspace divided, and its arguments as kernels walk them."""

    def __init__(self, plan: Plan, workspace: Tensor | None) -> None:
        self.plan, self.device = plan, plan.problem.device
        self.experts, self.rows, self.k = plan.problem.sizes
        needed = plan.memo.get("regions")
        if needed is None:
            needed = plan.memo["regions"] = regions(plan.problem)
        self.regions: Regions = needed
        if needed.bytes and workspace is None:
            workspace = needed.allocate(self.device)
        self.workspace = workspace
        self.memory = needed.pointers(workspace) if needed.bytes and workspace is not None else {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous copy of an argument, in the workspace."""
        assert self.workspace is not None
        return self.regions.tensor(self.workspace, name).view(tensor.shape).copy_(tensor)

    def rows_of(self, logits: Tensor) -> Rows:
        return rows_in(logits if lies_as_rows(logits) else self.copy("logits", logits))

    def mask_of(self, mask: Tensor | None, absent: Tensor) -> Tensor:
        """The mask as bytes, one after the other; or what stands for it where there is none."""
        if mask is None:
            return absent
        return mask.view(torch.uint8) if mask.is_contiguous() else self.copy("mask", mask)

    def start(self, kernel: str, warps: int = 4, **kinds: Any) -> Callable[..., None]:
        key = (kernel, *kinds.values())
        compiled = self.plan.memo.get(key)
        if compiled is None:
            described = variant(kernel, warps, **kinds)
            compiled = self.plan.memo[key] = described.prepare(self.device)
        return compiled

    def add(self, width: int, counts_width: int) -> tuple[Any, Any]:
        """Adds the runs, level by level; the last sums and counts."""
        levels, memory = _levels(self.rows), self.memory
        columns = -(-counts_width // COLUMNS)
        for level in range(1, len(levels)):
            self.start("moe_add_runs")(
                (levels[level], columns, 1), memory[f"sums_{level - 1}"], memory[f"counts_{level - 1}"],
                memory[f"sums_{level}"], memory[f"counts_{level}"], levels[level - 1], width, counts_width,
            )  # fmt: skip
        return memory[f"sums_{len(levels) - 1}"], memory[f"counts_{len(levels) - 1}"]


def _programs(items: int, warps: int) -> tuple[int, int, int]:
    return -(-items // warps), 1, 1


def balance(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    logits, indices, mask = arguments
    loss, load = outputs
    launch = _Launch(plan, workspace)
    if launch.rows == 0:
        loss.zero_()
        load.zero_()
        return
    walked, memory, warps = launch.rows_of(logits), launch.memory, plan.schedule["warps"]
    chosen = indices if indices.is_contiguous() else launch.copy("indices", indices)
    runs = _levels(launch.rows)[0]
    kinds = _kinds(plan.problem, walked.inner < launch.rows)
    launch.start("moe_balance_runs", warps, k=launch.k, indices=indices.dtype, **kinds)(
        _programs(runs, warps), walked.tensor, chosen, launch.mask_of(mask, load), memory["sums_0"],
        memory["counts_0"], status_word(launch.device), INDEX_OUT_OF_RANGE.row, launch.rows, runs, *walked.walk,
    )  # fmt: skip
    sums, counts = launch.add(launch.experts, launch.experts + 1)
    launch.start("moe_balance_finish", 1, experts=launch.experts)((1, 1, 1), sums, counts, loss, load)
    if launch.device.type == "cpu":
        check()


def z(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    logits, mask = arguments
    loss, tokens = outputs
    launch = _Launch(plan, workspace)
    if launch.rows == 0:
        loss.zero_()
        tokens.zero_()
        return
    walked, memory, warps = launch.rows_of(logits), launch.memory, plan.schedule["warps"]
    runs = _levels(launch.rows)[0]
    launch.start("moe_z_runs", warps, **_kinds(plan.problem, walked.inner < launch.rows))(
        _programs(runs, warps), walked.tensor, launch.mask_of(mask, loss), memory["sums_0"], memory["counts_0"],
        launch.rows, runs, *walked.walk,
    )  # fmt: skip
    sums, counts = launch.add(1, 1)
    launch.start("moe_z_finish", 1)((1, 1, 1), sums, counts, loss, tokens)


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    """Of either loss."""
    dloss, logits, mask, saved = arguments
    (dlogits,) = outputs
    launch = _Launch(plan, workspace)
    if launch.rows == 0:
        return
    walked, warps = launch.rows_of(logits), plan.schedule["warps"]
    launch.start(plan.candidate.kernel, warps, **_kinds(plan.problem, walked.inner < launch.rows))(
        _programs(launch.rows, warps), dloss, walked.tensor, launch.mask_of(mask, saved), saved, dlogits, launch.rows,
        *walked.walk,
    )  # fmt: skip


def _kinds(problem: Problem, split: bool) -> dict[str, Any]:
    masked = torch.bool in problem.dtypes
    return {"experts": problem.sizes[0], "element": problem.dtypes[0], "masked": masked, "split": split}


def _described(problem: Problem, kernel: str) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """What a plan may launch: kernel, whether it takes the plan's warps, kinds."""
    for split in (False, True):
        kinds = _kinds(problem, split)
        if kernel == "moe_balance_runs":
            kinds = {"k": problem.sizes[2], "indices": problem.dtypes[1]} | kinds
        yield kernel, True, kinds
    if kernel == "moe_balance_runs":
        yield "moe_balance_finish", False, {"experts": problem.sizes[0]}
    elif kernel == "moe_z_runs":
        yield "moe_z_finish", False, {}
    if not kernel.endswith("backward"):
        yield "moe_add_runs", False, {}


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch."""
    status_word(plan.problem.device)
    for kernel, scheduled, kinds in _described(plan.problem, plan.candidate.kernel):
        warps = plan.schedule["warps"] if scheduled else 4 if kernel == "moe_add_runs" else 1
        key = (kernel, *kinds.values())
        if key not in plan.memo:
            plan.memo[key] = variant(kernel, warps, **kinds).prepare(plan.problem.device)
