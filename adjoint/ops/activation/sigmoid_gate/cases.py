"""What `sigmoid_gate` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Special, Subject
from adjoint.contract.forms import reuse_inputs
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.activation import reference
from adjoint.ops.activation.sigmoid_gate import sigmoid_gate
from adjoint.ops.activation.values import (
    CPU_WORKLOADS,
    LAYOUTS,
    WORKLOAD_SHAPES,
    built_tensors,
    cases,
    exhaustive,
    huge_up,
    mixed_strides,
    workload,
)

_SPECIALS = tuple(
    Special(f"x = {x}, gate = {gate}, dy = {dy}", (x, gate), dy, (y,), (dx, dgate))
    for x, gate, dy, y, dx, dgate in [
        (2.0, 0.0, 3.0, 1.0, 1.5, 1.5),
        (-2.0, -0.0, 3.0, -1.0, 1.5, -1.5),
        (-0.0, 1.0, 1.0, -0.0, None, -0.0),
        (3.0, inf, 2.0, 3.0, 2.0, 0.0),
        (3.0, -inf, 2.0, 0.0, 0.0, 0.0),
        (-3.0, -inf, 2.0, -0.0, 0.0, -0.0),
        (inf, 0.0, 1.0, inf, 0.5, inf),
        (inf, -inf, 1.0, nan, 0.0, nan),
        (1.0, 0.0, -inf, 0.5, -inf, -inf),
        (nan, 0.0, 1.0, nan, 0.5, nan),
        (1.0, nan, 1.0, nan, nan, nan),
        (1.0, 1.0, nan, None, nan, nan),
    ]
)

_forward, _backward = reference.sigmoid_gate, reference.sigmoid_gate_backward


def _cancelled(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients with 1 − σ for a σ that was rounded to the storage type, as autograd computes them."""
    sigmoid = reference.sigmoid(gate)
    rounded = sigmoid.bfloat16().to(sigmoid.dtype)
    return dy * sigmoid, dy * x * sigmoid * (1 - rounded)


_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(_forward, _backward),
    "x and gate exchanged": answers(lambda x, gate: _forward(gate, x), lambda dy, x, gate: _backward(dy, gate, x)),
    "gradients exchanged": answers(_forward, lambda dy, x, gate: _backward(dy, x, gate)[::-1]),
    "silu instead of sigmoid": answers(reference.swiglu, lambda dy, x, gate: _backward(dy, x, gate)),
    "slope without 1 − σ": answers(_forward, lambda dy, x, gate: (_backward(dy, x, gate)[0], dy * _forward(x, gate))),
    "slope of a rounded σ": answers(_forward, _cancelled),
    "dgate without x": answers(_forward, lambda dy, x, gate: _backward(dy, torch.ones_like(x), gate)),
}


def _exchanged(make: Any) -> Any:
    """A case of a gate and its factor, in the order of this op's arguments."""
    return lambda *where: make(*where)[::-1]


SIGMOID_GATE = Subject(
    name="sigmoid_gate",
    function=sigmoid_gate,
    inputs=("x", "gate"),
    reference=lambda x, gate: (_forward(x, gate),),
    reference_backward=_backward,
    cases=(
        *cases(LAYOUTS, 2),
        Case("mixed strides", mixed_strides),
        Case("huge x", _exchanged(huge_up)),
        Case("huge x, gates above 0", lambda *where: (huge_up(*where)[1], -huge_up(*where)[0])),
    ),
    exhaustive=exhaustive(lambda gate, factor: (factor, gate)),
    mistakes=_MISTAKES,
    specials=_SPECIALS,
    plans=("eager",),
    forms=(reuse_inputs("x", "gate"),),
)

SUBJECTS = (SIGMOID_GATE,)


def _zeros(device: torch.device, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.zeros(shape, device=device)


def _run_second_backward(device: torch.device) -> None:
    x, gate = (_zeros(device).requires_grad_() for _ in range(2))
    y = sigmoid_gate(x * 1, gate * 1, reuse_inputs=True).sum()
    y.backward(retain_graph=True)
    y.backward()


def _reuse_overlapping(device: torch.device) -> Tensor:
    x, gate = _zeros(device).requires_grad_(), _zeros(device, (4, 1)).requires_grad_()
    return sigmoid_gate(x, gate.expand(4, 6), reuse_inputs=True)


def _reuse_twice(device: torch.device) -> Tensor:
    x = _zeros(device).requires_grad_() * 1
    return sigmoid_gate(x, x, reuse_inputs=True)


BAD_CALLS = (
    BadCall("shapes differ", lambda d: sigmoid_gate(_zeros(d), _zeros(d, (4, 5))), "gate", "(4, 6)", "(4, 5)"),
    BadCall("a gate to broadcast", lambda d: sigmoid_gate(_zeros(d), _zeros(d, (4, 1))), "gate", "(4, 6)", "(4, 1)"),
    BadCall("dtypes differ", lambda d: sigmoid_gate(_zeros(d), _zeros(d).half()), "gate", "float32", "float16"),
    BadCall("a second backward over reused memory", _run_second_backward, "reuse_inputs", error=Unsupported),
    BadCall("reuse of overlapping memory", _reuse_overlapping, "reuse_inputs", "gate", "overlap"),
    BadCall("reuse of one tensor twice", _reuse_twice, "reuse_inputs", "x and gate", "overlap"),
    BadCall(
        "reuse_inputs that is text",
        lambda d: sigmoid_gate(_zeros(d), _zeros(d), reuse_inputs="no"),  # type: ignore[arg-type]
        *("reuse_inputs", "True or False", "'no'"),
    ),
)


def _torch_sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """The op as users write it in torch."""
    return x * torch.sigmoid(gate)


WORKLOADS = (
    *(workload(SIGMOID_GATE, shape, _torch_sigmoid_gate) for shape in WORKLOAD_SHAPES),
    *(workload(SIGMOID_GATE, baseline=_torch_sigmoid_gate, **details) for details in CPU_WORKLOADS),
)


def built_calls() -> Iterator[Call]:
    """Calls in both layouts and every dtype."""
    return (bind(sigmoid_gate, *tensors) for tensors in built_tensors(2))
