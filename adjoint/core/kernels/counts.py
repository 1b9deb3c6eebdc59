"""Counters: how often this process has launched each plan, and compiled a kernel."""

import itertools

_launches: dict[str, "itertools.count[int]"] = {}
_compilations = itertools.count()


def count_launch(sku: str) -> None:
    """Counts one launch of a plan; thread-safe."""
    counter = _launches.get(sku)
    if counter is None:
        counter = _launches.setdefault(sku, itertools.count())
    next(counter)


def launches() -> dict[str, int]:
    """How often each plan has launched in this process, by SKU."""
    return {sku: _count(counter) for sku, counter in _launches.items()}


def count_compilation() -> None:
    """Counts one kernel that was compiled or loaded for a device; thread-safe."""
    next(_compilations)


def compilations() -> int:
    """How many kernels this process has compiled or loaded for a device."""
    return _count(_compilations)


def _count(counter: "itertools.count[int]") -> int:
    return int(repr(counter)[6:-1])
