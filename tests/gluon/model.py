"""Gluon on a CPU: enough of the language to run every kernel for Hopper on small problems, and to notice wrong ones.

    with modelled(schedule):              # kernels of Gluon, launched in Triton's interpreter, run here
        plan.run(...)

What is modelled: arithmetic; memory, its bounds, and programs that race for it; shared memory, which is full of NaN
until it is written; barriers and their phases; copies and products that run asynchronously; the partitions of a
program, which run as far as their barriers let them. What is not: layouts, warps and what threads of one partition need
to wait for each other.

A GPU runs partitions, copies and products at any time that barriers and waits allow. A `Schedule` decides when: `eager`
work is done when it is asked for, else as late as possible, and partitions have an order of precedence. A program must
give the same results under all of them; one in which nobody can go on, or that reads what is still under way, is a
`Fault`.
"""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon.values import SCALARS, Fault, Launch, Pointer, Value, both, unwrap

WARP = 32


@dataclass(frozen=True)
class Schedule:
    """When work is done.

    Attributes:
        eager: copies and products are done when they are asked for; else as late as possible.
        first: the numbers of the partitions that go before others, by precedence.
        yields: a partition that arrives at a barrier lets others go on, by precedence.
    """

    eager: bool = True
    first: tuple[int, ...] = ()
    yields: bool = False


SCHEDULES = (
    Schedule(), Schedule(False, (2, 1, 0), True), Schedule(False, (1, 2, 0), True), Schedule(True, (2, 1, 0), True),
    Schedule(False),
)  # fmt: skip
"""The first is the fastest; the second finds most of what is wrong."""

# ------------------------------------------------------------------------------------------------ programs


@dataclass
class Partition:
    """Warps that run one function; what they have asked for and not yet waited for."""

    number: int
    warps: int
    copies: deque[list[Callable[[], None]]] = field(default_factory=deque)
    group: list[Callable[[], None]] = field(default_factory=list)
    arrivals: list[Callable[[], None]] = field(default_factory=list)
    products: deque["Product"] = field(default_factory=deque)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    needs: Callable[[], bool] | None = None
    ended: bool = False


class Program:
    """One program of a launch. Its partitions are threads, of which one runs at a time."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...], schedule: Schedule, warps: int) -> None:
        self.place, self.grid, self.schedule = place, grid, schedule
        self.partitions = [Partition(0, warps)]
        self.error: BaseException | None = None
        self.back = threading.Semaphore(0)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        _current.program, _current.partition = self, self.partitions[0]
        function(*arguments)
        self._finish(self.partitions[0])

    def _finish(self, partition: Partition) -> None:
        if partition.copies or partition.group:
            raise Fault("a partition ends before its copies do")
        if partition.products:
            raise Fault("a partition ends before its products do")

    def specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int]) -> None:
        """Runs functions beside each other until all have ended."""
        if any(count & (count - 1) for count in warps):
            raise Fault(f"partitions of {warps} warps: each has a power of two")
        caller = _current.partition
        self.partitions = [Partition(n, count) for n, count in enumerate((caller.warps, *warps))]
        threads = [
            threading.Thread(target=self._run_partition, args=(partition, function, arguments), daemon=True)
            for partition, (function, arguments) in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        while not self.error and not all(partition.ended for partition in self.partitions):
            self._next().turn.release()
            self.back.acquire()
        for partition in self.partitions:  # those that wait, after an error
            partition.turn.release()
        for thread in threads:
            thread.join()
        self.partitions = [caller]
        if self.error:
            raise self.error

    def _next(self) -> Partition:
        """The first partition that can go on; where none can, work that is under way is done first."""
        for _ in range(2):
            order = (*self.schedule.first, *range(len(self.partitions)))
            for number in order:
                if number < len(self.partitions):
                    partition = self.partitions[number]
                    if not partition.ended and (partition.needs is None or partition.needs()):
                        partition.needs = None
                        return partition
            for partition in self.partitions:
                for arrive in partition.arrivals:
                    arrive()
                partition.arrivals.clear()
        stopped = SimpleNamespace(turn=SimpleNamespace(release=self.back.release))
        self.error = Fault("every partition waits for a barrier that nobody completes")
        return stopped  # type: ignore[return-value]

    def _run_partition(self, partition: Partition, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        _current.program, _current.partition = self, partition
        partition.turn.acquire()
        try:
            if not self.error:
                function(*arguments)
                self._finish(partition)
        except Stopped:
            pass
        except BaseException as error:
            self.error = self.error or error
        partition.ended = True
        self.back.release()

    def wait(self, needs: Callable[[], bool]) -> None:
        """The current partition goes on when something is so, and not before others had their chance."""
        partition = _current.partition
        if partition not in self.partitions or len(self.partitions) == 1:
            if not needs():
                raise Fault("the only partition waits for a barrier that nobody completes")
            return
        partition.needs = needs
        self.back.release()
        partition.turn.acquire()
        if self.error:
            raise Stopped


class Stopped(Exception):
    """Another partition has failed."""


class _Current(threading.local):
    program: Program
    partition: Partition


_current = _Current()

# ------------------------------------------------------------------------------------------- shared memory


class Shared:
    """A view of shared memory. `pending` counts copies under way, by the storage they write to."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.dtype, self.shape = tensor.dtype, list(tensor.shape)

    def index(self, at: Any) -> "Shared":
        at = int(at)
        if not 0 <= at < len(self.tensor):
            raise Fault(f"shared memory: index {at} of {len(self.tensor)}")
        return Shared(self.tensor[at])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        if int(start) + length > self.tensor.shape[dim]:
            raise Fault(f"shared memory: {start} to {int(start) + length} of {self.tensor.shape[dim]}")
        return Shared(self.tensor.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tensor.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        return Shared(self.tensor.reshape(-1).view(dtype).view(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.tensor.clone())

    def store(self, value: Value) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise Fault(f"a store of {value.dtype} {value.shape} to shared memory of {self.dtype} {self.shape}")
        self.tensor.copy_(value.tensor)


class Barrier:
    def __init__(self) -> None:
        self.count: int | None = None
        self.arrived, self.phase = 0, 0

    def arrive(self, count: int = 1) -> None:
        if self.count is None:
            raise Fault("a barrier is used before it is initialised")
        self.arrived += count
        if self.arrived > self.count:
            raise Fault(f"a barrier for {self.count} arrivals has {self.arrived}")
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase ^ 1


class Barriers(Barrier):
    """Barriers by index, [number, 1]; one alone, [1], is its own."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        if shape[-1] != 1 or len(shape) > 2:
            raise Fault(f"barriers: the last axis of {shape} is that of one")
        self.each, self.shape = [Barrier() for _ in range(shape[0])], shape[:1]

    def index(self, at: Any) -> Barrier:
        if not 0 <= int(at) < len(self.each):
            raise Fault(f"barriers: index {int(at)} of {len(self.each)}")
        return self.each[int(at)]


class _BarrierLayout:
    pass


def _poisoned(dtype: torch.dtype, shape: list[int]) -> Tensor:
    fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, fill, dtype=dtype)


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    return Barriers(shape) if isinstance(layout, _BarrierLayout) else Shared(_poisoned(dtype, shape))


def _initialise(barrier: Barrier, count: int) -> None:
    barrier.count = count


def _wait(barrier: Barrier, phase: Any) -> None:
    if barrier.count is None:
        raise Fault("a barrier is used before it is initialised")
    parity = int(phase)
    _current.program.wait(lambda: barrier.phase != parity)


def _arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    if _current.program.schedule.yields:
        _current.program.wait(lambda: True)


# ------------------------------------------------------------------------------------------ asynchronous work


def _copy(target: Shared, source: Pointer, mask: Any = None) -> None:
    """Until it is waited for, what it writes to is NaN; its source is read at the end."""
    target.tensor.copy_(_poisoned(target.dtype, target.shape))
    program, partition = _current.program, _current.partition

    early = source.load(mask).tensor  # a pointer out of bounds is a fault here, where the program is

    def finish() -> None:
        target.tensor.copy_(early if program.schedule.eager else source.load(mask).tensor)

    partition.group.append(finish)


def _commit() -> None:
    partition = _current.partition
    partition.copies.append(partition.group)
    partition.group = []


def _wait_group(number: int) -> None:
    """Waits for groups: copies that no group has yet are not among them."""
    partition = _current.partition
    while len(partition.copies) > number:
        for finish in partition.copies.popleft():
            finish()


def _arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Every thread arrives when all copies it has asked for are there."""
    assert not increment_count
    partition, program = _current.partition, _current.program
    under_way = [finish for group in (*partition.copies, partition.group) for finish in group]
    partition.copies.clear()
    partition.group = []

    def arrive() -> None:
        for finish in under_way:
            finish()
        barrier.arrive(partition.warps * WARP)

    if program.schedule.eager:
        arrive()
    else:
        partition.arrivals.append(arrive)


class Product(Value):
    """a·b + accumulator, under way until it is waited for."""

    def __init__(self, a: Any, b: Any, accumulator: Value | None) -> None:
        self.operands, self.accumulator = (a, b), accumulator
        self.result: Tensor | None = None
        self.is_done = False

    def compute(self) -> None:
        if self.result is None:
            a, b = (x.tensor.double() for x in self.operands)
            total = a @ b
            if self.accumulator is not None:
                before = self.accumulator
                if isinstance(before, Product):
                    before.compute()
                    assert before.result is not None
                    total = total + before.result.double()
                else:
                    total = total + before.tensor.double()
            self.result = total.float()

    @property
    def tensor(self) -> Tensor:
        if not self.is_done:
            raise Fault("a product is read before it is waited for")
        assert self.result is not None
        return self.result


def warpgroup_mma(a: Any, b: Shared, accumulator: Value, *, use_acc: bool = True, is_async: bool = False) -> Value:
    if not isinstance(b, Shared):
        raise Fault("the right operand of a warpgroup's product lies in shared memory")
    if a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise Fault(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape}")
    started = Product(Value(a.tensor) if isinstance(a, Value) else a, b, accumulator if use_acc else None)
    if _current.program.schedule.eager:
        started.compute()
    _current.partition.products.append(started)
    if not is_async:
        warpgroup_mma_wait(0, deps=[started])
    return started


def warpgroup_mma_wait(number: int, deps: list[Value]) -> Any:
    products = _current.partition.products
    while len(products) > number:
        done = products.popleft()
        done.compute()
        done.is_done = True
    return deps[0] if len(deps) == 1 else tuple(deps)


def mma_v2(a: Value, b: Value, accumulator: Value) -> Value:
    return Value((a.tensor.double() @ b.tensor.double() + accumulator.tensor.double()).float())


# ------------------------------------------------------------------------------------------------ language


def _reduce(x: Value, axis: int, combine: Callable[[Value, Value], Value]) -> Value:
    total, *rest = x.tensor.unbind(axis)
    result = Value(total)
    for each in rest:
        result = combine(result, Value(each))
    return result


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
    (x,) = arguments
    name = text.split()[0]
    if pack != (2 if "16x2" in name else 1):
        raise Fault(f"{text!r} takes {pack} numbers at a time")
    if name in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        return x.to(dtype)
    if name == "ex2.approx.ftz.f32":
        result = torch.exp2(x.tensor)
        return Value(torch.where(result < torch.finfo(torch.float32).smallest_normal, 0.0, result))
    raise NotImplementedError(f"no model of {text!r}")


def _where(condition: Any, first: Any, second: Any) -> Value:
    return Value(torch.where(unwrap(condition), *both(first, second)))


def _fma(a: Value, b: Value, c: Value) -> Value:
    return Value((a.tensor.double() * b.tensor.double() + c.tensor.double()).float())


def _specialize(functions: list[Any], worker_num_warps: list[int], worker_num_regs: list[int]) -> None:
    _current.program.specialize(functions, worker_num_warps)


def _layout(*arguments: Any, **keywords: Any) -> Any:
    return None


_NAMES = {
    "int1": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "BlockedLayout": _layout, "SliceLayout": _layout, "NVMMADistributedLayout": _layout, "DotOperandLayout": _layout,
    "NVMMASharedLayout": _layout, "SwizzledSharedLayout": _layout,
    "allocate_shared_memory": allocate_shared_memory,
    "program_id": lambda axis: Value(torch.tensor(_current.program.place[axis], dtype=torch.int32)),
    "num_programs": lambda axis: Value(torch.tensor(_current.program.grid[axis], dtype=torch.int32)),
    "num_warps": lambda: _current.partition.warps,
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
    "exp": lambda x: Value(x.tensor.exp()),
    "exp2": lambda x: Value(x.tensor.exp2()),
    "fma": _fma,
    "sum": lambda x, axis: Value(x.tensor.double().sum(axis).to(x.dtype)),
    "reduce": _reduce,
    "associative_scan": _scan,
    "split": lambda x: tuple(map(Value, x.tensor.unbind(-1))),
    "permute": lambda x, order: Value(x.tensor.permute(order)),
    "reshape": lambda x, shape: x.reshape(shape),
    "expand_dims": lambda x, axis: Value(x.tensor.unsqueeze(axis)),
    "inline_asm_elementwise": _assembly,
    "barrier": lambda: None, "thread_barrier": lambda: None, "fence_async_shared": lambda: None,
    "async_copy_global_to_shared": _copy, "commit_group": _commit, "wait_group": _wait_group,
    "mbarrier_arrive": _arrive_after_copies,
    "init": _initialise, "wait": _wait, "arrive": _arrive,
    "MBarrierLayout": _BarrierLayout,
    "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait, "mma_v2": mma_v2,
}  # fmt: skip
"""What modules of Gluon have, by name."""

_LANGUAGE = SimpleNamespace(**_NAMES)


Codes = dict[tuple[str, str], CodeType]
"""Other code for functions, by their modules and qualified names."""


class Translated:
    """Functions of Gluon as functions of the model, each translated once."""

    def __init__(self, codes: Codes) -> None:
        self._codes = codes
        self._known: dict[int, Any] = {}
        self._keep: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """What stands for a global of a kernel's module."""
        if id(value) in self._known:
            return self._known[id(value)]
        module = getattr(value, "__name__", "") if inspect.ismodule(value) else getattr(value, "__module__", "") or ""
        if getattr(value, "is_gluon", None) is not None or _is_jit(value):
            made: Any = self._function(value.fn)
        elif getattr(value, "__triton_aggregate__", False) is True:
            made = self._aggregate(value)
        elif inspect.ismodule(value) and module.startswith("triton.experimental.gluon"):
            made = _LANGUAGE
        elif inspect.ismodule(value) and module.startswith("adjoint."):
            made = _Module(self, value)
        elif module.startswith("triton.experimental.gluon") and getattr(value, "__name__", None) in _NAMES:
            made = _NAMES[value.__name__]
        elif hasattr(value, "value") and type(value).__name__ == "constexpr":
            made = value.value
        else:
            return value
        self._known[id(value)] = made
        self._keep.append(value)
        return made

    def _function(self, function: FunctionType) -> Callable[..., Any]:
        code = self._codes.get((function.__module__, function.__qualname__), function.__code__)
        scope = _Scope(function.__globals__, self).names(code, function)
        return FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)

    def _aggregate(self, value: Any) -> Any:
        members: dict[str, Any] = {}
        for member in value.hash_attrs:
            function = getattr(member, "fn", None) or getattr(member, "_fn", None) or member
            members[function.__name__] = self._function(function)
        return type(value.__name__, (), members)


def _is_jit(value: Any) -> bool:
    return type(value).__name__ in ("JITFunction", "GluonJITFunction", "InterpretedFunction", "ConstexprFunction")


class _Scope:
    """The globals that a function reads, translated."""

    def __init__(self, globals_: dict[str, Any], translated: Translated) -> None:
        self._globals, self._translated = globals_, translated

    def names(self, code: CodeType, function: FunctionType) -> dict[str, Any]:
        scope: dict[str, Any] = {"__builtins__": __builtins__}

        def collect(code: Any) -> None:
            for name in code.co_names:
                if name in self._globals and name not in scope:
                    scope[name] = self._globals[name]
            for constant in code.co_consts:
                if inspect.iscode(constant):
                    collect(constant)

        collect(code)
        for name in list(scope):
            if name != "__builtins__" and scope[name] is not function:
                value = scope[name]
                later = _is_jit(value) or getattr(value, "__triton_aggregate__", False) is True
                scope[name] = _Later(self._translated, value) if later else self._translated(value)
        return scope


class _Later:
    """What is translated when it is first used: functions and aggregates may name each other."""

    def __init__(self, translated: Translated, value: Any) -> None:
        self._translated, self._value = translated, value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._translated(self._value)(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._translated(self._value), name)


class _Module:
    """A module of ours, whose functions are translated when they are asked for."""

    def __init__(self, translated: Translated, value: Any) -> None:
        self._translated, self._value = translated, value

    def __getattr__(self, name: str) -> Any:
        return self._translated(getattr(self._value, name))


class Modelled:
    """A kernel of Gluon in the place of its compiled function: `kernel[grid](*arguments, **constants)`."""

    def __init__(self, kernel: kernels.Kernel, schedule: Schedule, codes: Codes) -> None:
        self._kernel, self._schedule = kernel, schedule
        self.fn, self.arg_names, self.__name__ = kernel.function.fn, kernel.function.arg_names, kernel.name
        self.__module__ = kernel.function.__module__
        self._function = Translated(codes)(kernel.function)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            own = Launch()
            values = [self._value(name, value, own) for name, value in zip(self._kernel.types, arguments, strict=True)]
            settled = [constants[name] for name in self._kernel.constants]
            for own.program, place in enumerate(product(*(range(size) for size in grid))):
                Program(place, grid, self._schedule, warps=4).run(self._function, (*values, *settled))

        return launch

    def _value(self, name: str, value: Any, launch: Launch) -> Any:
        if isinstance(value, Tensor):
            return Pointer.to_tensor(name, value, launch)
        return Value(torch.tensor(value, dtype=SCALARS[self._kernel.types[name].type]))


@contextmanager
def modelled(schedule: Schedule = SCHEDULES[0], codes: Codes | None = None) -> Iterator[None]:
    """Runs every kernel of Gluon in the model instead of on a GPU; some functions with other code."""
    every = [k for k in kernels.registered().values() if getattr(k.function, "is_gluon", lambda: False)()]
    before = [(kernel, kernel.function) for kernel in every]
    for kernel in every:
        kernel.function = Modelled(kernel, schedule, codes or {})
    kernels.forget()
    try:
        yield
    finally:
        for kernel, function in before:
            kernel.function = function
        kernels.forget()
