"""`kernel`, which declares a Triton function as a kernel, with its types, its budget and its numeric parameters."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from adjoint.core.kernels.parameters import Parameter
from adjoint.core.kernels.targets import TARGETS

if TYPE_CHECKING:
    from adjoint.core.kernels.variants import Variant

_kernels: dict[str, "Kernel"] = {}


@dataclass(frozen=True)
class Budget:
    """What a build may use: registers per thread, and shared memory per program.

    Attributes:
        spilled_elsewhere: the bytes that a build may spill for a target on which kernels are not tuned. No build spills
            for the target on which they are.
    """

    registers: int
    shared_bytes: int = 0
    spilled_elsewhere: int = 0


class Kernel:
    """One Triton function, the resources its builds may use, and the targets it is for.

    Attributes:
        types: the run-time parameters, in order.
        constants: the compile-time parameters, in order.
        variables: the type variables in the types of run-time parameters, such as `element` of `Pointer.element`.
        numeric: constants and variables that change bits, by their names in a SKU.
        schedule: constants that change no bit, and may depend on the GPU.
        variants: the variants described so far, by the settings of a launch.
        launchers: the launchers of the variants compiled so far, by variant and device.
    """

    def __init__(
        self, function: Any, budget: Budget, targets: Iterable[str], numeric: Mapping[str, str], schedule: Iterable[str]
    ) -> None:
        from triton.language import constexpr

        self.function, self.budget, self.targets = function, budget, frozenset(targets)
        self.name: str = function.__name__
        self.parameters: tuple[str, ...] = tuple(function.arg_names)
        annotations = function.fn.__annotations__
        self.constants = tuple(name for name in self.parameters if annotations.get(name) is constexpr)
        self.types: dict[str, Parameter] = {
            name: annotations[name] for name in self.parameters if isinstance(annotations.get(name), Parameter)
        }
        self.variables = frozenset(t.variable for t in self.types.values() if t.variable)
        self.settings = self.variables | frozenset(self.constants)
        self.numeric, self.schedule = dict(numeric), frozenset(schedule)
        self.variants: dict[Hashable, Variant] = {}
        self.launchers: dict[tuple[Variant, torch.device], Callable[..., None]] = {}
        self._require_types()

    def _require_types(self) -> None:
        """Raises unless the signature states the type of every parameter, and the declaration names parameters."""
        missing = [name for name in self.parameters if name not in self.types and name not in self.constants]
        if missing:
            raise TypeError(f"{self.name}: the signature states no type for {', '.join(missing)}")
        if self.parameters != (*self.types, *self.constants):
            raise TypeError(f"{self.name}: compile-time parameters come after the others")
        unknown = (set(self.numeric.values()) | self.schedule) - self.settings
        if unknown:
            raise TypeError(f"{self.name}: no compile-time parameter is called {', '.join(sorted(unknown))}")

    @cached_property
    def by_name(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Makes `launch(grid, *, <every run-time parameter>)` from `start(grid, *arguments)`.

        The function is generated, so that Python itself matches names and reports wrong ones. A grid has one to three
        axes. A grid without programs launches nothing.
        """
        names = ", ".join(self.types)
        source = (
            f"def by_name(start):\n"
            f"    def launch(grid, *, {names}):\n"
            f"        if 0 not in grid:\n"
            f"            start((*grid, 1, 1)[:3], {names})\n"
            f"    launch.__qualname__ = '{self.name}.launch'\n"  # the name in Python's error for a wrong argument
            f"    return launch\n"
        )
        scope: dict[str, Any] = {}
        exec(source, scope)
        return scope["by_name"]  # type: ignore[no-any-return]


def kernel(
    *,
    budget: Budget,
    targets: Iterable[str] = TARGETS,
    numeric: Iterable[str] | Mapping[str, str] = (),
    schedule: Iterable[str] = (),
) -> Callable[[Any], Kernel]:
    """Registers the `@triton.jit` or `@gluon.jit` function beneath it, whose parameters are typed.

    Args:
        budget: what a build may use.
        targets: the architectures that the kernel is for.
        numeric: the compile-time parameters that change bits. They are in the SKU, under their names in lower case or
            under the names that a mapping gives them.
        schedule: the compile-time parameters that change no bit and may depend on the GPU. All others follow from the
            problem.
    """
    labels = numeric if isinstance(numeric, Mapping) else {name.lower(): name for name in numeric}

    def decorate(function: Any) -> Kernel:
        entry = Kernel(function, budget, targets, labels, schedule)
        if entry.name in _kernels and _kernels[entry.name].function.__module__ != function.__module__:
            raise ValueError(f"two kernels are named {entry.name}")
        _kernels[entry.name] = entry
        return entry

    return decorate


def registered() -> dict[str, Kernel]:
    """Every kernel registered so far, by name."""
    return dict(_kernels)


def kernel_of(name: str) -> Kernel:
    """The kernel with this name."""
    return _kernels[name]
