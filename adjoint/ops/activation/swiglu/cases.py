"""What `swiglu` is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall, Case, Special, Subject
from adjoint.contract.forms import reuse_inputs
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.activation import reference
from adjoint.ops.activation.packing import ORDERS, unpack
from adjoint.ops.activation.swiglu import swiglu
from adjoint.ops.activation.values import (
    CPU_WORKLOADS,
    LAYOUTS,
    PACKED_LAYOUTS,
    WORKLOAD_SHAPES,
    built_tensors,
    cases,
    exhaustive,
    huge_up,
    mixed_strides,
    workload,
)

_SPECIALS = tuple(
    Special(f"gate = {gate}, up = {up}", (gate, up), 1.0, (y,), (dgate, dup))
    for gate, up, y, dgate, dup in [
        (0.0, 2.0, 0.0, 1.0, 0.0),
        (-0.0, 2.0, -0.0, 1.0, -0.0),
        (-0.0, -2.0, 0.0, -1.0, -0.0),
        (0.0, inf, nan, inf, 0.0),
        (nan, 2.0, nan, nan, nan),
    ]
) + tuple(
    Special(f"gate = {gate}, up = {up}", (gate, up), 1.0, (y,), (dgate, dup), of_plans={"eager.float32": as_torch})
    for gate, up, y, dgate, dup, as_torch in [
        (inf, 2.0, inf, 2.0, inf, ((inf,), (nan, inf))),
        (inf, 0.0, nan, 0.0, inf, ((nan,), (nan, inf))),
        (-inf, 2.0, -0.0, -0.0, -0.0, ((nan,), (nan, nan))),
        (-inf, inf, nan, nan, -0.0, ((nan,), (nan, nan))),
    ]
)
_LARGEST = Special(
    "gate = -300, up the largest number", (-300.0, torch.finfo(torch.bfloat16).max), 1.0, (-0.0,), (-0.0, -0.0),
    dtypes=(torch.float32, torch.bfloat16),
)  # fmt: skip


def _slope_cut(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dy * up * reference.sigmoid(gate), dy * reference.silu(gate)


def _without_up(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return dy * reference.silu_slope(gate), dy * reference.silu(gate)


_swiglu, _backward = reference.swiglu, reference.swiglu_backward
_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(_swiglu, _backward),
    "gate and up exchanged": answers(lambda gate, up: _swiglu(up, gate), lambda dy, gate, up: _backward(dy, up, gate)),
    "gradients exchanged": answers(_swiglu, lambda dy, gate, up: _backward(dy, gate, up)[::-1]),
    "slope without its second term": answers(_swiglu, _slope_cut),
    "dgate without up": answers(_swiglu, _without_up),
}


def _packed_mistakes(order: str) -> dict[str, Any]:
    forward, backward = reference.swiglu_packed, reference.swiglu_packed_backward
    other = "up_gate" if order == "gate_up" else "gate_up"

    def exchanged(dy: Tensor, packed: Tensor) -> Tensor:
        return reference.pack(*_backward(dy, *reference.unpack(packed, order))[::-1], order)

    return {
        "zero output": zeros,
        "another order": answers(partial(forward, order=other), partial(backward, order=other)),
        "gradients exchanged": answers(partial(forward, order=order), exchanged),
    }


SWIGLU = Subject(
    name="swiglu",
    function=swiglu,
    inputs=("gate", "up"),
    reference=lambda gate, up: (reference.swiglu(gate, up),),
    reference_backward=reference.swiglu_backward,
    cases=(*cases(LAYOUTS, 2), Case("mixed strides", mixed_strides), Case("huge up", huge_up)),
    exhaustive=exhaustive(lambda gate, factor: (gate, factor)),
    mistakes=_MISTAKES,
    specials=(*_SPECIALS, _LARGEST),
    plans=("eager",),
    forms=(reuse_inputs("gate", "up"),),
)

PACKED = tuple(
    Subject(
        name=f"swiglu[{order}]",
        function=swiglu,
        keywords={"order": order},
        inputs=("packed",),
        reference=lambda packed, order=order: (reference.swiglu_packed(packed, order),),
        reference_backward=lambda dy, packed, order=order: (reference.swiglu_packed_backward(dy, packed, order),),
        cases=cases(PACKED_LAYOUTS, 1),
        exhaustive=exhaustive(lambda gate, factor, order=order: (reference.pack(gate, factor, order),)),  # type: ignore[misc]
        mistakes=_packed_mistakes(order),
        plans=("eager",),
        forms=(reuse_inputs("packed"),),
    )
    for order in ORDERS
)

SUBJECTS = (SWIGLU, *PACKED)


def _zeros(device: torch.device, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.zeros(shape, device=device)


def _run_second_backward(device: torch.device) -> None:
    gate, up = (_zeros(device).requires_grad_() for _ in range(2))
    y = swiglu(gate * 1, up * 1, reuse_inputs=True).sum()
    y.backward(retain_graph=True)
    y.backward()


def _run_another_problem(device: torch.device) -> None:
    gate, up = (_zeros(device) for _ in range(2))
    adjoint.plan(swiglu, gate, up).run(gate.half(), up.half())


def _reuse_overlapping(device: torch.device) -> Tensor:
    gate, up = _zeros(device, (4, 1)).requires_grad_(), _zeros(device).requires_grad_()
    return swiglu(gate.expand(4, 6), up, reuse_inputs=True)


def _reuse_twice(device: torch.device) -> Tensor:
    x = _zeros(device).requires_grad_() * 1
    return swiglu(x, x, reuse_inputs=True)


BAD_CALLS = (
    BadCall("shapes differ", lambda d: swiglu(_zeros(d), _zeros(d, (4, 5))), "swiglu", "up", "(4, 6)", "(4, 5)"),
    BadCall("dtypes differ", lambda d: swiglu(_zeros(d), _zeros(d).half()), "up", "float32", "float16"),
    BadCall("odd packed width", lambda d: swiglu(_zeros(d, (4, 5))), "packed", "even", "5"),
    BadCall("packed without axes", lambda d: swiglu(_zeros(d, ())), "packed", "no axes"),
    BadCall("unknown order", lambda d: swiglu(_zeros(d), order="gateup"), "order", "gate_up", "gateup"),  # type: ignore[arg-type]
    BadCall("order with two tensors", lambda d: swiglu(_zeros(d), _zeros(d), order="gate_up"), "order", "up is given"),
    BadCall(
        "another problem than the plan's", _run_another_problem, "not made for", "float16", "float32", error=Unsupported
    ),
    BadCall("a second backward over reused memory", _run_second_backward, "swiglu", "reuse_inputs", error=Unsupported),
    BadCall("reuse of overlapping memory", _reuse_overlapping, "reuse_inputs", "gate", "overlap"),
    BadCall("reuse of one tensor twice", _reuse_twice, "reuse_inputs", "gate and up", "overlap"),
    BadCall(
        "reuse_inputs that is text",
        lambda d: swiglu(_zeros(d), _zeros(d), reuse_inputs="no"),  # type: ignore[arg-type]
        *("reuse_inputs", "True or False", "'no'"),
    ),
)


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The op as users write it in torch."""
    return F.silu(gate) * up


def _torch_packed(order: str, packed: Tensor) -> Tensor:
    return _torch_swiglu(*unpack(packed, order))


_PACKED_BASELINES: list[tuple[Subject, Callable[..., Tensor]]] = [
    (subject, partial(_torch_packed, subject.keywords["order"])) for subject in PACKED
]
_PACKED_PEERS = {"gate_up": ("flashinfer_packed_swiglu",)}

WORKLOADS = (
    *(workload(SWIGLU, shape, _torch_swiglu, peers=("liger_swiglu",)) for shape in WORKLOAD_SHAPES),
    *(
        workload(subject, WORKLOAD_SHAPES[0], baseline, peers=_PACKED_PEERS.get(subject.keywords["order"], ()))
        for subject, baseline in _PACKED_BASELINES
    ),
    *(
        workload(subject, baseline=baseline, **details)
        for details in CPU_WORKLOADS
        for subject, baseline in ((SWIGLU, _torch_swiglu), *_PACKED_BASELINES)
    ),
)


def built_calls() -> Iterator[Call]:
    """Calls in every layout and dtype, with two tensors and with one that interleaves both."""
    yield from (bind(swiglu, *tensors) for tensors in built_tensors(2))
    yield from (bind(swiglu, x, order="interleaved") for (x,) in built_tensors(1) if x.is_contiguous())
