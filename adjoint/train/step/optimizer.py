"""Optimizers: AdamW, or Muon for matrices and AdamW for the rest; and the learning rate of each step."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from adjoint.train.options import Options

_NOT_BY_MUON = ("embed_tokens.weight", "lm_head.weight")
_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def learning_rate(options: Options, step: int) -> float:
    """The learning rate of a step, counted from 0. It rises to the highest rate, and then falls by the schedule.

    >>> options = Options(steps=10, warmup_steps=2, learning_rate=1.0, final_rate=0.0, schedule="linear")
    >>> [round(learning_rate(options, step), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    part = min(1.0, (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps))
    fall = {"constant": 0.0, "linear": part, "cosine": (1 - math.cos(math.pi * part)) / 2}[options.schedule]
    return options.learning_rate * (1 - fall * (1 - options.final_rate))


class Optimizers:
    """The optimizers of a model's weights, as one. Their states have the names of the weights.

    Muon orthogonalises matrices. Each of several stacked experts is a matrix, so Muon gets them one by one, as slices
    that share the memory of the weight and of its gradient. Under FSDP a rank has whole experts, and updates its own.
    It has only some rows of every other matrix. Momentum and weight stay sharded then, and the matrix to orthogonalise
    is gathered, one matrix at a time.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], options: Options) -> None:
        self.weights = dict(weights)
        self._slices: dict[str, list[nn.Parameter]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._decay, self._momentum = options.weight_decay, options.momentum
        self._is_fused = all(weight.is_cuda for weight in self.weights.values())  # fused AdamW reads memory once
        by_muon: list[nn.Parameter] = []
        decayed, others = [], []
        for name, weight in self.weights.items():
            if options.optimizer == "muon" and name.endswith(_STACKED):
                self._slices[name] = [nn.Parameter(part) for part in local_part(weight).detach().unbind(0)]
                by_muon += self._slices[name]
            elif options.optimizer == "muon" and weight.dim() == 2 and not name.endswith(_NOT_BY_MUON):
                if isinstance(weight, DTensor):
                    self._buffers[name] = torch.zeros_like(weight).detach()
                else:
                    by_muon.append(weight)
            elif weight.dim() > 1:
                decayed.append(weight)
            else:
                others.append(weight)
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=0.0,
            betas=(options.beta1, options.beta2),
            fused=self._is_fused,
            foreach=not self._is_fused,
        )
        self.muon = None
        if by_muon:
            self.muon = torch.optim.Muon(
                by_muon,
                lr=0.0,
                weight_decay=options.weight_decay,
                momentum=options.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        self._make_states()

    @property
    def _all(self) -> list[torch.optim.Optimizer]:
        return [self.adamw] if self.muon is None else [self.adamw, self.muon]

    def _make_states(self) -> None:
        """Makes the states that the first step would make, so that a checkpoint can be read into them."""
        for group in self.adamw.param_groups:
            for weight in group["params"]:
                zeros = torch.zeros_like(weight, memory_format=torch.preserve_format)
                count = torch.zeros((), device=zeros.device if self._is_fused else "cpu")
                state = {"step": count, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                self.adamw.state[weight] = {name: x.detach() for name, x in state.items()}
        stacked = {id(part) for parts in self._slices.values() for part in parts}
        for group in self.muon.param_groups if self.muon is not None else ():
            for weight in group["params"]:
                if id(weight) not in stacked:
                    buffer = torch.zeros_like(weight, memory_format=torch.preserve_format)
                    self.muon_state(weight, buffer.detach())
        for name, parts in self._slices.items():
            self._buffers[name] = torch.zeros_like(self.weights[name]).detach()
            for part, buffer in zip(parts, local_part(self._buffers[name]).unbind(0), strict=True):
                self.muon_state(part, buffer)

    def muon_state(self, weight: nn.Parameter, buffer: Tensor) -> None:
        assert self.muon is not None
        self.muon.state[weight] = {"momentum_buffer": buffer}

    def step(self, rate: float) -> None:
        """Updates the weights by their gradients."""
        for name, parts in self._slices.items():
            gradient = self.weights[name].grad
            for part, slice_ in zip(parts, () if gradient is None else local_part(gradient).unbind(0), strict=True):
                part.grad = slice_
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        for name in self._buffers:
            if name not in self._slices:
                self._move_sharded(name, rate)

    @torch.no_grad()
    def _move_sharded(self, name: str, rate: float) -> None:
        """Muon's step for this rank's rows of a matrix, as `torch.optim.Muon` computes it for the whole matrix."""
        weight, buffer = self.weights[name], self._buffers[name]
        assert isinstance(weight, DTensor) and isinstance(weight.grad, DTensor)
        gradient = weight.grad.to_local()
        buffer_rows = local_part(buffer).lerp_(gradient, 1 - self._momentum)
        rows = gradient.lerp(buffer_rows, self._momentum)
        update = DTensor.from_local(
            rows, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        whole = nn.Parameter(torch.zeros(weight.shape, device=rows.device))
        whole.grad = update.full_tensor()
        torch.optim.Muon(
            [whole], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
        change = distribute_tensor(whole.detach(), weight.device_mesh, weight.placements, src_data_rank=None)
        weight.to_local().mul_(1 - rate * self._decay).add_(change.to_local(), alpha=rate)

    def zero_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
        for parts in self._slices.values():
            for part in parts:
                part.grad = None

    def states(self) -> dict[str, Tensor]:
        """Every tensor of the optimizers' states, by the name of the weight and its own name; they are not copied."""
        names = {id(weight): name for name, weight in self.weights.items()}
        states = {f"{name}.momentum_buffer": buffer for name, buffer in self._buffers.items()}
        for optimizer in self._all:
            for weight, state in optimizer.state.items():
                if (name := names.get(id(weight))) is not None:
                    states |= {f"{name}.{key}": value for key, value in state.items()}
        return dict(sorted(states.items()))

    def load(self, read: "Mapping[str, Any]") -> None:
        """Copies saved states into the states of these optimizers."""
        for name, tensor in self.states().items():
            tensor.copy_(read[name])

    def moved_by_muon(self) -> Iterator[str]:
        """The names of the weights that Muon updates."""
        muon = {id(weight) for group in (self.muon.param_groups if self.muon else ()) for weight in group["params"]}
        for name, weight in self.weights.items():
            if name in self._buffers or id(weight) in muon:
                yield name


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
