"""The head of a language model as a module."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import adjoint
from tests.promises import broken


def test_it_is_a_linear_layer_and_loads_a_head() -> None:
    head = nn.Linear(8, 30, bias=False)
    ours = adjoint.nn.LinearCrossEntropy(8, 30)
    ours.load_state_dict(head.state_dict())
    assert list(ours.state_dict()) == ["weight"]
    hidden = torch.randn(2, 5, 8)
    assert torch.equal(ours(hidden), head(hidden))


@pytest.mark.parametrize("bias", [False, True])
def test_its_loss_is_that_of_its_logits(bias: bool) -> None:
    head = adjoint.nn.LinearCrossEntropy(8, 30, bias=bias, shift=True, softcap=5.0, z_loss=1e-3)
    hidden, labels = torch.randn(2, 5, 8), torch.randint(30, (2, 5))
    loss = head(hidden, labels)
    exact = adjoint.cross_entropy(copy.deepcopy(head).double()(hidden.double()), labels, shift=True, z_loss=1e-3)
    options = {"bias": head.bias, "shift": True, "softcap": 5.0, "z_loss": 1e-3}
    inputs = (hidden, head.weight, labels)
    assert not broken(adjoint.linear_cross_entropy, inputs, {"loss": (loss, exact)}, **options)
    loss.backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_a_tied_weight_gets_both_gradients() -> None:
    embedding = adjoint.nn.Embedding(30, 8)
    head = adjoint.nn.LinearCrossEntropy(8, 30)
    head.weight = embedding.weight
    ids = torch.randint(30, (2, 5))
    head(embedding(ids), ids).backward()
    both = embedding.weight.grad
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    embedding.weight.grad = None
    head(embedding(ids), ids).backward()
    assert both is not None and embedding.weight.grad is not None and head.weight.grad is not None
    assert torch.equal(both, embedding.weight.grad + head.weight.grad)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_brings_hidden_and_a_weight_of_another_dtype_together(bias: bool, dtype: torch.dtype) -> None:
    """As it does for the logits of the same module; gradients have the parameters' dtype."""
    head = adjoint.nn.LinearCrossEntropy(8, 30, bias, dtype=dtype)
    hidden, labels = torch.randn(2, 5, 8), torch.randint(30, (2, 5))
    cast = copy.deepcopy(head).bfloat16()
    of_cast = hidden.bfloat16().requires_grad_()
    expected = torch.autograd.grad(cast(of_cast, labels), (of_cast, *cast.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        of_linear = (hidden @ torch.eye(8)).requires_grad_()
        loss = head(of_linear, labels)
    assert of_linear.dtype == torch.bfloat16 and torch.equal(loss, cast(of_cast, labels))
    gradients = torch.autograd.grad(loss, (of_linear, *head.parameters()))
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(gradients, expected, strict=True))
    assert all(x.dtype == dtype for x in gradients[1:])
    with pytest.raises(adjoint.ArgumentError, match="weight must have the dtype of hidden"):
        head(of_linear, labels)


def test_it_shows_the_options_that_were_chosen() -> None:
    head = adjoint.nn.LinearCrossEntropy(8, 30, softcap=30.0, reduction="sum")
    assert repr(head) == (
        "LinearCrossEntropy(in_features=8, out_features=30, bias=False, softcap=30.0, reduction='sum')"
    )


def test_log_probabilities_on_request() -> None:
    head = adjoint.nn.LinearCrossEntropy(8, 30, return_log_probabilities=True)
    loss, logs = head(torch.randn(4, 8), torch.tensor([1, 2, 3, -100]))
    assert logs.shape == (4,) and logs[3] == 0
    assert torch.equal(loss, -logs.double().sum().float() / 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "avg"}, "LinearCrossEntropy: reduction must be one of"),
        ({"softcap": -1.0}, "LinearCrossEntropy: softcap must be"),
        ({"ignore_index": None}, "LinearCrossEntropy: ignore_index must be an integer"),
        ({"shift": "yes"}, "LinearCrossEntropy: shift must be True or False"),
    ],
)
def test_options_are_checked_when_it_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        adjoint.nn.LinearCrossEntropy(4, 9, **options)


def test_sizes_that_are_none_and_hidden_of_other_columns_are_named() -> None:
    for sizes in ((-1, 7), ("3", 7), (3, None)):
        with pytest.raises(adjoint.ArgumentError, match=r"LinearCrossEntropy: (in|out)_features"):
            adjoint.nn.LinearCrossEntropy(*sizes)  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match="bias must be True or False"):
        adjoint.nn.LinearCrossEntropy(3, 7, "x")  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match=r"hidden must be a tensor with 3 columns, got \(2, 4\)"):
        adjoint.nn.LinearCrossEntropy(3, 7)(torch.randn(2, 4))
