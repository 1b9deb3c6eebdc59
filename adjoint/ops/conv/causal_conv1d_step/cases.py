"""What `causal_conv1d_step` is tested, verified and timed on."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload, normal
from adjoint.contract.forms import Form, Outcome
from adjoint.core.plan import Call, bind
from adjoint.ops.conv import reference
from adjoint.ops.conv.causal_conv1d_step import causal_conv1d_step
from adjoint.ops.conv.values import LAYOUTS, inputs
from adjoint.ops.gated_delta.values import blank, calls_of, changed, gradients, integers, on_meta, wrong, zeros

_INPUTS = ("x", "state", "weight", "bias", "state_indices")


def _rows(
    batch: int, time: int, channels: int, width: int, *, indices: tuple[int, ...] | None = None, states: int = 0,
    layout: str = "contiguous", **more: Any,
) -> Make:  # fmt: skip
    """x, a pool of states, weight, bias, and which state each row reads."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        x, weight, bias, state, _ = inputs(batch, time, channels, width, **more)(dtype, device, generator)
        if indices is not None:
            drawn = torch.randn((states, channels, width - 1), generator=generator, dtype=torch.float64)
            state = drawn.to(dtype).to(device)
        chosen = None if indices is None else torch.tensor(indices, device=device)
        return LAYOUTS[layout](x), state, weight, bias, chosen

    return make


def _step(x: Tensor, state: Tensor, weight: Tensor, bias: Any, state_indices: Any) -> tuple[Tensor, Tensor]:
    """The convolution, row by row; a skipped row gives 0."""
    rows, states = [], []
    for row in range(x.shape[0]):
        place = row if state_indices is None else int(state_indices[row])
        y, after = reference.forward(x[row : row + 1], weight, bias, state[max(place, 0)][None], None)
        reads = float(place >= 0)
        rows.append(y[0] * reads)
        states.append(after[0] * reads)
    return torch.stack(rows), torch.stack(states)


def _rebatched(values: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Rows with their states, or the last rows with the whole pool."""
    if values[-1] is None:
        return batching.rebatched(values, upstream, 0, [True, True, False, False, False])
    return _last_rows(values, upstream)


def _last_rows(values: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    x, pool, weight, bias, indices = values
    rows = slice(len(indices) // 2, None)

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((every[rows], some) for every, some in zip(whole[0], alone[0], strict=True))

    last = (x[rows], pool, weight, bias, indices[rows])
    yield Rebatch("the last rows", last, tuple(t[rows] for t in upstream), pairs)


def _states_of_rows(outcome: Outcome) -> tuple[Tensor, ...]:
    """The outputs, and the rows' new states out of the pool, in which nothing else has changed."""
    (y, pool), (*_, indices), (_, before, *_) = outcome.outputs, outcome.inputs, outcome.before
    places = torch.arange(len(y), device=y.device) if indices is None else indices.long()
    is_free = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    is_free[places[places >= 0]] = False
    if not torch.equal(pool[is_free], before[is_free]):
        raise ValueError("a state that no row has is another")
    return y, torch.where((places >= 0)[:, None, None], pool[places.clamp_min(0)], 0)


def _have_states_of_their_own(values: Inputs) -> bool:
    indices = values[-1]
    return indices is None or len(indices.unique()) == len(indices)


_IN_PLACE = Form(
    "in_place",
    lambda inputs: {"in_place": True},
    overwrites=("state",),
    results=_states_of_rows,
    is_differentiable=False,
    takes=_have_states_of_their_own,
    names={"new_state": "state"},
)

STEP = Subject(
    name="causal_conv1d_step",
    function=causal_conv1d_step,
    inputs=_INPUTS,
    by_name=("state_indices",),
    reference=_step,
    reference_backward=gradients(_step),
    batched=("x", "state"),
    rebatched=_rebatched,
    cases=(
        Case("two rows", _rows(2, 2, 5, 4)),
        Case("one token", _rows(3, 1, 20, 4, bias=False)),
        Case("paged", _rows(4, 3, 40, 4, indices=(3, -1, 0, 5), states=6)),
        Case("rows that share a state", _rows(3, 2, 7, 3, indices=(1, 1, 0), states=2)),
        Case("sixteen tokens, eight taps", _rows(2, 16, 16, 8, wide=True)),
        Case("one tap", _rows(2, 3, 4, 1)),
        Case("transposed", _rows(2, 5, 16, 4, layout="transposed")),
        Case("every other channel", _rows(2, 5, 16, 4, layout="every other channel")),
    ),
    mistakes={
        "zero output": zeros,
        "the states of other rows": wrong(changed(_step, _INPUTS, state=lambda state: state.flip(0))),
        "taps reversed": wrong(changed(_step, _INPUTS, weight=lambda weight: weight.flip(1))),
        "gradient of the state dropped": wrong(changed(_step, _INPUTS, state=Tensor.detach)),
    },
    forms=(_IN_PLACE,),
)

SUBJECTS = (STEP,)

# -------------------------------------------------------------------------------------------- bad calls

_call = calls_of(causal_conv1d_step, x=(2, 3, 6), state=(2, 6, 3), weight=(6, 4))


def _leaf(device: torch.device) -> Tensor:
    return torch.zeros(2, 6, 3, device=device, requires_grad=True)


BAD_CALLS = (
    BadCall("no token", _call(x=blank(2, 0, 6)), "causal_conv1d_step", "1 to 16", "got 0"),
    BadCall("too many tokens", _call(x=blank(2, 17, 6)), "1 to 16", "got 17", "causal_conv1d takes"),
    BadCall("nine taps", _call(weight=blank(6, 9), state=blank(2, 6, 8)), "width", "1 to 8", "got 9"),
    BadCall("a state with two axes", _call(state=blank(6, 3)), "state", "(2, 6, 3)", "(6, 3)"),
    BadCall("a state of another width", _call(state=blank(2, 6, 4)), "state", "(2, 6, 3)", "(2, 6, 4)"),
    BadCall("a pool without indices", _call(state=blank(5, 6, 3)), "state", "(2, 6, 3)", "(5, 6, 3)"),
    BadCall("a state of another dtype", _call(state=blank(2, 6, 3, dtype=torch.float64)), "state", "float32"),
    BadCall("more indices than rows", _call(state_indices=integers(0, 1, 0)), "state_indices", "(2,)", "(3,)"),
    BadCall("an index past the pool", _call(state_indices=integers(0, 2)), "state_indices", "got 2 at position 1"),
    BadCall("an index below −1", _call(state_indices=integers(-2, 0)), "state_indices", "got -2 at position 0"),
    BadCall("another activation", _call(activation="relu"), "activation", "'relu'"),
    BadCall("a gradient of an in-place step", _call(state=_leaf, in_place=True), "in_place", "gradient", "no_grad"),
    BadCall("an expanded state in place", _call(state=lambda d: torch.zeros(1, 6, 3, device=d).expand(2, 6, 3),
            in_place=True), "state", "share memory", "clone"),
)  # fmt: skip

# -------------------------------------------------------------------------------------------- workloads


def _in_torch(x: Tensor, state: Tensor, weight: Tensor, bias: Any, _: Any) -> tuple[Tensor, Tensor]:
    """One token of each row."""
    tokens = torch.cat((state, x.transpose(1, 2)), -1)
    return F.silu((tokens * weight).sum(-1))[:, None], tokens[..., 1:].contiguous()


def _decoding(batch: int, channels: int) -> Make:
    draw = normal((batch, 1, channels), (batch, channels, 3), (channels, 4))
    return lambda dtype, device, generator: (*draw(dtype, device, generator), None, None)


def _token(*values: Any) -> tuple[Tensor, Tensor]:
    """The reference, all rows at once."""
    x, state, weight, bias, _ = values
    return reference.forward(x, weight, bias, state, None)


def _workload(batch: int, channels: int) -> Workload:
    one = 2 * batch * channels
    return Workload(
        name=f"causal_conv1d_step {batch}×{channels}",
        subject=Subject(
            name=STEP.name, function=causal_conv1d_step, inputs=_INPUTS, by_name=("state_indices",), reference=_token,
            reference_backward=gradients(_token), cases=STEP.cases, batched=("x", "state"), rebatched=_rebatched,
        ),
        make=_decoding(batch, channels),
        forward_bytes=8 * one,
        backward_bytes=10 * one,
        baseline=_in_torch,  # type: ignore[arg-type]
        directions=("forward",),
        devices=("cuda",),
        recorded=True,
    )  # fmt: skip


WORKLOADS = (_workload(256, 8192),)

# ----------------------------------------------------------------------------------------------- builds

_BF16, _F16, _F32, _F64, _I32, _I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64
)  # fmt: skip


def _built(
    dtype: torch.dtype, width: int, index: torch.dtype | None = None, bias: bool = False, **options: Any
) -> Call:
    return bind(
        causal_conv1d_step, on_meta(64, 3, 1024, dtype=dtype), on_meta(64, 1024, width - 1, dtype=dtype),
        on_meta(1024, width, dtype=dtype), on_meta(1024, dtype=dtype) if bias else None,
        state_indices=None if index is None else on_meta(64, dtype=index), **options,
    )  # fmt: skip


def built_calls() -> Iterator[Call]:
    """The benchmark's, every dtype, pools, in place, and the narrowest and the widest window."""
    yield _built(_BF16, 4)
    yield _built(_BF16, 4, _I32, in_place=True)
    yield _built(_BF16, 4, _I64, True)
    yield _built(_F16, 8, _I32, True)
    yield _built(_F32, 1, _I32, True)
    yield _built(_F64, 4, _I64, activation=None)
