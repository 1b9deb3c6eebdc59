"""A search for inputs that break the promised bounds: many problems at once, each a head, climb towards theirs.

Every problem begins with keys from equal to random, decays from none to strong, strengths of which some are 1, and
small or large values and states. In a step some of its tensors change: by noise, by a factor for each number, in their
signs, or as copies of the first token. It keeps a change that brings the error of its target closer to the bound.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.values import gradients
from tests.ops.gated_delta.rule.bound.promised import GRADIENTS, OUTPUTS, shares

RESULTS = (*OUTPUTS, *GRADIENTS)


class Problems(NamedTuple):
    """Inputs of the rule, [1, T, problems, ...] and [1, problems, K, V], and gradients of its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    do: Tensor
    dfinal: Tensor

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return (*self[:6], None)

    @property
    def upstream(self) -> tuple[Tensor, Tensor]:
        return self.do, self.dfinal

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def exact(self) -> dict[str, Tensor]:
        """Outputs and gradients in float64."""
        inputs = (*(x.double() for x in self[:6]), None)
        rule = _by_chunks
        outputs = rule(*inputs)
        slopes = gradients(rule)(*(x.double() for x in self.upstream), *inputs)
        return dict(zip(RESULTS, (*outputs, *slopes), strict=True))

    def each(self, x: Tensor) -> Tensor:
        """The largest number of every problem."""
        return x[0].amax(0) if x.dim() == 3 else x[0]


def _by_chunks(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    return reference.gated_delta_rule(*inputs, by_chunks=True)  # type: ignore[arg-type]


Run = Callable[[Problems], dict[str, Tensor]]
"""Outputs and gradients of a plan, by name."""


def _spread(generator: torch.Generator, *shape: int) -> Callable[..., Tensor]:
    device = generator.device

    def draw(low: float, high: float) -> Tensor:
        """10 to a power from low to high."""
        return 10 ** (torch.rand(shape, generator=generator, device=device) * (high - low) + low)

    return draw


def drawn(generator: torch.Generator, number: int, time: int, K: int, V: int, dtype: torch.dtype) -> Problems:
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    each, of_states = _spread(generator, 1, 1, number, 1), _spread(generator, 1, number, 1, 1)
    keys = unit(unit(normal(1, 1, number, K)) + each(-3, 1) * unit(normal(1, time, number, K)))
    keys = torch.where(uniform(1, time, number, 1) < 0.1, uniform(1, time, number, 1) * keys, keys)
    decay = uniform(1, time, number) * each(-4, 1)[..., 0]
    strength = uniform(1, time, number) ** each(-1, 0.5)[..., 0]
    full, constant = uniform(1, 1, number) < 0.3, uniform(1, 1, number) < 0.3
    states = [normal(1, number, K, V) * of_states(-1, 1) * (uniform(1, number, 1, 1) < 0.7) for _ in range(2)]
    q, v, do = unit(normal(1, time, number, K)), normal(1, time, number, V) * each(-1, 1), normal(1, time, number, V)
    g, beta, kind = -decay.masked_fill(constant, 0.0), strength.masked_fill(full, 1.0), wide_dtype(dtype)
    return Problems(
        *(x.to(dtype) for x in (q, keys, v)),
        *(x.to(kind) for x in (g, beta, states[0])),
        do.to(dtype),
        states[1].to(kind),
    )


def smaller(problems: Problems, generator: torch.Generator) -> Problems:
    """The same with values, states and upstream gradients of each times 1 to 10⁻⁶: float16 has few digits of these."""
    number, draw = problems.q.shape[2], {}
    for name in ("v", "state", "do", "dfinal"):
        x = getattr(problems, name)
        one = [1] * x.dim()
        one[1 if name in ("state", "dfinal") else 2] = number
        draw[name] = (x * _spread(generator, *one)(-6, 0)).to(x.dtype)
    return problems._replace(**draw)


def changed(problems: Problems, generator: torch.Generator) -> Problems:
    """Each problem with some of its tensors changed, inside the domain."""
    device, number = generator.device, problems.q.shape[2]
    moved = []
    for name, x in zip(Problems._fields, problems, strict=True):
        one = [1] * x.dim()
        one[1 if name in ("state", "dfinal") else 2] = number
        wide = x.double()
        noise = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float64)
        noise = noise * _spread(generator, *one)(-3, 0)
        some = torch.rand(x.shape, generator=generator, device=device) < 0.1
        ways = (wide + noise * wide.abs().mean(), wide * (1 + noise), wide.abs(), wide.where(~some, wide[:, :1]))
        way = torch.randint(2 * len(ways), one, generator=generator, device=device)
        for index, other in enumerate(ways):
            wide = torch.where(way == index, other, wide)
        if name == "k":
            wide = wide / wide.norm(dim=-1, keepdim=True).clamp_min(1.0)
        wide = wide.clamp_max(0.0) if name == "g" else wide.clamp(0.0, 1.0) if name == "beta" else wide
        moved.append(wide.to(x.dtype))
    return Problems(*moved)


def climb(
    plan: str, run: Run, problems: Problems, target: str, steps: int, generator: torch.Generator
) -> dict[str, float]:
    """The largest share of its bound that the error of each result ever had."""

    def errors_of(some: Problems) -> dict[str, Tensor]:
        over_bounds = shares(plan, some.inputs, some.upstream, run(some), some.exact(), some.scale)
        return {name: some.each(share) for name, share in over_bounds.items()}

    best = errors_of(problems)
    largest = {name: float(share.max()) for name, share in best.items()}
    for _ in range(steps):
        others = changed(problems, generator)
        errors = errors_of(others)
        closer = errors[target] > best[target]
        kept = []
        for name, old, new in zip(Problems._fields, problems, others, strict=True):
            one = [1] * old.dim()
            one[1 if name in ("state", "dfinal") else 2] = -1
            kept.append(torch.where(closer.view(one), new, old))
        problems = Problems(*kept)
        for name, share in errors.items():
            best[name] = torch.where(closer, share, best[name])
            largest[name] = max(largest[name], float(share.max()))
    return largest
