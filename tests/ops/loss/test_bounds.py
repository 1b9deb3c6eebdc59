"""The bounds of `linear_cross_entropy` in blocks of tokens: those of all tokens at once, in a block's memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint.ops.loss.arguments import Loss
from adjoint.ops.loss.linear_cross_entropy import bounds, plans

COLUMNS, CLASSES = 24, 50

LOSSES = {
    "mean": Loss(2, 0.0, 0.0, 0.0, "mean", False, False),
    "mean, all options": Loss(2, 0.1, 0.01, 4.0, "mean", True, True),
    "sum, smoothing, z-loss": Loss(2, 0.1, 0.01, 0.0, "sum", False, False),
    "sum, shift": Loss(2, 0.0, 0.0, 0.0, "sum", True, False),
    "none, softcap": Loss(2, 0.0, 0.0, 4.0, "none", False, False),
    "none, shift, log-probabilities": Loss(2, 0.0, 0.0, 0.0, "none", True, True),
}
"""A sixth of the labels is 2, and does not count."""


def _arguments(loss: Loss, tokens: tuple[int, ...], has_bias: bool) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Upstream gradients, the last of which is the largest by far, and the inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    bias = normal(CLASSES) if has_bias else None
    labels = torch.randint(6, tokens, generator=generator)
    upstream = [normal(*tokens) if loss.reduction == "none" else normal()]
    upstream += [normal(*tokens)] if loss.log_probabilities else []
    for each in upstream:
        each.view(-1)[-1:] *= 1000
    return tuple(upstream), (normal(*tokens, COLUMNS), normal(CLASSES, COLUMNS) / 3, labels, bias)


def _bounds(
    loss: Loss, plan: str, dtype: torch.dtype, tokens: tuple[int, ...], has_bias: bool = True
) -> dict[str, Tensor]:
    upstream, inputs = _arguments(loss, tokens, has_bias)
    linear = plans._linear_of(plan, dtype, loss.is_total)
    forward = ("loss", "log_probabilities") if loss.log_probabilities else ("loss",)
    backward = ("dhidden", "dweight", "dbias") if has_bias else ("dhidden", "dweight")
    return {name: bounds.linear_bound(loss, linear, name)(*inputs) for name in forward} | {
        name: bounds.linear_bound(loss, linear, name)(*upstream, *inputs) for name in backward
    }


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", ["vendor", "tiles", "eager"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_blocks_have_the_bounds_of_the_whole(
    loss: Loss, dtype: torch.dtype, plan: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of three tokens, the last one short, and a row's end inside of one.

    Of float64 the bounds are of the size of their own roundings, which another order of sums changes.
    """
    whole = _bounds(loss, plan, dtype, (2, 11), has_bias)
    monkeypatch.setattr(bounds, "BLOCK_ELEMENTS", 3 * CLASSES + 7)
    blocks = _bounds(loss, plan, dtype, (2, 11), has_bias)
    shapes = {
        "dhidden": (2, 11, COLUMNS),
        "dweight": (CLASSES, COLUMNS),
        "dbias": (CLASSES,),
        "log_probabilities": (2, 11),
    }
    for name, bound in whole.items():
        assert bound.shape == shapes.get(name, (2, 11) if loss.reduction == "none" else ()), name
        torch.testing.assert_close(blocks[name], bound, rtol=0.03 if dtype == torch.float64 else 1e-9, atol=0)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_without_tokens_there_is_nothing_to_bound(loss: Loss) -> None:
    found = _bounds(loss, "vendor", torch.bfloat16, (0, 3))
    assert found["dhidden"].shape == (0, 3, COLUMNS)
    assert float(found["dweight"].max()) < 1e-30 and float(found["dbias"].max()) < 1e-30


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that torch makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, tuple | list) else (found,)
        self.elements = max(self.elements, *(x.numel() for x in made if isinstance(x, Tensor)), 0)
        return found


@pytest.mark.parametrize("loss", [LOSSES["mean"], LOSSES["mean, all options"]], ids=("plain", "all options"))
def test_no_more_than_a_block_of_logits_is_held(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it there are the inputs and the gradients, which are smaller here."""
    monkeypatch.setattr(bounds, "BLOCK_ELEMENTS", 32 * CLASSES)
    with _Largest() as largest:
        _bounds(loss, "vendor", torch.bfloat16, (2, 200))
    assert COLUMNS * 400 < 200 * CLASSES and largest.elements < 400 * CLASSES // 2
    monkeypatch.undo()
    with _Largest() as largest:
        _bounds(loss, "vendor", torch.bfloat16, (2, 200))
    assert largest.elements == 400 * CLASSES, "what is measured here shows in the whole"


def test_a_block_of_a_vocabulary_is_a_gibibyte() -> None:
    for classes in (151936, 248320):
        tokens = bounds.Tokens(*(torch.empty(4096, 1, device="meta") for _ in range(5)))
        sizes = [len(block.target) for block in tokens.blocks(classes)]
        assert sum(sizes) == 4096 and 2**29 < 8 * classes * sizes[0] <= 2**30
