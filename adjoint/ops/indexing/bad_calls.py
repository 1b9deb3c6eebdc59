"""Calls of take_along_axis that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.indexing.take_along_axis import take_along_axis

LINES, LENGTH = 3, 6
META = torch.device("meta")


def _x(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (LINES, LENGTH), device=device)


def _indices(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (LINES, 2), dtype=torch.int64, device=device)


def _take(device: torch.device, **options: Any) -> Tensor:
    return take_along_axis(_x(device), _indices(device), **options)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """300 indices in 100 lines, all right but one; the gradient is asked for as well."""

    def call(device: torch.device) -> None:
        indices = torch.arange(300, device=device).remainder(2 * LENGTH).sub(LENGTH).to(dtype)
        indices[position] = value
        x = _x(device, 100, LENGTH).requires_grad_()
        take_along_axis(x, indices.view(100, 3)).sum().backward()
        adjoint.check()

    return call


def _out_of_range_of_broadcast_indices(device: torch.device) -> None:
    indices = _indices(device, 1, 4)
    indices[0, 2] = LENGTH
    take_along_axis(_x(device), indices)
    adjoint.check()


def _broken_promise(*line: int) -> Callable[[torch.device], None]:
    """A line that has an index twice, after one that has not."""

    def call(device: torch.device) -> None:
        indices = torch.tensor([list(range(len(line))), line], device=device)
        with adjoint.checked():
            take_along_axis(_x(device, 2, LENGTH), indices, distinct=True)

    return call


def _second_derivative(device: torch.device) -> None:
    x = _x(device).requires_grad_()
    (dx,) = torch.autograd.grad(take_along_axis(x, _indices(device)).sum(), x, create_graph=True)
    dx.sum().backward()


def _forward_mode(device: torch.device) -> None:
    with forward_ad.dual_level():
        take_along_axis(forward_ad.make_dual(_x(device), _x(device)), _indices(device))


def _without_workspace(device: torch.device) -> None:
    x, indices = _x(device).requires_grad_(), _indices(device, LINES, 300)
    take_along_axis(x, indices, preference=adjoint.Preference(max_workspace_bytes=0)).sum().backward()


def _operator(dout: Tensor, indices: Tensor, distinct: bool = False) -> Tensor:
    return torch.ops.adjoint.take_along_axis_backward(dout, indices, [LINES, LENGTH], 1, distinct, "")


def _plan(device: torch.device, **options: Any) -> adjoint.Plan:
    return adjoint.plan(take_along_axis, _x(device), _indices(device), **options)


def _adjoint(device: torch.device, **options: Any) -> adjoint.Plan:
    plan = _plan(device, **options).adjoint
    assert plan is not None
    return plan


METADATA = (
    BadCall(
        "float indices",
        lambda d: take_along_axis(_x(d), _indices(d).float()),
        ArgumentError,
        ("take_along_axis: indices", "int64", "float32"),
    ),
    BadCall(
        "boolean indices",
        lambda d: take_along_axis(_x(d), _indices(d).bool()),
        ArgumentError,
        ("indices", "int64", "bool"),
    ),
    BadCall(
        "narrow indices",
        lambda d: take_along_axis(_x(d), _indices(d).short()),
        ArgumentError,
        ("indices", "int16", ".long()"),
    ),
    BadCall(
        "indices that are a list",
        lambda d: take_along_axis(_x(d), [[0], [0], [0]]),  # type: ignore[arg-type]
        ArgumentError,
        ("indices", "tensor", "list"),
    ),
    BadCall(
        "indices elsewhere", lambda d: take_along_axis(_x(d), _indices(META)), ArgumentError, ("indices", "x", "meta")
    ),
    BadCall("integer x", lambda d: take_along_axis(_x(d).long(), _indices(d)), ArgumentError, ("x must be", "int64")),
    BadCall(
        "sparse x",
        lambda d: take_along_axis(_x(d).to_sparse(), _indices(d)),
        ArgumentError,
        ("x must be", "dense", "sparse"),
    ),
    BadCall(
        "fewer axes",
        lambda d: take_along_axis(_x(d), _indices(d, 2)),
        ArgumentError,
        ("indices", "as many axes", "(3, 6)", "(2,)"),
    ),
    BadCall("no axes", lambda d: take_along_axis(_x(d)[0, 0], _indices(d)[0, 0]), ArgumentError, ("at least one",)),
    BadCall(
        "sizes that do not broadcast",
        lambda d: take_along_axis(_x(d), _indices(d, 2, 2)),
        ArgumentError,
        ("axis -1", "(2, 2)", "(3, 6)"),
    ),
    BadCall("axis past the last", lambda d: _take(d, axis=2), ArgumentError, ("axis", "-2 to 1", "got 2")),
    BadCall("axis before the first", lambda d: _take(d, axis=-3), ArgumentError, ("axis", "got -3")),
    BadCall("no axis", lambda d: _take(d, axis=None), ArgumentError, ("axis", "integer", "None", "flatten")),
    BadCall("boolean axis", lambda d: _take(d, axis=True), ArgumentError, ("axis", "integer", "True")),
    BadCall("distinct that is a number", lambda d: _take(d, distinct=1), ArgumentError, ("distinct", "True or False")),
    BadCall(
        "more distinct indices than elements",
        lambda d: take_along_axis(_x(d), _indices(d, LINES, 7), distinct=True),
        ArgumentError,
        ("distinct", "6 elements", "7 indices"),
    ),
    BadCall(
        "more distinct indices than elements, along another axis",
        lambda d: take_along_axis(_x(d), _indices(d, 4, LENGTH), 0, distinct=True),
        ArgumentError,
        ("distinct", "3 elements", "4 indices"),
    ),
    BadCall(
        "unknown out_of_range",
        lambda d: _take(d, out_of_range="clamp"),
        ArgumentError,
        ("out_of_range", "'raise'", "'zero'", "'clamp'"),
    ),
    BadCall(
        "a preference of another type",
        lambda d: _take(d, preference="eager"),
        ArgumentError,
        ("preference=", "adjoint.Preference", "str"),
    ),
    BadCall(
        "no workspace allowed",
        _without_workspace,
        Unsupported,
        ("take_along_axis", "triton", "eager", "the preference allows 0"),
    ),
)

VALUES = (
    BadCall(
        "the first index too large",
        _with_index(0, LENGTH),
        ArgumentError,
        ("take_along_axis: indices", "got 6 at position 0 ", '"zero"'),
    ),
    BadCall("an index in the middle too large", _with_index(150, 1000), ArgumentError, ("got 1000 at position 150 ",)),
    BadCall("the last index too large", _with_index(-1, 6, torch.int32), ArgumentError, ("got 6 at position 299 ",)),
    BadCall("an index before the first", _with_index(3, -7), ArgumentError, ("got -7 at position 3 ",)),
    BadCall(
        "an index before the first, in 32 bits",
        _with_index(3, -7, torch.int32),
        ArgumentError,
        ("got -7 at position 3 ",),
    ),
    BadCall(
        "an index that is right modulo 2^32",
        _with_index(257, 2**32 + 2),
        ArgumentError,
        ("got 4294967298 at position 257 ",),
    ),
    BadCall("an index past 2^31", _with_index(9, 2**31), ArgumentError, ("got 2147483648 at position 9 ",)),
    BadCall(
        "the smallest index there is", _with_index(40, -(2**63)), ArgumentError, (f"got {-(2**63)} at position 40 ",)
    ),
    BadCall(
        "an index out of range, of indices that are broadcast",
        _out_of_range_of_broadcast_indices,
        ArgumentError,
        ("got 6 at position 2 ",),
    ),
    BadCall(
        "a promise that is broken",
        _broken_promise(4, 0, 4),
        ArgumentError,
        ("distinct=True", "4 at position 5 ", "leave distinct out"),
    ),
    BadCall("a promise that is broken from the end", _broken_promise(1, 5, -1), ArgumentError, ("-1 at position 5 ",)),
)

GRADIENTS = (
    BadCall(
        "dout of the wrong shape, to the operator",
        lambda d: _operator(_x(d, LINES, 3), _indices(d)),
        ArgumentError,
        ("dout", "(3, 2)", "(3, 3)"),
    ),
    BadCall(
        "a promise that cannot be kept, to the operator",
        lambda d: _operator(_x(d, LINES, 7), _indices(d, LINES, 7), True),
        ArgumentError,
        ("distinct", "6 elements", "(3, 7)"),
    ),
    BadCall(
        "dout of the wrong shape, to the plan",
        lambda d: _adjoint(d).run(_x(d, 4, 2), _indices(d)),
        ArgumentError,
        ("dout", "(3, 2)", "(4, 2)"),
    ),
    BadCall(
        "dout of another dtype than the plan's",
        lambda d: _adjoint(d).run(_x(d, 3, 2).half(), _indices(d)),
        Unsupported,
        ("not made for", "float16", "float32"),
    ),
    BadCall(
        "out= of the wrong shape",
        lambda d: _plan(d).run(_x(d), _indices(d), out=_x(d, 3, 5)),
        ArgumentError,
        ("out=", "(3, 2)", "(3, 5)"),
    ),
    BadCall(
        "out= of the wrong shape, to the adjoint",
        lambda d: _adjoint(d).run(_x(d, 3, 2), _indices(d), out=_x(d, 5, 4)),
        ArgumentError,
        ("out=", "dx", "(3, 6)", "(5, 4)"),
    ),
    BadCall("create_graph=True", _second_derivative, Unsupported, ("take_along_axis", "second derivative")),
    BadCall(
        "vmap over lines",
        lambda d: torch.func.vmap(lambda x, i: take_along_axis(x, i))(_x(d), _indices(d)),
        Unsupported,
        ("take_along_axis", "vmap"),
    ),
    BadCall("a forward-mode gradient", _forward_mode, Unsupported, ("take_along_axis", "forward-mode")),
    BadCall(
        "a jvp",
        lambda d: torch.func.jvp(lambda x: take_along_axis(x, _indices(d)), (_x(d),), (_x(d),)),
        Unsupported,
        ("take_along_axis", "torch.func"),
    ),
)

BAD_CALLS = (*METADATA, *VALUES, *GRADIENTS)
