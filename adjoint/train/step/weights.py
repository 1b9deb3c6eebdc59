"""The float32 weights of a run, and the model that computes with them in another precision."""

import torch
from torch import Tensor, nn

from adjoint.train.step.objective import Objective
from adjoint.train.step.ranks import Ranks


class Weights:
    """The float32 weights that the optimizer updates and a checkpoint saves, by the names of the model's parameters.

    For a model in float32 they are its own parameters. So they are for a sharded model, because FSDP rounds the
    parameters when it gathers them. Otherwise the model's parameters are 16-bit copies of the weights, and their
    gradients are added up in float32.
    """

    def __init__(self, objective: Objective, precision: torch.dtype, ranks: Ranks) -> None:
        self._copies: dict[str, nn.Parameter] = {}
        if ranks.mesh is not None:
            ranks.shard(objective, precision)
        self.named = dict(objective.model.named_parameters())
        if ranks.mesh is None and precision is not torch.float32:
            self.named = {name: nn.Parameter(weight.detach().clone()) for name, weight in self.named.items()}
            objective.model.to(precision)
            self._copies = dict(objective.model.named_parameters())

    def collect_gradients(self) -> None:
        """Adds the gradients of 16-bit copies to those of the weights; called after a backward."""
        for name, copy in self._copies.items():
            if copy.grad is None:
                continue
            weight = self.named[name]
            if weight.grad is None:
                weight.grad = copy.grad.float()
            else:
                weight.grad += copy.grad
            copy.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the weights for the model; called after an update of the weights."""
        if self._copies:
            torch._foreach_copy_(list(self._copies.values()), [self.named[name] for name in self._copies])

    def gradients(self) -> dict[str, Tensor]:
        return {name: weight.grad for name, weight in self.named.items() if weight.grad is not None}
