"""What `rms_norm` is tested, verified and timed on."""

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
from adjoint.ops.norm.rms_norm import rms_norm
from adjoint.ops.norm.values import cases, normal_rows, rebatched

EPS, OFFSET_EPS = 1e-6, 1e-2


def _mistakes(eps: float, offset: float) -> dict[str, Any]:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return reference.rms_norm(x, weight, eps, offset)

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return reference.rms_norm_backward(dy, x, weight, eps, offset)

    listed = {
        "zero output": zeros,
        "narrow arithmetic": narrow_arithmetic(forward, backward),
        "dx without the mean": answers(
            forward,
            lambda dy, x, w: (dy * (offset + w) * reference.reciprocal(x, eps), backward(dy, x, w)[1]),
        ),
        "dweight without r": answers(
            forward, lambda dy, x, w: (backward(dy, x, w)[0], (dy * x).reshape(-1, x.shape[-1]).sum(0))
        ),
        "a row's sum instead of its mean": answers(
            lambda x, w: reference.l2_norm(x, eps) * (offset + w), backward
        ),
    }
    if offset:
        without = lambda x, w: reference.rms_norm(x, w, eps, 0.0)  # noqa: E731
        listed["weight without offset"] = answers(
            without, lambda dy, x, w: reference.rms_norm_backward(dy, x, w, eps, 0.0)
        )
        listed["another ε"] = answers(lambda x, w: reference.rms_norm(x, w, EPS, offset), backward)
    return listed


def _subject(name: str, eps: float, offset: float, keywords: dict[str, Any], specials: tuple[Special, ...]) -> Subject:
    return Subject(
        name=name,
        function=rms_norm,
        keywords=keywords,
        inputs=("x", "weight"),
        reference=lambda x, weight: (reference.rms_norm(x, weight, eps, offset),),
        reference_backward=lambda dy, x, weight: reference.rms_norm_backward(dy, x, weight, eps, offset),
        cases=cases(1, weight_at=1),
        mistakes=_mistakes(eps, offset),
        specials=specials,
        batched=("x",),
        rebatched=rebatched(weight_at=1),
    )


_SPECIALS = (
    Special("x = 0", (0.0, 2.0), 0.0, (0.0,), (0.0, 0.0)),
    Special("x = -0", (-0.0, 2.0), 0.0, (-0.0,), (0.0, 0.0)),
    Special("x = NaN", (nan, 2.0), 1.0, (nan,), (nan, nan)),
    Special("x = infinity", (inf, 2.0), 1.0, (nan,), (nan, nan)),
    Special("weight = NaN", (1.0, nan), 0.0, (nan,), (nan, 0.0)),
)

RMS_NORM = _subject("rms_norm", EPS, 0.0, {}, _SPECIALS)
WITH_OFFSET = _subject("rms_norm[offset]", OFFSET_EPS, 1.0, {"offset": 1.0, "eps": OFFSET_EPS}, ())


def _residual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rms_norm_residual(x, weight, residual, EPS, 0.0)


def _residual_backward(dy: Tensor, ds: Tensor, x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return reference.rms_norm_residual_backward(dy, ds, x, weight, residual, EPS, 0.0)


def _without_ds(dy: Tensor, ds: Tensor, x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return _residual_backward(dy, ds * 0, x, weight, residual)


def _of_x_alone(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rms_norm(x, weight, EPS, 0.0), x + residual


RESIDUAL = Subject(
    name="rms_norm[residual]",
    function=rms_norm,
    inputs=("x", "weight", "residual"),
    by_name=("residual",),
    reference=_residual,
    reference_backward=_residual_backward,
    cases=cases(2, weight_at=1),
    mistakes={
        "zero output": zeros,
        "the norm of x alone": answers(_of_x_alone, _residual_backward),
        "ds dropped": answers(_residual, _without_ds),
    },
    batched=("x", "residual"),
    rebatched=rebatched(weight_at=1),
)

SUBJECTS = (RMS_NORM, WITH_OFFSET, RESIDUAL)


def _zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


BAD_CALLS = (
    BadCall("x without axes", lambda d: rms_norm(_zeros(d), _zeros(d)), ArgumentError, ("rms_norm", "x", "axis")),
    BadCall(
        "weight of another size",
        lambda d: rms_norm(_zeros(d, 4, 6), _zeros(d, 5)),
        ArgumentError,
        ("rms_norm", "weight", "6 columns", "(5,)"),
    ),
    BadCall(
        "weight of another 16-bit dtype",
        lambda d: rms_norm(_zeros(d, 4, 6, dtype=torch.bfloat16), _zeros(d, 6, dtype=torch.float16)),
        ArgumentError,
        ("weight", "bfloat16", "float16"),
    ),
    BadCall("negative eps", lambda d: rms_norm(_zeros(d, 4, 6), _zeros(d, 6), eps=-1.0), ArgumentError, ("eps", "-1")),
    BadCall(
        "residual of another shape",
        lambda d: rms_norm(_zeros(d, 4, 6), _zeros(d, 6), residual=_zeros(d, 4, 5)),
        ArgumentError,
        ("rms_norm", "residual", "(4, 6)", "(4, 5)"),
    ),
)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _torch_residual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """As decoders write it."""
    s = x + residual
    return _torch_rms_norm(s, weight), s


WORKLOADS = (
    *(
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
    ),
    Workload(
        "rms_norm[residual] 32768×2048",
        RESIDUAL,
        normal_rows(2, 1, 32768, 2048),
        4 * 2 * 32768 * 2048,
        4 * 2 * 32768 * 2048,
        _torch_residual,  # type: ignore[arg-type]
        devices=("cuda",),
    ),
)


def built_calls() -> Iterator[Call]:
    """Widths of each schedule in bfloat16, the other dtypes, a wide weight, a residual, and every layout."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size in (100, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        yield bind(rms_norm, empty(64, size), empty(size))
    for dtype, size in ((torch.float16, 2048), (torch.float32, 2048), (torch.float32, 8192), (torch.float64, 1024)):
        yield bind(rms_norm, empty(64, size, dtype=dtype), empty(size, dtype=dtype))
    x, weight = empty(64, 2048), empty(2048, dtype=torch.float32)
    yield bind(rms_norm, x, weight, residual=x)
    yield bind(rms_norm, empty(64, 4096)[:, :2048], weight)
    yield bind(rms_norm, empty(8, 9, 128)[:, :8], empty(128))
