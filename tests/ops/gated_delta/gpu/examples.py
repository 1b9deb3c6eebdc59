"""Calls of the gated delta rule on a GPU: their inputs, the plans that serve them, and what is exact."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import leaves, widened
from adjoint.core.plan import Plan
from adjoint.ops.gated_delta.rule import plans

BFLOAT16 = torch.bfloat16
MANY, FEW, ODD, EIGHT = (8, 16), (2, 4), (1, 3), (2, 8)
"""Key heads and value heads: scanned from end to end, split over the card, not in pairs, and as many as are split."""

SMALLER: dict[str, Any] = {"sizes": (64, 128), "dtype": torch.float16}

PORTABLE = "triton.chunked"
NAMES = tuple(dict.fromkeys(c.name for c in (*plans.RULE, *plans.RULE_BACKWARD) if c.backend == "triton"))
"""Every plan that has kernels, of either direction."""

OUTPUTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")

every_plan = pytest.mark.parametrize("name", NAMES)
both_scans = pytest.mark.parametrize("heads", (MANY, FEW), ids=("many heads", "few heads"))


class Example(NamedTuple):
    """Inputs of a call: the op's tensors, and the gradients of its outputs and final states."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    cu_seqlens: Tensor | None
    do: Tensor
    dfinal: Tensor

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return self[:5]

    def of(self, begin: int, end: int, number: int, row: int = 0) -> "Example":
        """One sequence alone: tokens of a row, and the states of its number."""
        tokens = [x[row : row + 1, begin:end] for x in self.tokens]
        states = slice(number, number + 1)
        return Example(*tokens, self.state[states], None, self.do[row : row + 1, begin:end], self.dfinal[states])


def drawn(
    device: torch.device,
    time: int,
    heads: tuple[int, int] = MANY,
    *,
    sizes: tuple[int, int] = (128, 128),
    dtype: torch.dtype = BFLOAT16,
    rows: int = 1,
    bounds: tuple[int, ...] | None = None,
    decay: float = 0.25,
    near: bool = False,
    seed: int = 0,
) -> Example:
    """Directions as keys and queries, decays and strengths as a layer has them; `near` makes keys nearly equal."""
    generator = torch.Generator(device).manual_seed(seed)
    (key_heads, value_heads), (K, V) = heads, sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    keys = F.normalize(normal(rows, time, key_heads, K), dim=-1)
    if near:
        keys = F.normalize(F.normalize(normal(rows, 1, key_heads, K), dim=-1) + 0.05 * keys, dim=-1)
    number = rows if bounds is None else len(bounds) - 1
    return Example(
        F.normalize(normal(rows, time, key_heads, K), dim=-1).to(dtype),
        keys.to(dtype),
        normal(rows, time, value_heads, V).to(dtype),
        F.logsigmoid(normal(rows, time, value_heads)) * decay,
        normal(rows, time, value_heads).sigmoid(),
        normal(number, value_heads, K, V),
        None if bounds is None else torch.tensor(bounds, device=device),
        normal(rows, time, value_heads, V).to(dtype),
        normal(number, value_heads, K, V),
    )


def preference_for(name: str) -> Preference:
    """A plan by name in the directions that have it, and the portable one in the other."""
    return Preference(plan=name if name == PORTABLE else f"{name}+{PORTABLE}")


def plan_of(name: str, example: Example) -> Plan:
    """The plan, or a skipped test where the device or the shape has none."""
    try:
        return adjoint.plan(
            adjoint.gated_delta_rule,
            *example.tokens,
            initial_state=example.state,
            cu_seqlens=example.cu_seqlens,
            output_final_state=True,
            preference=preference_for(name),
        )
    except adjoint.Unsupported as refusal:
        pytest.skip(str(refusal))


def forward(preference: Preference, example: Example) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        o, final = adjoint.gated_delta_rule(
            *example.tokens,
            initial_state=example.state,
            cu_seqlens=example.cu_seqlens,
            output_final_state=True,
            preference=preference,
        )
    assert final is not None
    return o, final


def results(preference: Preference, example: Example) -> tuple[Tensor, ...]:
    """Outputs, final states, and all gradients."""
    inputs = leaves((*example.tokens, example.state))
    o, final = adjoint.gated_delta_rule(
        *inputs[:5],
        initial_state=inputs[5],
        cu_seqlens=example.cu_seqlens,
        output_final_state=True,
        preference=preference,
    )
    assert final is not None
    gradients = torch.autograd.grad((o, final), inputs, (example.do, example.dfinal))
    return o.detach(), final.detach(), *gradients


def exact_results(example: Example) -> tuple[Tensor, ...]:
    """In float64, by the chunked form in plain PyTorch, which other tests hold to the recurrence."""
    return results(Preference(plan="eager.chunked"), Example(*widened(example)))


def inside(plan: Plan, answers: dict[str, Tensor], exact: dict[str, Tensor], example: Example | None = None) -> None:
    """Every result is finite, within what is recorded and, with its inputs, within what its plan promises for them.
    What float32 has no normal number for may be 0."""
    assert plan.adjoint is not None
    stated = plan.guarantee | plan.adjoint.guarantee
    smallest = torch.finfo(torch.float32).smallest_normal
    *inputs, do, dfinal = (None,) * 9 if example is None else widened(example)
    for name, got in answers.items():
        assert bool(torch.isfinite(got).all()), name
        got, expected = (torch.where(x.abs() < smallest, 0.0, x) for x in (got, exact[name]))
        measured = stated[name].recorded.measure(got, expected)
        assert measured.holds, (name, str(measured))
        if example is not None:
            upstream = (do, dfinal) if name in GRADIENTS else ()
            measured = stated[name].error.measure(got, expected, *upstream, *inputs)
            assert measured.holds, (name, str(measured))


def named(answers: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip((*OUTPUTS, *GRADIENTS), answers, strict=True))


def of_sequence(answers: tuple[Tensor, ...], number: int, begin: int, end: int) -> tuple[Tensor, ...]:
    """What belongs to one of the packed sequences."""
    states = ("final_state", "dinitial_state")
    return tuple(x[number : number + 1] if key in states else x[:, begin:end] for key, x in named(answers).items())


def same(answers: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, answers, expected))


def warm(name: str, heads: str, smaller: str) -> None:
    """Compiles what the tests of a plan and of a number of heads launch, into Triton's cache."""
    device = torch.device("cuda", 0)
    options = SMALLER if smaller else {}
    for bounds in (None, (0, 3, 70)):
        example = drawn(device, 70, {"many": MANY, "few": FEW, "odd": ODD}[heads], bounds=bounds, **options)
        results(preference_for(name), example)
