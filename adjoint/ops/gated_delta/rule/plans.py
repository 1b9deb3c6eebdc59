"""Which code serves which problem of the gated delta rule."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from adjoint.core.kernels import NVIDIA
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.promises import eager_candidate
from adjoint.ops.gated_delta.rule import eager, guarantee
from adjoint.ops.gated_delta.rule.shape import Shape

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

_CHUNKS: dict[str, Any] = {
    "numeric": lambda problem: {"chunk": CHUNK, "segment": SEGMENT},
    "waits": lambda problem: len(problem.dtypes) > 3,  # with cu_seqlens, the number of chunks depends on values
    "revision": 2,
}


# ---------------------------------------------------------------------------------------------- on kernels

MAX_TOKENS = 2**31 - 2**17
"""The most tokens. Places on the token axis have 32 bits, with room for the rows of a chunk past the last token."""

MAX_HEADS = 2**14
"""The most heads, because offsets between the heads of a token have 32 bits."""

MAX_PROGRAMS = 2**31 - 1


def refuse(problem: Problem) -> str:
    """Why the kernels cannot serve a problem."""
    shape = Shape.of(problem)
    if shape.element == torch.float64:
        return "float64 is for plain PyTorch: its products have no kernels here"
    if shape.tokens > MAX_TOKENS:
        return f"numbers up to {MAX_TOKENS} tokens, these are {shape.tokens}"
    rows, normalize = shape.tokens * shape.key_heads, problem.options[1]
    if normalize and rows > MAX_TOKENS:
        return f"normalises up to {MAX_TOKENS} rows of q, these are {rows}"
    if shape.heads > MAX_HEADS:
        return f"takes up to {MAX_HEADS} value heads, these are {shape.heads}"
    blocks = -(-(shape.V + shape.K * shape.may_split) // 16)
    if (shape.chunks + shape.sequences) * shape.heads * blocks > MAX_PROGRAMS:
        return f"there may be {shape.chunks} chunks of {shape.heads} heads, more programs than a launch has"
    return ""


def _refuse_hopper(problem: Problem) -> str:
    """Why the kernels for Hopper cannot serve a problem."""
    shape, backward = Shape.of(problem), problem.op.endswith("backward")
    if shape.element not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit types, this is {shape.element}"
    if backward and (shape.K not in (64, 128) or shape.V not in (64, 128)):
        return f"takes K and V of 64 or 128, these are {shape.K} and {shape.V}"
    if shape.K not in (64, 128) or shape.V % 64 or not shape.V:
        return f"takes K of 64 or 128 and V of a multiple of 64, these are {shape.K} and {shape.V}"
    if backward and not shape.has_output_gradient:
        return "takes a gradient of the outputs, and there is none"
    return refuse(problem)


def _entry(problem: Problem, hopper: bool) -> str:
    """The name of a problem's schedule, by the sizes for which its kernels are specialised."""
    shape, backward = Shape.of(problem), problem.op.endswith("backward")
    direction = "backward" if backward else "forward"
    words = [f"hopper {direction}" if hopper else f"{direction} {'float32' if shape.is_float32 else '16-bit'}"]
    if shape.K > 128:
        words.append("K > 128")
    elif backward:
        words += ["few heads"] * shape.may_split + ["V <= 64"] * (shape.V <= 64 and not shape.is_float32)
    return ", ".join(words)


def _on_kernels(kernel: str, direction: str, hopper: bool) -> Candidate:
    """A plan on kernels, in Triton only or with those for Hopper."""
    return Candidate(
        name="gluon.fused" if hopper else "triton.chunked",
        backend="triton",
        kernel=kernel,
        revision=4 if hopper and direction == "backward" else 3,
        refuse=_refuse_hopper if hopper else refuse,
        guarantee=partial(guarantee.on_kernels, hopper=hopper),
        setup=imported(f"adjoint.ops.gated_delta.rule.{direction}:{direction}", hopper=hopper),
        targets=("sm_90",) if hopper else NVIDIA,
        schedules=_SCHEDULES,
        entry=lambda problem: _entry(problem, hopper),
    )


RULE = (
    _on_kernels("rule_forward_scan_hopper", "forward", hopper=True),
    _on_kernels("rule_state_scan", "forward", hopper=False),
    eager_candidate("eager.chunked", guarantee.in_pytorch, eager.forward, **_CHUNKS),
)
RULE_BACKWARD = (
    _on_kernels("rule_gradients_hopper", "backward", hopper=True),
    _on_kernels("rule_reverse_scan", "backward", hopper=False),
    eager_candidate("eager.chunked", guarantee.in_pytorch, eager.backward, **_CHUNKS),
)
