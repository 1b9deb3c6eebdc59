"""Inputs outside the domain that ops state: not finite, or for the gated delta rule too long or of the wrong sign."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

RULES = ("gated_delta_rule", "gated_delta_step")

ROUNDED = 1 + 2.0**-6
"""An upper bound of the length of a key that had length 1 before its numbers were rounded to bfloat16."""


def outside(op: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Sentences that say which inputs are outside the domain."""
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            strange = ~x.isfinite()
            if name == "g" and op in RULES:
                strange &= x != -torch.inf  # a reset
            count = int(strange.sum())
            if count:
                first = [int(i) for i in strange.nonzero()[0]]
                yield f"{name} is not finite in {count} of {x.numel()} places, first at {first}"
    if op in RULES:
        yield from _of_rule(inputs, normalizes=bool(options.get("normalize_qk")))


def _of_rule(inputs: Mapping[str, Any], *, normalizes: bool) -> Iterator[str]:
    g, beta, k = inputs["g"], inputs["beta"], inputs["k"]
    if (count := int((g > 0).sum())) > 0:
        yield f"g is positive in {count} of {g.numel()} places, at most {float(g[g > 0].max()):.3g}: the state grows"
    if (count := int(((beta < 0) | (beta > 1)).sum())) > 0:
        yield f"beta is outside [0, 1] in {count} of {beta.numel()} places"
    lengths = k.float().norm(dim=-1)
    if not normalizes and (count := int((lengths > ROUNDED).sum())) > 0:
        longest = float(lengths[lengths > ROUNDED].max())
        yield f"{count} of {lengths.numel()} keys are longer than 1, up to {longest:.3g}: pass normalize_qk=True"
