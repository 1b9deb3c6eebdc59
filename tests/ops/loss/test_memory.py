"""The memory that losses take on the CPU, beside that of the caller: blocks of logits, and no logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import adjoint
from adjoint.ops.loss import eager
from adjoint.ops.loss.linear_cross_entropy import eager as linear_eager
from tests.conftest import device_under_test

pytestmark = pytest.mark.skipif(device_under_test().type != "cpu", reason="counts what torch takes on the CPU")

BLOCK = 2**16
TOKENS, COLUMNS, CLASSES = 512, 8, 1024
EVERY_OPTION = {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-3}


def _peak(function: Callable[[], Any]) -> int:
    """The most bytes that a call of a function holds at once."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        function()
    events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def _step(loss: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(loss().sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "blocks"), [({}, 1), ({"reduction": "none"}, 1), (EVERY_OPTION, 2)], ids=("plain", "none", "options")
)
def test_linear_cross_entropy_holds_a_block_of_logits_and_the_slope_of_a_cap(
    options: dict[str, Any], blocks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth of the logits is a block here; the forward alone holds one."""
    for module in (eager, linear_eager):
        monkeypatch.setattr(module, "is_plain", lambda *_: False)
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", BLOCK)
    hidden, weight = (torch.randn(n, COLUMNS, dtype=dtype, requires_grad=True) for n in (TOKENS, CLASSES))
    labels = torch.arange(TOKENS)
    assert TOKENS * CLASSES >= 8 * BLOCK

    def loss() -> torch.Tensor:
        return adjoint.linear_cross_entropy(hidden, weight, labels, **options)

    inputs = 4 * (hidden.numel() + weight.numel())
    assert _peak(_step(loss, hidden, weight)) <= 4 * BLOCK * blocks + 4 * inputs
    with torch.no_grad():
        assert _peak(loss) <= 4 * BLOCK + 2 * inputs


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_sum_of_a_weight_s_gradient_takes_its_own_memory_and_that_of_a_block_s_share(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", BLOCK)
    tokens, columns = 4 * BLOCK // CLASSES, 512
    hidden, weight = (torch.randn(n, columns, requires_grad=True) for n in (tokens, CLASSES))
    labels = torch.arange(tokens)

    def loss() -> torch.Tensor:
        return adjoint.linear_cross_entropy(hidden, weight, labels, reduction=reduction)

    assert 3 * weight.nbytes > 2 * weight.nbytes + 4 * BLOCK + 3 * hidden.nbytes  # what a third copy would take
    assert _peak(_step(loss, hidden, weight)) <= 2 * weight.nbytes + 4 * BLOCK + 3 * hidden.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_few", [True, False])
def test_cross_entropy_holds_no_more_than_torch(
    is_few: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few logits a gradient in float32 until the backward; of many a block, and the logits."""
    if not is_few:
        monkeypatch.setattr(eager, "BLOCK_ELEMENTS", BLOCK)
    monkeypatch.setattr(eager, "is_plain", lambda *_: False)
    logits, labels = torch.randn(TOKENS, CLASSES).to(dtype).requires_grad_(), torch.arange(TOKENS)
    ours = _peak(_step(lambda: adjoint.cross_entropy(logits, labels), logits))
    assert ours <= _peak(_step(lambda: F.cross_entropy(logits, labels), logits)) + 2**16
    most = (4 if is_few else 0) * logits.numel() + (0 if is_few and dtype == torch.float32 else logits.nbytes)
    assert ours <= most + 4 * BLOCK * (not is_few) + 2**16
