"""The rule in plain PyTorch: what only it knows."""

import pytest
import torch

from adjoint.ops.gated_delta.rule import eager
from adjoint.verify.checks.bits import same_bits


@pytest.mark.parametrize("steepness", [1e-3, 1.0, 30.0, 1e36])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_decays_are_the_exponentials_of_what_remains(kind: torch.dtype, steepness: float, device: torch.device) -> None:
    """Bit for bit: decays that vanish, infinities and NaN, before a reset and after it."""
    generator = torch.Generator().manual_seed(5)
    g = -steepness * torch.rand(2, 3, 64, generator=generator, dtype=torch.float64)
    g[0, 1, 20] = torch.nan
    log_decay = g.to(device).cumsum(-1)
    future = torch.ones(64, 64, dtype=torch.bool, device=device).triu(1)
    high = log_decay.to(kind)
    between = high.unsqueeze(-1) - high.unsqueeze(-2)
    if kind == torch.float32:
        low = (log_decay - high).to(kind)
        between = between + low.unsqueeze(-1) - low.unsqueeze(-2)
    without = torch.zeros(2, 3, 64, dtype=torch.int8, device=device)
    some = (torch.rand(2, 3, 64, generator=generator) < 0.1).to(device).cumsum(-1, dtype=torch.int8)
    for resets in (without, some):
        absent = future | (resets.unsqueeze(-1) != resets.unsqueeze(-2))
        expected = between.masked_fill(absent, -torch.inf).exp()
        assert same_bits(eager._decays(log_decay, resets, kind), expected)
