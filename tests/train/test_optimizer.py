"""Which weights an optimizer moves, and that Muon takes stacked experts one by one."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from adjoint.models import HybridConfig, HybridLM
from adjoint.train.options import Options
from adjoint.train.step.optimizer import Optimizers, learning_rate
from tests.train.small import EXPERTS, SIZES


def options(**more: Any) -> Options:
    return Options(preset="tiny", **more).complete()


def test_muon_moves_matrices_and_adamw_the_rest() -> None:
    model = HybridLM(HybridConfig(**{**SIZES, **EXPERTS}))
    optimizers = Optimizers(dict(model.named_parameters()), options(optimizer="muon"))
    moved = set(optimizers.moved_by_muon())
    for name, weight in model.named_parameters():
        stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        matrix = weight.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
        assert (name in moved) == (stacked or matrix), name
    assert any(name.endswith("experts.down_proj") for name in moved)
    for name in model.state_dict():
        if name in moved:
            assert f"{name}.momentum_buffer" in optimizers.states()
        elif name != "lm_head.weight":
            assert {f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step"} <= set(optimizers.states()), name
    decays = [group["weight_decay"] for group in optimizers.adamw.param_groups]
    assert decays == [0.1, 0.0] and all(weight.dim() < 2 for weight in optimizers.adamw.param_groups[1]["params"])


def test_muon_takes_experts_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 6, 4, generator=generator)
    gradients = torch.randn(2, 3, 6, 4, generator=generator)
    weight = nn.Parameter(start.clone())
    together = Optimizers({"experts.down_proj": weight}, options(optimizer="muon"))
    alone = [nn.Parameter(part.clone()) for part in start]
    muon = torch.optim.Muon(alone, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        weight.grad = gradient.clone()
        together.step(0.01)
        for part, own in zip(alone, gradient, strict=True):
            part.grad = own.clone()
        muon.step()
    assert torch.equal(weight.detach(), torch.stack([part.detach() for part in alone]))
    assert not torch.equal(weight.detach(), start)


@pytest.mark.parametrize(("schedule", "last"), (("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)))
def test_the_rate_rises_and_falls(schedule: str, last: float) -> None:
    chosen = options(steps=100, warmup_steps=10, learning_rate=1.0, schedule=schedule)
    rates = [learning_rate(chosen, step) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[100] == pytest.approx(last)
    assert all(a <= b for a, b in itertools.pairwise(rates[:10]))
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
