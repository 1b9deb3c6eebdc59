"""What `swiglu` is tested, verified and timed on."""

from collections.abc import Iterable, Iterator
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall, Case, Special, Subject, Workload, normal
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.activation import reference
from adjoint.ops.activation.packing import ORDERS, unpack
from adjoint.ops.activation.swiglu import swiglu
from adjoint.ops.activation.values import (
    BUILT_LAYOUTS,
    LAYOUTS,
    PACKED_LAYOUTS,
    WORKLOAD_SHAPES,
    each,
    exhaustive,
    huge_up,
    mixed_strides,
)

_SWIGLU_SPECIALS = tuple(
    Special(f"gate = {gate}, up = {up}", (gate, up), 1.0, (y,), (dgate, dup))
    for gate, up, y, dgate, dup in [
        (0.0, 2.0, 0.0, 1.0, 0.0),
        (-0.0, 2.0, -0.0, 1.0, -0.0),
        (-0.0, -2.0, 0.0, -1.0, -0.0),
        (inf, 2.0, inf, 2.0, inf),
        (inf, 0.0, nan, 0.0, inf),
        (-inf, 2.0, -0.0, -0.0, -0.0),
        (-inf, inf, nan, nan, -0.0),
        (0.0, inf, nan, inf, 0.0),
        (nan, 2.0, nan, nan, nan),
    ]
)

_SWIGLU_SPECIALS += (
    Special(
        "gate = -300, up the largest number",
        (-300.0, torch.finfo(torch.bfloat16).max),
        1.0,
        (-0.0,),
        (-0.0, -0.0),
        dtypes=(torch.float32, torch.bfloat16),
    ),
)

_SWIGLU_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(reference.swiglu, reference.swiglu_backward),
    "gate and up exchanged": answers(
        lambda gate, up: reference.swiglu(up, gate), lambda dy, gate, up: reference.swiglu_backward(dy, up, gate)
    ),
    "gradients exchanged": answers(
        reference.swiglu, lambda dy, gate, up: reference.swiglu_backward(dy, gate, up)[::-1]
    ),
    "slope without its second term": answers(
        reference.swiglu,
        lambda dy, gate, up: (dy * up * reference.sigmoid(gate), dy * reference.silu(gate)),
    ),
    "dgate without up": answers(
        reference.swiglu, lambda dy, gate, up: (dy * reference.silu_slope(gate), dy * reference.silu(gate))
    ),
}


def _packed_mistakes(order: str) -> dict[str, Any]:
    other = "up_gate" if order == "gate_up" else "gate_up"
    return {
        "zero output": zeros,
        "another order": answers(
            lambda packed: reference.swiglu_packed(packed, other),
            lambda dy, packed: reference.swiglu_packed_backward(dy, packed, other),
        ),
        "gradients exchanged": answers(
            lambda packed: reference.swiglu_packed(packed, order),
            lambda dy, packed: reference.pack(
                *reference.swiglu_backward(dy, *reference.unpack(packed, order))[::-1], order
            ),
        ),
    }


SWIGLU = Subject(
    name="swiglu",
    function=swiglu,
    inputs=("gate", "up"),
    reference=lambda gate, up: (reference.swiglu(gate, up),),
    reference_backward=reference.swiglu_backward,
    cases=(
        *(Case(name, each(layout, 2)) for name, layout in LAYOUTS.items()),
        Case("mixed strides", mixed_strides),
        Case("huge up", huge_up),
    ),
    exhaustive=exhaustive(lambda gate, factor: (gate, factor)),
    mistakes=_SWIGLU_MISTAKES,
    specials=_SWIGLU_SPECIALS,
)

PACKED = tuple(
    Subject(
        name=f"swiglu[{order}]",
        function=swiglu,
        keywords={"order": order},
        inputs=("packed",),
        reference=lambda packed, order=order: (reference.swiglu_packed(packed, order),),
        reference_backward=lambda dy, packed, order=order: (reference.swiglu_packed_backward(dy, packed, order),),
        cases=tuple(Case(name, each(layout, 1)) for name, layout in PACKED_LAYOUTS.items()),
        exhaustive=exhaustive(lambda gate, factor, order=order: (reference.pack(gate, factor, order),)),  # type: ignore[misc]
        mistakes=_packed_mistakes(order),
    )
    for order in ORDERS
)

SUBJECTS = (SWIGLU, *PACKED)


def _pair(device: torch.device, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _run_second_backward(device: torch.device) -> None:
    gate, up = (_pair(device).requires_grad_() for _ in range(2))
    y = swiglu(gate * 1, up * 1, reuse_inputs=True).sum()
    y.backward(retain_graph=True)
    y.backward()


def _plan_for_float32(device: torch.device) -> adjoint.Plan:
    return adjoint.plan(swiglu, _pair(device), _pair(device))


BAD_CALLS = (
    BadCall("shapes differ", lambda d: swiglu(_pair(d), _pair(d, (4, 5))), "swiglu", "up", "(4, 6)", "(4, 5)"),
    BadCall("dtypes differ", lambda d: swiglu(_pair(d), _pair(d).half()), "up", "float32", "float16"),
    BadCall("odd packed width", lambda d: swiglu(_pair(d, (4, 5))), "packed", "even", "5"),
    BadCall("packed without axes", lambda d: swiglu(_pair(d, ())), "packed", "no axes"),
    BadCall("unknown order", lambda d: swiglu(_pair(d), order="gateup"), "order", "gate_up", "gateup"),  # type: ignore[arg-type]
    BadCall("order with two tensors", lambda d: swiglu(_pair(d), _pair(d), order="gate_up"), "order", "up is given"),
    BadCall(
        "another problem than the plan's",
        lambda d: _plan_for_float32(d).run(_pair(d).half(), _pair(d).half()),
        "not made for",
        "float16",
        "float32",
        error=Unsupported,
    ),
    BadCall("a second backward over reused memory", _run_second_backward, "swiglu", "reuse_inputs", error=Unsupported),
    BadCall(
        "reuse of overlapping memory",
        lambda d: swiglu(_pair(d, (4, 1)).requires_grad_().expand(4, 6), _pair(d).requires_grad_(), reuse_inputs=True),
        "reuse_inputs",
        "gate",
        "overlap",
    ),
    BadCall(
        "reuse of one tensor twice",
        lambda d: (lambda x: swiglu(x, x, reuse_inputs=True))(_pair(d).requires_grad_() * 1),
        "reuse_inputs",
        "gate and up",
        "overlap",
    ),
)


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As users write it."""
    return F.silu(gate) * up


def _workloads() -> Iterable[Workload]:
    for rows, columns in WORKLOAD_SHAPES:
        size = rows * columns * 2  # bytes of one bfloat16 tensor
        make = normal(2, (rows, columns))
        peers = ("liger_swiglu",)
        yield Workload(f"swiglu {rows}×{columns}", SWIGLU, make, 3 * size, 5 * size, _torch_swiglu, peers=peers)
    rows, columns = WORKLOAD_SHAPES[0]
    size = rows * columns * 2
    for subject in PACKED:
        yield Workload(
            f"{subject.name} {rows}×2·{columns}",
            subject,
            normal(1, (rows, 2 * columns)),
            3 * size,
            5 * size,
            lambda packed, order=subject.keywords["order"]: _torch_swiglu(*unpack(packed, order)),
        )


WORKLOADS = tuple(_workloads())


def built_calls() -> Iterator[Call]:
    """Every layout of every dtype, from two tensors and from one that interleaves both."""
    for dtype in SWIGLU.dtypes:
        for layout in BUILT_LAYOUTS:
            yield bind(swiglu, *(layout(torch.empty(64, 64, dtype=dtype, device="meta")) for _ in range(2)))
        yield bind(swiglu, torch.empty(64, 64, dtype=dtype, device="meta"), order="interleaved")
