"""Every compile-time constant of a kernel is numeric, part of a schedule, or a fact of the problem.

Numeric ones change bits and stand in the SKU; those of a schedule change none, which `verify` asserts. What is left
must follow from the problem: a flag, a name, or a number made of the problem's sizes. A tile that is none of these
could change bits that no SKU tells apart.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from adjoint.core.launch import Launch, Setup
from adjoint.core.problem import Problem


def unexplained(setup: Setup) -> Iterator[str]:
    """The constants of a setup that nothing explains, in words."""
    sizes = _sizes(setup.problem) | {value for value in setup.plan_numeric.values() if isinstance(value, int)}
    for launch in setup.launches:
        numeric = [launch.settings[name] for name in launch.kernel.numeric.values()]
        known = sizes | {_levels(value) for value in numeric if isinstance(value, int)}
        for name, value in _facts(launch).items():
            if not _is_fact(value, known):
                yield (
                    f"{launch.kernel.name}: {name}={value} is no size of {setup.problem}; say in the kernel's "
                    f"declaration that it is numeric, or part of the schedule"
                )


def _facts(launch: Launch) -> dict[str, Any]:
    """The constants that are neither numeric nor part of the schedule."""
    kernel = launch.kernel
    explained = set(kernel.numeric.values()) | kernel.schedule
    return {name: launch.settings[name] for name in kernel.constants if name not in explained}


def _is_fact(value: Any, sizes: frozenset[int]) -> bool:
    return not isinstance(value, int) or isinstance(value, bool) or value in sizes


def _sizes(problem: Problem) -> frozenset[int]:
    """What kernels make of a problem's sizes: themselves, twice them, products, ratios, and the tiles that hold them.

    Twice a size is what a gate and an up have side by side.
    """
    known = {0, 1, *(x for x in (*problem.sizes, *problem.options) if isinstance(x, int))}
    pairs = list(product(known, known))
    known |= {a * b for a, b in pairs} | {a // b for a, b in pairs if b} | {2 * size for size in problem.sizes}
    return frozenset(known | {tile for size in known for tile in _tiles(size)})


def _tiles(size: int) -> tuple[int, ...]:
    """What holds a row of a size: a multiple of 16, a power of two, one of at least 16; how often such a row can be
    halved; and into how many slices the lanes of a warp cut it."""
    power, slices = 1 << _levels(size), -(-size // 32)
    return max(16, -(-size // 16) * 16), power, max(16, power), _levels(size), slices, _levels(slices)


def _levels(size: int) -> int:
    return max(0, size - 1).bit_length()
