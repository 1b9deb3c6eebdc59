"""Launches the kernels of `recompute_w_u`: variants, workspaces, and the arguments of each direction."""

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
from adjoint.ops.gated_delta.faults import SEQUENCES_OUT_OF_ORDER
from adjoint.ops.gated_delta.stages import w_u_kernels as _w_u_kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.stages.eager_w_u import NEED_BETA, NEED_DECAY, NEED_K, NEED_T, NEED_V
from adjoint.ops.gated_delta.stages.w_u_plans import INPUTS, TF32, UPSTREAM, copied_names, parts_of

BOUNDS_BLOCK = 1024
"""Bounds of sequences that are put in order at once."""

COLUMNS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
"""Columns of a tile of the backward, whose products run along them: part of the bits."""

MAX_AHEAD = 256
"""Columns of keys and values together that a program holds in registers at once."""

MIN_TILE = 16
"""Rows and columns of the smallest matrix product."""

WARPS = (4, 8)
"""Fewest and most warps: with fewer, other matrix instructions would add in another order."""

# ------------------------------------------------------------------------------------------- variants

_NEEDS = {"NEED_K": NEED_K, "NEED_V": NEED_V, "NEED_BETA": NEED_BETA, "NEED_DECAY": NEED_DECAY, "NEED_T": NEED_T}
_ELEMENTS = frozenset(("k", "v", "w", "u", "dw", "du", "dk", "dv"))
_WIDE = frozenset(("beta", "G", "dbeta", "dG"))
_NARROW_SCALARS = frozenset(
    ("steps", "row_chunks", "key_heads", "repeat", "has_dw", "has_du", "key_size", "value_size")
)


class Kinds(NamedTuple):
    """What the variants of a plan have in common."""

    element: torch.dtype
    T: torch.dtype
    K: int
    V: int
    chunk: int
    need: int


def tile_width(size: int) -> int:
    """Columns of a tile that has all of a row's."""
    return max(MIN_TILE, 1 << max(0, size - 1).bit_length())


def is_tuned(kinds: Kinds, aligned: bool) -> bool:
    """Whether the tiles of a schedule are used: without wide loads, or in float32, they would not fit in registers."""
    return aligned and parts_of(kinds.element, kinds.T) != TF32


def variant(
    kernel: str,
    kinds: Kinds,
    schedule: Mapping[str, int],
    packed: bool,
    aligned: bool,
) -> Variant:
    """A kernel of the stage as it is compiled; `aligned` when rows begin at multiples of 16 elements."""
    described = kernels.registered()[kernel]
    backward = kernel != "gated_delta_w_u"
    tuned = is_tuned(kinds, aligned)
    prefix = "narrow" if kinds.element == kinds.T else "wide"
    columns = COLUMNS[kinds.element]
    if not backward:
        columns = schedule[f"{prefix}_columns"] if tuned else COLUMNS[torch.float32]
    k_columns, v_columns = (min(columns, tile_width(size)) for size in (kinds.K, kinds.V))
    values: dict[str, Any] = {
        "K": kinds.K, "V": kinds.V, "CHUNK": kinds.chunk, "TILE": max(MIN_TILE, kinds.chunk),
        "K_COLUMNS": k_columns, "V_COLUMNS": v_columns,
        "LEVELS": max(MIN_TILE, kinds.chunk).bit_length() - 1, "PLAIN": parts_of(kinds.element, kinds.element),
        "PACKED": packed, "PARTS": parts_of(kinds.element, kinds.T), "AHEAD": tuned and kinds.K + kinds.V <= MAX_AHEAD,
    } | {name: bool(kinds.need & bit) for name, bit in _NEEDS.items()}  # fmt: skip
    types, rows = {}, []
    for name in described.parameters:
        if name.isupper() and name not in ("G", "T"):
            continue
        if name in _ELEMENTS:
            types[name] = f"*{TRITON_TYPES[kinds.element]}"
        elif name in _WIDE:
            types[name] = "*fp32"
        elif name in ("T", "dT"):
            types[name] = f"*{TRITON_TYPES[kinds.T]}"
        elif name == "bounds":
            types[name] = "*i64"
        else:
            types[name] = "i32" if name in _NARROW_SCALARS or name.endswith("_time") else "i64"
        owner = name.split("_")[0]
        if name in (*_ELEMENTS, "T", "dT") or (owner in (*_ELEMENTS, "T") and "_" in name):
            rows.append(name)
    constants = {name: values[name] for name in described.parameters if name not in types}
    warps = min(max(schedule["warps"], WARPS[0]), WARPS[1]) if tuned else WARPS[1]
    return described.variant(
        types,
        constants,
        rows if aligned else (),
        num_warps=warps,
        num_stages=schedule[f"{prefix}_stages"] if backward and tuned else 1,  # a forward has no loop
    )


def bounds_variant(index: torch.dtype, report: bool) -> Variant:
    described = kernels.registered()["gated_delta_bounds"]
    types = {
        "cu_seqlens": f"*{TRITON_TYPES[index]}", "bounds": "*i64", "status_word": "*i64",
        "fault": "i32", "count": "i32", "time": "i64", "stride": "i64",
    }  # fmt: skip
    return described.variant(types, {"REPORT": report, "BLOCK": BOUNDS_BLOCK}, (), num_warps=8, num_stages=1)


# ------------------------------------------------------------------------------------------ workspaces


def regions(problem: Problem) -> Regions:
    """The bounds of packed sequences, and copies of what does not lie as rows."""
    K, V, chunk, batch, time, key_heads, heads, bounds = problem.sizes
    element, T_dtype = problem.dtypes[:2]
    tokens = batch * time
    sizes = {
        "k": (element, tokens * key_heads * K),
        "v": (element, tokens * heads * V),
        "T": (T_dtype, tokens * heads * chunk),
        "dw": (element, tokens * heads * K),
        "du": (element, tokens * heads * V),
    }
    held = {"bounds": (torch.int64, bounds + 2 if bounds else 0)}
    return Regions(**held, **{f"copied_{name}": sizes[name] for name in copied_names(problem.layout)})


class _Rows(NamedTuple):
    """A tensor as kernels walk it: strides of rows, tokens and heads."""

    tensor: Tensor
    strides: tuple[int, int, int]

    @property
    def aligned(self) -> bool:
        return self.tensor.data_ptr() % 16 == 0 and not any(stride % 16 for stride in self.strides)


class _Launch:
    """One direction of one call."""

    def __init__(self, plan: Plan, workspace: Tensor | None) -> None:
        problem = plan.problem
        self.plan, self.device = plan, problem.device
        self.K, self.V, self.chunk, self.batch, self.time, self.key_heads, self.heads, self.bounds = problem.sizes
        self.repeat = self.heads // max(1, self.key_heads)
        self.packed = self.bounds > 0
        self.need = problem.options[0] if problem.options else 0
        self.kinds = Kinds(problem.dtypes[0], problem.dtypes[1], self.K, self.V, self.chunk, self.need)
        held = plan.memo.get("regions")
        if held is None:
            held = plan.memo["regions"] = regions(problem)
        self.held: Regions = held
        self.workspace = workspace
        self.memory: dict[str, Any] = {}
        self.row_chunks = -(-self.time // self.chunk)
        # Before the first bound and after the last are stretches of their own.
        self.stretches = self.bounds + 1
        self.slots = self.time // self.chunk + self.stretches if self.packed else self.batch * self.row_chunks

    def take_memory(self) -> None:
        if self.held.bytes:
            if self.workspace is None:
                self.workspace = self.held.allocate(self.device)
            self.memory = self.held.pointers(self.workspace)

    def rows(self, name: str, tensor: Tensor) -> _Rows:
        if f"copied_{name}" in self.memory:
            assert self.workspace is not None
            tensor = self.held.tensor(self.workspace, f"copied_{name}").view(tensor.shape).copy_(tensor)
        strides = tuple(0 if size == 1 else step for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False))
        return _Rows(tensor, strides)  # type: ignore[arg-type]

    def find_sequences(self, cu_seqlens: Tensor | None, report: bool) -> Any:
        """Puts bounds in order on the device; what stands for them where nothing is packed."""
        if cu_seqlens is None:
            return status_word(self.device)
        self.start(("bounds", cu_seqlens.dtype, report))(
            (1, 1, 1), cu_seqlens, self.memory["bounds"], status_word(self.device), SEQUENCES_OUT_OF_ORDER.row,
            self.bounds, self.time, cu_seqlens.stride(0),
        )  # fmt: skip
        if report and self.device.type == "cpu":
            check()
        return self.memory["bounds"]

    def start(self, key: Any) -> Any:
        launcher = self.plan.memo.get(key)
        if launcher is None:
            launcher = self.plan.memo[key] = _described(self.plan, self.kinds, key).prepare(self.device)
        return launcher

    @property
    def walk(self) -> tuple[int, ...]:
        """time, stretches, steps, row_chunks"""
        return self.time, self.stretches, self.stretches.bit_length(), max(1, self.row_chunks)


def _described(plan: Plan, kinds: Kinds, key: tuple[Any, ...]) -> Variant:
    if key[0] == "bounds":
        return bounds_variant(key[1], key[2])
    packed, aligned = key[1:]
    return variant(key[0], kinds, plan.schedule, packed, aligned)


def prepare(plan: Plan) -> None:
    """Compiles everything a direction may launch."""
    status_word(plan.problem.device)
    run = _Launch(plan, None)
    backward = plan.problem.op.endswith("_backward")
    kernels_of = ["gated_delta_w_u"]
    if backward:
        wanted = {"gated_delta_w_u_backward": run.need & ~NEED_K, "gated_delta_w_u_backward_keys": run.need & NEED_K}
        kernels_of = [kernel for kernel, need in wanted.items() if need]
    if run.packed:
        for index in (torch.int32, torch.int64):
            run.start(("bounds", index, not backward))
    for kernel in kernels_of:
        for aligned in (True, False):
            run.start((kernel, run.packed, aligned))


# ------------------------------------------------------------------------------------------- the calls


def forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    *inputs, cu_seqlens = arguments
    run = _Launch(plan, workspace)
    if run.batch * run.time * run.heads == 0 and not run.packed:
        return
    run.take_memory()
    bounds = run.find_sequences(cu_seqlens, report=True)
    if run.time * run.heads * (run.K + run.V) == 0:
        return
    walked = [run.rows(name, tensor) for name, tensor in zip(INPUTS, inputs, strict=True)]
    k, v, _beta, _G, T = walked
    aligned = all(x.aligned for x in (k, v, T)) and not (run.K % 16 or run.V % 16)
    aligned = aligned and all(out.data_ptr() % 16 == 0 for out in outputs)
    run.start(("gated_delta_w_u", run.packed, aligned))(
        (run.slots * run.heads, 1, 1), *(x.tensor for x in walked), bounds, *outputs, *run.walk, run.key_heads,
        run.repeat, *(stride for x in walked for stride in x.strides),
    )  # fmt: skip


def backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
    *tensors, cu_seqlens, need = arguments
    run = _Launch(plan, workspace)
    if need == 0 or run.batch * run.time * run.heads == 0:
        return
    run.take_memory()
    bounds = run.find_sequences(cu_seqlens, report=False)
    names = (*INPUTS, *UPSTREAM)
    walked = {
        name: run.rows(name, tensors[0] if tensor is None else tensor)
        for name, tensor in zip(names, tensors, strict=True)
    }
    aligned = all(x.aligned for name, x in walked.items() if name not in ("beta", "G"))
    aligned = aligned and not (run.K % 16 or run.V % 16) and all(out.data_ptr() % 16 == 0 for out in outputs)
    has_dw, has_du = (tensor is not None for tensor in tensors[5:])
    if need & ~NEED_K:
        run.start(("gated_delta_w_u_backward", run.packed, aligned))(
            (run.slots * run.heads, 1, 1), *(x.tensor for x in walked.values()), bounds, *outputs[1:],
            *run.walk, run.key_heads, run.repeat, int(has_dw), int(has_du), run.K, run.V,
            *(stride for x in walked.values() for stride in x.strides),
        )  # fmt: skip
    if need & NEED_K and run.K:
        if not has_dw:
            outputs[0].zero_()
            return
        taken = [walked[name] for name in ("beta", "G", "T", "dw")]
        columns = min(COLUMNS[run.kinds.element], tile_width(run.K))
        run.start(("gated_delta_w_u_backward_keys", run.packed, aligned))(
            (run.slots * run.key_heads * -(-run.K // columns), 1, 1), *(x.tensor for x in taken), bounds, outputs[0],
            *run.walk, run.key_heads, run.repeat, *(stride for x in taken for stride in x.strides),
        )  # fmt: skip
