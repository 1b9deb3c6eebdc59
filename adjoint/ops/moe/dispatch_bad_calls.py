"""Calls of dispatch and combine that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.moe.combine import combine
from adjoint.ops.moe.dispatch import dispatch
from adjoint.ops.moe.layout import Layout

META = torch.device("meta")


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (3, 4), device=device)


def _indices(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values or (0, 1, 4, 1, 2, 2), device=device).view(3, 2)


def _laid_out(device: torch.device) -> tuple[Tensor, Tensor, Layout]:
    """Rows, weights and their layout."""
    rows, layout = dispatch(_x(device), _indices(device), 5)
    return rows, torch.ones(3, 2, device=device), layout


def _read(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the operators read of a layout."""
    layout = _laid_out(device)[2]
    return layout.inverse, layout.offsets


def _combine(
    change: Callable[[Tensor, Tensor, Layout], tuple[Any, Any, Any]], **options: Any
) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        combine(*change(*_laid_out(device)), **options)
        adjoint.check()

    return call


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A dispatch of 600 entries, all right but one."""

    def call(device: torch.device) -> None:
        indices = torch.arange(600, device=device).remainder(5).to(dtype)
        indices[position] = value
        dispatch(_x(device, 300, 4), indices.view(300, 2), 5)
        adjoint.check()

    return call


def _named_twice(rows: Tensor, weights: Tensor, layout: Layout) -> None:
    with adjoint.checked():
        combine(rows, weights, layout._replace(inverse=layout.inverse.clamp_min(1)))


def _second_derivative(device: torch.device, through: Callable[[Tensor], Tensor]) -> None:
    x = _x(device).requires_grad_()
    (gradient,) = torch.autograd.grad(through(x).sum(), x, create_graph=True)
    gradient.sum().backward()


def _there_and_back(x: Tensor) -> Tensor:
    _, layout = dispatch(x.detach(), _indices(x.device), 5)
    return combine(x.repeat(2, 1), None, layout)


DISPATCHES = (
    BadCall(
        "integer x", lambda d: dispatch(_x(d).long(), _indices(d), 5), ArgumentError, ("moe.dispatch", "x", "int64")
    ),
    BadCall("float indices", lambda d: dispatch(_x(d), _indices(d).float(), 5), ArgumentError, ("indices", "float32")),
    BadCall("indices elsewhere", lambda d: dispatch(_x(d), _indices(META), 5), ArgumentError, ("indices", "x", "meta")),
    BadCall(
        "indices of other tokens",
        lambda d: dispatch(_x(d, 4, 4), _indices(d), 5),
        ArgumentError,
        ("x and indices", "(4, 4)", "(3, 2)"),
    ),
    BadCall(
        "indices without slots",
        lambda d: dispatch(_x(d), _indices(d)[:, 0], 5),
        ArgumentError,
        ("indices", "(3,)"),
    ),
    BadCall(
        "x without axes", lambda d: dispatch(torch.zeros((), device=d), _indices(d), 5), ArgumentError, ("x", "()")
    ),
    BadCall("no experts", lambda d: dispatch(_x(d), _indices(d), 0), ArgumentError, ("num_experts", "at least 1", "0")),
    BadCall(
        "a boolean number of experts",
        lambda d: dispatch(_x(d), _indices(d), True),
        ArgumentError,
        ("num_experts", "True"),
    ),
    BadCall(
        "a number of experts that is none",
        lambda d: dispatch(_x(d), _indices(d), 5.0),  # type: ignore[arg-type]
        ArgumentError,
        ("num_experts", "5.0"),
    ),
    BadCall(
        "the first index too large", _with_index(0, 5), ArgumentError, ("moe.dispatch: indices", "got 5 at position 0 ")
    ),
    BadCall("the last index too large", _with_index(-1, 7, torch.int32), ArgumentError, ("got 7 at position 599 ",)),
    BadCall("a negative index", _with_index(301, -1), ArgumentError, ("got -1 at position 301 ",)),
    BadCall(
        "an index that is an expert modulo 2^32",
        _with_index(42, 2**32 + 1),
        ArgumentError,
        ("got 4294967297 at position 42 ",),
    ),
    BadCall(
        "no workspace allowed",
        lambda d: dispatch(_x(d), _indices(d), 5, preference=adjoint.Preference(max_workspace_bytes=0)),
        Unsupported,
        ("moe_dispatch", "triton", "eager", "the preference allows 0"),
    ),
    BadCall(
        "create_graph=True through dispatch",
        lambda d: _second_derivative(d, lambda x: dispatch(x, _indices(d), 5)[0]),
        Unsupported,
        ("moe.dispatch", "second derivative"),
    ),
    BadCall(
        "vmap over dispatch",
        lambda d: torch.func.vmap(lambda x: dispatch(x, _indices(d), 5)[0])(_x(d, 2, 3, 4)),
        Unsupported,
        ("moe_dispatch", "vmap"),
    ),
    BadCall(
        "drows of the wrong shape, to the operator",
        lambda d: torch.ops.adjoint.moe_dispatch_backward(_x(d, 5, 4), *_read(d), ""),
        ArgumentError,
        ("drows", "6 entries", "5 rows"),
    ),
)

COMBINES = (
    BadCall(
        "rows with one axis",
        _combine(lambda rows, weights, layout: (rows[:, 0], weights, layout)),
        ArgumentError,
        ("moe.combine", "rows", "(6,)"),
    ),
    BadCall(
        "too few rows",
        _combine(lambda rows, weights, layout: (rows[:5], weights, layout)),
        ArgumentError,
        ("rows", "6 entries", "5 rows"),
    ),
    BadCall(
        "integer rows",
        _combine(lambda rows, weights, layout: (rows.long(), weights, layout)),
        ArgumentError,
        ("rows", "int64"),
    ),
    BadCall(
        "weights of the wrong shape",
        _combine(lambda rows, weights, layout: (rows, weights.T, layout)),
        ArgumentError,
        ("weights", "(3, 2)", "(2, 3)"),
    ),
    BadCall(
        "weights of the wrong dtype",
        _combine(lambda rows, weights, layout: (rows, weights.half(), layout)),
        ArgumentError,
        ("weights", "float32", "float16"),
    ),
    BadCall(
        "integer weights",
        _combine(lambda rows, weights, layout: (rows, weights.long(), layout)),
        ArgumentError,
        ("weights", "int64"),
    ),
    BadCall(
        "weights elsewhere",
        _combine(lambda rows, weights, layout: (rows, weights.to(META), layout)),
        ArgumentError,
        ("weights", "meta"),
    ),
    BadCall(
        "a layout that is a tensor",
        _combine(lambda rows, weights, layout: (rows, weights, layout.inverse)),
        ArgumentError,
        ("layout", "Layout", "Tensor"),
    ),
    BadCall(
        "a layout in 64 bits",
        _combine(lambda rows, weights, layout: (rows, weights, Layout(*(t.long() for t in layout)))),
        ArgumentError,
        ("layout.inverse", "int32", "int64"),
    ),
    BadCall(
        "a layout without offsets",
        _combine(lambda rows, weights, layout: (rows, weights, layout._replace(offsets=layout.offsets[:0]))),
        ArgumentError,
        ("layout.offsets", "(0,)"),
    ),
    BadCall(
        "a layout that names a row past the end",
        _combine(lambda rows, weights, layout: (rows, weights, layout._replace(inverse=layout.inverse + 1))),
        ArgumentError,
        ("moe.combine: layout.inverse", "got 6 at position 2 "),
    ),
    BadCall(
        "a layout that names a row before the beginning",
        _combine(lambda rows, weights, layout: (rows, weights, layout._replace(inverse=layout.inverse - 1))),
        ArgumentError,
        ("layout.inverse", "got -1 at position 0 "),
    ),
    BadCall(
        "a layout that names a row twice",
        lambda d: _named_twice(*_laid_out(d)),
        ArgumentError,
        ("layout.inverse", "row 1 more than once"),
    ),
    BadCall(
        "create_graph=True through combine",
        lambda d: _second_derivative(d, _there_and_back),
        Unsupported,
        ("moe.combine", "second derivative"),
    ),
    BadCall(
        "dy of the wrong shape, to the operator",
        lambda d: torch.ops.adjoint.moe_combine_backward(_x(d, 2, 4), None, None, *_read(d), 1, ""),
        ArgumentError,
        ("dy", "(3,)", "(2, 4)"),
    ),
    BadCall(
        "no rows for the gradient of weights, to the operator",
        lambda d: torch.ops.adjoint.moe_combine_backward(_x(d), None, None, *_read(d), 2, ""),
        ArgumentError,
        ("weights", "rows"),
    ),
)

BAD_CALLS = (*DISPATCHES, *COMBINES)
