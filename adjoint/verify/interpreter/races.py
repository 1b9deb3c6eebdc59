"""Races between the programs of one launch, which Triton's interpreter hides: it runs them one after the other.

    with watched():                 # or `watch()`, from now on
        plan.run(...)               # raises `Race` where programs depend on their order

Two programs race if they store different numbers at one address, or if one loads what another stores. Two elements of
one store race if they have one address and different numbers. Programs that store the same number do not race, because
the bits are the same in any order. Atomic operations are not examined.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Race(Exception):
    """Programs of one launch store different numbers at one address, or one loads what another one stores."""


class _Launch:
    """The addresses that the programs of a launch have loaded from and stored to, and the stored values."""

    def __init__(self) -> None:
        self.program = -1
        self.loads: list[tuple[int, np.ndarray]] = []
        self.stores: list[tuple[int, np.ndarray, np.ndarray]] = []

    def load(self, addresses: np.ndarray) -> None:
        self.loads.append((self.program, addresses))

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        bits = np.ascontiguousarray(values).view(f"u{values.itemsize}").astype(np.uint64)
        self.stores.append((self.program, addresses, bits))

    def check(self) -> None:
        if not any(len(addresses) for _, addresses, _ in self.stores):
            return
        addresses, programs, bits = _joined(self.stores)
        order = np.argsort(addresses, kind="stable")
        addresses, programs, bits = addresses[order], programs[order], bits[order]
        first = np.flatnonzero(np.diff(addresses, prepend=~addresses[:1]))
        stored, owners = addresses[first], _extent(programs, first)
        values = _extent(bits, first)
        shared = owners[0] != owners[1]
        if (shared & (values[0] != values[1])).any():
            raise Race("two programs store different numbers at one address")
        if not self.loads:
            return
        loaded, readers, _ = _joined(self.loads)
        place = np.minimum(np.searchsorted(stored, loaded), len(stored) - 1)
        foreign = (readers != owners[0][place]) | shared[place]
        if ((stored[place] == loaded) & foreign).any():
            raise Race("a program loads what another one stores")


def _joined(accesses: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All addresses, with the program and the stored value of each."""
    programs = np.concatenate([np.full(len(addresses), program) for program, addresses, *_ in accesses])
    last = np.concatenate([access[-1] for access in accesses])
    return np.concatenate([access[1] for access in accesses]), programs, last


def _extent(values: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest of each run of values that begins at `first`."""
    return np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)


def _repeats(addresses: np.ndarray, values: np.ndarray) -> bool:
    """Whether one store has two different numbers for the same address."""
    order = np.argsort(addresses, kind="stable")
    same = np.diff(addresses[order]) == 0
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")[order]
    return bool((same & (bits[1:] != bits[:-1])).any())


@contextmanager
def watched() -> Iterator[None]:
    """Raises `Race` from launches in Triton's interpreter."""
    restore = watch()
    try:
        yield
    finally:
        restore()


def watch() -> Any:
    """Raises `Race` from launches from now on; returns a function that ends this."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    names = ("set_grid_dim", "set_grid_idx", "create_masked_load", "create_masked_store")
    before = {name: getattr(builder, name) for name in names}
    call = executor.__call__
    launch = _Launch()

    def begin_launch(self: Any, *sizes: int) -> None:
        nonlocal launch
        launch = _Launch()
        before["set_grid_dim"](self, *sizes)

    def begin_program(self: Any, *program: int) -> None:
        launch.program += 1
        before["set_grid_idx"](self, *program)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launch.load(pointers.data[mask.data.astype(bool)].reshape(-1))
        return before["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        chosen = mask.data.astype(bool)
        addresses, values = pointers.data[chosen].reshape(-1), value.data[chosen].reshape(-1)
        if _repeats(addresses, values):
            raise Race("one store has two numbers for an address")
        launch.store(addresses, values)
        return before["create_masked_store"](self, pointers, value, mask, *rest)

    def run(self: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            call(self, *arguments, **keywords)
        except interpreter.InterpreterError as error:
            raise (error.__cause__ if isinstance(error.__cause__, Race) else error) from None
        launch.check()

    replacements = dict(zip(names, (begin_launch, begin_program, load, store), strict=True))

    def put(functions: dict[str, Any], launcher: Any) -> None:
        for name, function in functions.items():
            setattr(builder, name, function)
        executor.__call__ = launcher

    put(replacements, run)
    return lambda: put(before, call)
