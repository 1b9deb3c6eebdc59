"""What `rms_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from functools import partial
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Special, Subject
from adjoint.contract.mistakes import answers, narrow_arithmetic
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.rms_norm import rms_norm
from adjoint.ops.norm.values import EPS, EVERY, FEW, MOST, bad_call, empty, special_rows, subject, workload

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def _subject(name: str, eps: float, offset: float, layouts: tuple[str, ...], **more: Any) -> Subject:
    forward = partial(reference.rms_norm, eps=eps, offset=offset)
    backward = partial(reference.rms_norm_backward, eps=eps, offset=offset)

    def without_mean(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return dy * (offset + weight) * reference.reciprocal(x, eps), backward(dy, x, weight)[1]

    def without_r(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return backward(dy, x, weight)[0], (dy * x).reshape(-1, x.shape[-1]).sum(0)

    mistakes = {
        "narrow arithmetic": narrow_arithmetic(forward, backward),
        "dx without the mean": answers(forward, without_mean),
        "dweight without r": answers(forward, without_r),
        "another offset": answers(partial(forward, offset=1 - offset), backward),
        "another ε": answers(partial(forward, eps=0.25), backward),
    }
    return subject(name, rms_norm, ("x", "weight"), forward, backward, layouts, mistakes, **more)


_SPECIALS = (*special_rows(2.0), Special("weight = NaN", (1.0, nan), 0.0, (nan,), (nan, 0.0)))

RMS_NORM = _subject("rms_norm", EPS, 0.0, EVERY, specials=_SPECIALS)
WITH_OFFSET = _subject("rms_norm[offset]", 1e-2, 1.0, FEW, keywords={"offset": 1.0, "eps": 1e-2})

_residual = partial(reference.rms_norm_residual, eps=EPS)
_residual_backward = partial(reference.rms_norm_residual_backward, eps=EPS)

_MISTAKES = {
    "the norm of x alone": answers(lambda x, w, residual: (_residual(x, w, x * 0)[0], x), _residual_backward),
    "ds dropped": answers(_residual, lambda dy, ds, *inputs: _residual_backward(dy, ds * 0, *inputs)),
}

RESIDUAL = subject(
    "rms_norm[residual]", rms_norm, ("x", "weight", "residual"), _residual, _residual_backward, MOST, _MISTAKES,
    by_name=("residual",),
)  # fmt: skip

SUBJECTS = (RMS_NORM, WITH_OFFSET, RESIDUAL)


def _exchange_dtype(device: torch.device) -> Tensor:
    return rms_norm(torch.zeros(4, 6, device=device).bfloat16(), torch.zeros(6, device=device).half())


_bad = partial(bad_call, rms_norm)

BAD_CALLS = (
    _bad("x without axes", ("x", "axis"), (), ()),
    _bad("weight of another size", ("weight", "6 columns", "(5,)"), (4, 6), (5,)),
    _bad("negative eps", ("eps", "-1"), (4, 6), (6,), eps=-1.0),
    _bad("eps that is text", ("eps", "number", "str"), (4, 6), (6,), eps="1e-6"),
    _bad("an offset that is a tensor", ("offset", "number", "Tensor"), (4, 6), (6,), offset=torch.ones(())),
    _bad("residual of another shape", ("residual", "(4, 6)", "(4, 5)"), (4, 6), (6,), residual=torch.zeros(4, 5)),
    BadCall("weight of another 16-bit dtype", _exchange_dtype, "weight", "bfloat16", "float16"),
)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


WORKLOADS = tuple(
    workload(RMS_NORM, rows, size, _torch_rms_norm, peers=("liger_rms_norm", "quack_rms_norm", "flashinfer_rms_norm"))
    for rows, size in ((32768, 2048), (16384, 4096))
)


def built_calls() -> Iterator[Call]:
    """Widths of each schedule in bfloat16, the other dtypes, a wide weight, a residual, and every layout."""
    widths = {_BF16: (100, 128, 512, 2048, 4096, 8192, 16384), _F16: (2048,), _F32: (2048, 8192), _F64: (1024,)}
    for dtype, sizes in widths.items():
        for size in sizes:
            yield bind(rms_norm, empty(64, size, dtype=dtype), empty(size, dtype=dtype))
    x, weight = empty(64, 2048), empty(2048, dtype=torch.float32)
    yield bind(rms_norm, x, weight, residual=x)
    yield bind(rms_norm, empty(64, 4096)[:, :2048], weight)
    yield bind(rms_norm, empty(8, 9, 128)[:, :8], empty(128))
