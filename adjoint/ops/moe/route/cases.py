"""What `moe.route` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload, normal
from adjoint.contract.mistakes import answers, zeros
from adjoint.core.plan import Call, bind
from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.logits import MAX_EXPERTS
from adjoint.ops.moe.route import plans, reference, route
from adjoint.ops.moe.values import changing, laid_across, shaped, values

K = 3


def _make(*shape: int, lay: Callable[[Tensor], Tensor] = lambda logits: logits) -> Make:
    return lambda dtype, device, generator: (lay(values(generator, dtype, device, *shape, scale=2)),)


def _special(logits: Tensor) -> Tensor:
    """Rows with infinities and NaN among the logits, and rows of only such values."""
    infinity, nan = float("inf"), float("nan")
    logits[0, ::2] = -infinity
    logits[1, ::3] = nan
    logits[2, 17] = infinity
    logits[3] = -infinity
    logits[4] = nan
    logits[5, 2:] = -infinity
    logits[6, :38] = nan
    return logits


_CASES = (
    Case("few tokens", _make(5, 12)),
    Case("ties", _make(9, 70, lay=lambda t: (t / 2).round())),  # also zeros of both signs
    Case("special values", _make(8, 40, lay=_special)),
    Case("strided", _make(2, 90, 3, lay=lambda t: t.transpose(1, 2)[..., ::2])),
    Case("three axes of tokens", _make(2, 3, 2, 33, lay=lambda t: laid_across(t, 2, 1, 0, 3))),
    Case("every expert", _make(3, K)),
    Case("no tokens", _make(0, 8)),
    Case("512 experts", _make(5000, 512), heavy=True),
    Case("1024 experts", _make(600, 1024), heavy=True),
)


# ------------------------------------------------------------------------------------------- references


Groups = tuple[int, int]
"""The number of groups of experts, and the number of groups that are kept."""


def _reference(
    score: str, renormalize: bool, k: int = K, kind: torch.dtype = torch.float32, groups: Groups = (1, 1)
) -> Callable[..., tuple[Tensor, ...]]:
    return lambda logits: reference.route(logits, k, score, None, *groups, renormalize, kind)[:1]


def _gradient(
    score: str, renormalize: bool, k: int = K, kind: torch.dtype = torch.float32, groups: Groups = (1, 1)
) -> Callable[..., tuple[Tensor, ...]]:
    def backward(dweights: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        indices = reference.select(logits.reshape(-1, logits.shape[-1]), k, score, None, *groups, kind)
        return (reference.route_backward(dweights, logits, indices, score, renormalize),)

    return backward


def _mistakes(score: str, renormalize: bool) -> dict[str, Callable[..., Answers]]:
    right, gradient = _reference(score, renormalize), _gradient(score, renormalize)

    def without_mean(dw: Tensor, x: Tensor) -> Tensor:
        (dx,) = gradient(dw, x)
        return torch.where(dx == 0, dx, dx + dx.abs().amax(-1, keepdim=True))

    return {
        "zero output": zeros,
        "the smallest expert": answers(lambda x: right(-x), gradient),
        "slots exchanged": answers(lambda x: right(x)[0].flip(-1), gradient),
        "gradient of the next expert": answers(right, lambda dw, x: gradient(dw, x)[0].roll(1, -1)),
        "renormalize exchanged": answers(_reference(score, not renormalize), _gradient(score, not renormalize)),
        "gradient without Σ w·dw": answers(right, without_mean),
    }


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Some tokens in a batch of their own; nothing if there are no tokens."""
    return batching.rebatched(inputs, upstream, 0) if len(inputs[0]) else ()


def _subject(name: str, score: str, renormalize: bool, *dtypes: torch.dtype) -> Subject:
    keywords: dict[str, Any] = {"k": K}
    keywords |= {"score": score} if score != "softmax" else {}
    keywords |= {} if renormalize else {"renormalize": False}
    kind = wide_dtype(dtypes[0])
    return Subject(
        name=name,
        function=route,
        keywords=keywords,
        inputs=("logits",),
        reference=_reference(score, renormalize, kind=kind),
        reference_backward=_gradient(score, renormalize, kind=kind),
        cases=_CASES,
        mistakes=_mistakes(score, renormalize),
        dtypes=dtypes,
        rebatched=_rebatched,
    )


_GROUPS = (4, 2)
_GROUPED = replace(
    _subject("moe.route[groups]", "softmax", True, torch.float32, torch.bfloat16),
    keywords={"k": K, "num_groups": _GROUPS[0], "groups_kept": _GROUPS[1]},
    reference=_reference("softmax", True, groups=_GROUPS),
    reference_backward=_gradient("softmax", True, groups=_GROUPS),
    choices=lambda logits: reference.route(logits, K, "softmax", None, *_GROUPS)[1:],
    cases=(
        Case("few tokens", _make(5, 12)),
        Case("ties", _make(9, 72, lay=lambda t: (t / 2).round())),
        Case("special values", _make(8, 40, lay=_special)),
        Case("strided", _make(2, 88, 3, lay=lambda t: t.transpose(1, 2)[..., ::2])),
        Case("512 experts", _make(5000, 512), heavy=True),
    ),
    mistakes={
        "zero output": zeros,
        "groups ignored": answers(_reference("softmax", True), _gradient("softmax", True)),
        "one group more": answers(
            _reference("softmax", True, groups=(4, 3)), _gradient("softmax", True, groups=(4, 3))
        ),
    },
)

SUBJECTS = (
    _subject("moe.route", "softmax", True, torch.float32, torch.bfloat16, torch.float16),
    _subject("moe.route[not renormalized]", "softmax", False, torch.bfloat16),
    _subject("moe.route[sigmoid]", "sigmoid", True, torch.float32, torch.bfloat16),
    _GROUPED,
    # Their selection compares float64.
    _subject("moe.route[float64]", "softmax", True, torch.float64),
    _subject("moe.route[float64, not renormalized]", "softmax", False, torch.float64),
    _subject("moe.route[float64, sigmoid]", "sigmoid", True, torch.float64),
)


# ----------------------------------------------------------------------------------------- bad calls

_changed = changing(
    route, lambda device: {"logits": torch.zeros(4, 12, device=device), "k": 2, "bias": torch.zeros(12, device=device)}
)

BAD_CALLS = (
    BadCall("boolean logits", _changed(logits=Tensor.bool), "route: logits", "bool"),
    BadCall("integer logits", _changed(logits=Tensor.long), "route: logits", "float64, float32", "int64", ".float()"),
    BadCall("a narrow bias for float64", _changed(logits=Tensor.double), "bias", "float64 logits", "got float32"),
    BadCall("logits without axes", _changed(logits=shaped(), k=1), "logits", "axis of experts"),
    BadCall("no experts", _changed(logits=shaped(3, 0), k=1), "1 to 1024 experts", "(3, 0)"),
    BadCall("too many experts", _changed(logits=shaped(2, 1025), k=1), "1024", "(2, 1025)"),
    BadCall("k = 0", _changed(k=0), "route: k", "from 1 to 12", "got 0"),
    BadCall("a negative k", _changed(k=-1), "route: k", "got -1"),
    BadCall("k past the experts", _changed(k=13), "route: k", "got 13 for 12 experts"),
    BadCall("k past 64", _changed(logits=shaped(2, 100), k=65), "route: k", "64", "got 65"),
    BadCall("k that is a float", _changed(k=2.0), "route: k", "integer", "2.0"),
    BadCall("k that is a boolean", _changed(k=True), "route: k", "integer", "True"),
    BadCall("an unknown score", _changed(score="relu"), "score", "'softmax', 'sigmoid'", "'relu'"),
    BadCall("groups that do not divide", _changed(num_groups=5), "num_groups", "12", "5"),
    BadCall("no groups", _changed(num_groups=0), "num_groups", "got 0"),
    BadCall("no group kept", _changed(num_groups=4, groups_kept=0), "groups_kept", "got 0"),
    BadCall("more groups kept than there are", _changed(num_groups=4, groups_kept=5), "groups_kept",
            "from 1 to num_groups, 4", "got 5"),
    BadCall("groups that hold too few", _changed(k=4, num_groups=4, groups_kept=1), "1 of 4 groups of 3 experts",
            "fewer than k = 4"),
    BadCall("renormalize that is a number", _changed(renormalize=1), "renormalize", "True or False"),
    BadCall("a bias too long", _changed(bias=shaped(13)), "bias", "12 experts", "(13,)"),
    BadCall("a bias for each token", _changed(bias=shaped(4, 12)), "bias", "(4, 12)"),
    BadCall("a bias of another dtype", _changed(bias=Tensor.bfloat16), "bias", "float32", "bfloat16"),
    BadCall("an integer bias", _changed(bias=Tensor.long), "bias", "int64"),
    BadCall("a bias elsewhere", _changed(bias=lambda bias: bias.to("meta")), "bias", "logits", "meta"),
)  # fmt: skip


# ----------------------------------------------------------------------------------------- workloads


def _for_choices(arguments: Inputs, choices: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], int]:
    """The gradient for a contender's own experts in tokens where they differ from ours only by the order of ties."""
    dweights, logits = arguments
    assert dweights is not None and logits is not None
    theirs = choices[0].long()
    ours = reference.select(logits, theirs.shape[1], "softmax", None)
    differ = (theirs != ours).any(-1)
    is_tie = (logits.gather(1, theirs) == logits.gather(1, ours)).all(-1)
    is_tie &= theirs.sort(-1).values.diff(dim=-1).ne(0).all(-1)  # no expert is chosen twice
    chosen = torch.where(is_tie[:, None], theirs, ours)
    return (reference.route_backward(dweights, logits, chosen, "softmax", True),), int((differ & is_tie).sum())


def _workload(rows: int, experts: int, k: int) -> Workload:
    def softmax_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.softmax(logits, -1, dtype=torch.float32)
        weights, chosen = torch.topk(shares, k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    subject = Subject(
        name="moe.route",
        function=route,
        keywords={"k": k},
        inputs=("logits",),
        reference=_reference("softmax", True, k),
        reference_backward=_gradient("softmax", True, k),
        cases=(),
    )
    moved = rows * experts * 2 + rows * k * (4 + 8)
    return Workload(
        f"moe.route {rows} tokens, {experts} experts, k = {k}",
        subject,
        normal((rows, experts)),
        moved,
        moved + rows * k * 4,
        softmax_topk,
        peers=("quack_top_8",) if k == 8 else (),
        devices=("cuda",),
        chosen=_for_choices,
    )


WORKLOADS = tuple(_workload(*sizes) for sizes in ((32768, 512, 10), (32768, 256, 8), (65536, 128, 8)))


# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls with the sizes of the benchmark, in every dtype and mode for one of them, and the largest problems."""
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
