"""One step of a run: parts of a batch through the model, gradients over all of them, and the optimizer."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from adjoint.core.errors import ArgumentError
from adjoint.train.options import Options
from adjoint.train.step.failure import explain
from adjoint.train.step.objective import Objective
from adjoint.train.step.optimizer import Optimizers, learning_rate
from adjoint.train.step.ranks import Ranks
from adjoint.train.step.weights import Weights
from adjoint.train.text.stream import Batch, Stream


@dataclass(frozen=True)
class StepResult:
    """A step's numbers: the cross entropy in nats per label, the routers' loss, the norm of the gradient before it is
    clipped, and the tokens of all ranks."""

    step: int
    loss: float
    router_loss: float
    gradient_norm: float
    rate: float
    tokens: int


class Trainer:
    """The model, optimizer and data of a run. `step` trains one step.

    Args:
        options: the options, from `Options.complete`.
        objective: the model, on the ranks' device.
        weights: its float32 weights.
        optimizers: the optimizers of the weights.
        stream: the data.
        ranks: the processes of the run.
        folder: the folder for a batch whose numbers are not finite.

    Raises:
        ArgumentError: the rows of a step cannot be divided evenly among the ranks and parts.
    """

    def __init__(
        self,
        options: Options,
        objective: Objective,
        weights: Weights,
        optimizers: Optimizers,
        stream: Stream,
        ranks: Ranks,
        folder: Path,
    ) -> None:
        parts = ranks.size * options.accumulation
        if options.batch_rows % parts:
            raise ArgumentError(
                f"train: batch_rows must be a multiple of {parts}, {ranks.size} rank{'s' * (ranks.size > 1)} times "
                f"{options.accumulation} accumulation steps, got {options.batch_rows}"
            )
        self.options, self.objective, self.weights, self.optimizers = options, objective, weights, optimizers
        self.stream, self.ranks, self._folder = stream, ranks, folder
        self._rows = options.batch_rows // parts

    def batches(self, step: int) -> list[Batch]:
        """This rank's parts of a step."""
        first = step * self.options.batch_rows + self.ranks.rank * self._rows * self.options.accumulation
        begins = range(first, first + self._rows * self.options.accumulation, self._rows)
        return [self.stream.batch(range(begin, begin + self._rows)) for begin in begins]

    def step(self, step: int) -> StepResult:
        """Trains one step. Steps are counted from 0.

        Raises:
            NotFinite: the loss or the gradient is not finite; the weights stay as they are.
        """
        batches = self.batches(step)
        labels = self.ranks.add_up_number(sum(batch.count for batch in batches))
        batches = [batch.to(self._device) for batch in batches]
        tokens = self.options.batch_rows * self.stream.length
        router_factor = self.options.router_loss / max(1, tokens * self.objective.sparse_layers)
        with_balance = bool(self.objective.sparse_layers and self.options.router_loss)
        choices = self._choices(batches) if with_balance and len(batches) > 1 else None
        self.optimizers.zero_gradients()
        sums = torch.zeros(2, device=self._device)
        for batch in batches:
            part = self.objective(batch, choices, with_balance=with_balance)
            # FSDP divides the sum of the ranks' gradients by their number.
            loss = part.nats * (self.ranks.size / max(1, labels)) + part.balance * (self.ranks.size * router_factor)
            loss.backward()
            self.weights.collect_gradients()
            sums += torch.stack((part.nats.detach().float(), part.balance.detach().float()))
        norm = self._norm()
        nats, balance, norm_value = torch.cat((self.ranks.add_up(sums), norm[None])).tolist()
        for what, value in (("loss", nats + balance), ("gradient", norm_value)):
            if not math.isfinite(value):
                raise explain(
                    self._folder, step + 1, what, self.objective, self.weights, batches, self.ranks
                )  # fmt: skip
        if self.options.clip:
            clip_grads_with_norm_(self.weights.named.values(), self.options.clip, norm)
        rate = learning_rate(self.options, step)
        self.optimizers.step(rate)
        self.weights.publish()
        return StepResult(step + 1, nats / max(1, labels), balance * router_factor, norm_value, rate, tokens)

    @property
    def _device(self) -> torch.device:
        return self.ranks.device

    def _choices(self, batches: list[Batch]) -> Tensor:
        """How often each expert is chosen in all parts of a step; this takes separate forwards."""
        return self.ranks.add_up(torch.stack([self.objective.count(batch) for batch in batches]).sum(0))

    def _norm(self) -> Tensor:
        """The norm of the whole gradient, over all ranks."""
        gradients = list(self.weights.gradients().values())
        norm = get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        return norm.float()
