"""A search for inputs that break what ops promise: cases of an op are changed, a few tensors at a time, and a change
stays if it brings an error closer to its limit.

Numbers are scaled by powers of two, all of a tensor or each by its own; they lose their signs, become 0 or equal to one
another; rows become equal, or are turned into each other's negatives, so that sums cancel; some become as small as
normal numbers are, or tiny beside the rest, so that products underflow. What leaves an op's domain is moved back into
it.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from adjoint.contract.cases import Case, Subject
from adjoint.contract.inputs import Inputs
from adjoint.core.errors import Unsupported
from adjoint.core.preference import Preference
from adjoint.verify.run import as_tuple, compare, differentiate, generator

OF_THE_RULE = ("gated_delta_rule", "gated_delta_step", "cumulative_decay", "gram", "solve", "carry", "output")
"""Functions whose domain is that of the gated delta rule, with `recompute_w_u`."""

LARGEST = 2.0**20
"""Of the numbers that are tried: results stay in the range of every type but float16."""


def _changed(x: Tensor, source: random.Random, generator: torch.Generator) -> Tensor:
    """A tensor changed in one of the ways above."""
    wide, shape = x.double(), list(x.shape)
    if not wide.numel():
        return x

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator, dtype=torch.float64)

    powers = source.choice((1, 2, 6))
    some = uniform(*shape) < source.choice((0.1, 0.5, 0.9))
    rows = shape[:-1] + [1] * bool(shape)
    way = source.randrange(12)
    if way == 0:
        wide = wide * 2.0 ** source.randint(-powers, powers)
    elif way == 1:
        wide = wide * 2.0 ** ((uniform(*rows) * 2 - 1) * powers).round()
    elif way == 2:
        wide = wide * 2.0 ** ((uniform(*shape) * 2 - 1) * powers).round()
    elif way == 3:
        wide = wide.abs()
    elif way == 4:
        wide = wide.masked_fill(some, 0.0)
    elif way == 5:
        wide = wide * (1 + (uniform(*shape) - 0.5) * source.choice((1e-3, 1e-2, 0.1)))
    elif way == 6:
        wide = torch.where(some, wide.flatten()[source.randrange(wide.numel())], wide)
    elif way == 9:
        wide = torch.where(some, torch.finfo(x.dtype).smallest_normal, wide)
    elif way == 10:
        wide = torch.where(some, wide * 2.0 ** -source.choice((40, 100)), wide)
    elif way == 11:
        wide = (1 + (uniform(*shape) * 8).floor() * torch.finfo(x.dtype).eps) * wide.sign()
    elif way == 7 and len(shape) > 1:
        wide = torch.where(uniform(*rows) < 0.5, wide.select(-2, source.randrange(shape[-2])).unsqueeze(-2), wide)
    elif shape:
        wide = torch.where(some, -wide.flip(-1), wide)
    return wide.clamp(-LARGEST, LARGEST).to(x.dtype)


def _in_domain(subject: Subject, inputs: Inputs, before: Inputs) -> Inputs:
    """Inputs of the gated delta rule and its stages, back in their domain; G and w stay as they were."""
    name = subject.function.__name__
    if name not in (*OF_THE_RULE, "recompute_w_u"):
        return inputs
    moved = list(inputs)
    for place, (input_name, x) in enumerate(zip(subject.inputs, inputs, strict=True)):
        if x is None or not x.is_floating_point():
            continue
        if input_name == "g":
            moved[place] = -x.abs().clamp(0.0, 100.0)
        elif input_name == "beta":
            moved[place] = x.abs().clamp_max(1)
        elif input_name == "k":
            moved[place] = (x.double() / x.double().norm(dim=-1, keepdim=True).clamp_min(1.0)).to(x.dtype)
        elif input_name in ("A", "T"):
            moved[place] = x.clamp(-1, 1)
        elif input_name in ("G", "w"):
            moved[place] = before[place]
    return tuple(moved)


def _usable(subject: Subject, dtype: torch.dtype, device: torch.device, most: int) -> list[Case]:
    """Cases of few numbers, without resets, whose infinite gates no change may touch."""

    def size(case: Case) -> int:
        return sum(x.numel() for x in case.make(dtype, torch.device("cpu"), generator()) if x is not None)

    return [case for case in subject.cases if 0 < size(case) <= most and "resets" not in case.name]


def climb(
    subject: Subject,
    dtype: torch.dtype,
    device: torch.device,
    preference: Preference,
    *,
    climbs: int,
    steps: int,
    most: int = 2000,
    seed: int = 0,
) -> dict[str, float]:
    """The largest share of its limit that the error of each result ever had; empty where a plan takes no case."""
    largest: dict[str, float] = {}
    source = random.Random(seed)
    for case in source.sample(cases := _usable(subject, dtype, device, most), min(climbs, len(cases))):
        drawn = generator(source.randrange(2**31))
        inputs = case.make(dtype, device, drawn)
        try:
            upstream = tuple(case.upstream(x, drawn) for x in as_tuple(subject(*inputs, preference=preference)))
        except Unsupported:
            continue
        target, best = "", -1.0
        for step in range(steps + 1):
            others, slopes = list(inputs), list(upstream)
            for place in _places(others, slopes, source) if step else ():
                tensors, index = (others, place) if place < len(others) else (slopes, place - len(others))
                tensors[index] = _changed(tensors[index].cpu(), source, drawn).to(device)
            changed = _in_domain(subject, tuple(others), inputs)
            found = differentiate(subject, changed, tuple(slopes), preference)
            measured = {x.name: x.promise for x in compare(found)}
            shares = {name: error.value / error.limit if error.limit else 0.0 for name, error in measured.items()}
            target = target or source.choice(list(shares))
            if shares[target] >= best:
                inputs, upstream, best = changed, tuple(slopes), shares[target]
            largest = {name: max(share, largest.get(name, 0.0)) for name, share in shares.items()}
    return largest


def _places(inputs: list[Tensor | None], upstream: list[Tensor], source: random.Random) -> Iterator[int]:
    """One or two tensors to change, among floating inputs and upstream gradients."""
    floating = [place for place, x in enumerate((*inputs, *upstream)) if x is not None and x.is_floating_point()]
    yield from source.sample(floating, min(len(floating), source.randint(1, 2)))
