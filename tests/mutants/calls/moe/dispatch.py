"""Calls whose bits must be those of the eager path: what mutants of layout, dispatch and combine are tried on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.combine import combine_tensors
from adjoint.ops.moe.layout import allocate
from adjoint.ops.moe.layout.eager import write as write_layout
from adjoint.ops.moe.token_rows.eager import scatter
from tests.mutants.calls.edges import LAYOUTS, Call

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def _values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _indices(experts: int, *shape: int, hot: bool = False, **wrong: int) -> Tensor:
    generator = torch.Generator().manual_seed(experts + len(shape))
    indices = torch.randint(experts, shape, generator=generator)
    if hot:
        indices[torch.rand(shape, generator=generator) < 0.6] = experts // 2
    for place, value in wrong.items():
        indices.view(-1)[int(place[1:])] = value
    return indices


@dataclass(frozen=True)
class Dispatched:
    """A dispatch and its gradient; of wrong indices, what is written besides the error."""

    indices: Tensor
    experts: int
    columns: int
    dtype: torch.dtype = SINGLE
    layouts: tuple[str, str, str] = ("", "", "")
    """Of x, indices and drows."""

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        lay = [LAYOUTS[name] for name in self.layouts]
        x = lay[0](_values(1, self.dtype, *self.indices.shape[:-1], self.columns))
        indices = lay[1](self.indices)
        if bool(((self.indices < 0) | (self.indices >= self.experts)).any()):
            return self._wrong(backend, x, indices)
        x.requires_grad_()
        rows, layout = moe.dispatch(x, indices, self.experts, preference=Preference(backend=backend))
        (dx,) = torch.autograd.grad(rows, x, lay[2](_values(2, self.dtype, *rows.shape)))
        return rows.detach(), *layout, dx

    def _wrong(self, backend: str, x: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
        message = ""
        if backend == "eager":
            layout = allocate(indices, self.experts)
            write_layout(indices, self.experts, layout, None)
            rows = x.new_empty(indices.numel(), self.columns)
            scatter(x, None, layout.inverse, layout.offsets, rows)
            outputs: tuple[Tensor, ...] = (rows, *layout)
            try:
                moe.dispatch(x, indices, self.experts, preference=Preference(backend="eager"))
            except adjoint.ArgumentError as error:
                message = str(error)
        else:
            plan = adjoint.plan(moe.dispatch, x, indices, self.experts, preference=Preference(backend=backend))
            arguments = (x, indices, self.experts)
            outputs = plan.allocate(arguments)
            try:
                plan.execute(arguments, outputs, None)
            except adjoint.ArgumentError as error:
                message = str(error)
        return torch.tensor(list(message.encode()), dtype=torch.int32), *outputs


@dataclass(frozen=True)
class Combined:
    """A combine and its gradients, of a layout in which some entries may have no expert, or no row at all."""

    indices: Tensor
    experts: int
    columns: int
    dtype: torch.dtype = SINGLE
    weights: torch.dtype | None = SINGLE
    layouts: tuple[str, str, str] = ("", "", "")
    """Of rows, weights (and the layout) and dy."""
    broken: tuple[tuple[int, int], ...] = ()
    zeros: bool = False

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        lay = [LAYOUTS[name] for name in self.layouts]
        layout = allocate(self.indices, self.experts)
        write_layout(self.indices, self.experts, layout, None)
        inverse = layout.inverse.clone()
        for place, row in self.broken:
            inverse.view(-1)[place] = row
        rows = _values(1, self.dtype, self.indices.numel(), self.columns)
        rows[int(layout.offsets[-1]) :] = torch.nan
        rows = lay[0](torch.zeros_like(rows).neg() if self.zeros else rows).requires_grad_()
        weights: Any = None
        if self.weights is not None:
            weights = lay[1](_values(3, self.weights, *self.indices.shape)).requires_grad_()
        preference = Preference(backend=backend)
        offsets = lay[1](layout.offsets) if self.layouts[1] != "transposed" else layout.offsets
        y = combine_tensors(rows, weights, lay[1](inverse), offsets, preference=preference)
        inputs = (rows,) if weights is None else (rows, weights)
        return y.detach(), *torch.autograd.grad(y, inputs, lay[2](_values(2, self.dtype, *y.shape)))


@dataclass(frozen=True)
class Astray:
    """The gradients of a combine whose layout names rows that are not there, and whose last offset may be past them."""

    rows: tuple[tuple[int, int], ...]
    further: int = 0

    def __call__(self, backend: str) -> tuple[Tensor, ...]:
        indices = _indices(5, 6, 2)
        layout = allocate(indices, 5)
        write_layout(indices, 5, layout, None)
        inverse = layout.inverse.clone()
        for place, row in self.rows:
            inverse.view(-1)[place] = row
        named = torch.zeros(12, dtype=torch.bool)
        named[inverse[(inverse >= 0) & (inverse < 12)].long()] = True
        dy, rows, weights = (
            LAYOUTS[""](_values(seed, SINGLE, *shape)) for seed, shape in enumerate(((6, 3), (12, 3), (6, 2)))
        )
        places = (LAYOUTS[""](inverse), LAYOUTS[""](layout.offsets + self.further))
        text = Preference(backend=backend).text
        drows, dweights = torch.ops.adjoint.moe_combine_backward(dy, rows, weights, *places, 3, text)
        dx = torch.ops.adjoint.moe_dispatch_backward(rows, *places, text)
        return drows[named], dweights, dx


def calls() -> Iterator[Call]:
    """Likely deaths first."""
    many = _indices(5, 22, 2, hot=True)
    unknown = _indices(5, 9, 3, hot=True, p0=5, p10=-1, p26=9)
    yield Dispatched(many, 5, 3)
    yield Combined(unknown, 5, 19)
    yield Dispatched(_indices(5, 22, 2, hot=True, p1=5, p17=-1, p40=2**32 + 1, p43=7), 5, 3)
    yield Combined(unknown, 5, 260, HALF)
    yield Dispatched(_indices(5, 4, 3, 2), 5, 19, HALF, ("transposed", "transposed", "transposed"))
    yield Combined(_indices(5, 4, 3, 2), 5, 19, SINGLE, SINGLE, ("transposed", "every other", "transposed"))
    yield Combined(unknown, 5, 3, weights=None)
    yield Combined(unknown, 5, 3, HALF, HALF, zeros=True)
    yield Combined(_indices(5, 4, 3), 5, 3, broken=((3, 12), (7, 13)))
    yield Combined(_indices(5, 30, 1), 5, 3, broken=((0, -1), (29, -(2**31))))
    yield Astray(((3, 12), (7, -1)))
    yield Astray(((3, 12), (4, 13), (7, -3)), further=4)
    yield Astray(((3, 12),), further=-40)
    yield Dispatched(_indices(5, 3, 2).int(), 5, 48)
    yield Dispatched(_indices(16, 66, 1), 16, 2)
    yield Dispatched(_indices(9, 16, 2), 9, 1, DOUBLE)
    yield Combined(_indices(3, 3, 3), 3, 520, DOUBLE, DOUBLE)
    yield Combined(_indices(3, 7, 5), 3, 17, DOUBLE, SINGLE)
    yield Dispatched(_indices(5, 2, 3, 2), 5, 20, SINGLE, ("swapped", "every other", "every other"))
    yield Combined(_indices(5, 2, 3, 2), 5, 20, SINGLE, SINGLE, ("every other", "", "swapped"))
    yield Dispatched(_indices(1, 40, 1), 1, 3)
    yield Dispatched(_indices(5, 0, 2), 5, 3)
    yield Dispatched(_indices(5, 3, 0), 5, 3)
    yield Dispatched(torch.full((20, 2), 4), 5, 3)
    yield Dispatched(torch.full((20, 2), 7), 5, 3)
    yield Combined(torch.full((4, 2), 7), 5, 3)
    yield Combined(_indices(1, 1, 1), 1, 1)
    for count in (15, 16, 17, 32):
        yield Dispatched(_indices(7, count, 1), 7, 1)
        yield Dispatched(_indices(7, count, 1, p0=7, p14=-3), 7, 1)


def shrink() -> None:
    """Spans of 16 entries, programs of a few elements."""
    named = Schedules.named
    sizes = {"block": 32, "elements": 128, "entries": 4, "warps": 4, "chunk": 64, "span": 16}

    def small(self: Schedules, kernel: str, name: str) -> dict[str, int]:
        schedule = named(self, kernel, name)
        if not kernel.startswith("moe_"):
            return schedule
        return {parameter: sizes[parameter.rpartition("_")[2]] for parameter in schedule}

    Schedules.named = small  # type: ignore[method-assign]
