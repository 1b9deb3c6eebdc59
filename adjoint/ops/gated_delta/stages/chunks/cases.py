"""The chunks that the stages without kernels are tested and verified on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.core.plan import Call
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.stages.chunks import carry, cumulative_decay, gram, output, solve
from adjoint.ops.gated_delta.values import CPU, Function, Sizes, chunk_places, gradients, tokens, w_u, zeros

_CHUNK = 4


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The rows of all chunks as [B, T, ...]."""
    return torch.cat(parts).unflatten(0, like.shape[:2])


def _padded(matrix: Tensor) -> Tensor:
    """[H, c, c] as rows of C for each token."""
    return F.pad(matrix, (0, _CHUNK - matrix.shape[-1])).transpose(0, 1)


def _decay(g: Tensor, cu_seqlens: Tensor | None, least: float = -torch.inf) -> tuple[Tensor, ...]:
    g = torch.where(g < least, least, g)
    return (_joined([g[at].cumsum(0) for _, _, at in chunk_places(g, cu_seqlens, _CHUNK)], g),)


def _gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    places = [at for _, _, at in chunk_places(k, cu_seqlens, _CHUNK)]
    return (_joined([_padded(reference.gram(k[at], beta[at], G[at])) for at in places], k),)


def _solve(A: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    matrices = [A[at].transpose(0, 1) for _, _, at in chunk_places(A, cu_seqlens, _CHUNK)]
    return (_joined([_padded(reference.solve(x[..., : x.shape[1]].tril(-1))) for x in matrices], A),)


def _carry(k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    current, values = list(state), []
    states = [torch.zeros_like(state[0])] * (k.shape[0] * k.shape[1] // _CHUNK + len(state))
    for number, place, at in chunk_places(k, cu_seqlens, _CHUNK):
        S = states[place] = current[number]
        values.append(u[at] - torch.einsum("thk,hkv->thv", w[at], S))
        keys = k[at].repeat_interleave(u.shape[2] // k.shape[2], 1) * (G[at][-1] - G[at]).exp()[..., None]
        current[number] = G[at][-1].exp()[:, None, None] * S + torch.einsum("thk,thv->hkv", keys, values[-1])
    return _joined(values, u), torch.stack(states), torch.stack(current)


def _output(
    q: Tensor, k: Tensor, values: Tensor, states: Tensor, G: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    parts = [
        reference.output(q[at], k[at], values[at], states[place], G[at], q.shape[-1] ** -0.5)
        for _, place, at in chunk_places(q, cu_seqlens, _CHUNK)
    ]
    return (_joined(parts, values),)


def _inputs_of(
    stage: str, shape: Sizes, cu_seqlens: tuple[int, ...] | None = None, resets: tuple[int, ...] = ()
) -> Make:
    """The inputs of a stage, as earlier stages compute them."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, v, g, beta, state, bounds = tokens(shape, cu_seqlens=cu_seqlens, resets=resets)(dtype, CPU, generator)
        wide = g.dtype
        (G,) = _decay(g, bounds, RESET[wide])
        (A,) = _gram(k.to(wide), beta, G, bounds)
        w, u = (x.to(dtype) for x in w_u(k.to(wide), v.to(wide), beta, G, _solve(A, bounds)[0], bounds))
        values, states, _ = _carry(k.to(wide), w.to(wide), u.to(wide), G, state, bounds)
        inputs = {
            "cumulative_decay": (g.to(dtype),),
            "gram": (k, beta, G),
            "solve": (A.to(dtype),),
            "carry": (k, w, u, G, state),
            "output": (q, k, values.to(dtype), states, G),
        }[stage]
        return tuple(None if x is None else x.to(device) for x in (*inputs, bounds))

    return make


_SMALL, _PACKED = (1, 5, 1, 2, 3, 2), (1, 30, 1, 2, 4, 5)
_RESETS, _AFTER_RESETS = (0, 3, 4, 6, 17, 20), ("gram", "carry", "output")
"""The tokens whose g is −inf, and the stages that take running sums with them."""


def _stage(function: Callable[..., Any], inputs: tuple[str, ...], exact: Function, outputs: int = 1) -> Subject:
    """A subject with cases of few tokens and of packed ones."""
    name = function.__name__
    options = {} if name == "solve" else {"chunk": _CHUNK}

    def resized(whole: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
        """The same tokens in every row, with the number of places for states that this gives."""
        rows = {"states": size * _SMALL[1] // _CHUNK + size}
        named = zip(inputs, whole, strict=False)
        other = (*(x[:1].repeat_interleave(rows.get(name, size), 0) for name, x in named), None)
        with torch.no_grad():
            outputs = function(*other[:-1], **options)
        return other, tuple(map(torch.ones_like, outputs if isinstance(outputs, tuple) else (outputs,)))

    return Subject(
        name=name,
        function=function,
        keywords=options,
        inputs=(*inputs, "cu_seqlens"),
        by_name=("cu_seqlens",),
        reference=exact,
        reference_backward=gradients(exact, outputs),
        cases=(
            Case("few tokens", _inputs_of(name, _SMALL)),
            Case("packed", _inputs_of(name, _PACKED, (0, 0, 1, 18, 30))),
            *(
                (Case("resets", _inputs_of(name, _PACKED, (0, 0, 1, 18, 30), _RESETS)),)
                if name in _AFTER_RESETS
                else ()
            ),
        ),
        mistakes={"zero output": zeros},
        dtypes=(torch.float64, torch.float32 if name == "solve" else torch.bfloat16),
        resized=resized,
    )


def _resets(dtype: torch.dtype) -> Subject:
    """Running sums of g with −inf, in one dtype, because the number that stands for −inf depends on the dtype."""
    exact = partial(_decay, least=RESET[wide_dtype(dtype)])
    return replace(
        _stage(cumulative_decay, ("g",), exact),
        name=f"cumulative_decay[resets, {short(dtype)}]",
        cases=(Case("resets", _inputs_of("cumulative_decay", _PACKED, (0, 0, 1, 18, 30), _RESETS)),),
        dtypes=(dtype,),
    )


SUBJECTS = (
    _stage(cumulative_decay, ("g",), _decay),
    *map(_resets, (torch.float64, torch.bfloat16)),
    _stage(gram, ("k", "beta", "G"), _gram),
    _stage(solve, ("A",), _solve),
    _stage(carry, ("k", "w", "u", "G", "state"), _carry, 3),
    _stage(output, ("q", "k", "values", "states", "G"), _output),
)
BAD_CALLS: tuple[BadCall, ...] = ()
WORKLOADS: tuple[Workload, ...] = ()


def built_calls() -> Iterator[Call]:
    """No calls, because there are no kernels."""
    yield from ()
