"""The tokens, gates and states that the family is tested on, and what is made from them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Inputs, Make
from adjoint.contract.inputs import differentiable, leaves
from adjoint.core.problem import wide_dtype

# ----------------------------------------------------------------------------------------------- keys

Keys = Callable[[torch.Generator, tuple[int, ...]], Tensor]


def unit_vectors(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Random directions, in float64."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def nearly_equal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """normalise(k₀ + 0.05·ε): what is new in a value is the small difference of large ones."""
    batch, _, heads, size = shape
    near = unit_vectors(generator, (batch, 1, heads, size)) + 0.05 * unit_vectors(generator, shape)
    return near / near.norm(dim=-1, keepdim=True)


def orthogonal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """The axes in turn."""
    _, time, _, size = shape
    return torch.eye(size, dtype=torch.float64)[torch.arange(time) % size][None, :, None].expand(shape)


def tokens(
    shape: tuple[int, int, int, int, int, int],
    *,
    cu_seqlens: tuple[int, ...] | None = None,
    state: bool = True,
    decay: float | None = 1.0,
    strength: tuple[float, float] = (0.05, 0.95),
    keys: Keys = unit_vectors,
    wide_gates: bool = True,
    lay: Callable[[Tensor], Tensor] = lambda x: x,
) -> Make:
    """q, k, v, g, beta, initial states and bounds of sequences.

    Args:
        shape: B, T, Hg, H, K, V.
        decay: the largest −g, uniform from a hundredth of it; None for g = 0.
        strength: the range of beta.
        wide_gates: g and beta in float32, not the dtype of q.
    """
    batch, time, key_heads, heads, K, V = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def uniform(low: float, high: float) -> Tensor:
            drawn = torch.rand((batch, time, heads), generator=generator, dtype=torch.float64)
            return drawn * (high - low) + low

        gates = wide_dtype(dtype) if wide_gates else dtype
        g = uniform(0.01, 1) * -decay if decay is not None else torch.zeros(batch, time, heads)
        inputs: list[Any] = [
            unit_vectors(generator, (batch, time, key_heads, K)).to(dtype),
            keys(generator, (batch, time, key_heads, K)).to(dtype),
            torch.randn((batch, time, heads, V), generator=generator, dtype=torch.float64).to(dtype),
            g.to(gates),
            uniform(*strength).to(gates),
        ]
        number = batch if cu_seqlens is None else len(cu_seqlens) - 1
        first = torch.randn((number, heads, K, V), generator=generator, dtype=torch.float64)
        inputs = [lay(x).to(device) for x in inputs]
        inputs.append(first.to(wide_dtype(dtype)).to(device) if state else None)
        inputs.append(None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device))
        return tuple(inputs)

    return make


def strided(x: Tensor) -> Tensor:
    """The same values, time last in memory."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def gradients(function: Callable[..., tuple[Tensor, ...]], outputs: int = 2) -> Callable[..., tuple[Tensor, ...]]:
    """`(*upstream, *inputs) -> gradients` of a function of torch, by autograd."""

    def slopes_of(*everything: Any) -> tuple[Tensor, ...]:
        upstream, inputs = everything[:outputs], leaves(everything[outputs:])
        with torch.enable_grad():
            results = function(*inputs)
            variables = differentiable(inputs)
            slopes = torch.autograd.grad(
                [o for o in results if o.requires_grad],
                variables,
                [u for o, u in zip(results, upstream, strict=True) if o.requires_grad],
                allow_unused=True,
            )
        return tuple(
            torch.zeros_like(x) if gradient is None else gradient for x, gradient in zip(variables, slopes, strict=True)
        )

    return slopes_of


def wrong(
    change: Callable[..., tuple[Tensor, ...]], right: Callable[..., tuple[Tensor, ...]] | None = None
) -> Callable[..., Answers]:
    """The gradients of another function of the inputs, in float64 and rounded as ours are; with the outputs of it, or
    those of the right one."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        exact = tuple(x.double() if x is not None and x.is_floating_point() else x for x in inputs)
        slopes = gradients(change, len(upstream))(*(u.double() for u in upstream), *exact)
        return (
            tuple(o.detach().to(u.dtype) for o, u in zip((right or change)(*exact), upstream, strict=True)),
            tuple(d.to(x.dtype) for d, x in zip(slopes, differentiable(inputs), strict=True)),
        )

    return answer


def zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return tuple(map(torch.zeros_like, upstream)), tuple(map(torch.zeros_like, differentiable(inputs)))
