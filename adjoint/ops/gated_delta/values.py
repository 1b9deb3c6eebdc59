"""The tokens, gates, states and chunks that the family is tested on, wrong answers, and calls that must raise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Inputs, Make
from adjoint.contract.inputs import differentiable, leaves, widened
from adjoint.core.errors import check
from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta import reference

CPU = torch.device("cpu")

Sizes = tuple[int, int, int, int, int, int]
"""The sizes B, T, Hg, H, K and V."""

Function = Callable[..., tuple[Tensor, ...]]

# ----------------------------------------------------------------------------------------------- tokens

Keys = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def unit_vectors(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Random directions, in float64."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def nearly_equal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """normalise(k₀ + 0.05·ε). The new part of a value is then a small difference of large numbers."""
    batch, _, heads, size = shape
    near = unit_vectors(generator, (batch, 1, heads, size)) + 0.05 * unit_vectors(generator, shape)
    return near / near.norm(dim=-1, keepdim=True)


def orthogonal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Keys along one axis after the other."""
    _, time, _, size = shape
    return torch.eye(size, dtype=torch.float64)[torch.arange(time) % size][None, :, None].expand(shape)


def tokens(
    shape: Sizes,
    *,
    cu_seqlens: tuple[int, ...] | None = None,
    state: bool = True,
    decay: float | None = 1.0,
    strength: tuple[float, float] = (0.05, 0.95),
    keys: Keys = unit_vectors,
    wide_gates: bool = True,
    resets: tuple[int, ...] = (),
    lay: Callable[[Tensor], Tensor] = lambda x: x,
) -> Make:
    """Makes q, k, v, g, beta, initial states and bounds of sequences.

    Args:
        decay: the largest −g. −g is uniform from a hundredth of it; None for g = 0.
        strength: the range of beta.
        wide_gates: whether g and beta are in float32, and not in the dtype of q.
        resets: the tokens whose g is −inf.
        lay: gives the same values with another layout in memory.
    """
    batch, time, key_heads, heads, K, V = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def uniform(low: float, high: float) -> Tensor:
            drawn = torch.rand((batch, time, heads), generator=generator, dtype=torch.float64)
            return drawn * (high - low) + low

        gates = wide_dtype(dtype) if wide_gates else dtype
        g = uniform(0.01, 1) * -decay if decay is not None else torch.zeros(batch, time, heads)
        g[:, list(resets)] = -torch.inf
        inputs = (
            unit_vectors(generator, (batch, time, key_heads, K)).to(dtype),
            keys(generator, (batch, time, key_heads, K)).to(dtype),
            torch.randn((batch, time, heads, V), generator=generator, dtype=torch.float64).to(dtype),
            g.to(gates),
            uniform(*strength).to(gates),
        )
        number = batch if cu_seqlens is None else len(cu_seqlens) - 1
        first = torch.randn((number, heads, K, V), generator=generator, dtype=torch.float64)
        return (
            *(lay(x).to(device) for x in inputs),
            first.to(wide_dtype(dtype)).to(device) if state else None,
            None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device),
        )

    return make


def strided(x: Tensor) -> Tensor:
    """The same values, with time as the last axis in memory."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def drawn_on(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    """Keywords of torch's random functions, for inputs that would take the host too long to draw."""
    seed = int(torch.randint(2**31, (), generator=generator))
    return {"device": device, "generator": torch.Generator(device).manual_seed(seed)}


# ----------------------------------------------------------------------------------------------- chunks

Place = tuple[int, slice]


def chunk_places(like: Tensor, cu_seqlens: Tensor | None, chunk: int) -> list[tuple[int, int, Place]]:
    """For every chunk, its sequence, the place of its state, and its tokens."""
    chunks = []
    batch, time = like.shape[:2]
    for number, (row, part) in enumerate(reference.sequences(batch, time, cu_seqlens)):
        for index, begin in enumerate(range(part.start, part.stop, chunk)):
            place = (row * time + part.start) // chunk + number + index
            chunks.append((number, place, (row, slice(begin, min(begin + chunk, part.stop)))))
    return chunks


def solved(shape: Sizes, chunk: int, cu_seqlens: tuple[int, ...] | None = None, narrow: bool = False) -> Make:
    """Makes k, v, beta, G and T of real chunks, with T in the dtype of k if `narrow`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        _, k, v, g, beta, _, bounds = tokens(shape, cu_seqlens=cu_seqlens)(dtype, CPU, generator)
        G, T = torch.zeros_like(g), g.new_zeros(*g.shape, chunk)
        for _, _, place in chunk_places(k, bounds, chunk):
            G[place] = g[place].cumsum(0)
            inverse = reference.solve(reference.gram(k[place].to(g.dtype), beta[place], G[place]))
            T[place][..., : inverse.shape[-1]] = inverse.transpose(0, 1)
        inputs = (k, v, beta, G, T.to(dtype) if narrow else T, bounds)
        return tuple(None if x is None else x.to(device) for x in inputs)

    return make


def w_u(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stage `recompute_w_u`, chunk by chunk."""
    parts = []
    for _, _, place in chunk_places(k, cu_seqlens, T.shape[-1]):
        matrix = T[place][..., : place[1].stop - place[1].start].transpose(0, 1)
        parts.append(reference.recompute_w_u(k[place], v[place], beta[place], G[place], matrix))
    if not parts:
        return v.new_zeros(*v.shape[:3], k.shape[3]), torch.zeros_like(v)
    w, u = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return w.unflatten(0, k.shape[:2]), u.unflatten(0, k.shape[:2])


# ---------------------------------------------------------------------------------------------- answers


def gradients(function: Function, outputs: int = 2) -> Function:
    """`(*upstream, *inputs) -> gradients` of a function of torch, by autograd."""

    def slopes_of(*everything: Any) -> tuple[Tensor, ...]:
        upstream, inputs = everything[:outputs], leaves(everything[outputs:])
        with torch.enable_grad():
            pairs = [(o, u) for o, u in zip(function(*inputs), upstream, strict=True) if o.requires_grad]
        results, slopes = [o for o, _ in pairs], [u for _, u in pairs]
        return torch.autograd.grad(results, differentiable(inputs), slopes, materialize_grads=True)

    return slopes_of


def changed(function: Function, names: tuple[str, ...], **changes: Callable[[Tensor], Tensor]) -> Function:
    """The function on inputs with these names, after some of them are changed."""

    def of_changed(*inputs: Any) -> tuple[Tensor, ...]:
        named = zip(names, inputs, strict=True)
        return function(*(changes[name](x) if name in changes and x is not None else x for name, x in named))

    return of_changed


def wrong(change: Function) -> Callable[..., Answers]:
    """The outputs and gradients of another function of the inputs, in float64 and rounded as ours are."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        exact = widened(inputs)
        slopes = gradients(change, len(upstream))(*(u.double() for u in upstream), *exact)
        return (
            tuple(o.detach().to(u.dtype) for o, u in zip(change(*exact), upstream, strict=True)),
            tuple(d.to(x.dtype) for d, x in zip(slopes, differentiable(inputs), strict=True)),
        )

    return answer


def zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return tuple(map(torch.zeros_like, upstream)), tuple(map(torch.zeros_like, differentiable(inputs)))


# ------------------------------------------------------------------------------------------------ calls

OnDevice = Callable[[torch.device], Any]


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> OnDevice:
    """Zeros of a shape, on a device."""
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def at(position: int, value: float, *shape: int) -> OnDevice:
    """Zeros of a shape, except for one number, on a device."""

    def make(device: torch.device) -> Tensor:
        numbers = torch.zeros(shape, device=device)
        numbers.view(-1)[position] = value
        return numbers

    return make


def integers(*values: int) -> OnDevice:
    """These numbers, on a device."""
    return lambda device: torch.tensor(values, device=device)


def calls_of(function: Callable[..., Any], **shapes: tuple[int, ...]) -> Callable[..., OnDevice]:
    """Makes `call(**changes)`, which calls the function on zeros of these shapes, with other or further arguments.

    Arguments that are functions are called with the device.
    """

    def with_changes(**changes: Any) -> OnDevice:
        def call(device: torch.device) -> None:
            arguments = {name: blank(*shape) for name, shape in shapes.items()} | changes
            function(**{name: value(device) if callable(value) else value for name, value in arguments.items()})
            check()

        return call

    return with_changes


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
