"""The plans of the stages without kernels, and what they promise."""

from functools import partial

import torch

from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.promises import BACKWARD, DOMAIN, FORWARD
from adjoint.ops.gated_delta.stages import in_pytorch
from adjoint.ops.gated_delta.stages.chunks import bounds, eager
from adjoint.ops.gated_delta.stages.chunks.bounds import derived
from adjoint.ops.gated_delta.stages.in_pytorch import promised

_DOUBLE = torch.float64
_RESETS = f"a g below {RESET[torch.float32]:g}, of float64 {RESET[torch.float64]:g}, down to −inf counts as that"

_CUMULATIVE_DECAY, _GRAM, _SOLVE, _OUTPUT = (
    derived(stage) for stage in (bounds.cumulative_decay, bounds.gram, bounds.solve, bounds.output)
)
_CARRY = derived(bounds.carry, bounds.CARRY_AXES)


def _waits(problem: Problem) -> bool:
    """Whether a plan waits: with `cu_seqlens`, the number of chunks depends on values."""
    return bool(problem.sizes[1])


forward, backward = (partial(direction, waits=_waits) for direction in (in_pytorch.forward, in_pytorch.backward))

STAGES = {
    "cumulative_decay": (
        forward(
            eager.cumulative_decay,
            promised(FORWARD, _DOUBLE, DOMAIN, _RESETS, G="wide", bound=_CUMULATIVE_DECAY),
            revision=2,
        ),
        backward(
            eager.cumulative_decay_backward,
            promised(BACKWARD, _DOUBLE, DOMAIN, f"{_RESETS}; its gradient is 0", dg=0, bound=_CUMULATIVE_DECAY),
            has_need=False,
            revision=2,
        ),
    ),
    "gram": (
        forward(eager.gram, promised(FORWARD, A="wide", bound=_GRAM)),
        backward(eager.gram_backward, promised(BACKWARD, dk=0, dbeta="wide", dG="wide", bound=_GRAM)),
    ),
    "solve": (
        forward(eager.solve, promised(FORWARD, T="wide", bound=_SOLVE)),
        backward(eager.solve_backward, promised(BACKWARD, dA="wide", bound=_SOLVE), has_need=False),
    ),
    "carry": (
        forward(eager.carry, promised(FORWARD, values=0, states="wide", final_state="wide", bound=_CARRY)),
        backward(eager.carry_backward, promised(BACKWARD, dk=0, dw=0, du=0, dG="wide", dstate="wide", bound=_CARRY)),
    ),
    "output": (
        forward(eager.output, promised(FORWARD, o=0, bound=_OUTPUT)),
        backward(
            eager.output_backward, promised(BACKWARD, dq=0, dk=0, dvalues=0, dstates="wide", dG="wide", bound=_OUTPUT)
        ),
    ),
}
"""The plans of the forward and of the backward of each stage."""
