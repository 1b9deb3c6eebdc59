"""What the gated delta rule is tested, verified and timed on."""

from dataclasses import replace
from functools import partial

import torch

from adjoint.contract.cases import Workload
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.bad_calls import BAD_CALLS
from adjoint.ops.gated_delta.builds import builds
from adjoint.ops.gated_delta.rule.cases import NORMALIZED, RULE
from adjoint.ops.gated_delta.rule.workloads import WORKLOADS as ON_A_GPU
from adjoint.ops.gated_delta.values import gradients, tokens

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (RULE, NORMALIZED)

_chunked = partial(reference.gated_delta_rule, by_chunks=True)
_TIME, _HEADS, _SIZE = 2048, 16, 128
_BYTES = _TIME * _HEADS * _SIZE * 4

_ON_A_CPU = Workload(
    name=f"{_TIME} tokens × {_HEADS} heads of {_SIZE}×{_SIZE}, float32",
    # The recurrence would keep a state for every token; by chunks it is the same function, and fits.
    subject=replace(RULE, reference=_chunked, reference_backward=gradients(_chunked)),
    make=tokens((1, _TIME, _HEADS, _HEADS, _SIZE, _SIZE), decay=0.1),
    forward_bytes=4 * _BYTES,
    backward_bytes=8 * _BYTES,
    baseline=None,
    peers=("transformers_gated_delta_rule",),
    dtype=torch.float32,
    devices=("cpu",),
    compile=False,
)

WORKLOADS: tuple[Workload, ...] = (*ON_A_GPU, _ON_A_CPU)
