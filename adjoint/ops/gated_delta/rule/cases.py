"""What `gated_delta_rule` is tested, verified and timed on."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.errors import Unsupported, checked
from adjoint.core.plan import Call, bind
from adjoint.core.preference import Preference
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.packing import CHUNK, saved_states
from adjoint.ops.gated_delta.rule import eager, gated_delta_rule
from adjoint.ops.gated_delta.rule.layers import K, V, in_torch, layer
from adjoint.ops.gated_delta.values import (
    at,
    blank,
    calls_of,
    changed,
    gradients,
    integers,
    nearly_equal,
    on_meta,
    orthogonal,
    strided,
    tokens,
    wrong,
    zeros,
)

_CASES = (
    Case("grouped heads", tokens((2, 4, 2, 4, 3, 2))),
    Case("a tail, no state", tokens((1, 70, 2, 4, 16, 8), state=False)),
    Case("packed", tokens((1, 90, 1, 2, 8, 12), cu_seqlens=(0, 0, 1, 66, 90, 90), wide_gates=False)),
    Case(
        "nearly equal keys, no decay", tokens((1, 80, 1, 1, 16, 16), keys=nearly_equal, decay=None, strength=(0.9, 1))
    ),
    Case("orthogonal keys, strong decay", tokens((1, 65, 1, 1, 8, 8), keys=orthogonal, decay=40.0)),
    Case("resets", tokens((1, 140, 2, 4, 16, 8), decay=0.1, resets=(0, 63, 64, 100, 101, 139))),
    Case(
        "resets, packed",
        tokens((1, 90, 1, 2, 8, 12), cu_seqlens=(0, 0, 1, 66, 90), resets=(0, 1, 40, 65, 66), wide_gates=False),
    ),
    Case("strided", tokens((2, 9, 1, 2, 5, 6), lay=strided)),
    Case("no tokens", tokens((2, 0, 1, 1, 4, 4))),
    Case("two segments", tokens((1, 1100, 1, 1, 4, 4), decay=0.05), heavy=True),
    Case("a layer", tokens((1, 2048, 4, 8, 128, 128), decay=0.1), heavy=True),
    Case("a layer, keys nearly equal", tokens((1, 1024, 2, 4, 128, 128), keys=nearly_equal, decay=0.1), heavy=True),
    Case(
        "a layer, resets",
        tokens((1, 1300, 4, 8, 128, 128), decay=0.1, resets=(0, 63, 64, *range(700, 740), 1023, 1024)),
        heavy=True,
    ),
    Case(
        "many heads, resets",
        tokens(
            (1, 300, 5, 10, 64, 128), cu_seqlens=(0, 0, 1, 66, 130, 200, 299, 300), resets=(5, 64, 129, 130, 200, 299)
        ),
        heavy=True,
    ),
    Case("many heads", tokens((1, 200, 8, 16, 128, 128), decay=0.1), heavy=True),
    Case("many heads, long", tokens((1, 4200, 5, 10, 64, 128), decay=0.05), heavy=True),
    Case("few heads of 64, packed", tokens((1, 300, 1, 3, 64, 64), cu_seqlens=(0, 65, 220, 300)), heavy=True),
    Case("largest heads, packed", tokens((1, 700, 1, 2, 256, 256), cu_seqlens=(0, 1, 300, 700)), heavy=True),
)

# --------------------------------------------------------------------------------------------- batches


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Batches in which a sequence keeps its bits: a row alone, a packed sequence alone, a prefix, and beside NaN."""
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

    row, last_chunk = number if cu_seqlens is None else 0, begin + (end - begin - 1) // CHUNK * CHUNK
    with_nan = [x.clone() for x in tokens]
    for x in with_nan:
        x[row, end - 1] = torch.nan

    def elsewhere(whole: Answers, part: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        """The results that must keep their bits: other sequences, with their states and gradients, and the outputs of
        earlier chunks of the same sequence."""
        for got, every in zip((*part[0], *part[1]), (*whole[0], *whole[1]), strict=True):
            mask = torch.ones(every.shape[:2], dtype=torch.bool, device=every.device)
            if every.shape[1] == time:
                mask[row, last_chunk if part[0] and got is part[0][0] else begin : end] = False
            else:
                mask[number] = False
            yield got[mask], every[mask]

    yield Rebatch(f"NaN as the last token of sequence {number}", (*with_nan, state, cu_seqlens), upstream, elsewhere)


# -------------------------------------------------------------------------------------------- mistakes

_INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")

LONG = 256
"""From this many tokens on the reference goes by chunks, because token by token a layer takes a GPU minutes."""


def _exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The reference: token by token, or by chunks for many tokens without resets, which chunks cannot take.

    In float64 both agree to far less than any bound.
    """
    by_chunks = q.shape[1] > LONG and bool(g.isfinite().all())
    return reference.gated_delta_rule(q, k, v, g, *rest, **keywords, by_chunks=by_chunks)


_changed = partial(changed, _exact, _INPUTS)


def _interleaved(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """A mistake: value head h reads key head h modulo Hg."""
    times = v.shape[2] // q.shape[2]
    return _exact(q.repeat(1, 1, times, 1), k.repeat(1, 1, times, 1), v, *rest)


_MISTAKES = {
    "zero output": zeros,
    "no decay": wrong(_changed(g=torch.zeros_like)),
    "decay a token late": wrong(_changed(g=lambda g: torch.cat((g[:, :1] * 0, g[:, :-1]), 1))),
    "wrong head map": wrong(_interleaved),
    "gradient of beta dropped": wrong(_changed(beta=Tensor.detach)),
    "gradient of g dropped": wrong(_changed(g=Tensor.detach)),
    "values off by four units of bfloat16": wrong(_changed(v=lambda x: x * (1 + 2.0**-5))),
}

_RULE = Subject(
    name="gated_delta_rule",
    function=gated_delta_rule,
    keywords={"output_final_state": True},
    inputs=_INPUTS,
    by_name=("initial_state", "cu_seqlens"),
    autocast=("q", "k", "v"),
    reference=_exact,
    reference_backward=gradients(_exact),
    cases=_CASES,
    mistakes=_MISTAKES,
    rebatched=_rebatched,
)


def _scaled(make: Make) -> Make:
    """Inputs whose q and k have many lengths."""

    def make_scaled(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, *rest = make(dtype, device, generator)
        return q * 3, k * torch.linspace(0.02, 5, max(1, k.shape[1]), dtype=dtype, device=device)[:, None, None], *rest

    return make_scaled


_normalizing = partial(_exact, normalize_qk=True, scale=0.7)
_NORMALIZED = replace(
    _RULE,
    name="gated_delta_rule[normalize_qk]",
    keywords={"output_final_state": True, "normalize_qk": True, "scale": 0.7},
    reference=_normalizing,
    reference_backward=gradients(_normalizing),
    cases=(
        Case("few tokens", _scaled(tokens((1, 4, 1, 2, 3, 2)))),
        Case("a tail", _scaled(tokens((1, 67, 1, 2, 12, 6)))),
        Case("a layer", _scaled(tokens((1, 200, 8, 16, 128, 128), decay=0.1)), heavy=True),
        Case(
            "few heads of 64, packed",
            _scaled(tokens((1, 200, 2, 4, 64, 128), cu_seqlens=(0, 1, 66, 200))),
            heavy=True,
        ),
    ),
    mistakes={
        "not normalised": wrong(partial(reference.gated_delta_rule, scale=0.7)),
        "default scale": wrong(partial(reference.gated_delta_rule, normalize_qk=True)),
    },
    dtypes=(torch.float64, torch.bfloat16),
)

SUBJECTS = (_RULE, _NORMALIZED)

# ------------------------------------------------------------------------------------------- bad calls

_call = calls_of(gated_delta_rule, q=(1, 6, 1, 4), k=(1, 6, 1, 4), v=(1, 6, 2, 3), g=(1, 6, 2), beta=(1, 6, 2))


def _in_checking_mode(**arguments: Any) -> None:
    with checked():
        gated_delta_rule(**arguments)


_checked_call = calls_of(_in_checking_mode, q=(1, 6, 1, 4), k=(1, 6, 1, 4), v=(1, 6, 2, 3), g=(1, 6, 2), beta=(1, 6, 2))


def _two_rows(device: torch.device) -> None:
    shapes = ((2, 6, 1, 4), (2, 6, 1, 4), (2, 6, 2, 3), (2, 6, 2), (2, 6, 2))
    gated_delta_rule(*(blank(*shape)(device) for shape in shapes), cu_seqlens=integers(0, 6)(device))


def _backward(need: int, saved: int) -> Any:
    """A call of the backward's operator with `saved` saved states."""
    shapes = ((1, 6, 2, 3), (1, 6, 1, 4), (1, 6, 1, 4), (1, 6, 2, 3), (1, 6, 2), (1, 6, 2), (saved, 2, 4, 3))

    def call(device: torch.device) -> Any:
        do, *inputs, states = (blank(*shape)(device) for shape in shapes)
        operator = torch.ops.adjoint.gated_delta_rule_backward
        return operator(do, None, *inputs, None, None, states, 1.0, False, need, "")

    return call


_INVARIANT = Preference(backend="eager", batch_invariant=True)
_STATE = "initial_state"

BAD_CALLS = (
    BadCall("q with three axes", _call(q=blank(6, 1, 4)), "q", "batch, time", "(6, 1, 4)"),
    BadCall("k of another shape", _call(k=blank(1, 5, 1, 4)), "k", "(1, 6, 1, 4)", "(1, 5, 1, 4)"),
    BadCall("k of another dtype", _call(k=blank(1, 6, 1, 4, dtype=torch.float16)), "k", "float32", "float16"),
    BadCall("v of another dtype", _call(v=blank(1, 6, 2, 3, dtype=torch.bfloat16)), "v", "float32", "bfloat16"),
    BadCall("v of another time", _call(v=blank(1, 5, 2, 3)), "v", "(1, 6)", "(1, 5, 2, 3)"),
    BadCall("g of another shape", _call(g=blank(1, 6, 1)), "g", "(1, 6, 2)", "(1, 6, 1)"),
    BadCall("g of another dtype", _call(g=blank(1, 6, 2, dtype=torch.float64)), "g", "float32", "float64"),
    BadCall("beta of another dtype", _call(beta=blank(1, 6, 2, dtype=torch.float16)), "beta", "float32", "float16"),
    BadCall("beta with the values' axes", _call(beta=blank(1, 6, 2, 1)), "beta", "(1, 6, 2, 1)"),
    BadCall("heads that do not divide", _call(q=blank(1, 6, 3, 4), k=blank(1, 6, 3, 4)),
            "2 heads of v", "3 heads of q and k", "multiple"),
    BadCall("K past the cap", _call(q=blank(1, 6, 1, 257), k=blank(1, 6, 1, 257)), "K", "257", "256", "because"),
    BadCall("V past the cap", _call(v=blank(1, 6, 2, 300)), "V", "300", "256", "because"),
    BadCall("a positive g", _call(g=at(7, 0.25, 1, 6, 2)), "g", "at most 0", "position 7 "),
    BadCall("NaN in g, in checking mode", _checked_call(g=at(7, torch.nan, 1, 6, 2)),
            "g", "NaN at position 7 ", "−inf"),
    BadCall("a beta above 1, in checking mode", _checked_call(beta=at(9, 1.25, 1, 6, 2)),
            "beta", "from 0 to 1", "position 9 ", "sigmoid"),
    BadCall("a beta below 0, in checking mode", _checked_call(beta=at(2, -0.5, 1, 6, 2)), "beta", "position 2 "),
    BadCall("NaN in beta, in checking mode", _checked_call(beta=at(11, torch.nan, 1, 6, 2)), "beta", "position 11 "),
    BadCall("a long key, in checking mode",
            _checked_call(k=at(13, 1.75, 1, 6, 1, 4), beta=lambda device: torch.full((1, 6, 2), 0.75, device=device)),
            "the state grow", "position 6 ", "normalize_qk=True"),
    BadCall("states of the wrong shape", _call(initial_state=blank(2, 2, 4, 3)),
            _STATE, "(1, 2, 4, 3)", "(2, 2, 4, 3)"),
    BadCall("states with K and V exchanged", _call(initial_state=blank(1, 2, 3, 4)),
            _STATE, "(1, 2, 4, 3)", "(1, 2, 3, 4)"),
    BadCall("states of the wrong dtype", _call(initial_state=blank(1, 2, 4, 3, dtype=torch.bfloat16)),
            _STATE, "float32", "bfloat16"),
    BadCall("a state per row where sequences are packed",
            _call(initial_state=blank(1, 2, 4, 3), cu_seqlens=integers(0, 2, 6)),
            _STATE, "(2, 2, 4, 3)", "(1, 2, 4, 3)"),
    BadCall("bounds that descend", _call(cu_seqlens=integers(0, 4, 3, 6)), "cu_seqlens", "got 3 at position 2 "),
    BadCall("bounds that begin past 0", _call(cu_seqlens=integers(1, 6)), "cu_seqlens", "got 1 at position 0 "),
    BadCall("bounds that end early", _call(cu_seqlens=integers(0, 5)),
            "cu_seqlens", "end with", "got 5 at position 1 "),
    BadCall("bounds past the end", _call(cu_seqlens=integers(0, 7)), "cu_seqlens", "got 7 at position 1 "),
    BadCall("a negative bound", _call(cu_seqlens=integers(0, -1, 6)), "cu_seqlens", "got -1 at position 1 "),
    BadCall("no bounds", _call(cu_seqlens=blank(0, dtype=torch.int64)), "cu_seqlens", "(0,)"),
    BadCall("bounds with two axes", _call(cu_seqlens=blank(1, 2, dtype=torch.int64)), "cu_seqlens", "(1, 2)"),
    BadCall("float bounds", _call(cu_seqlens=blank(2)), "cu_seqlens", "float32"),
    BadCall("bounds elsewhere", _call(cu_seqlens=on_meta(2, dtype=torch.int64)), "cu_seqlens", "meta"),
    BadCall("bounds and two rows", _two_rows, "cu_seqlens", "batch", "2"),
    BadCall("a scale that is no number", _call(scale="auto"), "scale", "'auto'"),
    BadCall("a preference of another type", _call(preference="eager"), "preference=", "str"),
    BadCall("batch invariance, which nobody promises", _call(preference=_INVARIANT),
            "gated_delta_rule", "o is not batch_invariant", error=Unsupported),
    BadCall("a gradient of a state that is not given, to the operator", _backward(need=63, saved=0), "need", _STATE),
    BadCall("saved states of the wrong shape, to the operator", _backward(need=31, saved=2),
            "saved", "(0, 2, 4, 3)", "(2, 2, 4, 3)"),
)  # fmt: skip

# ------------------------------------------------------------------------------------------- workloads

_ROWS = (
    (32768, 16, 32, 1, ""),
    (32768, 16, 32, 4, ""),
    (32768, 16, 32, 16, ""),
    (32768, 16, 32, 64, ""),
    (8192, 16, 32, 1, ""),
    (4096, 16, 32, 1, ""),
    (32768, 2, 8, 1, ""),
    (32768, 16, 32, 1, "slow decay"),
    (32768, 16, 32, 1, "FlashQLA's gates"),
    (32768, 16, 32, 1, "initial gates"),
)
"""The layers that are timed: tokens, key heads, value heads, the number of packed sequences, and gates."""

_LONGEST_IN_TORCH = 4096
"""The longest row, in tokens, for which torch takes part, because a compiler unrolls its loop over chunks."""


def _by_chunks(*inputs: Any) -> tuple[Tensor]:
    """The chunked form in float64. The recurrence would take minutes here; other tests compare the two."""
    v = inputs[2]
    out, unused = torch.empty_like(v), v.new_empty(0)
    eager.forward((*inputs, K**-0.5, False, False, False, False), (out, unused, unused))
    return (out,)


def _gradients(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    v, options = inputs[2], (K**-0.5, False)
    saved, unused = v.new_zeros(saved_states(v.shape[1]), v.shape[2], K, V), v.new_empty(0)
    eager.forward((*inputs, *options, False, False, True), (torch.empty_like(v), unused, saved))
    slopes = tuple(map(torch.empty_like, inputs[:5]))
    eager.backward((do, None, *inputs, saved, *options, NEED_STATE - 1), (*slopes, unused))
    return slopes


_TIMED = replace(
    _RULE,
    keywords={},
    reference=_by_chunks,
    reference_backward=_gradients,
    cases=(),
    mistakes={},
    pieces=lambda arguments, outputs: [(arguments, outputs)],
)


def _workload(time: int, key_heads: int, heads: int, sequences: int, decays: str) -> Workload:
    keys, values, gates = time * key_heads * K * 2, time * heads * V * 2, time * heads * 4
    products = CHUNK * (2 * K + 2 * V) + 3 * K * V  # k kᵀ, q kᵀ; T r, P v'; k S, q S, kᵀ v'
    packed = f", {sequences} sequences" if sequences > 1 else ""
    named = f", {decays}" if decays else ""
    return Workload(
        name=f"gated_delta_rule {time} tokens, {key_heads} and {heads} heads{packed}{named}",
        subject=_TIMED,
        make=layer(time, key_heads, heads, sequences, decays),
        forward_bytes=2 * keys + 2 * values + 2 * gates,
        backward_bytes=4 * keys + 3 * values + 4 * gates,
        baseline=in_torch if time <= _LONGEST_IN_TORCH and sequences == 1 else None,
        peers=("fla_gated_delta_rule", "flash_qla_gated_delta_rule", "flashinfer_gated_delta_rule"),
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
    # The recurrence would keep a state for every token. By chunks it is the same function, and it fits in memory.
    subject=replace(_RULE, reference=_chunked, reference_backward=gradients(_chunked)),
    make=tokens((1, _TIME, _HEADS, _HEADS, K, V), decay=0.1),
    forward_bytes=4 * _BYTES,
    backward_bytes=8 * _BYTES,
    baseline=None,
    peers=("transformers_gated_delta_rule",),
    dtype=torch.float32,
    devices=("cpu",),
)

WORKLOADS = (*(_workload(*row) for row in _ROWS), _ON_A_CPU)


def _error_workloads(time: int, nearly_equal: bool, divisor: int) -> Iterator[Workload]:
    """A layer whose errors are measured: outputs with the final state, and gradients without it."""
    keys = "nearly equal keys" if nearly_equal else "random keys"
    decay = f"log σ(x) / {divisor}" if divisor > 1 else "log σ(x)"
    workload = replace(
        _workload(time, 16, 32, 1, ""),
        name=f"gated_delta_rule {time} tokens, {keys}, g = {decay}",
        make=layer(time, 16, 32, 1, "", 1 / divisor, nearly_equal),
        baseline=None,
        directions=("backward",),
    )
    with_states = replace(_RULE, reference=_chunked, reference_backward=gradients(_chunked))
    peers = ("fla_gated_delta_rule_with_states",)
    yield replace(workload, subject=with_states, peers=peers, directions=("forward",))
    yield workload


ERROR_WORKLOADS = tuple(
    workload
    for row in (
        (1024, False, 1), (16384, False, 1), (1024, False, 16), (1024, True, 1), (1024, True, 16), (1024, True, 64),
    )
    for workload in _error_workloads(*row)
)  # fmt: skip
"""Layers whose errors are measured: tokens, whether keys are nearly equal, and the divisor of the decays log σ(x)."""


# ---------------------------------------------------------------------------------------------- builds

_LAYERS: tuple[tuple[Any, ...], ...] = (
    (torch.bfloat16, (16, 32), (128, 128), False, True),
    (torch.bfloat16, (16, 32), (128, 128), True, True),
    (torch.bfloat16, (4, 8), (128, 128), False, True),
    (torch.bfloat16, (16, 32), (256, 256), True, False),
    (torch.float16, (16, 32), (128, 64), False, False),
    (torch.float16, (2, 4), (128, 64), True, False),
    (torch.float32, (16, 32), (256, 256), True, False),
    (torch.float32, (4, 8), (128, 128), False, False),
)
"""The calls that are built: element type, key and value heads, K and V, whether q and k are normalised, and whether
kernels are built for the caller's unaligned memory as well. Few heads are split."""

_ON_HOPPER: tuple[tuple[Any, ...], ...] = (
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
"""The same for the Hopper plan: one or two key heads in a program, and an odd number of heads."""


def _built(dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], normalize: bool, **rest: Any) -> Call:
    (key_heads, value_heads), (K, V), time = heads, sizes, 32768
    q, k = (on_meta(1, time, key_heads, K, dtype=dtype) for _ in range(2))
    v = on_meta(1, time, value_heads, V, dtype=dtype)
    g, beta = (on_meta(1, time, value_heads) for _ in range(2))
    return bind(gated_delta_rule, q, k, v, g, beta, normalize_qk=normalize, **rest)


def built_calls() -> Iterator[tuple[Call, str, bool]]:
    """Calls in every type and size for which kernels are specialised: packed with states, and rows of a batch."""
    for *built, unaligned in _LAYERS:
        _, heads, sizes, _ = built
        states: dict[str, Any] = {"initial_state": on_meta(4, heads[1], *sizes), "output_final_state": True}
        bounds = on_meta(5, dtype=torch.int64)
        yield _built(*built, cu_seqlens=bounds, **states), "triton.chunked", unaligned
    yield _built(torch.bfloat16, (4, 8), (128, 128), False), "triton.chunked", False  # rows of a batch, which are split
    for *built, unaligned in _ON_HOPPER:
        _, heads, sizes, _ = built
        states = {"initial_state": on_meta(1, heads[1], *sizes), "output_final_state": True}
        yield _built(*built), "gluon.fused", unaligned
        yield _built(*built, **states), "gluon.fused", unaligned
