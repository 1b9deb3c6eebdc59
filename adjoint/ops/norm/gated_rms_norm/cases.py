"""What `gated_rms_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from functools import partial
from math import inf, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import Case, Special
from adjoint.contract.mistakes import answers, narrow_arithmetic
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.gated_rms_norm import gated_rms_norm
from adjoint.ops.norm.values import EPS, FEW, MOST, bad_call, empty, random_rows, subject, workload

_forward = partial(reference.gated_rms_norm, eps=EPS)
_backward = partial(reference.gated_rms_norm_backward, eps=EPS)


def _slope_of_the_sigmoid(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, _, dweight = _backward(dy, x, gate, weight)
    return dx, dy * reference.rms_norm(x, weight, EPS) * torch.sigmoid(gate), dweight


def _dweight_without_gate(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return *_backward(dy, x, gate, weight)[:2], reference.rms_norm_backward(dy, x, weight, EPS)[1]


def _gate_in_a_slice(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor, ...]:
    """x, a gate that is a part of a wider projection, and a weight."""
    fill = random_rows(dtype, device, generator)
    return fill(19, 128), fill(19, 3 * 128)[:, 128:256], fill(128)


_MISTAKES = {
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

_NORM = (gated_rms_norm, ("x", "gate", "weight"), _forward, _backward)
_CASES = (Case("gate in a slice", _gate_in_a_slice),)

GATED = subject("gated_rms_norm", *_NORM, MOST, _MISTAKES, cases=_CASES, specials=_SPECIALS)
ROUNDED = subject("gated_rms_norm[rounded]", *_NORM, FEW, _MISTAKES, keywords={"round_before_gate": True})

SUBJECTS = (GATED, ROUNDED)

_bad = partial(bad_call, gated_rms_norm)

BAD_CALLS = (
    _bad("gate of another shape", ("gate", "(4, 6)", "(4, 5)"), (4, 6), (4, 5), (6,)),
    _bad("weight of another size", ("weight", "6 columns", "(4,)"), (4, 6), (4, 6), (4,)),
    _bad("negative eps", ("eps",), (4, 6), (4, 6), (6,), eps=-1e-6),
)


def _torch_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS) * F.silu(gate)


WORKLOADS = (
    workload(GATED, 2**20, 128, _torch_gated_rms_norm, peers=("fla_gated_rms_norm",), devices=("cuda",)),
)  # fmt: skip


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, a wide weight, and a gate that is a slice."""
    for size in (128, 1024, 4096):
        yield bind(gated_rms_norm, empty(64, size), empty(64, size), empty(size, dtype=torch.float32))
    for dtype, size in ((torch.float16, 128), (torch.float32, 128), (torch.float32, 2048), (torch.float64, 1024)):
        x = empty(64, size, dtype=dtype)
        yield bind(gated_rms_norm, x, x, empty(size, dtype=dtype))
    yield bind(gated_rms_norm, empty(64, 8, 128), empty(64, 16, 128)[:, :8], empty(128), round_before_gate=True)
