"""How much of Python a call runs through: what a small tensor pays, counted instead of timed, so that it is the same
on every machine. Each function costs more than its own time: after a large tensor it is in no cache.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


CALLS: dict[str, tuple[Any, Any, Callable[[], tuple[Tensor, ...]]]] = {
    "silu": (adjoint.silu, F.silu, lambda: (torch.randn(4, 64),)),
    "swiglu": (adjoint.swiglu, _swiglu, lambda: (torch.randn(4, 64), torch.randn(4, 64))),
    "embedding": (adjoint.embedding, F.embedding, lambda: (torch.tensor([3, 0, 3]), torch.randn(8, 64))),
}
"""An op, the same work in torch, and tensors for both."""


def _count(run: Callable[[], Any]) -> int:
    """The functions that a call enters, in Python and in C, once everything is in its cache."""
    entered = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event in ("call", "c_call")

    for _ in range(2):
        run()
    former = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(former)
    return entered


@pytest.mark.parametrize(
    "name, without_gradient, with_gradient, backward",
    [("silu", 33, 41, 50), ("swiglu", 36, 44, 66), ("embedding", 45, 57, 60)],
)
def test_a_call_enters_few_functions_more_than_torch(
    name: str, without_gradient: int, with_gradient: int, backward: int
) -> None:
    ours, theirs, make = CALLS[name]
    inputs = make()
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]

    def count_more(run: Callable[[Any], Any]) -> int:
        return _count(lambda: run(ours)) - _count(lambda: run(theirs))

    with torch.no_grad():
        assert count_more(lambda function: function(*inputs)) <= without_gradient
    assert count_more(lambda function: function(*inputs)) <= with_gradient
    outputs = {function: function(*inputs) for function in (ours, theirs)}
    upstream = torch.randn_like(outputs[ours])
    more = count_more(lambda function: torch.autograd.grad(outputs[function], leaves, upstream, retain_graph=True))
    assert more <= backward
