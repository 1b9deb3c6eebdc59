"""The modules are the functions, with their parameters and options."""

from typing import Any

import pytest
import torch
from torch import nn

import adjoint
from adjoint.nn import GatedRMSNorm, RMSNorm
from tests.promises import broken


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_the_function(offset: float) -> None:
    module, x = RMSNorm(6, 1e-3, offset=offset), normal(4, 6)
    assert torch.equal(offset + module.weight, torch.ones(6))
    with torch.no_grad():
        module.weight.copy_(normal(6, seed=1))
    assert torch.equal(module(x), adjoint.rms_norm(x, module.weight, eps=1e-3, offset=offset))
    y, s = module(x, x)
    assert torch.equal(s, 2 * x) and torch.equal(y, module(2 * x))


def test_the_state_dict_is_torch_s() -> None:
    module, other = RMSNorm(6), nn.RMSNorm(6, eps=1e-6)
    other.load_state_dict(module.state_dict())
    x = normal(4, 6)
    exact = other.double()(x.double())
    assert not broken(adjoint.rms_norm, (x, module.weight), {"y": (module(x), exact)}, eps=1e-6)


@pytest.mark.parametrize("rounds", [False, True])
def test_gated_rms_norm_is_the_function(rounds: bool) -> None:
    module = GatedRMSNorm(16, round_before_gate=rounds, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(normal(16, seed=1))
    x, gate = normal(9, 16).bfloat16(), normal(9, 16, seed=2).bfloat16()
    expected = adjoint.gated_rms_norm(x, gate, module.weight, round_before_gate=rounds)
    assert torch.equal(module(x, gate), expected)
    assert not torch.equal(expected, adjoint.gated_rms_norm(x, gate, module.weight, round_before_gate=not rounds))


def test_what_a_module_says_of_itself() -> None:
    assert repr(RMSNorm(8, offset=1.0)) == "RMSNorm(8, eps=1e-06, offset=1.0)"
    assert repr(GatedRMSNorm(8, round_before_gate=True)) == "GatedRMSNorm(8, eps=1e-06, round_before_gate=True)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "size must be at least 1, got 0"),
        (("8",), "size must be an integer, got '8'"),
        ((8, -1.0), r"eps must not be negative, got -1\.0"),
        ((8, float("nan")), "eps must not be negative, got nan"),
        ((8, None), "eps must be a number, got NoneType"),
    ],
)
@pytest.mark.parametrize("module", [RMSNorm, GatedRMSNorm])
def test_arguments_are_checked_when_a_module_is_made(
    module: type[nn.Module], arguments: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(adjoint.ArgumentError, match=f"{module.__name__}: {words}"):
        module(*arguments)


def test_options_of_one_norm_are_checked_when_it_is_made() -> None:
    with pytest.raises(adjoint.ArgumentError, match="RMSNorm: offset must be a number, got str"):
        RMSNorm(8, offset="1")  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match="GatedRMSNorm: round_before_gate must be True or False, got 1"):
        GatedRMSNorm(8, round_before_gate=1)  # type: ignore[arg-type]


def test_a_preference_is_passed_on() -> None:
    wanted = adjoint.Preference(plan="nothing")
    for call in (
        lambda: RMSNorm(4, preference=wanted)(normal(2, 4)),
        lambda: GatedRMSNorm(4, preference=wanted)(normal(2, 4), normal(2, 4)),
    ):
        with pytest.raises(adjoint.Unsupported, match="nothing"):
            call()
