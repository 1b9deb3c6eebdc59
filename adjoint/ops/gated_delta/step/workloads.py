"""The steps of decoding that are timed, and on the CPU the whole rule."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs, Make, Workload
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule.cases import RULE
from adjoint.ops.gated_delta.step.cases import STEPS
from adjoint.ops.gated_delta.values import gradients, tokens

_KEY_HEADS, _HEADS, _SIZE = 16, 32, 128


def _decoding(batch: int, states: torch.dtype) -> Make:
    """One token of each row, drawn on the device: the states are gigabytes."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        drawn = partial(torch.randn, generator=own, device=device, dtype=torch.float32)
        q, k = (drawn(batch, 1, _KEY_HEADS, _SIZE) for _ in range(2))
        q, k = (torch.nn.functional.normalize(x, dim=-1).to(dtype) for x in (q, k))
        v = drawn(batch, 1, _HEADS, _SIZE).to(dtype)
        g, beta = -0.1 * drawn(batch, 1, _HEADS).abs(), drawn(batch, 1, _HEADS).sigmoid()
        return q, k, v, g, beta, drawn(batch, _HEADS, _SIZE, _SIZE).to(states), None

    return make


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    """One token of the recurrence, all rows at once."""
    q, k = (x[:, 0].repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    decayed = g[:, 0].exp()[..., None, None] * state
    new = beta[:, 0, :, None] * (v[:, 0] - torch.einsum("bhkv,bhk->bhv", decayed, k))
    after = decayed + torch.einsum("bhk,bhv->bhkv", k, new)
    return (q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", after, q))[:, None], after


def _in_torch(*inputs: Any) -> Any:
    """The same in float32, with results of the inputs' dtypes."""
    wide: Any = [x if x is None else x.float() for x in inputs]
    out, after = _step(*wide)
    return out.to(inputs[2].dtype), after.to(inputs[5].dtype)


def _workload(batch: int, states: torch.dtype) -> Workload:
    heads = batch * _HEADS
    small = 2 * (2 * batch * _KEY_HEADS * _SIZE + 2 * heads * _SIZE) + 2 * 4 * heads
    name = "" if states == torch.float32 else ", bfloat16 states"
    return Workload(
        name=f"decode {batch} × {_HEADS} heads of {_SIZE}×{_SIZE}{name}",
        subject=replace(STEPS[0], reference=_step, reference_backward=gradients(_step)),
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


DECODING = tuple(_workload(batch, states) for states in (torch.float32, torch.bfloat16) for batch in (1, 32, 256))

_chunked = partial(reference.gated_delta_rule, by_chunks=True)
_T, _H = 2048, 16
_TOKENS = _T * _H * _SIZE * 4

ON_A_CPU = Workload(
    name=f"{_T} tokens × {_H} heads of {_SIZE}×{_SIZE}, float32",
    # The recurrence would keep a state for every token; by chunks it is the same function, and fits.
    subject=replace(RULE, reference=_chunked, reference_backward=gradients(_chunked)),
    make=tokens((1, _T, _H, _H, _SIZE, _SIZE), decay=0.1),
    forward_bytes=4 * _TOKENS,
    backward_bytes=8 * _TOKENS,
    baseline=None,
    peers=("transformers_gated_delta_rule",),
    dtype=torch.float32,
    devices=("cpu",),
    compile=False,
)
