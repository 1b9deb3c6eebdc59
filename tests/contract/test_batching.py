"""What a subject does with its items by default: other sizes, other batches, pieces."""

from dataclasses import replace

import pytest
import torch

from adjoint.contract import batching
from adjoint.contract.inputs import differentiable, leaves, widened
from adjoint.ops.activation.swiglu.cases import SWIGLU
from tests.lookup import LOOKUP

IDS, WEIGHT, UPSTREAM = torch.tensor([3, 1, 4]), torch.randn(5, 4), torch.randn(3, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_items_are_repeated_or_cut(size: int) -> None:
    (ids, weight, scale), (upstream,) = LOOKUP.resize((IDS, WEIGHT, None), (UPSTREAM,), size)
    expected = [index % 3 for index in range(size)]
    assert torch.equal(ids, IDS[expected]) and torch.equal(upstream, UPSTREAM[expected])
    assert weight is WEIGHT and scale is None
    assert LOOKUP.items((ids, weight, scale)) == size


def test_items_may_follow_each_other_along_another_axis() -> None:
    subject = replace(SWIGLU, batch_axis=1)
    (gate, up), (upstream,) = subject.resize((WEIGHT, WEIGHT), (WEIGHT,), 6)
    assert gate.shape == up.shape == upstream.shape == (5, 6) and torch.equal(gate[:, 4:], WEIGHT[:, :2])


def test_rebatches_pair_what_stays_the_same() -> None:
    whole = ((UPSTREAM,), (UPSTREAM + 1, UPSTREAM + 2))
    others = list(SWIGLU.rebatch((UPSTREAM, UPSTREAM), (UPSTREAM,)))
    assert [other.name for other in others] == ["items 0+1", "items 2+1", "items 1+2"]
    last = others[-1]
    assert torch.equal(last.inputs[0], UPSTREAM[1:]) and torch.equal(last.upstream[0], UPSTREAM[1:])
    alone = ((UPSTREAM[1:],), (UPSTREAM[1:] + 1, UPSTREAM[1:] + 2))
    assert [torch.equal(a, b) for a, b in last.pairs(whole, alone)] == [True] * 3
    assert [torch.equal(a, b) for a, b in last.pairs((whole[0], ()), (alone[0], ()))] == [True]


def test_pieces_hold_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PIECE", 8)
    pieces = list(SWIGLU.cut((UPSTREAM, UPSTREAM), (UPSTREAM,)))
    assert len(pieces) == 2
    assert torch.equal(torch.cat([outputs[0] for _, outputs in pieces]), UPSTREAM)
    assert torch.equal(torch.cat([arguments[1] for arguments, _ in pieces]), UPSTREAM)


def test_shared_inputs_leave_one_piece() -> None:
    arguments, outputs = (IDS, WEIGHT, None), (UPSTREAM,)
    assert list(replace(LOOKUP, pieces=None).cut(arguments, outputs)) == [(arguments, outputs)]


def test_only_floating_inputs_are_widened_and_differentiated() -> None:
    inputs = (IDS, WEIGHT, None)
    assert [None if t is None else t.dtype for t in widened(inputs)] == [torch.int64, torch.float64, None]
    own = leaves(inputs)
    assert [t is not None and t.requires_grad for t in own] == [False, True, False]
    assert differentiable(own) == (own[1],) and not WEIGHT.requires_grad
    assert LOOKUP.gradients(inputs) == ("dweight",)
    assert LOOKUP.gradients((IDS, WEIGHT, WEIGHT[:3, 0])) == ("dweight", "dscale")
