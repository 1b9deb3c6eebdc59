"""Errors of the gated delta rule on a GPU, with every plan of kernels that the device accepts, those in Gluon too.

Few shapes, because each compiles its kernels: K = V = 128 with 16 value heads, and with 4, of which sequences of more
than 1024 tokens are split.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import widened
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import guarantee
from tests.ops.gated_delta.gpu.examples import (
    BFLOAT16,
    FEW,
    GRADIENTS,
    ODD,
    SMALLER,
    Example,
    drawn,
    every_plan,
    exact_results,
    forward,
    inside,
    named,
    plan_of,
    preference_for,
    results,
)

pytestmark = pytest.mark.gpu


def _without_decay(example: Example) -> Example:
    return example._replace(g=torch.zeros_like(example.g), beta=1 - 0.01 * example.beta)


def _orthogonal(example: Example) -> Example:
    _, time, _, size = example.k.shape
    axes = torch.eye(size, dtype=example.k.dtype, device=example.k.device)[
        torch.arange(time, device=example.k.device) % size
    ]
    return example._replace(k=axes[None, :, None].expand_as(example.k), beta=torch.ones_like(example.beta))


def _reset(*tokens: int) -> Callable[[Example], Example]:
    """−inf as the log decay of some tokens; of the last head alone one more."""

    def change(example: Example) -> Example:
        g = example.g.clone()
        g[:, list(tokens)] = -torch.inf
        g[:, tokens[0] + 1, -1] = -torch.inf
        return example._replace(g=g)

    return change


DOMAINS: dict[str, tuple[dict[str, Any], Callable[[Example], Example]]] = {
    "random": ({"time": 700}, lambda example: example),
    "random, split": ({"time": 2200, "heads": FEW, "decay": 0.05}, lambda example: example),
    "nearly equal keys": ({"time": 1024, "near": True, "decay": 1.0}, lambda example: example),
    "nearly equal keys, slow decay": ({"time": 1024, "near": True, "decay": 1 / 16}, lambda example: example),
    "no decay, full strength": ({"time": 300}, _without_decay),
    "decay that leaves nothing": ({"time": 300, "decay": 5000.0}, lambda example: example),
    "orthogonal keys, full strength": ({"time": 300}, _orthogonal),
    "one token": ({"time": 1}, lambda example: example),
    "a chunk and a token": ({"time": CHUNK + 1}, lambda example: example),
    "packed": ({"time": 700, "bounds": (0, 0, 1, 65, 193, 700, 700)}, lambda example: example),
    "smaller keys, float16": ({"time": 300, "heads": FEW, **SMALLER}, lambda example: example),
    "resets": ({"time": 700}, _reset(0, 63, 64, 100, 101, 640, 699)),
    "resets of most of a chunk": ({"time": 300, "heads": FEW, **SMALLER}, _reset(*range(64, 112))),
    "resets, split": ({"time": 2200, "heads": FEW, "decay": 0.05}, _reset(700, 1023, 1024, 2047, 2199)),
    "resets, packed": ({"time": 700, "bounds": (0, 0, 1, 65, 193, 700, 700)}, _reset(0, 1, 64, 65, 150, 192, 300)),
    "every token reset": ({"time": 130}, _reset(*range(129))),
    "three heads of a key": ({"time": 130, "heads": ODD}, lambda example: example),
}


@every_plan
@pytest.mark.parametrize("domain", DOMAINS)
def test_errors_are_within_what_is_stated(device: torch.device, name: str, domain: str) -> None:
    options, change = DOMAINS[domain]
    example = change(drawn(device, **options))
    plan = plan_of(name, example)
    inside(plan, named(results(preference_for(name), example)), named(exact_results(example)), example)


@every_plan
def test_wide_values(device: torch.device, name: str) -> None:
    """The forward alone, which takes more sizes of V than the backward does."""
    example = drawn(device, 300, FEW, sizes=(64, 192), dtype=torch.float16)
    exact = forward(Preference(plan="eager.chunked"), Example(*widened(example)))
    try:
        answers = forward(Preference(plan=name), example)
    except adjoint.Unsupported as refusal:
        pytest.skip(str(refusal))
    for got, expected in zip(answers, exact, strict=True):
        assert float((got.double() - expected).norm()) <= guarantee.CEILINGS[torch.float16] * float(expected.norm())


@every_plan
def test_residuals_of_a_rounding(device: torch.device, name: str) -> None:
    """Values that the state has already, but for their rounding: dβ is a sum of products with v − Sᵀk, which is then
    smaller than the errors of its terms. Its error is measured against those terms."""
    example = drawn(device, 300)
    remembered = torch.einsum("bthk,bhkv->bthv", example.k.float().repeat_interleave(2, 2), example.state)
    example = example._replace(v=remembered.to(BFLOAT16), g=torch.zeros_like(example.g))
    plan = plan_of(name, example)
    answers, exact = named(results(preference_for(name), example)), named(exact_results(example))
    terms = (example.v.double() * exact["dv"] / example.beta.double()[..., None]).abs().sum(-1)
    error = (answers.pop("dbeta").double() - exact["dbeta"]).norm()
    inside(plan, answers, exact, example)
    assert float(error) <= plan.adjoint.guarantee["dbeta"].recorded.ceiling * float(terms.norm())  # type: ignore[union-attr]


@every_plan
def test_a_million_tokens(device: torch.device, name: str) -> None:
    """One sequence. A decay of about 0.98 a token leaves nothing of a state, or of its gradient, in 65536 tokens: so
    float64 has the last outputs from those alone, and the first gradients likewise."""
    time, some, enough = 2**20, 4096, 2**16
    example = drawn(device, time, FEW, decay=0.02)
    plan = plan_of(name, example)
    answers = named(results(preference_for(name), example))
    last = named(exact_results(example.of(time - enough, time, 0)))
    first = named(exact_results(example.of(0, enough, 0)))
    early = {key: answers[key][:, :some] for key in GRADIENTS[:-1]} | {"dinitial_state": answers["dinitial_state"]}
    inside(plan, early, {key: x[:, :some] if key in GRADIENTS[:-1] else x for key, x in first.items()})
    late = {"o": answers["o"][:, -some:], "final_state": answers["final_state"]}
    inside(plan, late, {"o": last["o"][:, -some:], "final_state": last["final_state"]})
