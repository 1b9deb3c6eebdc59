"""Problems of the gated delta rule for the kernels on Hopper."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.values import gradients, nearly_equal, tokens


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


EXAMPLES: dict[str, Callable[[], Example]] = {
    "few heads": lambda: Example.of((1, 130, 2, 4, 64, 64)),
    "one head to a key head": lambda: Example.of((1, 70, 3, 3, 64, 128)),
    "many heads": lambda: Example.of((1, 100, 5, 10, 128, 64), torch.float16),
    "packed": lambda: Example.of((1, 200, 4, 16, 64, 64), cu_seqlens=(0, 0, 1, 66, 200)),
    "normalised": lambda: Example.of((2, 66, 5, 10, 64, 64), normalize=True),
    "keys nearly equal": lambda: Example.of((1, 128, 5, 10, 64, 128), keys=nearly_equal, decay=0.1),
    "resets": lambda: Example.of((1, 130, 2, 4, 64, 64), decay=0.1, resets=(0, 63, 64, 70, 71, 129)),
    "resets of many heads": lambda: Example.of(
        (1, 140, 5, 10, 128, 64), torch.float16, decay=0.1, resets=tuple(range(64, 112)), wide_gates=False
    ),
    "resets, split": lambda: Example.of((1, 1090, 1, 2, 64, 64), decay=0.05, resets=(700, 1023, 1024)),
    "split": lambda: Example.of((1, 1090, 1, 2, 64, 64), decay=0.05, state=False),
    "split, packed": lambda: Example.of((1, 1300, 1, 1, 128, 128), decay=0.05, cu_seqlens=(0, 70, 1300)),
}
"""Problems that go through every kernel, on both sides of each choice between kernels."""
