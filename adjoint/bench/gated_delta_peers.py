"""Other libraries' gated delta rule: FLA's recurrent kernel for decoding, and transformers' PyTorch code on the CPU."""

from typing import Any

import torch
from torch import Tensor

from adjoint.bench.contenders import FORWARD, STEP, Contender, NotInstalled, Task, as_tuple
from adjoint.contract.inputs import differentiable, leaves


def fla_step(task: Task) -> Contender:
    """FLA's recurrent kernel, which gives the new states beside the outputs; it has no backward."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except ImportError as error:
        raise NotInstalled("pip install flash-linear-attention") from error

    if task.direction != FORWARD:
        raise NotImplementedError("FLA's recurrent kernel has no backward")
    q, k, v, g, beta, state, _ = task.inputs

    def run() -> tuple[Tensor, ...]:
        return as_tuple(
            fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, initial_state=state, output_final_state=True)
        )

    return Contender(run)


def transformers_rule(task: Task) -> Contender:
    """What transformers' Qwen3.5 runs without FLA, and autograd over it."""
    try:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    except ImportError as error:
        raise NotInstalled("pip install transformers, 5.17 or newer") from error
    # Its decorator looks for FLA's kernel first; the function under it is the PyTorch code.
    rule: Any = modeling.torch_chunk_gated_delta_rule
    rule = getattr(rule, "__wrapped__", rule)

    def outputs(given: Any) -> tuple[Tensor, ...]:
        q, k, v, g, beta, state, _ = given
        repeat = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (q, k))
        return as_tuple(rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True))

    if task.direction == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return outputs(task.inputs)

        return Contender(forward)

    own = leaves(task.inputs)
    if task.direction == STEP:
        return Contender(lambda: torch.autograd.grad(outputs(own), differentiable(own), task.upstream))
    kept = outputs(own)
    return Contender(lambda: torch.autograd.grad(kept, differentiable(own), task.upstream, retain_graph=True))
