"""What `gated_delta_rule` is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.packing import CHUNK, saved_states
from adjoint.ops.gated_delta.rule import eager, gated_delta_rule
from adjoint.ops.gated_delta.rule.bad_calls import BAD_CALLS
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
    states = slice(number, number + 1)
    places = (slice(0 if cu_seqlens is not None else number, None), slice(begin, end))
    if rows == 0 or time == 0:
        return

    def of_tokens(x: Tensor) -> Tensor:
        return x[places][:1]

    def alone(whole: Answers, part: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        parts = (*part[0], *part[1])
        for got, every in zip(parts, (*whole[0], *whole[1]), strict=True):
            yield got, of_tokens(every) if every.shape[1] == time else every[states]

    first = None if state is None else state[states]
    inputs = (*map(of_tokens, tokens), first, None)
    yield Rebatch(f"sequence {number} alone", inputs, (of_tokens(do), dfinal[states]), alone)

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

    def make_scaled(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, *rest = make(dtype, device, generator)
        return q * 3, k * torch.linspace(0.02, 5, max(1, k.shape[1]), dtype=dtype, device=device)[:, None, None], *rest

    return make_scaled


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

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "built_calls"]

SUBJECTS = (RULE, NORMALIZED)


# ------------------------------------------------------------------------------------------- workloads

ROWS = (
    (32768, 16, 32, 1, 1),
    (32768, 16, 32, 4, 1),
    (8192, 16, 32, 1, 1),
    (32768, 2, 8, 1, 1),
    (32768, 16, 32, 1, 256),
)
"""Tokens, key heads, value heads, sequences they are packed from, and what log σ(x) is divided by for the decay.

Our times do not depend on the decay. Those of a peer do that leaves out what has decayed away: log σ(x) itself halves a
state at every token, more than most heads of a layer do.
"""

K = V = 128
"""The sizes of keys and values that are timed."""


def _layer(time: int, key_heads: int, heads: int, sequences: int, slower: int) -> Make:
    """Directions as keys and queries, decays and strengths as a layer has them, sequences of one length."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        source = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, time, *shape, device=device, generator=source)

        bounds = None
        if sequences > 1:
            bounds = torch.arange(0, time + 1, time // sequences, device=device)
        return (
            F.normalize(normal(key_heads, K), dim=-1).to(dtype),
            F.normalize(normal(key_heads, K), dim=-1).to(dtype),
            normal(heads, V).to(dtype),
            F.logsigmoid(normal(heads)) / slower,
            normal(heads).sigmoid(),
            None,
            bounds,
        )

    return make


def _by_chunks(*inputs: Any) -> tuple[Tensor]:
    """The chunked form in float64, which other tests hold to the recurrence: that would take minutes here."""
    out = torch.empty_like(inputs[2])
    eager.forward(*(*inputs, K**-0.5, False, out, None, None))
    return (out,)


def _gradients(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    differentiable, rest, v = inputs[:5], inputs[5:], inputs[2]
    saved = v.new_zeros(saved_states(v.shape[1]), v.shape[2], K, V)
    options = (K**-0.5, False)
    eager.forward(*(*inputs, *options, torch.empty_like(v), None, saved))
    slopes = tuple(map(torch.empty_like, differentiable))
    eager.backward(*(do, None, *differentiable, *rest, saved, *options, NEED_STATE - 1, (*slopes, v.new_empty(0))))
    return slopes


TIMED = replace(
    RULE,
    keywords={},
    reference=_by_chunks,
    reference_backward=_gradients,
    cases=(),
    mistakes={},
    pieces=lambda arguments, outputs: [(arguments, outputs)],
)


def _workloads() -> Iterator[Workload]:
    for time, key_heads, heads, sequences, slower in ROWS:
        keys, values, gates = time * key_heads * K * 2, time * heads * V * 2, time * heads * 4
        products = CHUNK * (2 * K + 2 * V) + 3 * K * V  # k kᵀ, q kᵀ; T r, P v'; k S, q S, kᵀ v'
        packed = f", {sequences} sequences" if sequences > 1 else ""
        slow = ", slow decay" if slower > 1 else ""
        yield Workload(
            f"gated_delta_rule {time} tokens, {key_heads} and {heads} heads{packed}{slow}",
            TIMED,
            _layer(time, key_heads, heads, sequences, slower),
            2 * keys + 2 * values + 2 * gates,
            4 * keys + 3 * values + 4 * gates,
            None,
            peers=("fla_gated_delta_rule", "flash_qla_gated_delta_rule"),
            compile=False,
            devices=("cuda",),
            operations=2 * time * heads * products,
            kept=True,
            recorded=True,
        )


_chunked = partial(reference.gated_delta_rule, by_chunks=True)
_TIME, _HEADS = 2048, 16
_BYTES = _TIME * _HEADS * K * 4

_ON_A_CPU = Workload(
    name=f"{_TIME} tokens × {_HEADS} heads of {K}×{V}, float32",
    # The recurrence would keep a state for every token; by chunks it is the same function, and fits.
    subject=replace(RULE, reference=_chunked, reference_backward=gradients(_chunked)),
    make=tokens((1, _TIME, _HEADS, _HEADS, K, V), decay=0.1),
    forward_bytes=4 * _BYTES,
    backward_bytes=8 * _BYTES,
    baseline=None,
    peers=("transformers_gated_delta_rule",),
    dtype=torch.float32,
    devices=("cpu",),
    compile=False,
)

WORKLOADS = (*_workloads(), _ON_A_CPU)


# ---------------------------------------------------------------------------------------------- builds

_LAYERS = (
    (torch.bfloat16, (16, 32), (128, 128), False, True),
    (torch.bfloat16, (16, 32), (128, 128), True, True),
    (torch.bfloat16, (4, 8), (128, 128), False, True),
    (torch.bfloat16, (16, 32), (256, 256), True, False),
    (torch.float16, (16, 32), (128, 64), False, False),
    (torch.float16, (2, 4), (128, 64), True, False),
    (torch.float32, (16, 32), (256, 256), True, False),
    (torch.float32, (4, 8), (128, 128), False, False),
)
"""Element type, key and value heads, K and V, whether q and k are normalised, and whether kernels are built for memory
of the caller without alignment too. Few heads are split."""

_ON_HOPPER = (
    (torch.bfloat16, (16, 32), (128, 128), False, True),
    (torch.bfloat16, (16, 32), (128, 128), True, False),
    (torch.bfloat16, (32, 32), (128, 128), False, False),
    (torch.bfloat16, (8, 32), (64, 128), True, False),
    (torch.bfloat16, (4, 8), (128, 128), False, False),
    (torch.bfloat16, (1, 3), (64, 64), False, False),
    (torch.float16, (32, 32), (128, 64), True, False),
    (torch.float16, (16, 32), (64, 64), False, False),
    (torch.float16, (16, 32), (64, 192), False, True),
    (torch.float16, (32, 32), (64, 192), False, False),
)
"""The same of the plan for Hopper: one key head of a program or two, and heads that are not in pairs."""


def _built(dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], normalize: bool, **rest: Any) -> Call:
    (key_heads, value_heads), (K, V), time = heads, sizes, 32768
    q, k, v = (
        torch.empty(1, time, *shape, dtype=dtype, device="meta")
        for shape in ((key_heads, K), (key_heads, K), (value_heads, V))
    )
    g, beta = (torch.empty(1, time, value_heads, device="meta") for _ in range(2))
    return bind(gated_delta_rule, q, k, v, g, beta, normalize_qk=normalize, **rest)


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Every type and size that kernels are cut for: packed with states, and rows of a batch."""
    for dtype, heads, sizes, normalize, unaligned in _LAYERS:
        states = {"initial_state": torch.empty(4, heads[1], *sizes, device="meta"), "output_final_state": True}
        bounds = torch.empty(5, dtype=torch.int64, device="meta")
        yield _built(dtype, heads, sizes, normalize, cu_seqlens=bounds, **states), "triton.chunked", unaligned
    yield _built(torch.bfloat16, (4, 8), (128, 128), False), "triton.chunked", False  # rows of a batch, which are split
    for dtype, heads, sizes, normalize, unaligned in _ON_HOPPER:
        states = {"initial_state": torch.empty(1, heads[1], *sizes, device="meta"), "output_final_state": True}
        yield _built(dtype, heads, sizes, normalize), "gluon.fused", unaligned
        yield _built(dtype, heads, sizes, normalize, **states), "gluon.fused", unaligned
