"""The functions of Gluon on a CPU, by their names."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.gluon.model import memory
from tests.gluon.model.programs import current
from tests.gluon.model.values import Fault, Matrix, Value, both, unwrap


def _reduce(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    """Halves are combined until one is left: an axis has a power of two."""
    part = x.tensor
    while part.shape[axis] > 1:
        first, second = part.split(part.shape[axis] // 2, axis)
        part = combine(Value(first), Value(second)).tensor
    return Value(part.squeeze(axis))


def _scan(x: Value, axis: int, combine: Callable[[Value, Value], Value], reverse: bool = False) -> Value:
    parts = list(x.tensor.unbind(axis))
    parts = parts[::-1] if reverse else parts
    sums = [Value(parts[0])]
    for each in parts[1:]:
        sums.append(combine(sums[-1], Value(each)))
    return Value(torch.stack([each.tensor for each in (sums[::-1] if reverse else sums)], axis))


def _assembly(
    text: str, constraints: str, arguments: list[Value], dtype: torch.dtype, is_pure: bool, pack: int
) -> Value:
    if text.startswith("{") and "sub.rn.f32" in text:  # what a number has beyond its rounding
        x, rounded = arguments
        if pack != 2:
            raise Fault(f"{text!r} takes {pack} numbers at a time")
        return Value((x.tensor - rounded.tensor.float()).to(dtype))
    (x,) = arguments
    name = text.split()[0]
    if pack != (2 if "16x2" in name else 1):
        raise Fault(f"{text!r} takes {pack} numbers at a time")
    if name in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        return x.to(dtype)
    if name == "rcp.approx.ftz.f32":
        return Value(1.0 / x.tensor)
    if name == "ex2.approx.ftz.f32":
        result = torch.exp2(x.tensor)
        return Value(torch.where(result < torch.finfo(torch.float32).smallest_normal, 0.0, result))
    raise NotImplementedError(f"no model of {text!r}")


def _where(condition: Any, first: Any, second: Any) -> Value:
    return Value(torch.where(unwrap(condition), *both(first, second)))


def _fma(a: Any, b: Any, c: Any) -> Value:
    a, b, c = (unwrap(x).double() for x in (a, b, c))
    return Value((a * b + c).float())


def _specialize(functions: list[Any], worker_num_warps: list[int], worker_num_regs: list[int]) -> None:
    current.program.specialize(functions, worker_num_warps)


def _copy(*arguments: Any, **keywords: Any) -> None:
    """A copy by threads, or by TMA: modules of Gluon have one name for both, and matrices tell them apart."""
    tiled = isinstance(arguments[0], Matrix)
    (memory.copy_tile if tiled else memory.copy)(*arguments, **keywords)


def _layout(*arguments: Any, **keywords: Any) -> Any:
    return None


NAMES = {
    "int1": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "BlockedLayout": _layout, "SliceLayout": _layout, "NVMMADistributedLayout": _layout, "DotOperandLayout": _layout,
    "NVMMASharedLayout": _layout, "SwizzledSharedLayout": _layout,
    "allocate_shared_memory": memory.allocate_shared_memory,
    "program_id": lambda axis: Value(torch.tensor(current.program.place[axis], dtype=torch.int32)),
    "num_programs": lambda axis: Value(torch.tensor(current.program.grid[axis], dtype=torch.int32)),
    "num_warps": lambda: current.partition.warps,
    "constexpr": lambda value: value,
    "warp_specialize": _specialize,
    "static_range": range,
    "arange": lambda start, end, layout: Value(torch.arange(start, end, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
    "zeros_like": lambda x: Value(torch.zeros_like(x.tensor)),
    "load": lambda pointer, mask=None, other=0: pointer.load(mask, other),
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
    "convert_layout": lambda x, layout: x,
    "where": _where,
    "minimum": lambda a, b: Value(torch.minimum(*both(a, b))),
    "maximum": lambda a, b: Value(torch.maximum(*both(a, b))),
    "abs": lambda x: Value(x.tensor.abs()),
    "exp": lambda x: Value(x.tensor.exp()),
    "exp2": lambda x: Value(x.tensor.exp2()),
    "fma": _fma,
    "sum": lambda x, axis: Value(x.tensor.double().sum(axis).to(x.dtype)),
    "reduce": _reduce,
    "associative_scan": _scan,
    "split": lambda x: tuple(map(Value, x.tensor.unbind(-1))),
    "join": lambda x, y: Value(torch.stack((x.tensor, y.tensor), -1)),
    "permute": lambda x, order: Value(x.tensor.permute(order)),
    "reshape": lambda x, shape: x.reshape(shape),
    "expand_dims": lambda x, axis: Value(x.tensor.unsqueeze(axis)),
    "inline_asm_elementwise": _assembly,
    "barrier": lambda: None, "thread_barrier": lambda: None, "fence_async_shared": lambda: None,
    "async_copy_global_to_shared": _copy, "commit_group": memory.commit, "wait_group": memory.wait_group,
    "async_copy_shared_to_global": memory.copy_to_memory, "store_wait": memory.wait_stores,
    "mbarrier_arrive": memory.arrive_after_copies,
    "init": memory.initialise, "wait": memory.wait, "arrive": memory.arrive, "expect": memory.expect,
    "MBarrierLayout": memory.BarrierLayout,
    "warpgroup_mma": memory.warpgroup_mma, "warpgroup_mma_wait": memory.warpgroup_mma_wait, "mma_v2": memory.mma_v2,
}  # fmt: skip
"""What modules of Gluon have, by name."""

LANGUAGE = SimpleNamespace(**NAMES)
