"""The sequences the gated delta rule is tested and verified on, and what is made from them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Make, Rebatch, Subject
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.values import gradients, nearly_equal, orthogonal, strided, tokens, wrong, zeros

_CASES = (
    Case("grouped heads", tokens((2, 4, 2, 4, 3, 2))),
    Case("a tail, no state", tokens((1, 70, 2, 4, 16, 8), state=False)),
    Case("packed", tokens((1, 90, 1, 2, 8, 12), cu_seqlens=(0, 0, 1, 66, 90, 90), wide_gates=False)),
    Case(
        "nearly equal keys, no decay", tokens((1, 80, 1, 1, 16, 16), keys=nearly_equal, decay=None, strength=(0.9, 1))
    ),
    Case("orthogonal keys, strong decay", tokens((1, 65, 1, 1, 8, 8), keys=orthogonal, decay=40.0)),
    Case("strided", tokens((2, 9, 1, 2, 5, 6), lay=strided)),
    Case("no tokens", tokens((2, 0, 1, 1, 4, 4))),
    Case("two segments", tokens((1, 1100, 1, 1, 4, 4), decay=0.05), heavy=True),
    Case("a layer", tokens((1, 2048, 4, 8, 128, 128), decay=0.1), heavy=True),
    Case("a layer, keys nearly equal", tokens((1, 1024, 2, 4, 128, 128), keys=nearly_equal, decay=0.1), heavy=True),
    Case("largest heads, packed", tokens((1, 700, 1, 2, 256, 256), cu_seqlens=(0, 1, 300, 700)), heavy=True),
)

# --------------------------------------------------------------------------------------------- batches


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """A sequence keeps its bits: a row alone, a packed sequence alone, and the outputs of a prefix."""
    *tokens, state, cu_seqlens = inputs
    do, dfinal = upstream
    rows, time = do.shape[:2]
    bounds = [0, time] if cu_seqlens is None else cu_seqlens.tolist()
    longest = max(range(len(bounds) - 1), key=lambda n: bounds[n + 1] - bounds[n])
    begin, end = bounds[longest], bounds[longest + 1]
    number = longest if cu_seqlens is not None else rows - 1
    own, places = slice(number, number + 1), (slice(0 if cu_seqlens is not None else number, None), slice(begin, end))
    if rows == 0 or time == 0:
        return

    def of_tokens(x: Tensor) -> Tensor:
        return x[places][:1]

    def alone(whole: Answers, part: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (*part[0], *part[1])
        for got, every in zip(parts, (*whole[0], *whole[1]), strict=True):
            yield got, of_tokens(every) if every.shape[1] == time else every[own]

    first = None if state is None else state[own]
    given = (*map(of_tokens, tokens), first, None)
    yield Rebatch(f"sequence {number} alone", given, (of_tokens(do), dfinal[own]), alone)

    if cu_seqlens is None and time > 1:
        cut = time - time // 3

        def prefix(whole: Answers, part: Answers) -> Iterator[tuple[Tensor, Tensor]]:
            if whole[0]:
                yield part[0][0], whole[0][0][:, :cut]

        yield Rebatch(f"the first {cut}", (*(x[:, :cut] for x in tokens), state, None), (do[:, :cut], dfinal), prefix)


# -------------------------------------------------------------------------------------------- mistakes


def _changed(**changes: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The rule on inputs of which some are changed first."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")

    def rule(*inputs: Any) -> tuple[Tensor, Tensor]:
        named = zip(names, inputs, strict=True)
        return reference.gated_delta_rule(*(changes[n](x) if n in changes and x is not None else x for n, x in named))

    return rule


def _late_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Each token's decay one token too late."""
    return reference.gated_delta_rule(q, k, v, torch.cat((g[:, :1] * 0, g[:, :-1]), 1), beta, *rest)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Value head h reads key head h modulo Hg."""
    times = v.shape[2] // q.shape[2]
    return reference.gated_delta_rule(q.repeat(1, 1, times, 1), k.repeat(1, 1, times, 1), v, *rest)


_MISTAKES = {
    "zero output": zeros,
    "no decay": wrong(_changed(g=torch.zeros_like)),
    "decay a token late": wrong(_late_decay),
    "wrong head map": wrong(_interleaved),
    "gradient of beta dropped": wrong(_changed(beta=Tensor.detach), right=reference.gated_delta_rule),
    "gradient of g dropped": wrong(_changed(g=Tensor.detach), right=reference.gated_delta_rule),
    "values off by four units of bfloat16": wrong(_changed(v=lambda x: x * (1 + 2.0**-5))),
}

_INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")

RULE = Subject(
    name="gated_delta_rule",
    function=gated_delta_rule,
    keywords={"output_final_state": True},
    inputs=_INPUTS,
    by_name=("initial_state", "cu_seqlens"),
    autocast=("q", "k", "v"),
    reference=reference.gated_delta_rule,
    reference_backward=gradients(reference.gated_delta_rule),
    cases=_CASES,
    mistakes=_MISTAKES,
    rebatched=_rebatched,
)


def _normalizing(*inputs: Any) -> tuple[Tensor, Tensor]:
    return reference.gated_delta_rule(*inputs, normalize_qk=True, scale=0.7)


def _scaled(make: Make) -> Make:
    """q and k of many lengths."""

    def made(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, *rest = make(dtype, device, generator)
        return q * 3, k * torch.linspace(0.02, 5, max(1, k.shape[1]), dtype=dtype, device=device)[:, None, None], *rest

    return made


NORMALIZED = Subject(
    name="gated_delta_rule[normalize_qk]",
    function=gated_delta_rule,
    keywords={"output_final_state": True, "normalize_qk": True, "scale": 0.7},
    inputs=_INPUTS,
    by_name=("initial_state", "cu_seqlens"),
    autocast=("q", "k", "v"),
    reference=_normalizing,
    reference_backward=gradients(_normalizing),
    cases=(
        Case("few tokens", _scaled(tokens((1, 4, 1, 2, 3, 2)))),
        Case("a tail", _scaled(tokens((1, 67, 1, 2, 12, 6)))),
    ),
    mistakes={
        "not normalised": wrong(lambda *inputs: reference.gated_delta_rule(*inputs, scale=0.7)),
        "default scale": wrong(lambda *inputs: reference.gated_delta_rule(*inputs, normalize_qk=True)),
    },
    dtypes=(torch.float64, torch.bfloat16),
    rebatched=_rebatched,
)
