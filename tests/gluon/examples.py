"""Problems of the gated delta rule for the kernels on Hopper."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.values import gradients, tokens


@dataclass(frozen=True)
class Example:
    """Inputs of the rule, whether q and k are normalised, and whether final states are wanted."""

    inputs: Inputs
    normalize: bool = False
    final: bool = True

    @staticmethod
    def of(
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
        normalize: bool = False,
        final: bool = True,
        **options: object,
    ) -> "Example":
        make = tokens(shape, **options)  # type: ignore[arg-type]
        return Example(make(dtype, torch.device("cpu"), torch.Generator().manual_seed(1)), normalize, final)

    @property
    def call(self) -> Call:
        *given, state, bounds = self.inputs
        keywords = {"initial_state": state, "cu_seqlens": bounds, "output_final_state": self.final}
        return bind(gated_delta_rule, *given, normalize_qk=self.normalize, **keywords)

    def upstream(self) -> tuple[Tensor | None, ...]:
        """Of the outputs, and of the final states if they are wanted."""
        generator = torch.Generator().manual_seed(2)
        o, final = self.call.operator.allocate(*self.call.arguments)[:2]
        do, dfinal = (torch.randn(x.shape, generator=generator).to(x.dtype) for x in (o, final))
        return do, dfinal if self.final else None

    def exact(self) -> tuple[Tensor, ...]:
        """Outputs and gradients in float64."""
        inputs = tuple(None if x is None else x.double() if x.is_floating_point() else x for x in self.inputs)
        by_chunks = bool(self.inputs[3].isfinite().all())  # where nothing is reset, which the recurrence alone knows
        rule = partial(reference.gated_delta_rule, normalize_qk=self.normalize, by_chunks=by_chunks)
        upstream = tuple(None if x is None else x.double() for x in self.upstream())
        return *rule(*inputs), *gradients(rule)(*upstream, *inputs)
