"""What `linear_cross_entropy` is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.core.preference import Preference
from adjoint.ops.loss import reference
from adjoint.ops.loss.linear_cross_entropy import linear_cross_entropy
from adjoint.ops.loss.values import (
    MODES,
    in_mode,
    labels_of,
    mistakes,
    rebatched,
    resized,
    with_label,
    with_upstream,
)
from adjoint.ops.moe.values import changing, laid_across, of_device, shaped, values


def _layer(
    tokens: tuple[int, ...], columns: int, classes: int, dtype_of_labels: torch.dtype = torch.int64,
    ignored: float = 0.3, scale: float = 2.0, bias: bool = False, across: bool = False,
) -> Make:  # fmt: skip
    """Rows of hidden, a weight whose logits have a size of about `scale`, labels and a bias."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        hidden = values(generator, dtype, device, *tokens, columns)
        weight = values(generator, dtype, device, classes, columns, scale=scale * max(1, columns) ** -0.5)
        labels = labels_of(generator, tokens, classes, device, dtype_of_labels, ignored)
        numbers = values(generator, dtype, device, classes) if bias else None
        if across:
            hidden, labels = laid_across(hidden, 1, 0, 2), laid_across(labels, 1, 0)
            weight = laid_across(weight, 1, 0)
        return hidden, weight, labels, numbers

    return make


_CASES = (
    Case("few tokens", _layer((2, 3), 4, 7, ignored=0.0)),
    Case("some do not count", _layer((5, 9), 40, 131)),
    Case("a bias", _layer((2, 4), 16, 33, torch.int32, bias=True)),
    Case("matrices across", _layer((3, 4), 24, 40, across=True, bias=True)),
    Case("no tokens", _layer((0, 3), 8, 9, bias=True)),
    Case("no labels", _layer((2, 3), 8, 9, ignored=2.0, bias=True)),
    Case("one class", _layer((2, 2), 8, 1, ignored=0.0)),
    Case("two segments of classes", _layer((1, 3), 8, 2500, ignored=0.0)),
    Case("several blocks of rows, a vocabulary", _layer((2, 3000), 128, 151936, bias=True), heavy=True),
    Case("an odd vocabulary", _layer((2, 300), 200, 50257, scale=6.0), heavy=True),
)

BATCHED = (True, False, True, False)


def _subject(suffix: str, keywords: dict[str, Any]) -> Subject:
    return Subject(
        name=f"linear_cross_entropy{suffix}",
        function=linear_cross_entropy,
        inputs=("hidden", "weight", "labels", "bias"),
        by_name=("bias",),
        keywords=keywords,
        reference=lambda *inputs: reference.linear_cross_entropy(*inputs, **keywords),
        reference_backward=with_upstream(reference.linear_cross_entropy_backward, keywords),
        cases=tuple(replace(case, make=in_mode(case.make, 2, keywords)) for case in _CASES),
        mistakes={
            **mistakes(reference.linear_cross_entropy, reference.linear_cross_entropy_backward, keywords),
            "gradients of half of the tokens": _half_of_the_tokens(keywords),
        },
        plans=("triton.tiles",),
        batched=("hidden", "labels"),
        resized=resized(BATCHED, keywords),
        rebatched=rebatched(BATCHED),
    )


def _half_of_the_tokens(keywords: dict[str, Any]) -> Callable[..., Any]:
    """dweight and dbias of the first half alone, as when blocks overwrite each other's sums."""
    backward = with_upstream(reference.linear_cross_entropy_backward, keywords)

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Any:
        wide = tuple(x.double() if x is not None and x.is_floating_point() else x for x in inputs)
        gradients = backward(*(x.double() for x in upstream), *wide)
        skipped = wide[2].clone()
        skipped[len(skipped) // 2 :] = keywords.get("ignore_index", -100)
        half = backward(*(x.double() for x in upstream), *wide[:2], skipped, wide[3])
        outputs = reference.linear_cross_entropy(*wide, **keywords)
        given = [x for x in inputs if x is not None and x.is_floating_point()]
        found = (gradients[0], *half[1:])
        return (
            tuple(x.to(like.dtype) for x, like in zip(outputs, upstream, strict=True)),
            tuple(x.to(like.dtype) for x, like in zip(found, given, strict=True)),
        )

    return answer


SUBJECTS = tuple(_subject(suffix, keywords) for suffix, keywords in MODES.items())

# ------------------------------------------------------------------------------------------ bad calls


def _inputs(device: torch.device) -> dict[str, Any]:
    shapes = {"hidden": (4, 3, 6), "weight": (12, 6), "bias": (12,)}
    inputs: dict[str, Any] = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    return inputs | {"labels": torch.zeros(4, 3, dtype=torch.int64, device=device)}


_changed = changing(linear_cross_entropy, _inputs)

BAD_CALLS = (
    BadCall("hidden without axes", _changed(hidden=shaped()), "linear_cross_entropy", "hidden", "without axes"),
    BadCall("weight of other columns", _changed(weight=shaped(12, 5)), "weight", "[classes, 6]", "(12, 5)"),
    BadCall("weight transposed", _changed(weight=shaped(6, 12)), "weight", "[classes, 6]", "(6, 12)"),
    BadCall("weight with one axis", _changed(weight=shaped(6)), "weight", "(6,)"),
    BadCall("no classes", _changed(weight=shaped(0, 6), bias=None), "weight", "at least one class", "(0, 6)"),
    BadCall("weight in another type", _changed(weight=Tensor.half), "weight", "float32", "float16"),
    BadCall("bias of other classes", _changed(bias=shaped(11)), "bias", "(12,)", "(11,)"),
    BadCall("bias in another type", _changed(bias=Tensor.double), "bias", "float32", "float64"),
    BadCall("labels of other tokens", _changed(labels=shaped(4, 2)), "labels", "(4, 3)", "(4, 2)"),
    BadCall("narrow labels", _changed(labels=Tensor.short), "labels", "int16", ".long()"),
    BadCall("a label too large", _changed(labels=with_label(7, 12)), "labels", "of weight", "got 12 at position 7 "),
    BadCall("a negative label", _changed(labels=with_label(0, -1, torch.int32)), "got -1 at position 0 "),
    BadCall("a label that is a class modulo 2^32", _changed(labels=with_label(2, 2**32 + 1)), "4294967297"),
    BadCall("a shifted label too large", _changed(labels=with_label(5, 12), shift=True), "got 12 at position 5 "),
    BadCall("a reduction of another name", _changed(reduction="avg"), "linear_cross_entropy: reduction", "'avg'"),
    BadCall("smoothing past 1", _changed(label_smoothing=2), "label_smoothing", "0 to 1", "2.0"),
    BadCall("a negative z_loss", _changed(z_loss=-1.0), "z_loss", "-1.0"),
    BadCall("a softcap of 0", _changed(softcap=0), "softcap", "positive"),
    BadCall("a preference of another type", _changed(preference="eager"), "preference=", "str"),
    BadCall("no workspace allowed", _changed(preference=Preference(max_workspace_bytes=0)), "triton.vendor", "eager",
            "the preference allows 0", error=Unsupported),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ workloads


def _drawn(tokens: int, columns: int, classes: int) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = of_device(device, generator)
        hidden = torch.randn(tokens, columns, dtype=dtype, device=device, generator=own)
        weight = torch.randn(classes, columns, dtype=dtype, device=device, generator=own).mul_(columns**-0.5)
        return hidden, weight, torch.randint(classes, (tokens,), device=device, generator=own), None

    return make


def composed(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, reduction: str = "mean") -> Tensor:
    """torch's own functions, which hold all logits."""
    return F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction=reduction)


REFERENCE_ROWS = 2048
"""Rows of hidden whose logits the float64 reference of a workload holds at once."""


def _row_blocks(labels: Tensor) -> Iterator[slice]:
    for start in range(0, len(labels), REFERENCE_ROWS):
        yield slice(start, start + REFERENCE_ROWS)


def _in_blocks(keywords: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The reference, and its backward, of one number or a number for each token, a block of rows at a time."""
    is_mean, options = keywords.get("reduction", "mean") == "mean", {"reduction": "none"}

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        blocks = [
            reference.linear_cross_entropy(hidden[rows], weight, labels[rows], bias, **options)[0]
            for rows in _row_blocks(labels)
        ]
        losses = torch.cat(blocks)
        return (losses.mean() if is_mean else losses,)

    def backward(
        dloss: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        upstream = (dloss / len(labels)).expand(labels.shape) if is_mean else dloss
        of_hidden, of_weight = [], torch.zeros_like(weight)
        for rows in _row_blocks(labels):
            found = reference.linear_cross_entropy_backward(
                (upstream[rows],), hidden[rows], weight, labels[rows], bias, **options
            )
            of_hidden.append(found[0])
            of_weight += found[1]
        return torch.cat(of_hidden), of_weight

    return forward, backward


def _workload(
    tokens: int, columns: int, classes: int, keywords: dict[str, Any] | None = None, on_cpu: bool = False,
    repeatable: bool = False,
) -> Workload:  # fmt: skip
    keywords = keywords or {}
    forward, backward = _in_blocks(keywords)
    subject = replace(
        SUBJECTS[0], keywords=keywords, reference=forward, reference_backward=backward, cases=(), mistakes={},
        rebatched=None,
    )  # fmt: skip
    size = 4 if on_cpu else 2
    matrices = size * (tokens + classes) * columns
    mode = ", none" if "reduction" in keywords else ", repeatable" if repeatable else ""
    reduction = keywords.get("reduction", "mean")
    return Workload(
        f"linear_cross_entropy {tokens}×{columns}×{classes}{mode}{', float32' if on_cpu else ''}",
        subject,
        _drawn(tokens, columns, classes),
        matrices,
        2 * matrices,
        partial(composed, reduction=reduction),
        peers=() if keywords or repeatable else ("liger_linear_cross_entropy", "quack_linear_cross_entropy"),
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        devices=("cpu",) if on_cpu else ("cuda",),
        directions=("forward + backward",),
        operations=2 * tokens * columns * classes,
        compile=tokens * classes < 2**32,
        preference=Preference(repeatable=True) if repeatable else None,
    )


WORKLOADS = (
    _workload(8192, 2048, 151936),
    _workload(8192, 2048, 151936, repeatable=True),
    _workload(8192, 2048, 151936, {"reduction": "none"}),
    _workload(32768, 2048, 248320),
    _workload(64, 256, 4096, on_cpu=True),
    _workload(512, 512, 8192, on_cpu=True),
)

ERROR_WORKLOADS = (_workload(2048, 1024, 32000),)
"""Smaller than what is timed: a reference and bounds in float64 take seconds there, and nothing else is learned."""

# --------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Every mode in every dtype, with and without a bias."""
    for dtype in SUBJECTS[0].dtypes:
        hidden = torch.empty(64, 16, 2048, dtype=dtype, device="meta")
        weight = torch.empty(151936, 2048, dtype=dtype, device="meta")
        labels = torch.empty(64, 16, dtype=torch.int64, device="meta")
        for number, keywords in enumerate(MODES.values()):
            bias = torch.empty(151936, dtype=dtype, device="meta") if number == 1 else None
            yield bind(linear_cross_entropy, hidden, weight, labels, bias=bias, **keywords)
