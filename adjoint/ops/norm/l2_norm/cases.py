"""What `l2_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.mistakes import answers, narrow_arithmetic
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.l2_norm import l2_norm
from adjoint.ops.norm.values import EPS, MOST, bad_call, empty, special_rows, subject, workload

_forward, _backward = partial(reference.l2_norm, eps=EPS), partial(reference.l2_norm_backward, eps=EPS)


def _without_second_term(dy: Tensor, x: Tensor) -> Tensor:
    return dy / torch.sqrt(x.square().sum(-1, keepdim=True) + EPS)


_MISTAKES = {
    "narrow arithmetic": narrow_arithmetic(_forward, _backward),
    "the mean instead of the sum": answers(lambda x: x * reference.reciprocal(x, EPS), _backward),
    "dx without its second term": answers(_forward, _without_second_term),
}

L2_NORM = subject("l2_norm", l2_norm, ("x",), _forward, _backward, MOST, _MISTAKES, specials=special_rows())

SUBJECTS = (L2_NORM,)

BAD_CALLS = (
    bad_call(l2_norm, "x without axes", ("x", "axis"), ()),
    bad_call(l2_norm, "negative eps", ("eps",), (4,), eps=-1.0),
)

WORKLOADS = (
    workload(L2_NORM, 2**19, 128, lambda x: F.normalize(x, dim=-1, eps=EPS), peers=("fla_l2_norm",)),
)  # fmt: skip


def built_calls() -> Iterator[Call]:
    """Widths of heads and of models, the other dtypes, and rows in runs."""
    for size in (64, 128, 1024, 4096, 16384):
        yield bind(l2_norm, empty(64, size))
    for dtype, size in ((torch.float16, 128), (torch.float32, 128), (torch.float32, 8192), (torch.float64, 128)):
        yield bind(l2_norm, empty(64, size, dtype=dtype))
    yield bind(l2_norm, empty(8, 9, 128)[:, :8])
