"""What `gated_delta_step` is tested, verified and timed on."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.forms import Form, Outcome
from adjoint.core.errors import checked
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.step import gated_delta_step
from adjoint.ops.gated_delta.values import (
    Sizes,
    at,
    blank,
    calls_of,
    changed,
    drawn_on,
    gradients,
    integers,
    on_meta,
    tokens,
    wrong,
    zeros,
)


def _rows(
    shape: Sizes,
    state_indices: tuple[int, ...] | None = None,
    states: int = 0,
    narrow_state: bool = False,
    resets: tuple[int, ...] = (),
) -> Make:
    """q, k, v, g, beta, a pool of states, and the state that each row reads."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, v, g, beta, state, _ = tokens(shape, resets=resets)(dtype, device, generator)
        if state_indices is not None:
            pool = torch.randn((states, *state.shape[1:]), generator=generator, dtype=torch.float64)
            state = pool.to(state.dtype).to(device)
        if narrow_state and dtype != torch.float64:
            state = state.bfloat16()
        indices = None if state_indices is None else torch.tensor(state_indices, device=device)
        return q, k, v, g, beta, state, indices

    return make


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_indices: Any, every: bool = False
) -> tuple[Tensor, Tensor]:
    """The recurrence, row by row; a skipped row gives 0."""
    outputs, states = [], []
    for row in range(q.shape[0]):
        place = row if state_indices is None else int(state_indices[row])
        start = state[max(place, 0)]
        out, after = reference.recurrence(q[row], k[row], v[row], g[row], beta[row], start, q.shape[-1] ** -0.5)
        reads = float(place >= 0)
        outputs.append(out * reads)
        states.append((after if every else after[-1]) * reads)
    return torch.stack(outputs), torch.stack(states)


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Other batches: rows with their states, or the last rows with the whole pool."""
    return batching.rebatched(inputs, upstream, 0) if inputs[-1] is None else _last_rows(inputs, upstream)


def _last_rows(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    *tokens, pool, indices = inputs
    rows = slice(len(indices) // 2, None)
    places = indices[rows][indices[rows] >= 0].long()  # no other row of the case reads these states

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((every[rows], some) for every, some in zip(whole[0], alone[0], strict=True))
        if whole[1]:
            *gradients, dpool = whole[1]
            *gradients_alone, dpool_alone = alone[1]
            yield from ((every[rows], some) for every, some in zip(gradients, gradients_alone, strict=True))
            yield dpool[places], dpool_alone[places]

    last = (*(x[rows] for x in tokens), pool, indices[rows])
    yield Rebatch("the last rows", last, tuple(x[rows] for x in upstream), pairs)


_INPUTS = ("q", "k", "v", "g", "beta", "state", "state_indices")


def _states_of_rows(outcome: Outcome) -> tuple[Tensor, ...]:
    """The outputs, and the rows' new states from the pool; raises if another state has changed."""
    (o, states), (*_, pool, indices), (*_, before, _) = outcome.outputs, outcome.inputs, outcome.before
    places = torch.arange(len(o), device=o.device) if indices is None else indices.long()
    is_free = torch.ones(len(pool), dtype=torch.bool, device=pool.device)
    is_free[places[places >= 0]] = False
    if not torch.equal(pool[is_free], before[is_free]):
        raise ValueError("a state that no row has is another")
    after = torch.where((places >= 0)[:, None, None, None], pool[places.clamp_min(0)], 0)
    if states.dim() == pool.dim():
        return o, after
    if not torch.equal(states[:, -1], after):
        raise ValueError("the last of all states is not what is left in place")
    return o, states


_IN_PLACE = Form(
    "in_place",
    lambda inputs: {"in_place": True},
    overwrites=("state",),
    results=_states_of_rows,
    is_differentiable=False,
    names={"new_state": "states"},
)

_changed = partial(changed, _step, _INPUTS)
_every_state = partial(_step, every=True)

_STEP = Subject(
    name="gated_delta_step",
    function=gated_delta_step,
    inputs=_INPUTS,
    by_name=("state_indices",),
    autocast=("q", "k", "v"),
    reference=_step,
    reference_backward=gradients(_step),
    rebatched=_rebatched,
    cases=(
        Case("states in 16 bits", _rows((2, 1, 1, 1, 3, 4), narrow_state=True)),
        Case("grouped heads", _rows((2, 2, 1, 2, 3, 2))),
        Case("paged", _rows((3, 2, 1, 1, 4, 3), (3, -1, 0), 5)),
        Case("resets", _rows((2, 3, 1, 2, 3, 2), resets=(0, 2))),
        Case("sixteen tokens", _rows((8, 16, 2, 4, 128, 128)), heavy=True),
        Case("large heads, paged", _rows((5, 3, 1, 2, 256, 200), (6, 2, -1, 0, 3), 9, True), heavy=True),
    ),
    mistakes={
        "zero output": zeros,
        "the states of other rows": wrong(_changed(state=lambda x: x.flip(0))),
        "gradient of the state dropped": wrong(_changed(state=Tensor.detach)),
    },
    forms=(_IN_PLACE,),
)
_ALL_STATES = replace(
    _STEP,
    name="gated_delta_step[all states]",
    keywords={"return_all_states": True},
    reference=_every_state,
    reference_backward=gradients(_every_state),
    cases=(Case("two tokens", _rows((1, 2, 1, 1, 3, 2))),),
    mistakes={"zero output": zeros},
    dtypes=(torch.float64, torch.bfloat16),
)

SUBJECTS = (_STEP, _ALL_STATES)

# -------------------------------------------------------------------------------------------- bad calls

_TOKENS = {"q": (1, 4), "k": (1, 4), "v": (2, 3), "g": (2,), "beta": (2,)}
_SHAPES = {**{name: (1, 2, *rest) for name, rest in _TOKENS.items()}, "state": (1, 2, 4, 3)}
_call = calls_of(gated_delta_step, **_SHAPES)


def _in_checking_mode(**arguments: Any) -> None:
    with checked():
        gated_delta_step(**arguments)


_checked_call = calls_of(_in_checking_mode, **_SHAPES)


def _with_tokens(count: int) -> Any:
    return _call(**{name: blank(1, count, *rest) for name, rest in _TOKENS.items()})


def _strong(device: torch.device) -> Tensor:
    return torch.full((1, 2, 2), 0.75, device=device)


def _leaf(device: torch.device) -> Tensor:
    return torch.zeros(1, 2, 4, 3, device=device, requires_grad=True)


BAD_CALLS = (
    BadCall("no token", _with_tokens(0), "gated_delta_step", "1 to 16", "got 0"),
    BadCall("too many tokens", _with_tokens(17), "1 to 16", "got 17", "gated_delta_rule"),
    BadCall("a state with three axes", _call(state=blank(2, 4, 3)), "state", "axes", "(2, 4, 3)"),
    BadCall("a state of another head size", _call(state=blank(1, 2, 4, 5)), "state", "(1, 2, 4, 3)", "(1, 2, 4, 5)"),
    BadCall("a state in float16", _call(state=blank(1, 2, 4, 3, dtype=torch.float16)),
            "state", "float32 or bfloat16", "float16"),
    BadCall("a state elsewhere", _call(state=on_meta(1, 2, 4, 3)), "state", "meta"),
    BadCall("a pool without indices", _call(state=blank(5, 2, 4, 3)), "state", "(1, 2, 4, 3)", "(5, 2, 4, 3)"),
    BadCall("more indices than rows", _call(state_indices=integers(0, 0)), "state_indices", "(1,)", "(2,)"),
    BadCall("float indices", _call(state_indices=blank(1)), "state_indices", "float32"),
    BadCall("an index past the pool", _call(state_indices=integers(1)), "state_indices", "got 1 at position 0"),
    BadCall("an index below −1", _call(state_indices=integers(-2)), "state_indices", "got -2 at position 0"),
    BadCall("a positive g in a step", _call(g=lambda device: torch.full((1, 2, 2), 0.5, device=device)),
            "g", "at most 0", "position 0 "),
    BadCall("NaN in g of a step, in checking mode", _checked_call(g=at(3, torch.nan, 1, 2, 2)),
            "g", "NaN at position 3 "),
    BadCall("a beta above 1 of a step, in checking mode", _checked_call(beta=at(1, 1.5, 1, 2, 2)),
            "beta", "position 1 "),
    BadCall("a long key of a step, in checking mode", _checked_call(k=at(5, 1.75, 1, 2, 1, 4), beta=_strong),
            "the state grow", "position 2 ", "normalize_qk=True"),
    BadCall("a gradient of an in-place step", _call(state=_leaf, in_place=True), "in_place", "gradient", "no_grad"),
)  # fmt: skip

# -------------------------------------------------------------------------------------------- workloads

_KEY_HEADS, _HEADS, _SIZE = 16, 32, 128


def _decoding(batch: int, states: torch.dtype) -> Make:
    """One token of each row, drawn on the device because the states have gigabytes."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        normal = partial(torch.randn, **drawn_on(device, generator))
        q, k = (F.normalize(normal(batch, 1, _KEY_HEADS, _SIZE), dim=-1).to(dtype) for _ in range(2))
        v = normal(batch, 1, _HEADS, _SIZE).to(dtype)
        g, beta = -0.1 * normal(batch, 1, _HEADS).abs(), normal(batch, 1, _HEADS).sigmoid()
        return q, k, v, g, beta, normal(batch, _HEADS, _SIZE, _SIZE).to(states), None

    return make


def _token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    """One token of the recurrence, for all rows at once."""
    q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    decayed = g[:, 0].exp()[..., None, None] * state
    new_values = beta[:, 0, :, None] * (v[:, 0] - torch.einsum("bhkv,bhk->bhv", decayed, k))
    after = decayed + torch.einsum("bhk,bhv->bhkv", k, new_values)
    return (q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", after, q))[:, None], after


def _in_torch(*inputs: Any) -> Any:
    """The same in float32, with results of the inputs' dtypes."""
    wide: Any = [x if x is None else x.float() for x in inputs]
    out, after = _token(*wide)
    return out.to(inputs[2].dtype), after.to(inputs[5].dtype)


def _workload(batch: int, states: torch.dtype) -> Workload:
    heads = batch * _HEADS
    small = 2 * (2 * batch * _KEY_HEADS * _SIZE + 2 * heads * _SIZE) + 2 * 4 * heads
    name = "" if states == torch.float32 else ", bfloat16 states"
    return Workload(
        name=f"decode {batch} × {_HEADS} heads of {_SIZE}×{_SIZE}{name}",
        subject=replace(_STEP, reference=_token, reference_backward=gradients(_token)),
        make=_decoding(batch, states),
        forward_bytes=small + 2 * heads * _SIZE * _SIZE * states.itemsize,
        backward_bytes=2 * small + 3 * heads * _SIZE * _SIZE * states.itemsize,
        baseline=_in_torch,
        # FLA always returns float32 states, which is other work if ours are narrower.
        peers=("fla_gated_delta_step",) if states == torch.float32 else (),
        directions=("forward",),
        devices=("cuda",),
        recorded=True,
    )


WORKLOADS = tuple(_workload(batch, states) for states in (torch.float32, torch.bfloat16) for batch in (1, 32, 256))

# ----------------------------------------------------------------------------------------------- builds

_BF16, _F16, _F32, _F64, _I32, _I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64
)  # fmt: skip


def built_calls() -> Iterator[Call]:
    """Calls with the benchmark's states, every type, and the largest heads with all modes on."""
    yield _built(_BF16, _F32, _F32, None, 128)
    yield _built(_BF16, _F32, _F32, None, 128, in_place=True)
    yield _built(_BF16, _F32, _BF16, _I32, 128, in_place=True)
    yield _built(_BF16, _F32, _F32, _I32, 128, in_place=True, normalize_qk=True)
    yield _built(_F16, _F32, _F32, _I64, 128)
    yield _built(_F16, _F32, _BF16, _I32, 256, normalize_qk=True)
    yield _built(_BF16, _BF16, _F32, _I64, 256, normalize_qk=True, return_all_states=True)
    yield _built(_BF16, _BF16, _BF16, _I32, 256, normalize_qk=True, return_all_states=True)
    yield _built(_BF16, _BF16, _F32, _I32, 256, normalize_qk=True, return_all_states=True, in_place=True)
    yield _built(_F32, _F32, _F32, _I32, 256, normalize_qk=True, return_all_states=True, in_place=True)
    yield _built(_F64, _F64, _F64, _I64, 256, normalize_qk=True)


def _built(
    element: torch.dtype, gates: torch.dtype, states: torch.dtype, index: torch.dtype | None, size: int, **options: bool
) -> Call:
    return bind(
        gated_delta_step,
        *(on_meta(2, 1, heads, size, dtype=element) for heads in (1, 1, 2)),
        *(on_meta(2, 1, 2, dtype=gates) for _ in range(2)),
        on_meta(2, 2, size, size, dtype=states),
        state_indices=None if index is None else on_meta(2, dtype=index),
        **options,
    )
