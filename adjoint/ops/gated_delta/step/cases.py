"""The decoding steps that `gated_delta_step` is tested and verified on."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, Case, Inputs, Make, Rebatch, Subject
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
        kept = float(place >= 0)
        outputs.append(out * kept)
        states.append((after if every else after[-1]) * kept)
    return torch.stack(outputs), torch.stack(states)


def _every_state(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _step(*(*inputs, True))


def _other_rows(*inputs: Any) -> tuple[Tensor, Tensor]:
    *given, state, indices = inputs
    return _step(*(*given, state.flip(0), indices))


def _rebatched(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterable[Rebatch]:
    """Rows with their states, or the last rows with the whole pool."""
    return batching.rebatched(inputs, upstream, 0) if inputs[-1] is None else _last_rows(inputs, upstream)


def _last_rows(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    *tokens, pool, indices = inputs
    rows = slice(len(indices) // 2, None)
    places = indices[rows][indices[rows] >= 0].long()  # no other row of the case has them

    def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ((all_of_them[rows], some) for all_of_them, some in zip(whole[0], alone[0], strict=True))
        if whole[1]:
            *gradients, dpool = whole[1]
            *own, own_dpool = alone[1]
            yield from ((all_of_them[rows], some) for all_of_them, some in zip(gradients, own, strict=True))
            yield dpool[places], own_dpool[places]

    given = (*(x[rows] for x in tokens), pool, indices[rows])
    yield Rebatch("the last rows", given, tuple(x[rows] for x in upstream), pairs)


_INPUTS = ("q", "k", "v", "g", "beta", "state", "state_indices")

STEPS = (
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
