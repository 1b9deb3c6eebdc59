"""What `gated_rms_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Special, Subject, Workload
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import ArgumentError
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.gated_rms_norm import gated_rms_norm
from adjoint.ops.norm.values import cases, normal_rows, rebatched

EPS = 1e-6


def _forward(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return reference.gated_rms_norm(x, gate, weight, EPS)


def _backward(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return reference.gated_rms_norm_backward(dy, x, gate, weight, EPS)


def _slope_of_sigmoid_alone(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, _, dweight = _backward(dy, x, gate, weight)
    return dx, dy * reference.rms_norm(x, weight, EPS, 0.0) * torch.sigmoid(gate), dweight


def _dweight_without_gate(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dgate, _ = _backward(dy, x, gate, weight)
    return dx, dgate, reference.rms_norm_backward(dy, x, weight, EPS, 0.0)[1]


_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(_forward, _backward),
    "sigmoid instead of silu": answers(
        lambda x, gate, w: reference.rms_norm(x, w, EPS, 0.0) * torch.sigmoid(gate), _backward
    ),
    "slope without its second term": answers(_forward, _slope_of_sigmoid_alone),
    "dweight without the gate": answers(_forward, _dweight_without_gate),
    "x and gate exchanged": answers(lambda x, gate, w: _forward(gate, x, w), _backward),
}

_SPECIALS = (
    Special("x = 0", (0.0, 1.0, 2.0), 0.0, (0.0,), (0.0, 0.0, 0.0)),
    Special("gate = infinity", (1.0, inf, 0.0), 0.0, (nan,), (nan, 0.0, nan)),
    Special("gate = NaN", (1.0, nan, 2.0), 1.0, (nan,), (nan, nan, nan)),
    Special("x = NaN", (nan, 1.0, 2.0), 1.0, (nan,), (nan, nan, nan)),
)


def _subject(name: str, specials: tuple[Special, ...] = (), **keywords: Any) -> Subject:
    return Subject(
        name=name,
        function=gated_rms_norm,
        keywords=keywords,
        inputs=("x", "gate", "weight"),
        reference=lambda x, gate, weight: (_forward(x, gate, weight),),
        reference_backward=_backward,
        cases=cases(2, weight_at=2),
        mistakes=_MISTAKES,
        specials=specials,
        batched=("x", "gate"),
        rebatched=rebatched(weight_at=2),
    )


GATED = _subject("gated_rms_norm", _SPECIALS)
ROUNDED = _subject("gated_rms_norm[round_before_gate]", round_before_gate=True)

SUBJECTS = (GATED, ROUNDED)


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, device=device)


BAD_CALLS = (
    BadCall(
        "gate of another shape",
        lambda d: gated_rms_norm(_zeros(d, 4, 6), _zeros(d, 4, 5), _zeros(d, 6)),
        ArgumentError,
        ("gated_rms_norm", "gate", "(4, 6)", "(4, 5)"),
    ),
    BadCall(
        "weight of another size",
        lambda d: gated_rms_norm(_zeros(d, 4, 6), _zeros(d, 4, 6), _zeros(d, 4)),
        ArgumentError,
        ("gated_rms_norm", "weight", "6 columns", "(4,)"),
    ),
    BadCall(
        "negative eps",
        lambda d: gated_rms_norm(_zeros(d, 4, 6), _zeros(d, 4, 6), _zeros(d, 6), eps=-1e-6),
        ArgumentError,
        ("gated_rms_norm", "eps"),
    ),
)


def _torch_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS) * F.silu(gate)


_ROWS, _SIZE = 1_048_576, 128

WORKLOADS = (
    Workload(
        f"gated_rms_norm {_ROWS}×{_SIZE}",
        GATED,
        normal_rows(2, 2, _ROWS, _SIZE),
        3 * 2 * _ROWS * _SIZE,
        5 * 2 * _ROWS * _SIZE,
        _torch_gated_rms_norm,
        peers=("fla_gated_rms_norm",),
        devices=("cuda",),
    ),
)


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, a wide weight, and a gate that is a slice."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size in (128, 256, 1024, 2048, 4096):
        yield bind(gated_rms_norm, empty(64, size), empty(64, size), empty(size, dtype=torch.float32))
    for dtype, size in ((torch.float16, 128), (torch.float32, 128), (torch.float32, 2048), (torch.float64, 128)):
        x = empty(64, size, dtype=dtype)
        yield bind(gated_rms_norm, x, x, empty(size, dtype=dtype))
    yield bind(gated_rms_norm, empty(64, 8, 128), empty(64, 16, 128)[:, :8], empty(128), round_before_gate=True)
