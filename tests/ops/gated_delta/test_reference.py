"""The definition: two formulations that share no line agree, and so do finite differences."""

import pytest
import torch

from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta import reference
from tests.ops.gated_delta.sequences import BACKWARD_64, FORWARD_64, by_recurrence, drawn, relative

SHAPES = {
    "grouped heads": ((2, 7, 2, 4, 3, 5), {}),
    "chunks and a tail": ((1, 150, 1, 2, 8, 4), {}),
    "packed": ((1, 80, 1, 1, 4, 6), {"cu_seqlens": (0, 0, 1, 70, 80, 80)}),
    "no decay": ((1, 70, 1, 1, 4, 4), {"decay": None, "strength": (0.9, 1)}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_recurrence_and_chunks_agree(name: str) -> None:
    shape, options = SHAPES[name]
    inputs = drawn(shape, **options)
    exact, slopes = by_recurrence(inputs)
    chunked, chunked_slopes = by_recurrence(inputs, by_chunks=True)
    for got, expected in zip(chunked, exact, strict=True):
        assert relative(got, expected) < FORWARD_64
    for got, expected in zip(chunked_slopes, slopes, strict=True):
        assert relative(got, expected) < BACKWARD_64


@pytest.mark.parametrize("by_chunks", (False, True))
def test_gradcheck(by_chunks: bool) -> None:
    *inputs, cu_seqlens = leaves(drawn((1, 5, 1, 2, 2, 2), cu_seqlens=(0, 1, 1, 5)))

    def rule(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.gated_delta_rule(*inputs, cu_seqlens, normalize_qk=True, by_chunks=by_chunks)

    assert torch.autograd.gradcheck(rule, tuple(inputs))


def test_gradcheck_of_the_gate() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((2, 3), (2, 3), (3,), (3,))
    ]
    assert torch.autograd.gradcheck(reference.gate, tuple(inputs))


def test_a_state_that_is_full_learns_nothing_more() -> None:
    """With one key, strength 1 and no decay, the state is the last value."""
    q = k = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 4, 1, 2)
    v = torch.tensor([3.0, 5.0, -2.0, 7.0], dtype=torch.float64).view(1, 4, 1, 1)
    g, beta = torch.zeros(1, 4, 1, dtype=torch.float64), torch.ones(1, 4, 1, dtype=torch.float64)
    for by_chunks in (False, True):
        o, final = reference.gated_delta_rule(q, k, v, g, beta, scale=1.0, by_chunks=by_chunks)
        assert torch.equal(o.flatten(), v.flatten())
        assert final.flatten().tolist() == [7.0, 0.0]
