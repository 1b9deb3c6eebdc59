"""What `l2_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Special, Subject, Workload
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.errors import ArgumentError
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.l2_norm import l2_norm
from adjoint.ops.norm.values import cases, normal_rows

EPS = 1e-6


def _forward(x: Tensor) -> Tensor:
    return reference.l2_norm(x, EPS)


def _backward(dy: Tensor, x: Tensor) -> Tensor:
    return reference.l2_norm_backward(dy, x, EPS)


L2_NORM = Subject(
    name="l2_norm",
    function=l2_norm,
    inputs=("x",),
    reference=lambda x: (_forward(x),),
    reference_backward=lambda dy, x: (_backward(dy, x),),
    cases=cases(1, weight_at=None),
    mistakes={
        "zero output": zeros,
        "narrow arithmetic": narrow_arithmetic(_forward, _backward),
        "the mean instead of the sum": answers(lambda x: x * reference.reciprocal(x, EPS), _backward),
        "dx without its second term": answers(
            _forward, lambda dy, x: dy / torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)
        ),
    },
    specials=(
        Special("x = 0", (0.0,), 0.0, (0.0,), (0.0,)),
        Special("x = -0", (-0.0,), 0.0, (-0.0,), (0.0,)),
        Special("x = NaN", (nan,), 1.0, (nan,), (nan,)),
        Special("x = infinity", (inf,), 1.0, (nan,), (nan,)),
    ),
)

SUBJECTS = (L2_NORM,)

BAD_CALLS = (
    BadCall(
        "x without axes", lambda d: l2_norm(torch.zeros((), device=d)), ArgumentError, ("l2_norm", "x", "axis")
    ),
    BadCall(
        "negative eps", lambda d: l2_norm(torch.zeros(4, device=d), eps=-1.0), ArgumentError, ("l2_norm", "eps", "-1")
    ),
)


def _torch_l2_norm(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=EPS)


_ROWS, _SIZE = 524_288, 128

WORKLOADS = (
    Workload(
        f"l2_norm {_ROWS}×{_SIZE}",
        L2_NORM,
        normal_rows(1, None, _ROWS, _SIZE),
        2 * 2 * _ROWS * _SIZE,
        3 * 2 * _ROWS * _SIZE,
        _torch_l2_norm,
        peers=("fla_l2_norm",),
    ),
)


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, and rows in runs."""
    bfloat16, float32, float64 = torch.bfloat16, torch.float32, torch.float64
    for size, dtype in ((64, bfloat16), (128, bfloat16), (1024, bfloat16), (4096, bfloat16), (16384, bfloat16),
                        (128, torch.float16), (128, float32), (8192, float32), (128, float64)):  # fmt: skip
        yield bind(l2_norm, torch.empty(64, size, dtype=dtype, device="meta"))
    yield bind(l2_norm, torch.empty(8, 9, 128, dtype=bfloat16, device="meta")[:, :8])
