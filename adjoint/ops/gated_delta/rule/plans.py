"""Which code serves which problem of the gated delta rule, and what it guarantees."""

from pathlib import Path
from typing import Any

import torch

from adjoint.core.guarantee import Empirical, Guarantee
from adjoint.core.kernels import NVIDIA
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.promises import (
    BACKWARD,
    CASES,
    CHECKED,
    FORWARD,
    RESETS,
    domain_of,
    eager_candidate,
    promise,
)
from adjoint.ops.gated_delta.rule import eager
from adjoint.ops.gated_delta.rule.shape import FEW_HEADS, REVERSE_SEGMENT, UNSPLIT_REVERSE, Shape

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

_OUT_OF_RANGE = (
    "g above 0 and cu_seqlens out of order are reported: at once on the CPU, by adjoint.check() on a GPU, where g is "
    f"then taken as it is, cu_seqlens as what lies within bounds, and tokens of no sequence give 0; {CHECKED}"
)

_SPECIAL_VALUES = (
    f"{RESETS}; any other NaN or infinity of a token may reach every output from the first token of its chunk of "
    f"{CHUNK} on, of q its own alone, but no chunk before, and no other sequence"
)
_SPECIAL_GRADIENTS = f"{RESETS}; any other NaN or infinity may reach every gradient of its own sequence, and no other's"

# ---------------------------------------------------------------------------------------- in plain PyTorch


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    wide = wide_dtype(problem.dtypes[0])
    outputs = {"o": problem.dtypes[0], "final_state": wide}
    kept = promise(problem, {"saved": wide}, FORWARD, domain="what the backward begins its segments with")
    words: dict[str, Any] = {"out_of_range": _OUT_OF_RANGE, "special_values": _SPECIAL_VALUES}
    return promise(problem, outputs, FORWARD, **words) | kept


def _backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, g, beta = problem.dtypes[:3]
    state = wide_dtype(dtype)
    dtypes = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dinitial_state": state}
    return promise(problem, dtypes, BACKWARD, special_values=_SPECIAL_GRADIENTS)


_CHUNKS: dict[str, Any] = {
    "numeric": lambda problem: {"chunk": CHUNK, "segment": SEGMENT},
    "waits": lambda problem: len(problem.dtypes) > 3,  # with cu_seqlens, the number of chunks is data
    "revision": 2,
}


# ---------------------------------------------------------------------------------------------- on kernels

MAX_TOKENS = 2**31 - 2**17
"""Places on the token axis are 32 bits, with room for the rows of a chunk past the last."""

MAX_HEADS = 2**14
"""Offsets between the heads of a token are 32 bits."""

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


CEILINGS = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
"""Of o, final and saved states, as the kernels compute them. The largest measured are in docs/gated-delta.md."""

BACKWARD_CEILINGS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of every gradient. The largest that was measured: 2.1e-6, 2.0e-2 and 1e-3, of dg where states are random and their
products ⟨S, dS⟩, of 16-bit numbers, cancel; on layers of 1024 tokens and more 7e-7, 1.3e-2 and 9e-4."""

_ROUNDINGS = {
    "o": 5, "final_state": 4, "saved": 4,
    "dq": 7, "dk": 8, "dv": 8, "dg": 8, "dbeta": 8, "dinitial_state": 6,
}  # fmt: skip
"""Of what a product takes or memory keeps, to the storage type, on the longest way to a result.

Forward: T, the state, the residual, the new values, and with o itself. Backward: T, S, the residual and v' as forward;
W, Tᵀ Pᵀ do, dS⁺, β·e^G·Y, Y; M or E; and the gradient itself.
"""

_THROUGH_M = 3
"""More on the way of what depends on dS, where it passes through the M of a segment: S, the residual and v'."""

_FLOORS = {torch.float16: torch.finfo(torch.float16).smallest_normal}
"""What lies in memory between kernels loses digits below this."""


def _promise(
    problem: Problem, name: str, ceiling: float, domain: str, extra_roundings: int = 0, **words: Any
) -> Guarantee:
    """What the kernels promise of a result."""
    dtype = problem.dtypes[0]
    return Guarantee(
        repeatable=True,
        batch_invariant="sequence",
        device_invariant=False,
        accumulator="float32",
        roundings=_ROUNDINGS[name] + extra_roundings if dtype != torch.float32 else 0,
        error=Empirical(ceiling, f"{CASES}; K and V up to 256", _FLOORS.get(dtype, 0.0)),
        domain=f"{domain_of(name)}{domain}",
        **words,
    )


def _kernel_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, may_split = problem.dtypes[0], Shape.of(problem).may_split
    domain = "; new values and states stay below 65504" if dtype == torch.float16 else ""
    domain += f"; products of chunks of {CHUNK} tokens, counted from the start of a sequence"
    if may_split:
        domain += f"; up to {FEW_HEADS} value heads, segments of {SEGMENT} begin with M S + B of the state S before"
    domain += "; cut after a whole number of chunks with the state carried on, a sequence keeps its bits"
    domain += f", unless it is longer than {SEGMENT} tokens" if may_split else ""
    if dtype == torch.float32:
        domain += "; products are IEEE float32, those with M three of TF32 parts each"
    out_of_range = {"o": _OUT_OF_RANGE, "final_state": _OUT_OF_RANGE, "saved": ""}
    return {
        name: _promise(
            problem,
            name,
            CEILINGS[dtype],
            domain,
            prefix_invariant=True,
            out_of_range=words,
            special_values=_SPECIAL_VALUES,
        )
        for name, words in out_of_range.items()
    }


def _kernel_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, may_split = problem.dtypes[0], Shape.of(problem).may_split
    domain = "; new values, states and their gradients stay below 65504" if dtype == torch.float16 else ""
    domain += f"; products of chunks of {CHUNK} tokens, counted from the start of a sequence"
    domain += ", in IEEE float32 or as three of TF32 parts" if dtype == torch.float32 else ""
    if may_split:
        domain += f"; up to {FEW_HEADS} value heads, sequences of more than {UNSPLIT_REVERSE} tokens are segments of "
        domain += f"{REVERSE_SEGMENT} that end with Mᵀ dS + B of the gradient dS after"
    return {
        name: _promise(
            problem,
            name,
            BACKWARD_CEILINGS[dtype],
            domain,
            _THROUGH_M * (may_split and name != "dq"),
            special_values=_SPECIAL_GRADIENTS,
        )
        for name in ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
    }


def _entry(problem: Problem, hopper: bool) -> str:
    """The name of a problem's schedule: by what its kernels are cut for."""
    shape, backward = Shape.of(problem), problem.op.endswith("backward")
    direction = "backward" if backward else "forward"
    words = [f"hopper {direction}" if hopper else f"{direction} {'float32' if shape.is_float32 else '16-bit'}"]
    if shape.K > 128:
        words.append("K > 128")
    elif backward:
        words += ["few heads"] * shape.may_split + ["V <= 64"] * (shape.V <= 64 and not shape.is_float32)
    return ", ".join(words)


def _on_kernels(kernel: str, direction: str, hopper: bool) -> Candidate:
    """A plan on kernels, in Triton alone or with those for Hopper."""
    return Candidate(
        name="gluon.fused" if hopper else "triton.chunked",
        backend="triton",
        kernel=kernel,
        revision=3,
        refuse=_refuse_hopper if hopper else refuse,
        guarantee=_kernel_guarantee if direction == "forward" else _kernel_backward_guarantee,
        setup=imported(f"adjoint.ops.gated_delta.rule.{direction}:{direction}", hopper=hopper),
        targets=("sm_90",) if hopper else NVIDIA,
        schedules=_SCHEDULES,
        entry=lambda problem: _entry(problem, hopper),
    )


RULE = (
    _on_kernels("rule_forward_scan_hopper", "forward", hopper=True),
    _on_kernels("rule_state_scan", "forward", hopper=False),
    eager_candidate("eager.chunked", _guarantee, eager.forward, **_CHUNKS),
)
RULE_BACKWARD = (
    _on_kernels("rule_gradients_hopper", "backward", hopper=True),
    _on_kernels("rule_reverse_scan", "backward", hopper=False),
    eager_candidate("eager.chunked", _backward_guarantee, eager.backward, **_CHUNKS),
)
