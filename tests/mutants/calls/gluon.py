"""Launches that mutants of the kernels in Gluon are tried on, in the model of Gluon on a CPU.

The plans for Hopper run small problems once, with the kernels as they are, and every launch of a kernel in Gluon is
recorded: what its arguments' memory holds before, and after. A mutant runs the launches of its own kernel again, from
the same memory, and must leave the same bits in all of it, whenever copies and products are done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import adjoint
from adjoint.core import kernels
from adjoint.core.kernels import Kernel
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.hopper import gradients_beside
from tests.gluon import hopper
from tests.gluon.breaks import code_of
from tests.gluon.experts.layers import Layer
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.model.translation import Codes, Modelled
from tests.gluon.rule.examples import Example
from tests.mutants.calls.gated_delta.backward import no_numbers
from tests.mutants.trees import Mutant

SHARED = "adjoint.device.gluon"
RULE_MODULES = tuple(
    f"adjoint.ops.gated_delta.rule.hopper.{part}"
    for part in (
        "device",
        "chunk_inverse",
        "forward_scan",
        "whole_scan",
        "state_chunks",
        "states_ahead",
        "transitions",
        "state_scan",
        "reverse_scan",
        "gradients",
    )
)
EXPERT_MODULES = tuple(
    f"adjoint.ops.moe.experts.hopper.{part}" for part in ("device", "up", "product", "hidden_gradients", "outer")
)
MODULES = (SHARED, *RULE_MODULES, *EXPERT_MODULES)


class Memory:
    """The arguments of a launch, and a copy of all that their memory holds; tensors that share memory still do."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._storages: dict[int, Tensor] = {}
        self._arguments: list[Any] = []
        for value in arguments:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._storages.setdefault(storage.data_ptr(), _bytes_of(storage).clone())
                view = (storage.data_ptr(), value.dtype, value.storage_offset(), value.shape, value.stride())
                self._arguments.append(view)
            else:
                self._arguments.append(value)

    def arguments(self) -> tuple[Any, ...]:
        """Arguments with memory of their own, which holds the same."""
        storages = {place: contents.clone() for place, contents in self._storages.items()}

        def restored(value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            place, dtype, offset, shape, strides = value
            return storages[place].view(dtype).as_strided(shape, strides, offset)

        return tuple(restored(value) for value in self._arguments)

    def is_left_in(self, arguments: tuple[Any, ...]) -> bool:
        """Whether all memory of other arguments holds the same bits."""
        return all(
            torch.equal(_bytes_of(value.untyped_storage()), self._storages[view[0]])
            for value, view in zip(arguments, self._arguments, strict=True)
            if isinstance(value, Tensor)
        )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    function: Any
    grid: tuple[int, ...]
    constants: dict[str, Any]
    before: Memory
    after: Memory
    seconds: float

    def is_changed(self, codes: Codes, schedule: Schedule) -> bool:
        """Whether the kernel, with other code in it, leaves anything else in memory."""
        arguments = self.before.arguments()
        with patch.object(self.kernel, "function", self.function):
            Modelled(self.kernel, schedule, codes)[self.grid](*arguments, **self.constants)
        return not self.after.is_left_in(arguments)


_recorded: list[Launch] = []
"""Those that take the least time first."""


@contextmanager
def _recording() -> Iterator[None]:
    run = Modelled.__getitem__
    functions = {kernel.name: kernel.function for kernel in kernels.registered().values()}

    def record(self: Modelled, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            before, begin = Memory(arguments), perf_counter()
            run(self, grid)(*arguments, **constants)
            seconds, function = perf_counter() - begin, functions[self.__name__]
            _recorded.append(Launch(self._kernel, function, grid, constants, before, Memory(arguments), seconds))

        return launch

    with patch.object(Modelled, "__getitem__", record):
        yield


@contextmanager
def small() -> Iterator[None]:
    """Segments of two chunks, so that few tokens have several; sequences of up to eight heads are split."""
    sizes = {"UNSPLIT_REVERSE": 128, "REVERSE_SEGMENT": 128}
    with patch.object(packing, "SEGMENT", 128), patch.multiple(rule_shape, **sizes):
        adjoint.core.op.operator.forget()
        yield
    adjoint.core.op.operator.forget()


EXAMPLES: tuple[Callable[[], Example], ...] = (
    lambda: Example.of((1, 256, 2, 4, 64, 64), decay=0.05),
    lambda: Example.of((1, 384, 5, 10, 128, 64), torch.float16, final=False, decay=0.05),
    lambda: Example.of((1, 200, 3, 9, 64, 128), cu_seqlens=(0, 0, 1, 66, 200), decay=0.05),
    lambda: Example.of((2, 66, 2, 6, 128, 128), normalize=True, state=False),
    lambda: Example.of((1, 385, 2, 2, 128, 128), cu_seqlens=(0, 128, 385), decay=0.05, resets=(5, 64, 130, 300)),
)
"""Keys of 64 and 128, one value head to a key head and more, more than eight, one sequence and several, of which the
first is as long as one that is not split may be, resets."""


WHOLE_V_EXAMPLES: tuple[Callable[[], Example], ...] = (
    lambda: Example.of((1, 384, 5, 10, 64, 256), decay=0.05),
    lambda: Example.of((1, 256, 1, 2, 64, 256), decay=0.05),
    lambda: Example.of((1, 70, 5, 10, 64, 128), cu_seqlens=(0, 0, 66, 66, 70)),
)
"""More columns than a program has: states that are saved, or that segments begin with; both end with a segment. And
sequences without tokens, which keep their states."""


AHEAD_EXAMPLES: tuple[Callable[[], Example], ...] = (
    lambda: Example.of((1, 820, 1, 2, 64, 128), decay=0.05),
    lambda: Example.of((1, 400, 2, 2, 128, 128), torch.float16, cu_seqlens=(0, 0, 1, 66, 390, 400)),
    lambda: Example.of((2, 192, 1, 4, 64, 256), state=False, final=False, decay=0.05),
)
"""Stretches side by side: more chunks of states ahead than shared memory holds, sequences that end in any stretch, and
stretches that begin with the sequence. States are saved within stretches and at their ends."""


BESIDE_EXAMPLES: tuple[Callable[[], Example], ...] = (
    lambda: Example.of((1, 300, 1, 2, 64, 64), decay=0.05),
    lambda: Example.of((1, 320, 2, 2, 64, 64), state=False, final=False, decay=0.05),
)
"""Reverse scans in two parts, and gradients in two launches: with states at both ends, and with none."""


def _whole(V: int, K: int = 64) -> Example:
    """More chunks in a segment than shared memory holds, where segments have the size they have, or as many as that."""
    return Example.of((1, 330, 1, 2, K, V), decay=0.05)


@cache
def record() -> None:
    """Keeps what every launch of the kernels as they are begins and ends with."""
    for module in RULE_MODULES:
        import_module(module)
    with no_numbers(), _recording():
        with small():
            for example in (make() for make in EXAMPLES):
                _run(example)
                if example.inputs[2].shape[-1] % 128 == 0:
                    _run_forward(example, hopper.WHOLE_V)
            for example in (make() for make in WHOLE_V_EXAMPLES):
                _run_forward(example, hopper.WHOLE_V)
            with patch.object(rule_shape, "FEW_HEADS", 0):
                for example in (make() for make in AHEAD_EXAMPLES):
                    _run_forward(example, hopper.AHEAD)
                with patch.object(gradients_beside, "sizes_of", lambda *_: gradients_beside.Sizes(3, 2)):
                    for example in (make() for make in BESIDE_EXAMPLES):
                        _run_backward(example, hopper.BESIDE)
            with patch.object(packing, "SEGMENT", 320):
                _run_forward(_whole(V=64, K=128), hopper.HALVES)
        _run(_whole(V=64))
        _run_forward(_whole(V=128), hopper.WHOLE_V)
    _recorded.sort(key=lambda launch: launch.seconds)


LAYERS: tuple[Callable[[], Layer], ...] = (
    lambda: Layer.of(320, 128, (70, 20)),
    lambda: Layer.of(192, 192, (3, 0, 65, *(1,) * 10), slots=2, dtype=torch.float16).with_infinite_u(),
    lambda: Layer.of(576, 64, (9, 130)),
    lambda: Layer.of(256, 64, (1,) * 8),
    lambda: Layer.of(128, 256, (70, 64)).with_nan_in_the_first_token(),
)
"""More stages than shared memory holds, halves of tiles of rows and of columns, an expert without rows, more tiles than
a group has, two launches of columns; a whole group, and whole tiles of columns. Of u, a number past the largest, which
stays beside the last column; and a token that is NaN, and reaches no expert but its own."""


ONE_AFTER_THE_OTHER = Layer.of(320, 64, (64, 64, 0, 0, 64, 5))
"""Tiles of 64 rows, which have none for one warpgroup, and experts without rows, behind which one program has more."""


@cache
def record_experts() -> None:
    """Keeps the same of the expert layer's kernels."""
    for module in EXPERT_MODULES:
        import_module(module)
    with _recording():
        for make in LAYERS:
            make().results(SCHEDULES[0])
        ONE_AFTER_THE_OTHER.results(SCHEDULES[0], programs=1)
    _recorded.sort(key=lambda launch: launch.seconds)


def _run(example: Example) -> None:
    hopper.run_both(example.call, example.upstream(), SCHEDULES[0])


def _run_forward(example: Example, parameters: dict[str, int]) -> None:
    call = example.call
    hopper.run(call.operator, call.arguments, SCHEDULES[0], parameters=parameters)


def _run_backward(example: Example, parameters: dict[str, int]) -> None:
    call = example.call
    outputs = hopper.run(call.operator, call.arguments, SCHEDULES[0])
    hopper.run_backward(call, example.upstream(), outputs, SCHEDULES[0], parameters=parameters)


def noticed(mutant: Mutant, schedule: Schedule) -> bool:
    """Whether any launch with a function's other code leaves other bits in memory; of shared functions, any launch of
    the modules beside theirs, or any at all."""
    codes, package = {}, mutant.module.rpartition(".")[0]
    launches = [launch for launch in _recorded if launch.function.fn.__module__ == mutant.module]
    if mutant.function:
        file = str(import_module(mutant.module).__file__)
        codes[mutant.module, mutant.function] = code_of(compile(mutant.source, file, "exec"), mutant.function)
        beside = [launch for launch in _recorded if launch.function.fn.__module__.startswith(package)]
        launches = launches or beside or _recorded
    try:
        return any(launch.is_changed(codes, schedule) for launch in launches)
    except Exception:
        return True
