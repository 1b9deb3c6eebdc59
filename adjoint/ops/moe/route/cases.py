"""What `moe.route` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.logits import MAX_EXPERTS
from adjoint.ops.moe.route import plans, reference, route

K = 3


def logits_of(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)


def _make(*shape: int, lay: Callable[[Tensor], Tensor] = lambda logits: logits) -> Make:
    return lambda dtype, device, generator: (lay(logits_of(generator, dtype, device, *shape)),)


def _ties(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Few distinct values, many of them equal; zeros of both signs."""
    return ((logits_of(generator, dtype, device, 9, 70) / 2).round(),)


def _special(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Rows with infinities and NaN among the logits, and rows of nothing else."""
    logits = logits_of(generator, dtype, device, 8, 40)
    infinity, nan = float("inf"), float("nan")
    logits[0, ::2] = -infinity
    logits[1, ::3] = nan
    logits[2, 17] = infinity
    logits[3] = -infinity
    logits[4] = nan
    logits[5, 2:] = -infinity
    logits[6, :38] = nan
    return (logits,)


_CASES = (
    Case("few tokens", _make(5, 12)),
    Case("ties", _ties),
    Case("special values", _special),
    Case("strided", _make(2, 90, 3, lay=lambda t: t.transpose(1, 2)[..., ::2])),
    Case(
        "three axes of tokens", _make(2, 3, 2, 33, lay=lambda t: t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    ),
    Case("every expert", _make(3, K)),
    Case("no tokens", _make(0, 8)),
    Case("512 experts", _make(5000, 512), heavy=True),
    Case("1024 experts", _make(600, 1024), heavy=True),
)


# ------------------------------------------------------------------------------------------- references


def _reference(score: str, renormalize: bool) -> Callable[..., tuple[Tensor, ...]]:
    return lambda logits: reference.route(logits, K, score, renormalize=renormalize)[:1]


def _gradient(score: str, renormalize: bool) -> Callable[..., tuple[Tensor, ...]]:
    def backward(dweights: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        indices = reference.select(logits.reshape(-1, logits.shape[-1]), K, score, None)
        return (reference.route_backward(dweights, logits, indices, score, renormalize),)

    return backward


def _mistakes(score: str, renormalize: bool) -> dict[str, Callable[..., Answers]]:
    """Wrong answers: `change` makes them from the right ones, in float64."""

    def wrong(change: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Answers]:
        def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
            x, dw = inputs[0].double(), upstream[0].double()
            (weights,), (dx,) = _reference(score, renormalize)(x), _gradient(score, renormalize)(dw, x)
            changed, dchanged = change(x, dw, weights, dx)
            return (changed.float(),), (dchanged.to(inputs[0].dtype),)

        return answer

    def rotated(x: Tensor, dw: Tensor, weights: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        return weights, dx.roll(1, -1)

    def other_scale(x: Tensor, dw: Tensor, weights: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        (other,) = _reference(score, not renormalize)(x)
        return other, _gradient(score, not renormalize)(dw, x)[0]

    def without_mean(x: Tensor, dw: Tensor, weights: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        return weights, torch.where(dx == 0, dx, dx + dx.abs().amax(-1, keepdim=True))

    return {
        "zero output": wrong(lambda x, dw, weights, dx: (torch.zeros_like(weights), torch.zeros_like(dx))),
        "the smallest expert": wrong(lambda x, dw, weights, dx: (_reference(score, renormalize)(-x)[0], dx)),
        "slots exchanged": wrong(lambda x, dw, weights, dx: (weights.flip(-1), dx)),
        "gradient of the next expert": wrong(rotated),
        "renormalize exchanged": wrong(other_scale),
        "gradient without Σ w·dw": wrong(without_mean),
    }


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Some tokens in a batch of their own; nothing where there are none."""
    return batching.rebatched(inputs, upstream, 0) if len(inputs[0]) else ()


def _subject(name: str, score: str, renormalize: bool, dtypes: tuple[torch.dtype, ...]) -> Subject:
    keywords: dict[str, Any] = {"k": K}
    keywords |= {"score": score} if score != "softmax" else {}
    keywords |= {} if renormalize else {"renormalize": False}
    return Subject(
        name=name,
        function=route,
        keywords=keywords,
        inputs=("logits",),
        reference=_reference(score, renormalize),
        reference_backward=_gradient(score, renormalize),
        cases=_CASES,
        mistakes=_mistakes(score, renormalize),
        dtypes=dtypes,
        rebatched=_rebatched,
    )


SUBJECTS = (
    _subject("moe.route", "softmax", True, (torch.float32, torch.bfloat16, torch.float16)),
    _subject("moe.route[not renormalized]", "softmax", False, (torch.bfloat16,)),
    _subject("moe.route[sigmoid]", "sigmoid", True, (torch.float32, torch.bfloat16)),
)


# ----------------------------------------------------------------------------------------- bad calls

TOKENS, EXPERTS = 4, 12


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (TOKENS, EXPERTS), device=device)


def _route(device: torch.device, k: Any = 2, **options: Any) -> Any:
    return route(_zeros(device), k, **options)


def _bias(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape or (EXPERTS,), device=device)


BAD_CALLS = (
    BadCall("boolean logits", lambda d: route(_zeros(d).bool(), 2), "route: logits", "bool"),
    BadCall("logits in float64", lambda d: route(_zeros(d).double(), 2), "logits", "float64", ".float()"),
    BadCall("logits without axes", lambda d: route(_zeros(d)[0, 0], 1), "logits", "axis of experts"),
    BadCall("no experts", lambda d: route(_zeros(d, 3, 0), 1), "1 to 1024 experts", "(3, 0)"),
    BadCall("too many experts", lambda d: route(_zeros(d, 2, 1025), 1), "1024", "(2, 1025)"),
    BadCall("k = 0", lambda d: _route(d, 0), "route: k", "from 1 to 12", "got 0"),
    BadCall("a negative k", lambda d: _route(d, -1), "route: k", "got -1"),
    BadCall("k past the experts", lambda d: _route(d, 13), "route: k", "got 13 for 12 experts"),
    BadCall("k past 64", lambda d: route(_zeros(d, 2, 100), 65), "route: k", "64", "got 65"),
    BadCall("k that is a float", lambda d: _route(d, 2.0), "route: k", "integer", "2.0"),
    BadCall("k that is a boolean", lambda d: _route(d, True), "route: k", "integer", "True"),
    BadCall("an unknown score", lambda d: _route(d, score="relu"), "score", "'softmax', 'sigmoid'", "'relu'"),
    BadCall("groups that do not divide", lambda d: _route(d, num_groups=5), "num_groups", "12", "5"),
    BadCall("no groups", lambda d: _route(d, num_groups=0), "num_groups", "got 0"),
    BadCall("no group kept", lambda d: _route(d, num_groups=4, groups_kept=0), "groups_kept", "got 0"),
    BadCall(
        "more groups kept than there are",
        lambda d: _route(d, num_groups=4, groups_kept=5),
        "groups_kept",
        "from 1 to num_groups, 4",
        "got 5",
    ),
    BadCall(
        "groups that hold too few",
        lambda d: _route(d, 4, num_groups=4, groups_kept=1),
        "1 of 4 groups of 3 experts",
        "fewer than k = 4",
    ),
    BadCall("renormalize that is a number", lambda d: _route(d, renormalize=1), "renormalize", "True or False"),
    BadCall("a bias too long", lambda d: _route(d, bias=_bias(d, 13)), "bias", "12 experts", "(13,)"),
    BadCall("a bias for each token", lambda d: _route(d, bias=_zeros(d)), "bias", "(4, 12)"),
    BadCall("a bias of another dtype", lambda d: _route(d, bias=_bias(d).bfloat16()), "bias", "float32", "bfloat16"),
    BadCall("an integer bias", lambda d: _route(d, bias=_bias(d).long()), "bias", "int64"),
    BadCall("a bias elsewhere", lambda d: _route(d, bias=_bias("meta")), "bias", "logits", "meta"),
)


# ----------------------------------------------------------------------------------------- workloads


def _on_device(rows: int, experts: int) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        seed = int(torch.randint(2**31, (), generator=generator))
        on_device = torch.Generator(device).manual_seed(seed)
        return (torch.randn(rows, experts, dtype=dtype, device=device, generator=on_device),)

    return make


def _eagerly(k: int) -> Callable[..., Tensor]:
    def softmax_topk(logits: Tensor) -> Tensor:
        shares = torch.softmax(logits, -1, dtype=torch.float32)
        weights, _ = torch.topk(shares, k, -1)
        return weights / weights.sum(-1, keepdim=True)

    return softmax_topk


def _timed(k: int) -> Subject:
    def exact(logits: Tensor) -> tuple[Tensor, ...]:
        return reference.route(logits, k)[:1]

    def backward(dweights: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        indices = reference.select(logits, k, "softmax", None)
        return (reference.route_backward(dweights, logits, indices, "softmax", True),)

    return Subject(
        name="moe.route",
        function=route,
        keywords={"k": k},
        inputs=("logits",),
        reference=exact,
        reference_backward=backward,
        cases=(),
    )


def _workloads() -> Iterable[Workload]:
    for rows, experts, k in ((32768, 512, 10), (32768, 256, 8), (65536, 128, 8)):
        results = rows * k * (4 + 8)
        yield Workload(
            f"moe.route {rows} tokens, {experts} experts, k = {k}",
            _timed(k),
            _on_device(rows, experts),
            rows * experts * 2 + results,
            rows * experts * 2 + results + rows * k * 4,
            _eagerly(k),
            devices=("cuda",),
        )


WORKLOADS = tuple(_workloads())


# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """The rows of the benchmark, every dtype and mode on one of them, and the largest problems."""
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    sigmoid: dict[str, Any] = {"score": "sigmoid"}
    dense: dict[str, Any] = {"renormalize": False}
    groups: dict[str, Any] = {"num_groups": 8, "groups_kept": 4}
    for dtype, experts, k, biased, options in (
        (bf16, 512, 10, False, {}),
        (bf16, 256, 8, False, {}),
        (bf16, 128, 8, False, {}),
        (f16, 128, 8, False, {}),
        (f32, 128, 8, False, {}),
        (bf16, 100, 8, False, dense),
        (bf16, 512, 10, False, dense),
        (bf16, 128, 8, True, {}),
        (bf16, 256, 8, True, sigmoid),
        (bf16, 256, 8, True, sigmoid | groups),
        (bf16, MAX_EXPERTS, plans.MAX_K, False, {}),
        (f32, MAX_EXPERTS, plans.MAX_K, False, dense | groups),
        (f32, MAX_EXPERTS, plans.MAX_K, False, sigmoid | groups),
    ):
        logits = torch.empty(64, experts, dtype=dtype, device="meta")
        bias = torch.empty(experts, device="meta") if biased else None
        yield bind(route, logits, k, bias=bias, **options)
