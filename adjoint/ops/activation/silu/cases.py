"""What `silu` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan

import torch
import torch.nn.functional as F

import adjoint
from adjoint.contract.cases import BadCall, Special, Subject
from adjoint.contract.forms import reuse_inputs
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.activation import reference
from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.values import (
    CPU_WORKLOADS,
    LAYOUTS,
    WORKLOAD_SHAPES,
    built_tensors,
    cases,
    exhaustive,
    workload,
)

_AS_TORCH = {"eager.float32": ((nan,), (nan,))}
_SPECIALS = (
    *(
        Special(f"x = {x}, dy = {dy}", (x,), dy, (y,), (dx,))
        for x, dy, y, dx in [
            (0.0, 1.0, 0.0, 0.5),
            (-0.0, 1.0, -0.0, 0.5),
            (nan, 1.0, nan, nan),
            (1.0, 0.0, None, 0.0),
            (1.0, nan, None, nan),
        ]
    ),
    Special("x = inf, dy = 3", (inf,), 3.0, (inf,), (3.0,), of_plans={"eager.float32": ((inf,), (nan,))}),
    Special("x = -inf, dy = 3", (-inf,), 3.0, (-0.0,), (-0.0,), of_plans=_AS_TORCH),
    Special("x = -inf, dy = inf", (-inf,), inf, (-0.0,), (nan,), of_plans=_AS_TORCH),
)

_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(reference.silu, reference.silu_backward),
    "slope without its second term": answers(reference.silu, lambda dy, x: dy * reference.sigmoid(x)),
    "sigmoid instead of silu": answers(reference.sigmoid, reference.silu_backward),
    "upstream gradient ignored": answers(reference.silu, lambda dy, x: reference.silu_slope(x)),
}

SILU = Subject(
    name="silu",
    function=silu,
    inputs=("x",),
    reference=lambda x: (reference.silu(x),),
    reference_backward=lambda dy, x: (reference.silu_backward(dy, x),),
    cases=cases(LAYOUTS, 1),
    exhaustive=exhaustive(lambda gate, factor: (gate,)),
    mistakes=_MISTAKES,
    specials=_SPECIALS,
    plans=("eager",),
    forms=(reuse_inputs("x"),),
)

SUBJECTS = (SILU,)


def _run_over_input(device: torch.device) -> None:
    x = torch.zeros(9, device=device)
    adjoint.plan(silu, x[:-1]).run(x[:-1], out=x[1:])


BAD_CALLS = (
    BadCall(
        "a preference nothing satisfies",
        lambda device: silu(torch.zeros(4, 6, device=device), preference=adjoint.Preference(device_invariant=True)),
        *("triton.rows", "triton.strided", "eager", "device_invariant"),
        error=Unsupported,
    ),
    BadCall("an unknown backend", lambda device: adjoint.Preference(backend="cuda"), "backend", "triton", "cuda"),
    BadCall(
        "reuse_inputs that is text",
        lambda device: silu(torch.zeros(4, 6, device=device), reuse_inputs="yes"),  # type: ignore[arg-type]
        *("reuse_inputs", "True or False", "'yes'"),
    ),
    BadCall("out= over an input", _run_over_input, "out=", "shares memory", "x"),
)

WORKLOADS = (
    *(workload(SILU, shape, F.silu) for shape in WORKLOAD_SHAPES),
    *(workload(SILU, baseline=F.silu, **details) for details in CPU_WORKLOADS),
)


def built_calls() -> Iterator[Call]:
    """Calls in both layouts and every dtype."""
    return (bind(silu, *tensors) for tensors in built_tensors(1))
