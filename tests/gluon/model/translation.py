"""Gluon on a CPU: enough of the language to run every kernel for Hopper on small problems, and to notice wrong ones.

    with modelled(schedule):              # kernels of Gluon, launched in Triton's interpreter, run here
        plan.run(...)

What is modelled: arithmetic; memory, its bounds, and programs that race for it (`values`); the partitions of a program,
which run as far as their barriers let them (`programs`); shared memory, which is full of NaN until it is written,
barriers and their phases, copies and products that run asynchronously (`memory`); the language's functions
(`language`). Here functions of Gluon become functions of those. What is not modelled: layouts, warps and what threads
of one partition need to wait for each other.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon.model.language import LANGUAGE, NAMES
from tests.gluon.model.programs import SCHEDULES, Program, Schedule
from tests.gluon.model.values import SCALARS, Launch, Matrix, Pointer, Value

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
            made = LANGUAGE
        elif inspect.ismodule(value) and module.startswith("adjoint."):
            made = _Module(self, value)
        elif module.startswith("triton.experimental.gluon") and getattr(value, "__name__", None) in NAMES:
            made = NAMES[value.__name__]
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
        if isinstance(self._kernel.types[name], kernels.Tiled):
            return Matrix(name, value, launch)
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
