"""What `gated_rms_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Special, Subject, Workload
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.gated_rms_norm import gated_rms_norm
from adjoint.ops.norm.values import FEW, cases, empty, gate_in_a_slice, normal_rows, rebatched

EPS = 1e-6


def _forward(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return reference.gated_rms_norm(x, gate, weight, EPS)


def _backward(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return reference.gated_rms_norm_backward(dy, x, gate, weight, EPS)


def _slope_of_the_sigmoid(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, _, dweight = _backward(dy, x, gate, weight)
    return dx, dy * reference.rms_norm(x, weight, EPS, 0.0) * torch.sigmoid(gate), dweight


def _dweight_without_gate(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return *_backward(dy, x, gate, weight)[:2], reference.rms_norm_backward(dy, x, weight, EPS, 0.0)[1]


_MISTAKES = {
    "zero output": zeros,
    "narrow arithmetic": narrow_arithmetic(_forward, _backward),
    "slope without its second term": answers(_forward, _slope_of_the_sigmoid),
    "dweight without the gate": answers(_forward, _dweight_without_gate),
    "x and gate exchanged": answers(lambda x, gate, weight: _forward(gate, x, weight), _backward),
}

_SPECIALS = (
    Special("x = 0", (0.0, 1.0, 2.0), 0.0, (0.0,), (0.0, 0.0, 0.0)),
    Special("gate = infinity", (1.0, inf, 0.0), 0.0, (nan,), (nan, 0.0, nan)),
    Special("gate = NaN", (1.0, nan, 2.0), 1.0, (nan,), (nan, nan, nan)),
    Special("x = NaN", (nan, 1.0, 2.0), 1.0, (nan,), (nan, nan, nan)),
)


def _subject(name: str, **more: Any) -> Subject:
    return Subject(
        name=name,
        function=gated_rms_norm,
        inputs=("x", "gate", "weight"),
        reference=lambda x, gate, weight: (_forward(x, gate, weight),),
        reference_backward=_backward,
        mistakes=_MISTAKES,
        batched=("x", "gate"),
        rebatched=rebatched(weight_at=2),
        **more,
    )


GATED = _subject("gated_rms_norm", cases=(*cases(2, 2), Case("gate in a slice", gate_in_a_slice)), specials=_SPECIALS)
ROUNDED = _subject("gated_rms_norm[rounded]", cases=cases(2, 2, FEW), keywords={"round_before_gate": True})

SUBJECTS = (GATED, ROUNDED)


def _bad(name: str, words: tuple[str, ...], gate: int, weight: int, eps: float = EPS) -> BadCall:
    def call(device: torch.device) -> Any:
        x, second = torch.zeros(4, 6, device=device), torch.zeros(4, gate, device=device)
        return gated_rms_norm(x, second, torch.zeros(weight, device=device), eps=eps)

    return BadCall(name, call, "gated_rms_norm", *words)


BAD_CALLS = (
    _bad("gate of another shape", ("gate", "(4, 6)", "(4, 5)"), 5, 6),
    _bad("weight of another size", ("weight", "6 columns", "(4,)"), 6, 4),
    _bad("negative eps", ("eps",), 6, 6, -1e-6),
)


def _torch_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS) * F.silu(gate)


WORKLOADS = (
    Workload(
        "gated_rms_norm 1048576×128",
        GATED,
        normal_rows(2, 2, 2**20, 128),
        3 * 2 * 2**20 * 128,
        5 * 2 * 2**20 * 128,
        _torch_gated_rms_norm,
        peers=("fla_gated_rms_norm",),
        devices=("cuda",),
    ),
)


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, a wide weight, and a gate that is a slice."""
    for size in (128, 1024, 4096):
        yield bind(gated_rms_norm, empty(64, size), empty(64, size), empty(size, dtype=torch.float32))
    for dtype, size in ((torch.float16, 128), (torch.float32, 128), (torch.float32, 2048), (torch.float64, 1024)):
        x = empty(64, size, dtype=dtype)
        yield bind(gated_rms_norm, x, x, empty(size, dtype=dtype))
    yield bind(gated_rms_norm, empty(64, 8, 128), empty(64, 16, 128)[:, :8], empty(128), round_before_gate=True)
