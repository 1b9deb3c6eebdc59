"""Shared memory of a program on a CPU, its barriers, and the work that is asynchronous there: copies and products."""

from typing import Any

import torch
from torch import Tensor

from tests.gluon.model.programs import WARP, current
from tests.gluon.model.values import Fault, Matrix, Pointer, Value, unwrap

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
        self.arrived, self.phase, self.bytes = 0, 0, 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """Arrivals, and bytes that are to be copied before the phase is complete."""
        if self.count is None:
            raise Fault("a barrier is used before it is initialised")
        self.arrived += count
        self.bytes += expected
        if self.arrived > self.count:
            raise Fault(f"a barrier for {self.count} arrivals has {self.arrived}")
        self._complete()

    def receive(self, count: int) -> None:
        """Bytes that were copied."""
        self.bytes -= count
        self._complete()

    def _complete(self) -> None:
        if self.arrived == self.count:
            if self.bytes < 0:
                raise Fault(f"a barrier has received {-self.bytes} bytes more than it expects")
            if self.bytes == 0:
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


class BarrierLayout:
    pass


def _poison(memory: Tensor) -> None:
    memory.fill_(float("nan") if memory.dtype.is_floating_point else torch.iinfo(memory.dtype).max)


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        return Barriers(shape)
    memory = torch.empty(shape, dtype=dtype)
    _poison(memory)
    return Shared(memory)


def initialise(barrier: Barrier, count: int) -> None:
    barrier.count = count


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    if not bool(unwrap(pred)):
        return
    if barrier.count is None:
        raise Fault("a barrier is used before it is initialised")
    parity = int(phase)
    current.program.wait(lambda: barrier.phase != parity)


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    if not bool(unwrap(pred)):
        return
    barrier.arrive(count)
    if current.program.schedule.yields:
        current.program.wait(lambda: True)


# ------------------------------------------------------------------------------------------ asynchronous work


def copy(target: Shared, source: Pointer, mask: Any = None) -> None:
    """Until it is waited for, what it writes to is NaN; its source is read at the end."""
    _poison(target.tensor)
    program, partition = current.program, current.partition

    early = source.load(mask).tensor  # a pointer out of bounds is a fault here, where the program is

    def finish() -> None:
        target.tensor.copy_(early if program.schedule.eager else source.load(mask).tensor)

    partition.group.append(finish)


def expect(barrier: Barrier, count: int) -> None:
    """One arrival, and the bytes that copies of tiles will bring."""
    barrier.arrive(1, count)


def copy_tile(source: Matrix, coordinates: list[Any], barrier: Barrier, target: Shared) -> None:
    """Until the barrier has received its bytes, what it writes to is NaN; its source is read at the end."""
    place = [int(unwrap(each)) for each in coordinates]
    if place[1] * target.tensor.itemsize % 16:
        raise Fault(f"{source.name}: a tile begins at column {place[1]}, not at a multiple of 16 bytes")
    _poison(target.tensor)
    program, partition = current.program, current.partition
    early = source.load(place, target.shape)

    def arrive() -> None:
        target.tensor.copy_(early if program.schedule.eager else source.load(place, target.shape))
        barrier.receive(early.numel() * early.itemsize)

    if program.schedule.eager:
        arrive()
    else:
        partition.arrivals.append(arrive)


def copy_to_memory(target: Matrix, coordinates: list[Any], source: Shared) -> None:
    """A group of its own: it reads shared memory, and writes, until it is waited for."""
    place = [int(unwrap(each)) for each in coordinates]
    if place[1] * source.tensor.itemsize % 16:
        raise Fault(f"{target.name}: a tile begins at column {place[1]}, not at a multiple of 16 bytes")

    def finish() -> None:
        target.store(place, source.tensor)

    current.partition.stores.append(finish)
    if current.program.schedule.eager:
        wait_stores(0)


def wait_stores(number: int) -> None:
    """Waits until so few groups of copies to memory are left."""
    stores = current.partition.stores
    while len(stores) > number:
        stores.popleft()()


def commit() -> None:
    partition = current.partition
    partition.copies.append(partition.group)
    partition.group = []


def wait_group(number: int) -> None:
    """Waits for groups: copies that no group has yet are not among them."""
    partition = current.partition
    while len(partition.copies) > number:
        for finish in partition.copies.popleft():
            finish()


def arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    """Every thread arrives when all copies it has asked for are there."""
    assert not increment_count
    partition, program = current.partition, current.program
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


INSTRUCTION = 16
"""How much of what a product sums over one instruction takes; its result is rounded."""


class Product(Value):
    """a·b + accumulator, under way until it is waited for."""

    def __init__(self, a: Any, b: Any, accumulator: Value | None) -> None:
        self.operands, self.accumulator = (a, b), accumulator
        self.result: Tensor | None = None
        self.is_done = False

    def compute(self) -> None:
        if self.result is None:
            a, b = (x.tensor.double() for x in self.operands)
            before = self.accumulator
            if isinstance(before, Product):
                before.compute()
                assert before.result is not None
                total = before.result
            else:
                total = torch.zeros(a.shape[0], b.shape[1]) if before is None else before.tensor
            for left, right in zip(a.split(INSTRUCTION, 1), b.split(INSTRUCTION), strict=True):
                total = (left @ right + total.double()).float()
            self.result = total

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
    if current.program.schedule.eager:
        started.compute()
    current.partition.products.append(started)
    if not is_async:
        warpgroup_mma_wait(0, deps=[started])
    return started


def warpgroup_mma_wait(number: int, deps: list[Value]) -> Any:
    products = current.partition.products
    while len(products) > number:
        done = products.popleft()
        done.compute()
        done.is_done = True
    return deps[0] if len(deps) == 1 else tuple(deps)


def mma_v2(a: Value, b: Value, accumulator: Value) -> Value:
    return Value((a.tensor.double() @ b.tensor.double() + accumulator.tensor.double()).float())
