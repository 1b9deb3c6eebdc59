"""The loss of a step: cross entropy over all labels that count, and the routers' losses over the same tokens.

    L = Σ −log p(label) / N + c · E · Σ_e f_e·P_e

N is the number of labels of the whole step: of all ranks and accumulation steps. f_e, the choices of expert e to a
token, and P_e, the mean of its probability, are taken over all tokens of the step, of all sparse layers as one. f has
no gradient, so L is a sum over the parts of a step once f is known, and the gradients of the parts add up to that of L.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adjoint.models.hybrid import HybridLM
from adjoint.nn.moe import Routing
from adjoint.ops.loss import linear_cross_entropy
from adjoint.train.text.stream import Batch


class Sums(NamedTuple):
    """The sums of a part of a step: −log p over its labels, and E · Σ f_e · p_e over its tokens and layers."""

    nats: Tensor
    balance: Tensor


class Objective(nn.Module):
    """A model with its loss. This module is sharded, and called for every part of a step.

    Args:
        model: the language model.
        add_up: a function that sums a tensor over all ranks.
    """

    def __init__(self, model: HybridLM, add_up: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.model = model
        self._add_up = add_up

    @property
    def sparse_layers(self) -> int:
        """How many layers have experts."""
        config = self.model.config
        return sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))

    def forward(self, batch: Batch, choices: Tensor | None = None, *, with_balance: bool = True) -> Sums:
        """Computes the sums of a part of a step.

        Args:
            batch: the tokens.
            choices: how many tokens of the step chose each expert, over all layers and ranks. By default they are
                counted here, and the part is the whole step.
            with_balance: whether to compute the routers' losses.
        """
        hidden, routings = self.model.model(batch.tokens, batch.cu_seqlens)
        nats = linear_cross_entropy(hidden, self.model.lm_head.weight, batch.labels, reduction="sum")
        if not routings or not with_balance:
            return Sums(nats, nats.new_zeros(()))
        counts = self._add_up(count_choices(routings)) if choices is None else choices
        choices_of_token = routings[0].indices.shape[-1]
        load = counts.float() * (choices_of_token / counts.sum())
        chances = torch.stack([routing.logits.float().softmax(-1).flatten(0, -2).sum(0) for routing in routings]).sum(0)
        return Sums(nats, (chances * load).sum() * load.numel())

    @torch.no_grad()
    def count(self, batch: Batch) -> Tensor:
        """How many tokens of a part chose each expert. This is a separate forward, for the `choices` of a step."""
        counts: list[Tensor] = []
        whole, self._add_up = self._add_up, lambda x: counts.append(x) or x  # type: ignore[func-returns-value]
        try:
            self(batch)
        finally:
            self._add_up = whole
        return counts[0]


def count_choices(routings: "list[Routing]") -> Tensor:
    """How many tokens chose each expert, over all layers."""
    experts = routings[0].logits.shape[-1]
    return torch.stack([torch.bincount(routing.indices.flatten(), minlength=experts) for routing in routings]).sum(0)
