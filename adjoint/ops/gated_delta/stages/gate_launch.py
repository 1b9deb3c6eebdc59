"""Launches the kernels of `gate` and `normalize`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.workspace import Regions
from adjoint.ops.gated_delta.stages import gate_kernels as _gate_kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.stages.gate_plans import levels
from adjoint.ops.gated_delta.stages.w_u_plans import copied_names

NEED_A, NEED_B, NEED_A_LOG, NEED_DT_BIAS = (1 << bit for bit in range(4))

MAX_COLUMNS = 128
"""Heads of a program of `gate`: they are independent of each other."""

_OF_GATE = ("a", "b", "A_log", "dt_bias", "g", "beta", "dg", "dbeta", "da", "db", "sums", "first", "second")
_OF_NORMALIZE = ("x", "y", "dx", "dy")
_LONG = frozenset(("runs", "count"))

# ------------------------------------------------------------------------------------------- variants


def variant(
    kernel: str, types: dict[str, torch.dtype], size: int, warps: int, aligned: bool = False, **values: Any
) -> Variant:
    """A kernel as it is compiled; `types` are those of its pointers that are not float32."""
    described = kernels.registered()[kernel]
    normalizing = "normalize" in kernel
    columns = 1 << max(0, size - 1).bit_length()
    columns = columns if normalizing else min(columns, MAX_COLUMNS)
    rows = max(1, values.pop("elements", 1) // columns)
    constants = values | {
        "HEADS": size, "SIZE": size, "COLUMNS": columns, "LEVELS": columns.bit_length() - 1, "ROWS": rows,
    }  # fmt: skip
    signature = {}
    for name in described.parameters:
        if name in (*_OF_GATE, *_OF_NORMALIZE):
            signature[name] = f"*{TRITON_TYPES[types.get(name, torch.float32)]}"
        elif not name.isupper():
            signature[name] = "i64" if name in _LONG or name.endswith(("_outer", "_step")) else "i32"
    own = (*_OF_NORMALIZE, "x_outer", "x_step", "dy_outer", "dy_step")
    return described.variant(
        signature,
        {name: constants[name] for name in described.parameters if name not in signature},
        [name for name in own if name in signature] if aligned else (),
        num_warps=warps,
        num_stages=1,
    )


def _types(problem: Problem) -> dict[str, torch.dtype]:
    kinds = problem.dtypes
    if problem.op.startswith("normalize"):
        return dict.fromkeys(("x", "y", "dx", "dy"), kinds[0])
    names = (("a", "da"), ("b", "db"), ("A_log",), ("dt_bias",))
    return {name: kind for together, kind in zip(names, kinds, strict=True) for name in together}


def _described(plan: Plan, key: tuple[Any, ...]) -> Variant:
    problem, (kernel, *rest) = plan.problem, key
    types, (size, _), schedule = _types(problem), problem.sizes, plan.schedule
    if kernel == "gated_delta_gate":
        return variant(kernel, types, size, schedule["warps"], elements=schedule["elements"])
    if kernel == "gated_delta_gate_backward":
        (need,) = problem.options[-1:]
        return variant(
            kernel, types, size, schedule["warps"],
            NEED_A=bool(need & NEED_A), NEED_B=bool(need & NEED_B), NEED_SUMS=bool(need & (NEED_A_LOG | NEED_DT_BIAS)),
        )  # fmt: skip
    if kernel == "gated_delta_add_runs":
        (last,) = rest
        need = problem.options[-1]
        kinds = {"first": types["A_log"], "second": types["dt_bias"]} if last else {}
        wanted = {"NEED_FIRST": bool(need & NEED_A_LOG), "NEED_SECOND": bool(need & NEED_DT_BIAS)}
        return variant(kernel, kinds, size, 4, **wanted)
    (aligned,) = rest
    return variant(kernel, types, size, schedule["warps"], aligned, elements=schedule["elements"])


def _keys(problem: Problem) -> Iterator[tuple[Any, ...]]:
    """Everything a plan may launch."""
    if problem.op.startswith("normalize"):
        kernel = "gated_delta_normalize_backward" if problem.op.endswith("_backward") else "gated_delta_normalize"
        yield from ((kernel, aligned) for aligned in (True, False))
    elif problem.op == "gate":
        yield ("gated_delta_gate",)
    else:
        yield ("gated_delta_gate_backward",)
        yield from (("gated_delta_add_runs", last) for last in (True, False))


def prepare(plan: Plan) -> None:
    """Compiles everything a plan may launch."""
    for key in _keys(plan.problem):
        _start(plan, key)


def _start(plan: Plan, key: tuple[Any, ...]) -> Any:
    launcher = plan.memo.get(key)
    if launcher is None:
        launcher = plan.memo[key] = _described(plan, key).prepare(plan.problem.device)
    return launcher


# ------------------------------------------------------------------------------------------ workspaces


def regions(problem: Problem) -> Regions:
    """Sums of runs, level by level, and copies of what does not lie as rows."""
    size, rows = problem.sizes
    types = _types(problem)
    held = {f"copied_{name}": (types.get(name, torch.float32), rows * size) for name in copied_names(problem.layout)}
    if problem.op == "gate_backward" and problem.options[-1] & (NEED_A_LOG | NEED_DT_BIAS) and rows:
        for level, count in enumerate(levels(rows)[:-1]):
            held[f"sums_{level}"] = (torch.float32, 2 * count * size)
    return Regions(**held)


class _Rows(NamedTuple):
    """A tensor as kernels walk it."""

    tensor: Tensor
    walk: tuple[int, int, int]

    @property
    def aligned(self) -> bool:
        return self.tensor.data_ptr() % 16 == 0 and not (self.walk[1] % 16 or self.walk[2] % 16)


class _Memory:
    """The workspace of one call, divided."""

    def __init__(self, plan: Plan, workspace: Tensor | None) -> None:
        held = plan.memo.get("regions")
        if held is None:
            held = plan.memo["regions"] = regions(plan.problem)
        self.held: Regions = held
        if held.bytes and workspace is None:
            workspace = held.allocate(plan.problem.device)
        self.workspace = workspace
        self.pointers: dict[str, Any] = held.pointers(workspace) if held.bytes and workspace is not None else {}

    def rows(self, name: str, tensor: Tensor) -> _Rows:
        if f"copied_{name}" in self.pointers:
            assert self.workspace is not None
            tensor = self.held.tensor(self.workspace, f"copied_{name}").view(tensor.shape).copy_(tensor)
        walk = leading_axes(tensor)
        assert walk is not None
        return _Rows(tensor, (max(1, walk[0]), *walk[1:]))


# ------------------------------------------------------------------------------------------- the calls


def _columns(size: int) -> tuple[int, int]:
    """Programs along the heads, and heads of each."""
    columns = min(1 << max(0, size - 1).bit_length(), MAX_COLUMNS)
    return -(-size // columns), columns


def gate(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    a, b, A_log, dt_bias, _ = arguments
    size, rows = plan.problem.sizes
    if rows == 0:
        return
    memory = _Memory(plan, workspace)
    walked = [memory.rows("a", a), memory.rows("b", b)]
    programs, columns = _columns(size)
    each = max(1, plan.schedule["elements"] // columns)
    _start(plan, ("gated_delta_gate",))(
        (-(-rows // each), programs, 1), *(x.tensor for x in walked), A_log, dt_bias, *outputs, rows,
        *(step for x in walked for step in x.walk), A_log.stride(0), dt_bias.stride(0),
    )  # fmt: skip


def gate_backward(
    plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None
) -> None:
    a, b, A_log, dt_bias, dg, dbeta, _, need = arguments
    da, db, dA_log, ddt_bias = outputs
    size, rows = plan.problem.sizes
    if rows == 0:
        for total in (dA_log, ddt_bias):
            total.zero_()
        return
    if need == 0:
        return
    memory = _Memory(plan, workspace)
    given = {"a": a, "b": b, "dg": dg, "dbeta": dbeta}
    # What is absent is not read: any memory stands for it.
    walked = [_Rows(a, (1, 0, 0)) if tensor is None else memory.rows(name, tensor) for name, tensor in given.items()]
    programs, _ = _columns(size)
    counts, summed = levels(rows), bool(need & (NEED_A_LOG | NEED_DT_BIAS))
    first_sums = memory.pointers["sums_0"] if summed else a
    _start(plan, ("gated_delta_gate_backward",))(
        (counts[0], programs, 1), walked[0].tensor, walked[1].tensor, A_log, dt_bias, walked[2].tensor,
        walked[3].tensor, da, db, first_sums, rows, counts[0], int(dg is not None), int(dbeta is not None),
        *(step for x in walked for step in x.walk), A_log.stride(0), dt_bias.stride(0),
    )  # fmt: skip
    if not summed:
        return
    for level in range(1, len(counts)):
        last = level == len(counts) - 1
        count, targets = counts[level - 1], counts[level]
        if last:
            first, second = dA_log, ddt_bias
        else:
            first = memory.pointers[f"sums_{level}"]
            second = _after(first, targets * size)
        _start(plan, ("gated_delta_add_runs", last))(
            (targets, programs, 1), memory.pointers[f"sums_{level - 1}"], first, second, count
        )


def _after(pointer: Any, elements: int) -> Any:
    """A place in float32 memory, past so many elements: an address on a GPU, a view elsewhere."""
    return pointer + 4 * elements if isinstance(pointer, int) else pointer[elements:]


def _aligned(size: int, outputs: tuple[Tensor, ...], *walked: _Rows) -> bool:
    return size % 16 == 0 and all(x.aligned for x in walked) and all(out.data_ptr() % 16 == 0 for out in outputs)


def _programs(plan: Plan) -> int:
    size, rows = plan.problem.sizes
    return -(-rows // max(1, plan.schedule["elements"] // (1 << max(0, size - 1).bit_length())))


def normalize(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    size, rows = plan.problem.sizes
    if rows == 0:
        return
    x = _Memory(plan, workspace).rows("x", arguments[0])
    _start(plan, ("gated_delta_normalize", _aligned(size, outputs, x)))(
        (_programs(plan), 1, 1), x.tensor, *outputs, rows, *x.walk
    )


def normalize_backward(
    plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None
) -> None:
    size, rows = plan.problem.sizes
    if rows == 0 or arguments[-1] == 0:
        return
    memory = _Memory(plan, workspace)
    x, dy = memory.rows("x", arguments[0]), memory.rows("dy", arguments[1])
    _start(plan, ("gated_delta_normalize_backward", _aligned(size, outputs, x, dy)))(
        (_programs(plan), 1, 1), x.tensor, dy.tensor, *outputs, rows, *x.walk, *dy.walk
    )
