"""The chunks that the stages of the gated delta rule are tested and verified on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Make, Rebatch, Subject
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import state_dtype
from adjoint.ops.gated_delta.stages import carry, cumulative_decay, gram, output, solve
from adjoint.ops.gated_delta.stages.gates import gate, normalize
from adjoint.ops.gated_delta.stages.w_u import recompute_w_u
from adjoint.ops.gated_delta.values import gradients, tokens, wrong, zeros

CPU = torch.device("cpu")


def _solved(
    shape: tuple[int, int, int, int, int, int],
    chunk: int,
    cu_seqlens: tuple[int, ...] | None = None,
    narrow: bool = False,
) -> Make:
    """k, v, beta, G and T of real chunks; T in the dtype of k where that is asked."""
    batch, time, _, heads, _, _ = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        _, k, v, g, beta, _, bounds = tokens(shape, cu_seqlens=cu_seqlens)(dtype, CPU, generator)
        G, T = torch.zeros_like(g), g.new_zeros(batch, time, heads, chunk)
        for row, part in reference.sequences(batch, time, bounds):
            for begin in range(part.start, part.stop, chunk):
                place = (row, slice(begin, min(begin + chunk, part.stop)))
                G[place] = g[place].cumsum(0)
                solved = reference.solve(reference.gram(k[place].to(g.dtype), beta[place], G[place]))
                T[place][..., : solved.shape[-1]] = solved.transpose(0, 1)
        kept = (k, v, beta, G, T.to(dtype) if narrow else T, bounds)
        return tuple(None if x is None else x.to(device) for x in kept)

    return make


def _w_u(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stage, chunk by chunk."""
    chunk, parts = T.shape[-1], []
    for row, part in reference.sequences(k.shape[0], k.shape[1], cu_seqlens):
        for begin in range(part.start, part.stop, chunk):
            place = (row, slice(begin, min(begin + chunk, part.stop)))
            own = T[place][..., : place[1].stop - begin].transpose(0, 1)
            parts.append(reference.recompute_w_u(k[place], v[place], beta[place], G[place], own))
    if not parts:
        return v.new_zeros(*v.shape[:3], k.shape[3]), torch.zeros_like(v)
    w, u = (torch.cat(found) for found in zip(*parts, strict=True))
    return w.unflatten(0, k.shape[:2]), u.unflatten(0, k.shape[:2])


def _alone(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Every sequence by itself, whether it was a row of a batch or packed with others."""
    *tensors, cu_seqlens = inputs
    batch, time = tensors[0].shape[:2]
    for row, part in reference.sequences(batch, time, cu_seqlens):
        if part.start == part.stop:
            continue
        at = (slice(row, row + 1), part)

        def pairs(whole: Answers, alone: Answers, at: tuple[slice, slice] = at) -> Iterator[tuple[Tensor, Tensor]]:
            every, parts = (*whole[0], *whole[1]), (*alone[0], *alone[1])
            return ((part, x[at]) for x, part in zip(every, parts, strict=True))

        yield Rebatch(
            f"sequence {row}, {part.start}", (*(x[at] for x in tensors), None), tuple(x[at] for x in upstream), pairs
        )


W_U_MISTAKES = {
    "zero output": zeros,
    "w without its decay": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G * 0, T, cu)),
    "T transposed": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G, T.flip(-1), cu)),
    "gradient of T dropped": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G, T.detach(), cu)),
}


def _w_u_subject(name: str, narrow: bool, dtypes: tuple[torch.dtype, ...]) -> Subject:
    cases: tuple[Case, ...] = (
        Case("grouped heads", _solved((2, 5, 1, 2, 3, 2), 4, narrow=narrow)),
        Case("packed", _solved((1, 40, 1, 2, 9, 7), 16, (0, 0, 1, 18, 40, 40), narrow)),
        Case("a layer", _solved((1, 1000, 2, 4, 128, 128), 64, narrow=narrow), heavy=True),
    )
    if not narrow:
        cases = (*cases, Case("no tokens", _solved((1, 0, 1, 1, 4, 4), 16)))
    return Subject(
        name=name,
        function=recompute_w_u,
        inputs=("k", "v", "beta", "G", "T", "cu_seqlens"),
        by_name=("cu_seqlens",),
        reference=_w_u,
        reference_backward=gradients(_w_u),
        cases=cases,
        mistakes=W_U_MISTAKES,
        rebatched=_alone,
        dtypes=dtypes,
    )


W_U = (
    _w_u_subject("recompute_w_u", False, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    _w_u_subject("recompute_w_u[narrow T]", True, (torch.bfloat16,)),
)

# ------------------------------------------------------------------------------------- the other stages

_SMALL, _SMALL_CHUNK = (1, 5, 1, 2, 3, 2), 4
_PACKED = (0, 0, 1, 18, 30)


def _places(like: Tensor, cu_seqlens: Tensor | None, chunk: int) -> list[tuple[int, int, tuple[int, slice]]]:
    """Every chunk: its sequence, where its state is kept, and its tokens."""
    found = []
    batch, time = like.shape[:2]
    for number, (row, part) in enumerate(reference.sequences(batch, time, cu_seqlens)):
        for index, begin in enumerate(range(part.start, part.stop, chunk)):
            kept = (row * time + part.start) // chunk + number + index
            found.append((number, kept, (row, slice(begin, min(begin + chunk, part.stop)))))
    return found


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The rows of all chunks as [B, T, ...]."""
    return torch.cat(parts).unflatten(0, like.shape[:2])


def _padded(matrix: Tensor, chunk: int) -> Tensor:
    """[H, c, c] as rows of C for each token."""
    return torch.nn.functional.pad(matrix, (0, chunk - matrix.shape[-1])).transpose(0, 1)


def _decay_of(chunk: int) -> Callable[..., tuple[Tensor, ...]]:
    def decay(g: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        return (_joined([g[at].cumsum(0) for _, _, at in _places(g, cu_seqlens, chunk)], g),)

    return decay


def _gram_of(chunk: int) -> Callable[..., tuple[Tensor, ...]]:
    def gram(k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        at = [place for _, _, place in _places(k, cu_seqlens, chunk)]
        return (_joined([_padded(reference.gram(k[x], beta[x], G[x]), chunk) for x in at], k),)

    return gram


def _solve(A: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    parts = []
    for _, _, at in _places(A, cu_seqlens, A.shape[-1]):
        own = A[at].transpose(0, 1)
        parts.append(_padded(reference.solve(own[..., : own.shape[1]].tril(-1)), A.shape[-1]))
    return (_joined(parts, A),)


def _carry_of(chunk: int) -> Callable[..., tuple[Tensor, ...]]:
    def carry(
        k: Tensor, w: Tensor, u: Tensor, G: Tensor, state: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ...]:
        current, values = list(state), []
        states = [torch.zeros_like(state[0])] * (k.shape[0] * k.shape[1] // chunk + len(state))
        for number, kept, at in _places(k, cu_seqlens, chunk):
            S = states[kept] = current[number]
            values.append(u[at] - torch.einsum("thk,hkv->thv", w[at], S))
            keys = k[at].repeat_interleave(u.shape[2] // k.shape[2], 1) * (G[at][-1] - G[at]).exp()[..., None]
            current[number] = G[at][-1].exp()[:, None, None] * S + torch.einsum("thk,thv->hkv", keys, values[-1])
        return _joined(values, u), torch.stack(states), torch.stack(current)

    return carry


def _output_of(chunk: int) -> Callable[..., tuple[Tensor, ...]]:
    def output(
        q: Tensor, k: Tensor, values: Tensor, states: Tensor, G: Tensor, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ...]:
        at = [(kept, place) for _, kept, place in _places(q, cu_seqlens, chunk)]
        scale = q.shape[-1] ** -0.5
        parts = [reference.output(q[x], k[x], values[x], states[kept], G[x], scale) for kept, x in at]
        return (_joined(parts, values),)

    return output


def _made(stage: str, shape: tuple[int, int, int, int, int, int], chunk: int, cu_seqlens: Any = None) -> Make:
    """The inputs of a stage, as the stages before it give them."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        q, k, v, g, beta, state, bounds = tokens(shape, cu_seqlens=cu_seqlens)(dtype, CPU, generator)
        wide = g.dtype
        (G,) = _decay_of(chunk)(g, bounds)
        (A,) = _gram_of(chunk)(k.to(wide), beta, G, bounds)
        w, u = (x.to(dtype) for x in _w_u(k.to(wide), v.to(wide), beta, G, _solve(A, bounds)[0], bounds))
        values, states, _ = _carry_of(chunk)(k.to(wide), w.to(wide), u.to(wide), G, state, bounds)
        given = {
            "cumulative_decay": (g.to(dtype),),
            "gram": (k, beta, G),
            "solve": (A.to(dtype),),
            "carry": (k, w, u, G, state),
            "output": (q, k, values.to(dtype), states, G),
        }[stage]
        return tuple(None if x is None else x.to(device) for x in (*given, bounds))

    return make


def _stage(
    function: Callable[..., Any],
    inputs: tuple[str, ...],
    reference_of: Callable[[int], Callable[..., tuple[Tensor, ...]]],
    outputs: int = 1,
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.bfloat16),
) -> Subject:
    """One subject of one chunk size, on few tokens and on packed ones."""
    name, chunk = function.__name__, _SMALL_CHUNK
    exact, options = reference_of(chunk), {} if name == "solve" else {"chunk": chunk}

    def resized(given: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
        """The same tokens in every row; as many places for states as that makes."""
        rows = {"states": size * _SMALL[1] // chunk + size}
        named = zip(inputs, given, strict=False)
        other = (*(x[:1].repeat_interleave(rows.get(name, size), 0) for name, x in named), None)
        with torch.no_grad():
            found = function(*other[:-1], **options)
        return other, tuple(map(torch.ones_like, found if isinstance(found, tuple) else (found,)))

    return Subject(
        name=name,
        function=function,
        keywords=options,
        inputs=(*inputs, "cu_seqlens"),
        by_name=("cu_seqlens",),
        reference=exact,
        reference_backward=gradients(exact, outputs),
        cases=(
            Case("few tokens", _made(name, _SMALL, chunk)),
            Case("packed", _made(name, (1, 30, 1, 2, 4, 5), chunk, _PACKED)),
        ),
        mistakes={"zero output": zeros},
        dtypes=dtypes,
        resized=resized,
    )


def _gates(shape: tuple[int, ...]) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        a, b = (normal(*shape) * 3).to(dtype), normal(*shape).to(dtype)
        return tuple(
            x.to(device) for x in (a, b, normal(shape[-1]).to(state_dtype(dtype)), normal(shape[-1]).to(dtype))
        )

    return make


def _fewer_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Some tokens alone: g and β keep their bits. Two of the gradients are sums over all tokens."""
    a, b, *parameters = inputs
    for begin in range(a.shape[0]):
        here = slice(begin, begin + 1)

        def pairs(whole: Answers, alone: Answers, here: slice = here) -> Iterator[tuple[Tensor, Tensor]]:
            return ((part, every[here]) for every, part in zip(whole[0], alone[0], strict=True))

        yield Rebatch(f"row {begin}", (a[here], b[here], *parameters), tuple(x[here] for x in upstream), pairs)


def _vectors(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    x = torch.randn((4, 3, 6), generator=generator, dtype=torch.float64)
    x[0] *= 1e-3  # where the 1e-6 counts
    return (x.to(dtype).to(device),)


OTHERS = (
    _stage(cumulative_decay, ("g",), _decay_of),
    _stage(gram, ("k", "beta", "G"), _gram_of),
    _stage(solve, ("A",), lambda chunk: _solve, dtypes=(torch.float64, torch.float32)),
    _stage(carry, ("k", "w", "u", "G", "state"), _carry_of, 3),
    _stage(output, ("q", "k", "values", "states", "G"), _output_of),
    Subject(
        name="gate",
        function=gate,
        inputs=("a", "b", "A_log", "dt_bias"),
        reference=reference.gate,
        reference_backward=gradients(reference.gate),
        cases=(Case("tokens", _gates((2, 3, 4))),),
        mistakes={"zero output": zeros},
        dtypes=(torch.float64, torch.bfloat16),
        batched=("a", "b"),
        rebatched=_fewer_tokens,
    ),
    Subject(
        name="normalize",
        function=normalize,
        inputs=("x",),
        reference=lambda x: (reference.normalized(x),),
        reference_backward=gradients(lambda x: (reference.normalized(x),), 1),
        cases=(Case("vectors", _vectors),),
        mistakes={"zero output": zeros},
        dtypes=(torch.float64, torch.bfloat16),
    ),
)
