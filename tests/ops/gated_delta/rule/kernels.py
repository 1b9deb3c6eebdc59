"""The kernels of the gated delta rule one by one, on memory of their own."""

import torch
from torch import Tensor

from adjoint.contract.inputs import Inputs
from adjoint.core.launch import Setup
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.rule import plans
from adjoint.ops.gated_delta.rule.shape import Shape, describe

CHUNKED = next(candidate for candidate in plans.RULE if candidate.name == "triton.chunked")


class Kernels:
    """What binds kernels for some inputs, and memory for them that holds no numbers.

    Attributes:
        setup: binds them, under the schedule of a candidate.
        shape: the sizes of the problem.
    """

    def __init__(self, inputs: Inputs, candidate: Candidate = CHUNKED, op: str = "gated_delta_rule") -> None:
        tokens = dict(zip(("q", "k", "v", "g", "beta"), inputs[:5], strict=True))
        problem = Problem(op, inputs[0].device, *describe(tokens, {}, inputs[6]))
        self.setup, self.shape = Setup(problem, candidate.schedule(problem, problem.device)), Shape.of(problem)

    def memory(self, **regions: tuple[torch.dtype, int]) -> dict[str, Tensor]:
        """Regions as tensors, beside those that were asked for before."""
        self.setup.scratch(**regions)
        return self.setup.regions.tensors(self.setup.regions.allocate(self.setup.device).fill_(0xFF))
