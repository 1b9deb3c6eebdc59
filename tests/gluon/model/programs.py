"""One program of a launch on a CPU: its partitions, and a schedule that decides which of them goes on.

A GPU runs partitions, copies and products at any time that barriers and waits allow. A `Schedule` decides when: `eager`
work is done when it is asked for, else as late as possible, and partitions have an order of precedence. A program must
give the same results under all of them; one in which nobody can go on, or that reads what is still under way, is a
`Fault`.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.gluon.model.values import Fault

if TYPE_CHECKING:
    from tests.gluon.model.memory import Product

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


@dataclass(eq=False)
class Partition:
    """Warps that run one function; what they have asked for and not yet waited for."""

    number: int
    warps: int
    copies: deque[list[Callable[[], None]]] = field(default_factory=deque)
    group: list[Callable[[], None]] = field(default_factory=list)
    arrivals: list[Callable[[], None]] = field(default_factory=list)
    products: deque["Product"] = field(default_factory=deque)
    stores: deque[Callable[[], None]] = field(default_factory=deque)
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
        current.program, current.partition = self, self.partitions[0]
        function(*arguments)
        self._finish(self.partitions[0])

    def _finish(self, partition: Partition) -> None:
        if partition.copies or partition.group or partition.stores:
            raise Fault("a partition ends before its copies do")
        if partition.products:
            raise Fault("a partition ends before its products do")

    def specialize(self, functions: list[tuple[Any, tuple[Any, ...]]], warps: list[int]) -> None:
        """Runs functions beside each other until all have ended."""
        if any(count & (count - 1) for count in warps):
            raise Fault(f"partitions of {warps} warps: each has a power of two")
        caller = current.partition
        self.partitions = [Partition(n, count) for n, count in enumerate((caller.warps, *warps))]
        threads = [
            threading.Thread(target=self._run_partition, args=(partition, function, arguments), daemon=True)
            for partition, (function, arguments) in zip(self.partitions, functions, strict=True)
        ]
        for thread in threads:
            thread.start()
        self._go_on()
        self.back.acquire()
        for partition in self.partitions:  # those that wait, after an error
            partition.turn.release()
        for thread in threads:
            thread.join()
        self.partitions = [caller]
        if self.error:
            raise self.error

    def _go_on(self) -> None:
        """Lets the next partition run; or the caller of all, where they have ended, or one has failed."""
        if not self.error and not all(partition.ended for partition in self.partitions):
            try:
                self._next().turn.release()
                return
            except Exception as error:
                self.error = error
        self.back.release()

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
        raise Fault("every partition waits for a barrier that nobody completes")

    def _run_partition(self, partition: Partition, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        current.program, current.partition = self, partition
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
        self._go_on()

    def wait(self, needs: Callable[[], bool]) -> None:
        """The current partition goes on when something is so, and not before others had their chance."""
        partition = current.partition
        if partition not in self.partitions or len(self.partitions) == 1:
            if not needs():
                raise Fault("the only partition waits for a barrier that nobody completes")
            return
        partition.needs = needs
        chosen = self._next()
        if chosen is partition:
            return
        chosen.turn.release()
        partition.turn.acquire()
        if self.error:
            raise Stopped


class Stopped(Exception):
    """Another partition has failed."""


class _Current(threading.local):
    program: Program
    partition: Partition


current = _Current()
