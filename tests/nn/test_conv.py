"""The module is the function, with the parameters of Hugging Face's modules."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import adjoint
from adjoint.nn import CausalConv1d
from tests.promises import broken


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
def test_the_state_dict_is_that_of_a_depthwise_convolution(bias: bool) -> None:
    """What Qwen3-Next's modules call `conv1d`: padded on both sides, of which they keep the first tokens."""
    theirs = nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=bias)
    module = CausalConv1d(6, 4, bias=bias)
    module.load_state_dict(theirs.state_dict())
    assert module.state_dict().keys() == theirs.state_dict().keys()
    x = normal(2, 9, 6)
    exact = nn.functional.silu(theirs.double()(x.double().transpose(1, 2))[..., :9]).transpose(1, 2)
    inputs = (x, module.weight[:, 0], module.bias)
    assert not broken(adjoint.causal_conv1d, inputs, {"y": (module(x), exact)})


def test_parameters_begin_as_torch_s() -> None:
    module = CausalConv1d(512, 4, bias=True)
    assert module.bias is not None
    for parameter in (module.weight, module.bias):
        assert parameter.abs().max() <= 0.5 and parameter.abs().mean() > 0.2


def test_every_option_is_passed_on() -> None:
    module = CausalConv1d(6, 4, bias=True, activation=None)
    x, state, bounds = normal(1, 9, 6), normal(2, 6, 3, seed=1), torch.tensor([0, 4, 9])
    found = module(x, initial_state=state, output_final_state=True, cu_seqlens=bounds, split=(2, 4))
    expected = adjoint.causal_conv1d(
        x, module.weight[:, 0], module.bias, activation=None, initial_state=state, output_final_state=True,
        cu_seqlens=bounds, split=(2, 4),
    )  # fmt: skip
    assert all(map(torch.equal, found, expected)) and len(found) == 3


def test_a_step_is_the_function() -> None:
    module = CausalConv1d(6, 4)
    x, pool, indices = normal(2, 1, 6), normal(5, 6, 3, seed=1), torch.tensor([4, 0])
    y, after = module.step(x, pool, state_indices=indices)
    expected = adjoint.causal_conv1d_step(x, pool, module.weight[:, 0], state_indices=indices)
    assert torch.equal(y, expected[0]) and torch.equal(after, expected[1])
    with torch.no_grad():
        _, same = module.step(x, pool, state_indices=indices, in_place=True)
    assert same is pool and torch.equal(pool[indices], after)


def test_gradients_reach_the_parameters() -> None:
    module = CausalConv1d(6, 4, bias=True)
    module(normal(2, 5, 6)).sum().backward()
    assert module.weight.grad is not None and module.weight.grad.shape == (6, 1, 4)
    assert module.bias is not None and module.bias.grad is not None


def test_what_a_module_says_of_itself() -> None:
    assert repr(CausalConv1d(8, 4, bias=True)) == "CausalConv1d(8, 4, bias=True, activation='silu')"


def test_a_preference_is_passed_on() -> None:
    module = CausalConv1d(4, 2, preference=adjoint.Preference(plan="nothing"))
    with pytest.raises(adjoint.Unsupported, match="nothing"):
        module(normal(1, 2, 4))
    with pytest.raises(adjoint.Unsupported, match="nothing"):
        module.step(normal(1, 1, 4), normal(1, 4, 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CausalConv1d(0, 4), "channels must be at least 1, got 0"),
        (lambda: CausalConv1d(4.5, 4), "channels must be an integer, got 4.5"),  # type: ignore[arg-type]
        (lambda: CausalConv1d(4, 0), "width must be from 1 to 8, got 0"),
        (lambda: CausalConv1d(4, 9), "width must be from 1 to 8, got 9"),
        (lambda: CausalConv1d(4, 4, activation="relu"), "activation must be 'silu' or None, got 'relu'"),
    ],
)
def test_a_module_that_could_never_run_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        make()


def test_what_is_no_tensor_is_named() -> None:
    for module in (CausalConv1d(4, 4), adjoint.nn.RMSNorm(4)):
        with pytest.raises(adjoint.ArgumentError, match="x must be a tensor, got NoneType"):
            module(None)
