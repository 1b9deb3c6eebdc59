"""How mutants are tried: at the edge of memory that nobody may touch, with bits compared.

Every tensor a kernel is given lies there, so that a read or a write past it ends the process. Outputs and workspaces
are filled before, differently each time, programs run in either order, and none may load or change what another stores.
"""

import ctypes
import mmap
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import adjoint
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import poison
from adjoint.core.kernels import Variant
from adjoint.core.plan import Plan, select
from adjoint.core.schedules import Schedules
from adjoint.core.workspace import Regions
from adjoint.device import grouping
from adjoint.verify.checks.bits import same_bits
from adjoint.verify.interpreter import races

# ---------------------------------------------------------------------------------- the edge of memory


def at_the_edge(tensor: Tensor, front: bool = False) -> Tensor:
    """A contiguous copy that ends, or begins, where a page begins, or ends, that nobody may touch."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor.clone()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + mmap.PAGESIZE + pages):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
    offset = mmap.PAGESIZE + (0 if front else pages - size)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


@dataclass
class _Edges:
    """Which edge is guarded now, the order of programs, what fills workspaces, and the regions in use."""

    front: bool = False
    backwards: bool = False
    fill: int = 0
    held: dict[str, Tensor] = field(default_factory=dict)


_edges = _Edges()


def _launch_anywhere(self: Variant, function: Any, constants: dict[str, Any]) -> Callable[..., None]:
    """A launcher that takes addresses as they are: at an edge, memory that torch would align is not aligned."""
    return lambda grid, *arguments: function[grid](*arguments, **constants)


def guard() -> None:
    """From now on, every region of a workspace and every output lies at an edge, programs run in either order, and
    those that race are noticed."""
    races.watch()
    Variant._interpreted = _launch_anywhere  # type: ignore[method-assign]
    allocate_regions, allocate_outputs = Regions.allocate, Plan.allocate

    def allocate(self: Regions, device: torch.device) -> Tensor:
        _edges.held = {}
        return allocate_regions(self, device)

    def tensor(self: Regions, workspace: Tensor, name: str) -> Tensor:
        if name not in _edges.held:
            dtype, count = self._regions[name]
            empty = torch.full((count * dtype.itemsize,), _edges.fill, dtype=torch.uint8).view(dtype)
            _edges.held[name] = at_the_edge(empty, _edges.front)
        return _edges.held[name]

    def outputs(self: Plan, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        found = tuple(at_the_edge(tensor, _edges.front) for tensor in allocate_outputs(self, arguments))
        for tensor in found:
            poison(tensor)
        return found

    begin = InterpreterBuilder.set_grid_idx

    def begin_in_order(self: Any, *program: int) -> None:
        if _edges.backwards:
            program = tuple(size - 1 - index for size, index in zip(self.grid_dim, program, strict=True))
        begin(self, *program)

    InterpreterBuilder.set_grid_idx = begin_in_order
    Regions.allocate, Regions.tensor, Plan.allocate = allocate, tensor, outputs  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------- layouts


def _edge(tensor: Tensor) -> Tensor:
    return at_the_edge(tensor, _edges.front)


def _transposed(tensor: Tensor) -> Tensor:
    """The same values, the first axis the fastest."""
    axes = list(range(tensor.dim()))[::-1]
    return _edge(tensor.permute(axes)).permute(axes)


def _swapped(tensor: Tensor) -> Tensor:
    """The same values, the first two axes laid the other way round."""
    return _edge(tensor.transpose(0, 1)).transpose(0, 1)


def _every_other(tensor: Tensor) -> Tensor:
    return _edge(torch.stack((tensor, -tensor - 1), -1))[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": _edge, "transposed": _transposed, "swapped": _swapped, "every other": _every_other
}  # fmt: skip

# ---------------------------------------------------------------------------------------------- calls

Call = Callable[[str], tuple[Tensor, ...]]


def _outcome(call: Call, backend: str) -> tuple[Tensor, ...] | str:
    try:
        return call(backend)
    except adjoint.ArgumentError as error:
        return str(error)


def surround(number: int) -> None:
    """Chooses, by a number, which edge is guarded, the order of programs, and what fills workspaces."""
    _edges.front, _edges.backwards, _edges.fill = number % 2 == 1, number % 4 < 2, (0, 0xFF, 0x7F)[number % 3]


def differs(call: Call, number: int) -> bool:
    """Whether the kernels give other bits, or another error, than the eager path. The number says which edge."""
    expected = _outcome(call, "eager")
    surround(number)
    got = _outcome(call, "triton")
    if isinstance(got, str) or isinstance(expected, str):
        return got != expected
    return not (len(got) == len(expected) and all(map(same_bits, got, expected)))


# ------------------------------------------------------------------------------------- small programs


def rewrite(module: ModuleType, source: str, changes: dict[str, str]) -> str:
    """A module's source with constants changed, each found exactly once."""
    for before, after in changes.items():
        source, found = re.subn(rf"(?m)^{re.escape(before)}$", after, source)
        assert found == 1, f"{module.__name__}: {found} lines {before!r}"
    return source


def small_schedules(sizes: dict[str, int]) -> None:
    """From now on, schedules have small sizes, by the last words of their names; sorting has its own."""
    named = Schedules.named

    def small(self: Schedules, kernel: str, name: str) -> dict[str, int]:
        if kernel in SMALL_GROUPING:
            return SMALL_GROUPING[kernel]
        return {parameter: sizes[parameter.rpartition("_")[2]] for parameter in named(self, kernel, name)}

    Schedules.named = small  # type: ignore[method-assign]


SMALL_GROUPING = {
    "grouping": {
        "small_block": 8, "block": 16, "small_count": 19, "few_count": 40, "chunk": 2, "clearing_programs": 2,
        "num_warps": 4,
    },
    "group_sum_counts": {"width": 4, "chunk": 2, "shares": 2, "num_warps": 4},
}  # fmt: skip


def small_digits() -> None:
    """From now on, a pass of a sort takes 3 bits; the kernels of `adjoint.device.grouping` must be loaded again."""
    vars(grouping)["DIGIT"] = 3


def differs_alone(backward: Bound, gradients: tuple[Tensor, ...]) -> bool:
    """Whether a gradient that is asked for alone has other bits than among all."""
    *rest, need = backward.arguments
    operator = backward.plan.operator
    for bit, gradient in enumerate(gradients):
        if need >> bit & 1:
            arguments = (*rest, 1 << bit)
            plan = select(operator, operator.describe(*arguments), backward.plan.preference)
            if not same_bits(Bound(plan, arguments).run()[bit], gradient):
                return True
    return False
