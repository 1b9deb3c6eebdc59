"""What `silu` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan

import torch
import torch.nn.functional as F

import adjoint
from adjoint.contract.cases import BadCall, Case, Special, Subject, Workload, normal
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.activation import reference
from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.values import BUILT_LAYOUTS, LAYOUTS, WORKLOAD_SHAPES, each, exhaustive

_SILU_SPECIALS = tuple(
    Special(f"x = {x}, dy = {dy}", (x,), dy, (y,), (dx,))
    for x, dy, y, dx in [
        (0.0, 1.0, 0.0, 0.5),
        (-0.0, 1.0, -0.0, 0.5),
        (inf, 3.0, inf, 3.0),
        (-inf, 3.0, -0.0, -0.0),
        (nan, 1.0, nan, nan),
        (1.0, 0.0, None, 0.0),
        (1.0, nan, None, nan),
        (-inf, inf, -0.0, nan),
    ]
)

_SILU_MISTAKES = {
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
    cases=tuple(Case(name, each(layout, 1)) for name, layout in LAYOUTS.items()),
    exhaustive=exhaustive(lambda gate, factor: (gate,)),
    mistakes=_SILU_MISTAKES,
    specials=_SILU_SPECIALS,
)

SUBJECTS = (SILU,)

BAD_CALLS = (
    BadCall(
        "a preference nothing satisfies",
        lambda device: silu(torch.zeros(4, 6, device=device), preference=adjoint.Preference(device_invariant=True)),
        "triton.rows",
        "triton.strided",
        "eager",
        "device_invariant",
        error=Unsupported,
    ),
    BadCall(
        "an unknown backend",
        lambda device: adjoint.Preference(backend="cuda"),
        "backend",
        "triton",
        "cuda",
        error=adjoint.ArgumentError,
    ),
    BadCall(
        "out= over an input",
        lambda device: (lambda x: adjoint.plan(silu, x[:-1]).run(x[:-1], out=x[1:]))(torch.zeros(9, device=device)),
        "out=",
        "shares memory",
        "x",
        error=adjoint.ArgumentError,
    ),
)

WORKLOADS = tuple(
    Workload(
        f"silu {rows}×{columns}",
        SILU,
        normal(1, (rows, columns)),
        2 * 2 * rows * columns,
        3 * 2 * rows * columns,
        F.silu,
    )
    for rows, columns in WORKLOAD_SHAPES
)


def built_calls() -> Iterator[Call]:
    """Both layouts of every dtype."""
    for dtype in SILU.dtypes:
        for layout in BUILT_LAYOUTS:
            yield bind(silu, layout(torch.empty(64, 64, dtype=dtype, device="meta")))
