"""What `l2_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Special, Subject, Workload
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.l2_norm import l2_norm
from adjoint.ops.norm.values import cases, empty, normal_rows, rebatched

EPS = 1e-6


def _forward(x: Tensor) -> Tensor:
    return reference.l2_norm(x, EPS)


def _backward(dy: Tensor, x: Tensor) -> Tensor:
    return reference.l2_norm_backward(dy, x, EPS)


def _without_second_term(dy: Tensor, x: Tensor) -> Tensor:
    return dy / torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)


L2_NORM = Subject(
    name="l2_norm",
    function=l2_norm,
    inputs=("x",),
    reference=lambda x: (_forward(x),),
    reference_backward=lambda dy, x: (_backward(dy, x),),
    cases=cases(1, None),
    mistakes={
        "zero output": zeros,
        "narrow arithmetic": narrow_arithmetic(_forward, _backward),
        "the mean instead of the sum": answers(lambda x: x * reference.reciprocal(x, EPS), _backward),
        "dx without its second term": answers(_forward, _without_second_term),
    },
    specials=(
        Special("x = 0", (0.0,), 0.0, (0.0,), (0.0,)),
        Special("x = -0", (-0.0,), 0.0, (-0.0,), (0.0,)),
        Special("x = NaN", (nan,), 1.0, (nan,), (nan,)),
        Special("x = infinity", (inf,), 1.0, (nan,), (nan,)),
    ),
    rebatched=rebatched(None),
)

SUBJECTS = (L2_NORM,)

BAD_CALLS = (
    BadCall("x without axes", lambda d: l2_norm(torch.zeros((), device=d)), "l2_norm", "x", "axis"),
    BadCall("negative eps", lambda d: l2_norm(torch.zeros(4, device=d), eps=-1.0), "l2_norm", "eps"),
)

WORKLOADS = (
    Workload(
        "l2_norm 524288×128",
        L2_NORM,
        normal_rows(1, None, 2**19, 128),
        2 * 2 * 2**19 * 128,
        3 * 2 * 2**19 * 128,
        lambda x: F.normalize(x, dim=-1, eps=EPS),
        peers=("fla_l2_norm",),
    ),
)


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, and rows in runs."""
    for size in (64, 128, 1024, 4096, 16384):
        yield bind(l2_norm, empty(64, size))
    for dtype, size in ((torch.float16, 128), (torch.float32, 128), (torch.float32, 8192), (torch.float64, 128)):
        yield bind(l2_norm, empty(64, size, dtype=dtype))
    yield bind(l2_norm, empty(8, 9, 128)[:, :8])
