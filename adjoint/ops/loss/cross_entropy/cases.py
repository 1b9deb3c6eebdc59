"""What `cross_entropy` is tested, verified and timed on."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.contract.forms import reuse_inputs
from adjoint.core.plan import Call, bind
from adjoint.ops.loss import reference
from adjoint.ops.loss.cross_entropy import cross_entropy
from adjoint.ops.loss.values import (
    IGNORED,
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


def _logits(
    tokens: tuple[int, ...], classes: int, dtype_of_labels: torch.dtype = torch.int64, ignored: float = 0.3,
    scale: float = 2.0, layout: str = "",
) -> Make:  # fmt: skip
    """Logits and labels; a token that does not count has NaN among its logits."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits = values(generator, dtype, device, *tokens, classes, scale=scale)
        labels = labels_of(generator, tokens, classes, device, dtype_of_labels, ignored)
        if layout == "columns apart":
            logits = torch.stack((logits, logits), -1)[..., 0]
        if layout == "rows apart":
            logits = torch.cat((logits, logits), -1)[..., :classes]
        if layout == "across":
            logits, labels = laid_across(logits, 1, 0, 2), laid_across(labels, 1, 0)
        return logits, labels

    return make


def _with_nan(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    logits, labels = _logits((3, 4), 19)(dtype, device, generator)
    labels[1, 1:3] = IGNORED
    logits[1, 1] = float("nan")  # its own label, and with a shift the label of the next, does not count
    return logits, labels


_CASES = (
    Case("few tokens", _logits((2, 3), 7, ignored=0.0)),
    Case("some do not count", _logits((4, 5), 131)),
    Case("a token of NaN that does not count", _with_nan),
    Case("rows apart", _logits((3, 4), 40, torch.int32, layout="rows apart")),
    Case("columns apart", _logits((3, 4), 33, layout="columns apart")),
    Case("batch and time across", _logits((3, 4), 24, layout="across")),
    Case("no tokens", _logits((0, 3), 9)),
    Case("no labels", _logits((2, 3), 9, ignored=2.0)),
    Case("one class", _logits((2, 2), 1, ignored=0.0)),
    Case("several strides of lanes, and a rest", _logits((1, 2), 20011, ignored=0.0)),
    Case("far apart", _logits((2, 4), 300, scale=60.0)),
    Case("a vocabulary", _logits((2, 300), 151936), heavy=True),
    Case("an odd vocabulary", _logits((2, 100), 50257, scale=9.0), heavy=True),
    Case("2^18 classes", _logits((2, 60), 2**18), heavy=True),
)


def _subject(suffix: str, keywords: dict[str, Any]) -> Subject:
    batched = (True, True)
    return Subject(
        name=f"cross_entropy{suffix}",
        function=cross_entropy,
        inputs=("logits", "labels"),
        keywords=keywords,
        reference=lambda *inputs: reference.cross_entropy(*inputs, **keywords),
        reference_backward=with_upstream(reference.cross_entropy_backward, keywords),
        cases=tuple(replace(case, make=in_mode(case.make, 1, keywords)) for case in _CASES),
        mistakes=mistakes(reference.cross_entropy, reference.cross_entropy_backward, keywords),
        resized=resized(batched, keywords),
        rebatched=rebatched(batched),
        forms=(reuse_inputs("logits"),),
    )


SUBJECTS = tuple(_subject(suffix, keywords) for suffix, keywords in MODES.items())

# ------------------------------------------------------------------------------------------ bad calls


def _inputs(device: torch.device) -> dict[str, Any]:
    return {
        "logits": torch.zeros(4, 3, 12, device=device),
        "labels": torch.zeros(4, 3, dtype=torch.int64, device=device),
    }


_changed = changing(cross_entropy, _inputs)

BAD_CALLS = (
    BadCall("logits without axes", _changed(logits=shaped(), labels=shaped()), "cross_entropy", "logits", "()"),
    BadCall("logits without classes", _changed(logits=shaped(4, 3, 0)), "logits", "at least one class", "(4, 3, 0)"),
    BadCall("labels of other tokens", _changed(labels=shaped(4, 2)), "labels", "(4, 3)", "(4, 2)"),
    BadCall("labels with one axis more", _changed(labels=shaped(4, 3, 1)), "labels", "(4, 3)", "(4, 3, 1)"),
    BadCall("labels for classes second", _changed(labels=shaped(4, 12)), "(4, 3)", "(4, 12)", "logits.movedim(1, -1)"),
    BadCall("narrow labels", _changed(labels=Tensor.short), "labels", "int16", ".long()"),
    BadCall("labels that are a mask", _changed(labels=Tensor.bool), "labels", "bool"),
    BadCall("a label too large", _changed(labels=with_label(7, 12)), "cross_entropy: labels", "got 12 at position 7 "),
    BadCall("a negative label", _changed(labels=with_label(0, -1, torch.int32)), "got -1 at position 0 "),
    BadCall("a label that is a class modulo 2^32", _changed(labels=with_label(2, 2**32 + 1)), "4294967297"),
    BadCall("a shifted label too large", _changed(labels=with_label(1, 12), shift=True), "got 12 at position 1 "),
    BadCall("a reduction of another name", _changed(reduction="max"), "reduction", "'mean'", "'max'"),
    BadCall("smoothing past 1", _changed(label_smoothing=1.5), "label_smoothing", "0 to 1", "1.5"),
    BadCall("smoothing that is NaN", _changed(label_smoothing=float("nan")), "label_smoothing", "nan"),
    BadCall("smoothing that is text", _changed(label_smoothing="some"), "label_smoothing", "'some'"),
    BadCall("a negative z_loss", _changed(z_loss=-1.0), "z_loss", "-1.0"),
    BadCall("a softcap of 0", _changed(softcap=0.0), "softcap", "positive", "0.0"),
    BadCall("an infinite softcap", _changed(softcap=float("inf")), "softcap", "inf"),
    BadCall("a softcap that float32 has not", _changed(softcap=1e300), "softcap", "2^127", "1e+300"),
    BadCall("a softcap that is 0 in float32", _changed(softcap=1e-60), "softcap", "2^-126", "1e-60"),
    BadCall("a z_loss that float32 has not", _changed(z_loss=1e39), "z_loss", "2^127", "1e+39"),
    BadCall("a z_loss that no float is", _changed(z_loss=10**400), "z_loss", "must be a number"),
    BadCall("an ignore_index of 65 bits", _changed(ignore_index=2**63), "ignore_index", "64 bits", str(2**63)),
    BadCall("an ignore_index of 201 bits", _changed(ignore_index=-(2**200), shift=True), "ignore_index", "64 bits"),
    BadCall("reuse_inputs that is a number", _changed(reuse_inputs=2), "reuse_inputs", "True or False", "got 2"),
    BadCall("ignore_index that is no integer", _changed(ignore_index=1.0), "ignore_index", "1.0"),
    BadCall("shift that is a number", _changed(shift=1), "shift", "got 1"),
    BadCall(
        "a shift without time", _changed(logits=shaped(5), labels=lambda x: x.new_zeros(()), shift=True), "shift=True"
    ),
    BadCall("a preference of another type", _changed(preference="eager"), "preference=", "str"),
)

# ------------------------------------------------------------------------------------------ workloads


def _drawn(tokens: int, classes: int) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = of_device(device, generator)
        logits = torch.randn(tokens, classes, dtype=dtype, device=device, generator=own)
        return logits, torch.randint(classes, (tokens,), device=device, generator=own)

    return make


def _workload(tokens: int, classes: int, devices: tuple[str, ...], dtype: torch.dtype) -> Workload:
    memory = tokens * classes * dtype.itemsize
    suffix = "" if dtype == torch.bfloat16 else ", float32"
    return Workload(
        f"cross_entropy {tokens}×{classes}{suffix}",
        replace(SUBJECTS[0], cases=(), mistakes={}, rebatched=None, forms=(), pieces=lambda *whole: [whole]),  # a mean
        _drawn(tokens, classes),
        memory,
        2 * memory,
        F.cross_entropy,
        peers=("quack_cross_entropy",),
        dtype=dtype,
        devices=devices,
        directions=("forward", "backward", "forward + backward"),
    )


WORKLOADS = (
    _workload(4096, 151936, ("cuda",), torch.bfloat16),
    _workload(256, 8000, ("cpu",), torch.float32),
)

ERROR_WORKLOADS = (_workload(4096, 32000, ("cuda",), torch.bfloat16),)
"""Small enough that float64 has room for the bounds of all logits."""

# --------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call | tuple[Any, ...]]:
    """Every mode, in every dtype."""
    for dtype in SUBJECTS[0].dtypes:
        logits = torch.empty(64, 16, 151936, dtype=dtype, device="meta")
        labels = torch.empty(64, 16, dtype=torch.int64, device="meta")
        yield from map(partial(_bind, logits, labels), MODES.values())


def _bind(logits: Tensor, labels: Tensor, keywords: dict[str, Any]) -> Call:
    return bind(cross_entropy, logits, labels, **keywords)
