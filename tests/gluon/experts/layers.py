"""Expert layers for the kernels on Hopper."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.experts import experts, reference
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.model.translation import Codes

GRADIENTS = ("dx", "dgate_up", "ddown", "dweights")


@dataclass(frozen=True)
class Layer:
    """The inputs of an expert layer, and the gradient of its result."""

    inputs: Inputs
    dy: Tensor

    @staticmethod
    def of(
        columns: int, inner: int, rows: tuple[int, ...], slots: int = 1, dtype: torch.dtype = torch.bfloat16
    ) -> "Layer":
        """A layer whose experts have so many rows, mixed among tokens; the last slots of the last token are of none."""
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        entries = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        entries = entries[torch.randperm(len(entries), generator=generator)]
        missing = -len(entries) % slots
        indices = torch.cat((entries, torch.full((missing,), len(rows)))).view(-1, slots)
        tokens = len(indices)
        inputs = (
            draw(tokens, columns),
            draw(len(rows), 2 * inner, columns, scale=columns**-0.5),
            draw(len(rows), columns, inner, scale=inner**-0.5),
            indices,
            torch.rand(tokens, slots, generator=generator),
        )
        return Layer(inputs, draw(tokens, columns))

    def with_nan_in_the_first_token(self) -> "Layer":
        """The token is of the second expert, as the first of its rows: the first expert's end right before it."""
        x, gate_up, down, indices, weights = (tensor.clone() for tensor in self.inputs)
        other = int((indices[:, 0] == 1).nonzero()[0, 0])
        indices[[0, other], 0] = indices[[other, 0], 0]
        dy = self.dy.clone()
        x[0] = dy[0] = torch.nan
        return Layer((x, gate_up, down, indices, weights), dy)

    def with_infinite_u(self) -> "Layer":
        """The first column of u is infinite for a token of the last expert's, and no other number is."""
        x, gate_up, down, indices, weights = self.inputs
        expert = len(gate_up) - 1
        token = int((indices == expert).any(1).nonzero()[0, 0])
        gate_up = gate_up.clone()
        gate_up[expert, gate_up.shape[1] // 2] = torch.finfo(gate_up.dtype).max * x[token].sign()
        return Layer((x, gate_up, down, indices, weights), self.dy)

    @cached_property
    def call(self) -> Call:
        return bind(experts, *self.inputs)

    def kept(
        self, schedule: Schedule = SCHEDULES[0], codes: Codes | None = None, programs: int = 3
    ) -> tuple[Tensor, ...]:
        """y, and what the backward reads."""
        return hopper.run(self.call.operator, self.call.arguments, schedule, codes, programs=programs)

    def gradients(
        self, kept: tuple[Tensor, ...], schedule: Schedule = SCHEDULES[0], codes: Codes | None = None, programs: int = 3
    ) -> tuple[Tensor, ...]:
        assert self.call.adjoint is not None and self.call.adjoint_arguments is not None
        arguments = self.call.adjoint_arguments((self.dy,), kept)
        return hopper.run(self.call.adjoint, arguments, schedule, codes, programs=programs)

    def results(self, schedule: Schedule = SCHEDULES[0], programs: int = 3) -> dict[str, Tensor]:
        """The result and the gradients of the plan for Hopper, by name."""
        kept = self.kept(schedule, programs=programs)
        slopes = self.gradients(kept, schedule, programs=programs)
        return {"y": kept[0], **dict(zip(GRADIENTS, slopes, strict=True))}

    def exact(self) -> dict[str, Tensor]:
        """Both in float64."""
        wide = tuple(x.double() if x.is_floating_point() else x for x in self.inputs)
        slopes = reference.experts_backward(self.dy.double(), *wide)
        return {"y": reference.experts(*wide), **dict(zip(GRADIENTS, slopes, strict=True))}


LAYERS: dict[str, Callable[[], Layer]] = {
    "one expert": lambda: Layer.of(128, 64, (40,)),
    "tails on both sides of 64 rows": lambda: Layer.of(128, 128, (64, 65, 0, 1, 130), slots=3),
    "columns in halves of tiles": lambda: Layer.of(320, 192, (3, 70, 128), slots=2, dtype=torch.float16),
    "more tiles than a group has": lambda: Layer.of(192, 192, (1,) * 7 + (0, 130) + (2,) * 8),
    "two launches of columns": lambda: Layer.of(576, 64, (20, 5), slots=5),
    "one launch of more columns than a program sums": lambda: Layer.of(704, 576, (9, 70)),
}
"""Layers that go through every kernel, on both sides of each choice between ways."""
