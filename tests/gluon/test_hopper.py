"""Every kernel for Hopper on small problems, in the model of Gluon: errors, bits under other schedules, and mutants."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from adjoint.contract.cases import Inputs
from adjoint.contract.inputs import widened
from adjoint.core import kernels
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.values import gradients, nearly_equal, tokens
from tests.gluon import hopper
from tests.gluon.model import SCHEDULES, Schedule

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter")


@dataclass(frozen=True)
class Example:
    """Inputs of the rule, and whether q and k are normalised."""

    inputs: Inputs
    normalize: bool = False

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, normalize: bool = False, **options: object
    ) -> "Example":
        make = tokens(shape, **options)  # type: ignore[arg-type]
        return Example(make(dtype, torch.device("cpu"), torch.Generator().manual_seed(1)), normalize)

    @property
    def call(self) -> Call:
        *given, state, bounds = self.inputs
        keywords = {"initial_state": state, "cu_seqlens": bounds, "output_final_state": True}
        return bind(gated_delta_rule, *given, normalize_qk=self.normalize, **keywords)

    def upstream(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(2)
        outputs = self.call.operator.allocate(*self.call.arguments)[:2]
        return tuple(torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs)

    def exact(self) -> tuple[Tensor, ...]:
        """Outputs and gradients in float64."""
        inputs = tuple(None if x is None else x.double() if x.is_floating_point() else x for x in self.inputs)
        rule = partial(reference.gated_delta_rule, normalize_qk=self.normalize, by_chunks=True)
        upstream = tuple(x.double() for x in self.upstream())
        return *rule(*inputs), *gradients(rule)(*upstream, *inputs)


EXAMPLES = {
    "few heads": lambda: Example.of((1, 130, 2, 4, 64, 64)),
    "one head to a key head": lambda: Example.of((1, 70, 3, 3, 64, 128)),
    "many heads": lambda: Example.of((1, 100, 5, 10, 128, 64), torch.float16),
    "packed": lambda: Example.of((1, 200, 4, 16, 64, 64), cu_seqlens=(0, 0, 1, 66, 200)),
    "normalised": lambda: Example.of((2, 66, 5, 10, 64, 64), normalize=True),
    "keys nearly equal": lambda: Example.of((1, 128, 5, 10, 64, 128), keys=nearly_equal, decay=0.1),
    "split": lambda: Example.of((1, 1090, 1, 2, 64, 64), decay=0.05, state=False),
    "split, packed": lambda: Example.of((1, 1300, 1, 1, 128, 128), decay=0.05, cu_seqlens=(0, 70, 1300)),
}


def run(example: Example, schedule: Schedule) -> dict[str, Tensor]:
    """Outputs and gradients of the plan for Hopper, by name, without the states that it keeps."""
    call = example.call
    assert call.adjoint is not None
    outputs, slopes = hopper.run_both(call, example.upstream(), schedule)
    named = zip((*call.operator.outputs, *call.adjoint.outputs), (*outputs, *slopes), strict=True)
    return {name: result for name, result in named if name != "saved" and result.numel()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_within_their_guarantees(name: str) -> None:
    example = EXAMPLES[name]()
    call, results = example.call, run(example, SCHEDULES[0])
    assert call.adjoint is not None and call.adjoint_arguments is not None
    upstream, kept = example.upstream(), call.operator.allocate(*call.arguments)
    promises = {}
    for operator, arguments in (
        (call.operator, call.arguments), (call.adjoint, call.adjoint_arguments(upstream, kept))
    ):  # fmt: skip
        promises |= hopper.candidate_of(operator).guarantee(operator.describe(*arguments))
    inputs, slopes = widened(example.inputs), widened(upstream)
    for (output, result), exact in zip(results.items(), example.exact(), strict=True):
        arguments = inputs if output in call.operator.outputs else (*slopes, *inputs)
        for statement in (promises[output].error, promises[output].recorded):
            measured = statement.measure(result, exact, *arguments)
            assert measured.holds, (output, measured)


@pytest.mark.parametrize("name", ["few heads", "many heads", "packed", "split, packed"])
def test_schedules_change_no_bit(name: str) -> None:
    example = EXAMPLES[name]()
    first, *others = (run(example, schedule) for schedule in SCHEDULES)
    for other in others:
        assert all(torch.equal(first[output], other[output]) for output in first)
