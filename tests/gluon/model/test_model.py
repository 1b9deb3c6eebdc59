"""The model itself: what it must refuse."""

import pytest
import torch

from tests.gluon.model import memory
from tests.gluon.model.memory import Barriers, Shared
from tests.gluon.model.programs import Program, Schedule, current
from tests.gluon.model.values import Fault, Launch, Matrix, Pointer, Value


def in_program(function, schedule: Schedule = Schedule()):  # type: ignore[no-untyped-def]  # noqa: B008
    Program((0,), (1,), schedule, warps=4).run(function, ())


def specialized(*functions, schedule: Schedule = Schedule()):  # type: ignore[no-untyped-def]  # noqa: B008
    in_program(lambda: current.program.specialize([(f, ()) for f in functions], [4] * (len(functions) - 1)), schedule)


def barrier(count: int = 1) -> Barriers:
    made = Barriers([1])
    made.count = count
    return made


def test_addresses_outside_of_a_tensor_are_faults() -> None:
    numbers = torch.zeros(10)[:4]
    pointer = Pointer.to_tensor("x", numbers)
    with pytest.raises(Fault, match="x: elements 4 to 4"):
        (pointer + 4).load()
    with pytest.raises(Fault, match="elements -1"):
        (pointer - 1).store(1.0)
    place = pointer + Value(torch.arange(6))
    assert torch.equal(place.load(Value(torch.arange(6) < 4), 7.0).tensor, torch.tensor([0.0] * 4 + [7.0] * 2))


def test_an_element_is_written_once_by_a_store() -> None:
    pointer = Pointer.to_tensor("x", torch.zeros(4)) + Value(torch.tensor([1, 1]))
    with pytest.raises(Fault, match="twice"):
        pointer.store(Value(torch.ones(2)))


def test_shared_memory_is_poisoned_until_it_is_written() -> None:
    shared = memory.allocate_shared_memory(torch.float32, [2, 3], None)
    assert shared.load(None).tensor.isnan().all()
    shared.index(1).store(Value(torch.ones(3)))
    assert shared.index(1).load(None).tensor.eq(1).all() and shared.index(0).load(None).tensor.isnan().all()
    with pytest.raises(Fault, match="index 2 of 2"):
        shared.index(2)


@pytest.mark.parametrize("eager", [True, False])
def test_copies_arrive_when_their_group_is_waited_for(eager: bool) -> None:
    source, shared = Pointer.to_tensor("x", torch.ones(4)) + Value(torch.arange(4)), Shared(torch.zeros(4))

    def program() -> None:
        memory.copy(shared, source)
        memory.wait_group(0)
        assert shared.load(None).tensor.isnan().all()  # no group has it yet
        memory.commit()
        memory.wait_group(1)
        assert shared.load(None).tensor.isnan().all()
        memory.wait_group(0)
        assert shared.load(None).tensor.eq(1).all()

    in_program(program, Schedule(eager))


def test_copies_that_nobody_waits_for_are_faults() -> None:
    source = Pointer.to_tensor("x", torch.ones(4)) + Value(torch.arange(4))
    with pytest.raises(Fault, match="before its copies"):
        in_program(lambda: memory.copy(Shared(torch.zeros(4)), source))


def test_products_are_read_after_they_are_waited_for() -> None:
    a, b = Value(torch.eye(4)), Shared(torch.arange(16.0).view(4, 4))

    def program(number: int) -> None:
        product = memory.warpgroup_mma(a, b, Value(torch.zeros(4, 4)), use_acc=False, is_async=True)
        product = memory.warpgroup_mma_wait(number, deps=[product])
        assert torch.equal((product + 0.0).tensor, b.tensor)

    in_program(lambda: program(0))
    with pytest.raises(Fault, match="read before"):
        in_program(lambda: program(1))


def test_a_late_product_reads_what_its_operand_has_become() -> None:
    b = Shared(torch.eye(4))

    def program() -> None:
        product = memory.warpgroup_mma(Value(torch.eye(4)), b, Value(torch.zeros(4, 4)), is_async=True)
        b.store(Value(torch.full((4, 4), 3.0)))
        results.append(memory.warpgroup_mma_wait(0, deps=[product]).tensor[0, 0].item())

    results: list[float] = []
    in_program(program, Schedule(True))
    in_program(program, Schedule(False))
    assert results == [1.0, 3.0]


def test_partitions_wait_for_phases() -> None:
    full, empty, order = barrier(), barrier(), []

    def consumer() -> None:
        for phase in (0, 1):
            memory.wait(full, phase)
            order.append("read")
            empty.arrive()

    def producer() -> None:
        for phase in (1, 0):  # the phase before the first counts as complete
            memory.wait(empty, phase)
            order.append("write")
            full.arrive()

    specialized(consumer, producer)
    assert order == ["write", "read", "write", "read"]


def test_a_barrier_that_nobody_completes_is_a_fault() -> None:
    ready = barrier(2)
    with pytest.raises(Fault, match="nobody completes"):
        specialized(lambda: memory.wait(ready, 0), ready.arrive)
    with pytest.raises(Fault, match="nobody completes"):
        in_program(lambda: memory.wait(barrier(), 0))


def test_too_many_arrivals_are_a_fault() -> None:
    ready = barrier(2)
    ready.arrive()
    with pytest.raises(Fault, match="3"):
        ready.arrive(2)


def test_errors_of_a_partition_reach_the_caller() -> None:
    ready = barrier()

    def fails() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        specialized(lambda: memory.wait(ready, 0), fails)


def test_numbers_have_the_types_of_the_language() -> None:
    small, large = Value(torch.tensor(3, dtype=torch.int32)), Value(torch.tensor(5, dtype=torch.int64))
    assert (small * 2).dtype == torch.int32 and (small + large).dtype == torch.int64
    assert (Value(torch.arange(4, dtype=torch.int32)) + large).dtype == torch.int64  # torch would keep int32
    assert (small * 0.5).dtype == torch.float32
    assert ((small - 10) // 2).tensor.item() == -3  # towards 0, as in C


def test_programs_that_race_are_a_fault() -> None:
    launch = Launch()
    place = Pointer.to_tensor("x", torch.zeros(4), launch)
    place.store(1.0)
    place.store(2.0)  # its own
    launch.program = 1
    (place + 1).store(2.0)
    launch.program = 2
    with pytest.raises(Fault, match="two programs store at one address"):
        place.store(2.0)  # of the same number, too: every number has one writer
    with pytest.raises(Fault, match="a program loads what another one stores"):
        (place + 1).load()


@pytest.mark.parametrize("eager", [True, False])
def test_tiles_arrive_with_their_bytes_and_are_zeros_outside(eager: bool) -> None:
    matrix, shared, ready = Matrix("x", torch.ones(3, 8)), Shared(torch.zeros(4, 8)), barrier()

    def producer() -> None:
        memory.expect(ready, 4 * 8 * 4)
        memory.copy_tile(matrix, [1, 4], ready, shared)

    def consumer() -> None:
        memory.wait(ready, 0)
        expected = torch.zeros(4, 8)
        expected[:2, :4] = 1
        assert torch.equal(shared.load(None).tensor, expected)

    specialized(consumer, producer, schedule=Schedule(eager))


def test_a_barrier_that_expects_other_bytes_is_a_fault() -> None:
    matrix, shared = Matrix("x", torch.ones(4, 8)), Shared(torch.zeros(4, 8))

    def program(count: int) -> None:
        ready = barrier()
        memory.expect(ready, count)
        memory.copy_tile(matrix, [0, 0], ready, shared)
        memory.wait(ready, 0)

    in_program(lambda: program(128))
    with pytest.raises(Fault, match="nobody completes"):
        in_program(lambda: program(256))
    with pytest.raises(Fault, match="64 bytes more"):
        in_program(lambda: program(64))
    with pytest.raises(Fault, match="column 1"):
        in_program(lambda: memory.copy_tile(matrix, [0, 1], barrier(), shared))
    with pytest.raises(Fault, match="contiguous"):
        Matrix("x", torch.ones(4, 8).T)
