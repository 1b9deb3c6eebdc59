"""The plans of the stages without kernels, and what they promise."""

import torch

from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.promises import BACKWARD, DOMAIN, FORWARD
from adjoint.ops.gated_delta.stages.chunks import eager
from adjoint.ops.gated_delta.stages.in_pytorch import backward, forward, promised

_DOUBLE = torch.float64
_RESETS = f"a g below {RESET[torch.float32]:g}, of float64 {RESET[torch.float64]:g}, down to −inf counts as that"

STAGES = {
    "cumulative_decay": (
        forward(eager.cumulative_decay, promised(FORWARD, _DOUBLE, DOMAIN, _RESETS, G="wide"), revision=2),
        backward(
            eager.cumulative_decay_backward,
            promised(BACKWARD, _DOUBLE, DOMAIN, f"{_RESETS}; its gradient is 0", dg=0),
            has_need=False,
            revision=2,
        ),
    ),
    "gram": (
        forward(eager.gram, promised(FORWARD, A="wide")),
        backward(eager.gram_backward, promised(BACKWARD, dk=0, dbeta="wide", dG="wide")),
    ),
    "solve": (
        forward(eager.solve, promised(FORWARD, T="wide")),
        backward(eager.solve_backward, promised(BACKWARD, dA="wide"), has_need=False),
    ),
    "carry": (
        forward(eager.carry, promised(FORWARD, values=0, states="wide", final_state="wide")),
        backward(eager.carry_backward, promised(BACKWARD, dk=0, dw=0, du=0, dG="wide", dstate="wide")),
    ),
    "output": (
        forward(eager.output, promised(FORWARD, o=0)),
        backward(eager.output_backward, promised(BACKWARD, dq=0, dk=0, dvalues=0, dstates="wide", dG="wide")),
    ),
}
"""The plan of the forward and that of the backward."""
