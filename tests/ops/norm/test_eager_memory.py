"""How much new float64 memory a norm's backward in plain PyTorch takes: it costs more than the arithmetic."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint.ops.norm import eager
from adjoint.ops.norm.arguments import GATED, RESIDUAL, RMS, Norm


class _Wide(TorchDispatchMode):
    """Keeps every float64 result of some size, so that each has memory of its own for as long as it is counted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.kept = size, list[Tensor]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64 and result.numel() == self.size:
            self.kept.append(result)
        return result

    @property
    def count(self) -> int:
        return len({x.untyped_storage().data_ptr() for x in self.kept})


@pytest.mark.parametrize(
    "norm, options, expected",
    [(RMS, (1e-6, 1.0), 3), (RESIDUAL, (1e-6, 1.0), 3), (GATED, (1e-6, False), 6), (GATED, (1e-6, True), 7)],
)
def test_a_backward_takes_little_new_memory(norm: Norm, options: tuple[Any, ...], expected: int) -> None:
    x, dy, other, weight = torch.randn(6, 40), torch.randn(6, 40), torch.randn(6, 40), torch.randn(40)
    upstream = (dy, other) if norm.residual else (dy,)
    inputs = (x, weight, other) if norm.gate else (x, weight)
    outputs = (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x))
    with _Wide(x.numel()) as wide:
        eager.backward(norm, (*upstream, *inputs, *options, 7), outputs)
    assert wide.count == expected
