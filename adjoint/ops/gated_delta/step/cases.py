"""What `gated_delta_step` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.step import gated_delta_step
from adjoint.ops.gated_delta.values import gradients, tokens, wrong, zeros


def _rows(
    shape: tuple[int, int, int, int, int, int],
    state_indices: tuple[int, ...] | None = None,
    states: int = 0,
    narrow_state: bool = False,
) -> Make:
    """q, k, v, g, beta, a pool of states, and which of them each row reads."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, v, g, beta, state, _ = tokens(shape)(dtype, device, generator)
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


def _every_state(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _step(*(*inputs, True))


def _other_rows(*inputs: Any) -> tuple[Tensor, Tensor]:
    *tokens, state, indices = inputs
    return _step(*(*tokens, state.flip(0), indices))


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Rows with their states, or the last rows with the whole pool."""
    return batching.rebatched(inputs, upstream, 0) if inputs[-1] is None else _last_rows(inputs, upstream)


def _last_rows(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    *tokens, pool, indices = inputs
    rows = slice(len(indices) // 2, None)
    places = indices[rows][indices[rows] >= 0].long()  # no other row of the case has them

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

SUBJECTS = (
    Subject(
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
            Case("sixteen tokens", _rows((8, 16, 2, 4, 128, 128)), heavy=True),
            Case("large heads, paged", _rows((5, 3, 1, 2, 256, 200), (6, 2, -1, 0, 3), 9, True), heavy=True),
        ),
        mistakes={
            "zero output": zeros,
            "the states of other rows": wrong(_other_rows),
            "gradient of the state dropped": wrong(
                lambda q, k, v, g, beta, state, indices: _step(q, k, v, g, beta, state.detach(), indices), right=_step
            ),
        },
    ),
    Subject(
        name="gated_delta_step[all states]",
        function=gated_delta_step,
        keywords={"return_all_states": True},
        inputs=_INPUTS,
        by_name=("state_indices",),
        autocast=("q", "k", "v"),
        reference=_every_state,
        reference_backward=gradients(_every_state),
        rebatched=_rebatched,
        cases=(Case("two tokens", _rows((1, 2, 1, 1, 3, 2))),),
        mistakes={"zero output": zeros},
        dtypes=(torch.float64, torch.bfloat16),
    ),
)

# -------------------------------------------------------------------------------------------- bad calls

META = torch.device("meta")
BATCH, TIME, KEY_HEADS, HEADS, K, V = 1, 2, 1, 2, 4, 3


def _arguments(device: torch.device) -> dict[str, Tensor]:
    return {
        "q": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "k": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "v": torch.zeros(BATCH, TIME, HEADS, V, device=device),
        "g": torch.zeros(BATCH, TIME, HEADS, device=device),
        "beta": torch.zeros(BATCH, TIME, HEADS, device=device),
        "state": torch.zeros(BATCH, HEADS, K, V, device=device),
    }


def _state(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _indices(*values: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, device=device)


def _with(**changes: Any) -> Callable[[torch.device], Any]:
    """A step with other arguments; those that are functions are called with the device."""

    def call(device: torch.device) -> None:
        others = {name: value(device) if callable(value) else value for name, value in changes.items()}
        gated_delta_step(**(_arguments(device) | others))
        adjoint.check()

    return call


def _tokens(count: int) -> dict[str, Callable[[torch.device], Tensor]]:
    """So many tokens of every input."""

    def of(name: str) -> Callable[[torch.device], Tensor]:
        return lambda device: _arguments(device)[name][:, :1].repeat_interleave(count, 1)

    return {name: of(name) for name in ("q", "k", "v", "g", "beta")}


BAD_CALLS = (
    BadCall("no token", _with(**_tokens(0)), "gated_delta_step", "1 to 16", "got 0"),
    BadCall("too many tokens", _with(**_tokens(17)), "1 to 16", "got 17", "gated_delta_rule"),
    BadCall("a state with three axes", _with(state=_state(HEADS, K, V)), "state", "axes", "(2, 4, 3)"),
    BadCall(
        "a state of another head size", _with(state=_state(BATCH, HEADS, K, 5)), "state", "(1, 2, 4, 3)", "(1, 2, 4, 5)"
    ),
    BadCall(
        "a state in float16",
        _with(state=_state(BATCH, HEADS, K, V, dtype=torch.float16)),
        "state",
        "float32 or bfloat16",
        "float16",
    ),
    BadCall("a state elsewhere", _with(state=lambda d: _state(BATCH, HEADS, K, V)(META)), "state", "meta"),
    BadCall("a pool without indices", _with(state=_state(5, HEADS, K, V)), "state", "(1, 2, 4, 3)", "(5, 2, 4, 3)"),
    BadCall("more indices than rows", _with(state_indices=_indices(0, 0)), "state_indices", "(1,)", "(2,)"),
    BadCall("float indices", _with(state_indices=lambda d: torch.zeros(1, device=d)), "state_indices", "float32"),
    BadCall("an index past the pool", _with(state_indices=_indices(1)), "state_indices", "got 1 at position 0"),
    BadCall("an index below −1", _with(state_indices=_indices(-2)), "state_indices", "got -2 at position 0"),
    BadCall(
        "a positive g in a step",
        _with(g=lambda d: torch.full((BATCH, 2, HEADS), 0.5, device=d)),
        "g",
        "at most 0",
        "position 0 ",
    ),
    BadCall(
        "a gradient of an in-place step",
        _with(state=lambda d: torch.zeros(BATCH, HEADS, K, V, device=d).requires_grad_(), in_place=True),
        "in_place",
        "gradient",
        "no_grad",
    ),
)

# -------------------------------------------------------------------------------------------- workloads

_KEY_HEADS, _HEADS, _SIZE = 16, 32, 128


def _decoding(batch: int, states: torch.dtype) -> Make:
    """One token of each row, drawn on the device: the states are gigabytes."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        drawn = partial(torch.randn, generator=on_device, device=device, dtype=torch.float32)
        q, k = (drawn(batch, 1, _KEY_HEADS, _SIZE) for _ in range(2))
        q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
        v = drawn(batch, 1, _HEADS, _SIZE).to(dtype)
        g, beta = -0.1 * drawn(batch, 1, _HEADS).abs(), drawn(batch, 1, _HEADS).sigmoid()
        return q, k, v, g, beta, drawn(batch, _HEADS, _SIZE, _SIZE).to(states), None

    return make


def _token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    """One token of the recurrence, all rows at once."""
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
        subject=replace(SUBJECTS[0], reference=_token, reference_backward=gradients(_token)),
        make=_decoding(batch, states),
        forward_bytes=small + 2 * heads * _SIZE * _SIZE * states.itemsize,
        backward_bytes=2 * small + 3 * heads * _SIZE * _SIZE * states.itemsize,
        baseline=_in_torch,
        # FLA gives float32 states whatever it is given: other work, where they are narrower.
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
    """The benchmark's states, every type, and the largest heads with every mode on."""
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
    def empty(*shape: int, dtype: torch.dtype = element) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return bind(
        gated_delta_step,
        *(empty(2, 1, heads, size) for heads in (1, 1, 2)),
        *(empty(2, 1, 2, dtype=gates) for _ in range(2)),
        empty(2, 2, size, size, dtype=states),
        state_indices=None if index is None else empty(2, dtype=index),
        **options,
    )
