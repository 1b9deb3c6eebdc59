"""What `rms_norm` is tested, verified and timed on."""

from collections.abc import Iterator
from math import inf, nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Special, Subject, Workload
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.norm import reference
from adjoint.ops.norm.rms_norm import rms_norm
from adjoint.ops.norm.values import FEW, WIDEST, cases, empty, normal_rows, rebatched

EPS = 1e-6


def _mistakes(eps: float, offset: float) -> dict[str, Any]:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(x, weight, eps, offset)

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rms_norm_backward(dy, x, weight, eps, offset)

    def without_mean(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return dy * (offset + weight) * reference.reciprocal(x, eps), backward(dy, x, weight)[1]

    def without_r(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return backward(dy, x, weight)[0], (dy * x).reshape(-1, x.shape[-1]).sum(0)

    return {
        "zero output": zeros,
        "narrow arithmetic": narrow_arithmetic(forward, backward),
        "dx without the mean": answers(forward, without_mean),
        "dweight without r": answers(forward, without_r),
        "another offset": answers(lambda x, w: reference.rms_norm(x, w, eps, 1 - offset), backward),
        "another ε": answers(lambda x, w: reference.rms_norm(x, w, 0.25, offset), backward),
    }


def _subject(name: str, eps: float, offset: float, **more: Any) -> Subject:
    return Subject(
        name=name,
        function=rms_norm,
        inputs=("x", "weight"),
        reference=lambda x, weight: (reference.rms_norm(x, weight, eps, offset),),
        reference_backward=lambda dy, x, weight: reference.rms_norm_backward(dy, x, weight, eps, offset),
        mistakes=_mistakes(eps, offset),
        batched=("x",),
        rebatched=rebatched(weight_at=1),
        **more,
    )


_SPECIALS = (
    Special("x = 0", (0.0, 2.0), 0.0, (0.0,), (0.0, 0.0)),
    Special("x = -0", (-0.0, 2.0), 0.0, (-0.0,), (0.0, 0.0)),
    Special("x = NaN", (nan, 2.0), 1.0, (nan,), (nan, nan)),
    Special("x = infinity", (inf, 2.0), 1.0, (nan,), (nan, nan)),
    Special("weight = NaN", (1.0, nan), 0.0, (nan,), (nan, 0.0)),
)

RMS_NORM = _subject("rms_norm", EPS, 0.0, cases=(*cases(1, 1), WIDEST), specials=_SPECIALS)
WITH_OFFSET = _subject("rms_norm[offset]", 1e-2, 1.0, cases=cases(1, 1, FEW), keywords={"offset": 1.0, "eps": 1e-2})


def _residual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rms_norm_residual(x, weight, residual, EPS, 0.0)


def _residual_backward(dy: Tensor, ds: Tensor, x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return reference.rms_norm_residual_backward(dy, ds, x, weight, residual, EPS, 0.0)


RESIDUAL = Subject(
    name="rms_norm[residual]",
    function=rms_norm,
    inputs=("x", "weight", "residual"),
    by_name=("residual",),
    reference=_residual,
    reference_backward=_residual_backward,
    cases=cases(2, 1),
    mistakes={
        "zero output": zeros,
        "the norm of x alone": answers(lambda x, w, residual: (_residual(x, w, x * 0)[0], x), _residual_backward),
        "ds dropped": answers(_residual, lambda dy, ds, *inputs: _residual_backward(dy, ds * 0, *inputs)),
    },
    batched=("x", "residual"),
    rebatched=rebatched(weight_at=1),
)

SUBJECTS = (RMS_NORM, WITH_OFFSET, RESIDUAL)


def _bad(name: str, words: tuple[str, ...], x: tuple[int, ...], weight: tuple[int, ...], **keywords: Any) -> BadCall:
    def call(device: torch.device) -> Any:
        return rms_norm(torch.zeros(x, device=device), torch.zeros(weight, device=device), **keywords)

    return BadCall(name, call, "rms_norm", *words)


BAD_CALLS = (
    _bad("x without axes", ("x", "axis"), (), ()),
    _bad("weight of another size", ("weight", "6 columns", "(5,)"), (4, 6), (5,)),
    _bad("negative eps", ("eps", "-1"), (4, 6), (6,), eps=-1.0),
    _bad("eps that is text", ("eps", "number", "str"), (4, 6), (6,), eps="1e-6"),
    _bad("an offset that is a tensor", ("offset", "number", "Tensor"), (4, 6), (6,), offset=torch.ones(())),
    _bad("residual of another shape", ("residual", "(4, 6)", "(4, 5)"), (4, 6), (6,), residual=torch.zeros(4, 5)),
    BadCall(
        "weight of another 16-bit dtype",
        lambda device: rms_norm(torch.zeros(4, 6, device=device).bfloat16(), torch.zeros(6, device=device).half()),
        "weight",
        "bfloat16",
        "float16",
    ),
)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


WORKLOADS = tuple(
    Workload(
        f"rms_norm {rows}×{size}",
        RMS_NORM,
        normal_rows(1, 1, rows, size),
        2 * 2 * rows * size,
        3 * 2 * rows * size,
        _torch_rms_norm,
        peers=("liger_rms_norm", "quack_rms_norm"),
    )
    for rows, size in ((32768, 2048), (16384, 4096))
)


def built_calls() -> Iterator[Call]:
    """Widths of each schedule in bfloat16, the other dtypes, a wide weight, a residual, and every layout."""
    for size in (100, 128, 512, 2048, 4096, 8192, 16384):
        yield bind(rms_norm, empty(64, size), empty(size))
    for dtype, size in ((torch.float16, 2048), (torch.float32, 2048), (torch.float32, 8192), (torch.float64, 1024)):
        yield bind(rms_norm, empty(64, size, dtype=dtype), empty(size, dtype=dtype))
    x, weight = empty(64, 2048), empty(2048, dtype=torch.float32)
    yield bind(rms_norm, x, weight, residual=x)
    yield bind(rms_norm, empty(64, 4096)[:, :2048], weight)
    yield bind(rms_norm, empty(8, 9, 128)[:, :8], empty(128))
