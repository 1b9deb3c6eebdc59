"""Launches the router's kernels: variants, workspaces, and how rows are walked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.moe import route_kernels as _route_kernels  # noqa: F401  (registers them)
from adjoint.ops.moe.rows import lies_as_rows

LANES = 32
SCORES = {"softmax": 0, "sigmoid": 1}
_WIDE = ("outer_stride", "inner_stride", "bias_stride")
_TYPED = {
    "weights": torch.float32,
    "gradient": torch.float32,
    "bias": torch.float32,
    "indices": torch.int64,
}


class Kinds(NamedTuple):
    """What the variants of a plan's kernels have in common."""

    element: torch.dtype
    experts: int
    k: int
    score: str
    renormalize: bool
    biased: bool = False
    groups: int = 1
    kept: int = 1


class Access(NamedTuple):
    """How a variant reads and writes: rows along two axes, 16 bytes at a time."""

    split: bool
    aligned: bool = False


FORWARD_ACCESSES = tuple(Access(split) for split in (False, True))
BACKWARD_ACCESSES = tuple(Access(split, aligned) for split in (False, True) for aligned in (False, True))


def variant(kernel: str, kinds: Kinds, schedule: dict[str, int], access: Access) -> Variant:
    """A kernel of the router as it is compiled."""
    described = kernels.registered()[kernel]
    slices = -(-kinds.experts // LANES)
    warps = schedule["warps"] if schedule else max(1, kinds.experts // 256)
    size = kinds.experts // kinds.groups
    halved = _power(kinds.groups) * _power(size) if kernel == "moe_route_grouped" else slices
    values = {
        "EXPERTS": kinds.experts,
        "K": kinds.k,
        "SCORE": SCORES[kinds.score],
        "BIASED": kinds.biased,
        "RENORMALIZE": kinds.renormalize,
        "SPLIT": access.split,
        "SLICES": slices,
        "LEVELS": (halved - 1).bit_length(),
        "SLOT_GROUPS": -(-kinds.k // LANES),
        "GROUPS": kinds.groups,
        "KEPT": kinds.kept,
        "GROUP_BLOCK": _power(kinds.groups),
        "MEMBER_BLOCK": _power(size),
        "BLOCK": max(16, _power(kinds.experts)),
        "ROWS": rows_of(schedule) if schedule else 1,
    }
    runtime = [name for name in described.parameters if not name.isupper()]
    types = {}
    for name in runtime:
        if name in ("logits", "dlogits"):
            types[name] = f"*{TRITON_TYPES[kinds.element]}"
        elif name in _TYPED:
            types[name] = f"*{TRITON_TYPES[_TYPED[name]]}"
        else:
            types[name] = "i64" if name.endswith(_WIDE) else "i32"
    return described.variant(
        types,
        {name: values[name] for name in described.parameters if name.isupper()},
        ("dlogits",) if access.aligned else (),
        num_warps=warps,
        num_stages=1,
    )


def rows_of(schedule: dict[str, int]) -> int:
    """Rows a program takes."""
    return schedule.get("rows_per_warp", 1) * schedule["warps"]


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


# ------------------------------------------------------------------------------------------------- rows


class Rows(NamedTuple):
    """A tensor [..., columns] as rows of adjacent elements, row n at (n // inner)·outer + (n % inner)·inner stride."""

    tensor: Tensor
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def walk(self) -> tuple[int, int, int]:
        return self.inner, self.outer_stride, self.inner_stride


def rows_in(tensor: Tensor, copy: Tensor | None = None) -> Rows:
    """How to walk a tensor, or the contiguous copy that is made of it where it does not lie as rows."""
    if not lies_as_rows(tensor):
        assert copy is not None
        tensor = copy.view(tensor.shape).copy_(tensor)
    axes = leading_axes(tensor)
    assert axes is not None
    return Rows(tensor, *axes)


def regions(problem: Problem) -> Regions:
    """Memory for the copies a problem's layout names."""
    forward = problem.op == "moe_route"
    experts, *rest = problem.sizes
    rows = rest[0] if rest else 0
    k = problem.options[0] if forward else problem.options[1]
    element = problem.dtypes[0] if forward else problem.options[2]
    sizes = {"logits": (element, rows * experts)} | {
        "dweights": (torch.float32, rows * k),
        "weights": (torch.float32, rows * k),
        "indices": (torch.int64, rows * k),
    }
    return Regions(**{name: sizes[name] for name in problem.layout.removesuffix(" copied").split(", ") if name})


def _memory(plan: Plan, workspace: Tensor | None) -> dict[str, Tensor]:
    """The copies' memory, by name."""
    if not plan.problem.layout:
        return {}
    needed = regions(plan.problem)
    return needed.tensors(needed.allocate(plan.problem.device) if workspace is None else workspace)


def _launcher(plan: Plan, kernel: str, access: Access) -> Callable[..., None]:
    compiled = plan.memo.get(access)
    if compiled is None:
        described = variant(kernel, kinds_of(plan.problem), plan.schedule, access)
        compiled = plan.memo[access] = described.prepare(plan.problem.device)
    return compiled


# ---------------------------------------------------------------------------------------------- launches


def kinds_of(problem: Problem) -> Kinds:
    if problem.op == "moe_route":
        k, score, groups, kept, renormalize = problem.options
        whole = groups == kept
        return Kinds(
            problem.dtypes[0], problem.sizes[0], k, score, renormalize, len(problem.dtypes) > 1,
            1 if whole else groups, 1 if whole else kept,
        )  # fmt: skip
    experts, k, element, score, renormalize = problem.options
    return Kinds(element, experts, k, score, renormalize)


def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    logits, bias = arguments[:2]
    weights, indices = outputs
    rows = weights.numel() // weights.shape[-1]
    if rows == 0:
        return
    walked = rows_in(logits, _memory(plan, workspace).get("logits"))
    access = Access(walked.inner < rows)
    given, bias_stride = (weights, 1) if bias is None else (bias, bias.stride(0))
    if plan.candidate.kernel == "moe_route_grouped":
        start = _launcher(plan, "moe_route_grouped", access)
        start((rows, 1, 1), walked.tensor, given, weights, indices, *walked.walk, bias_stride)
    else:
        start = _launcher(plan, "moe_route_forward", access)
        blocks = -(-rows // rows_of(plan.schedule))
        start((blocks, 1, 1), walked.tensor, given, weights, indices, rows, *walked.walk, bias_stride)


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    dweights, weights, indices, logits = arguments[:4]
    experts = arguments[4]
    (dlogits,) = outputs
    rows = dlogits.numel() // experts
    if rows == 0:
        return
    memory = _memory(plan, workspace)
    upstream = rows_in(dweights, memory.get("dweights"))
    saved = [
        tensor if tensor.is_contiguous() else memory[name].view(tensor.shape).copy_(tensor)
        for name, tensor in (("weights", weights), ("indices", indices))
    ]
    read = Rows(dlogits, rows, 0, 0) if logits is None else rows_in(logits, memory.get("logits"))
    aligned = dlogits.data_ptr() % 16 == 0
    access = Access(min(upstream.inner, read.inner) < rows, aligned)
    start = _launcher(plan, plan.candidate.kernel, access)
    blocks = -(-rows // rows_of(plan.schedule))
    start((blocks, 1, 1), *saved, upstream.tensor, read.tensor, dlogits, rows, *upstream.walk, *read.walk)


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch."""
    accesses = FORWARD_ACCESSES if plan.problem.op == "moe_route" else BACKWARD_ACCESSES
    for access in accesses:
        _launcher(plan, plan.candidate.kernel, access)
