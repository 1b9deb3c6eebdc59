"""Which code serves which problem of the gated delta rule, and what it guarantees."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Empirical, Guarantee
from adjoint.core.kernels import NVIDIA
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.promises import (
    BACKWARD,
    CASES,
    DOMAIN,
    FORWARD,
    domain_of,
    eager_candidate,
    empirical_error,
    promise,
)
from adjoint.ops.gated_delta.rule import eager
from adjoint.ops.gated_delta.rule.shape import FEW_HEADS, REVERSE_SEGMENT, UNSPLIT_REVERSE, Shape

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

_OUT_OF_RANGE = (
    "g above 0 and cu_seqlens out of order are reported: at once on the CPU, by adjoint.check() on a GPU, where g is "
    "then taken as it is, cu_seqlens as what lies within bounds, and tokens of no sequence give 0"
)


def _rule_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, wide = problem.dtypes[0], wide_dtype(problem.dtypes[0])
    state = empirical_error(wide, wide, FORWARD)
    return {
        "o": promise(problem, empirical_error(dtype, wide, FORWARD), int(dtype != wide), out_of_range=_OUT_OF_RANGE),
        "final_state": promise(problem, state, 0, out_of_range=_OUT_OF_RANGE),
        "saved": promise(problem, state, 0, domain="what the backward begins its segments with"),
    }


def _rule_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, g, beta = problem.dtypes[:3]
    wide = wide_dtype(dtype)
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dinitial_state": wide}
    return {
        name: promise(problem, empirical_error(kind, wide, BACKWARD), int(kind != wide), domain=domain_of(name))
        for name, kind in kinds.items()
    }


def _rule(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    *inputs, output_final_state, keep = arguments
    out, final_state, saved = outputs
    eager.forward(*(*inputs, out, final_state if output_final_state else None, saved if keep else None))


def _rule_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager.backward(*(*arguments, outputs))


def _is_packed(problem: Problem) -> bool:
    """Whether there is `cu_seqlens`, whose chunks plain PyTorch has to count."""
    return len(problem.dtypes) > 3


def _chunks(problem: Problem) -> dict[str, Any]:
    return {"chunk": CHUNK, "segment": SEGMENT}


# ---------------------------------------------------------------------------------------------- kernels

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


CEILINGS = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
"""Of o, final and saved states, as the kernels compute them. The largest measured are in docs/gated-delta.md."""

_FLOORS = {torch.float16: torch.finfo(torch.float16).smallest_normal}
"""What lies in memory between kernels loses digits below this."""

_KERNEL_CASES = f"{CASES}; K and V up to 256"

_ROUNDINGS = {"o": 5, "final_state": 4, "saved": 4}
"""Of what a product takes, to the storage type: T, the state, the residual, the new values, and with o itself."""


_CHUNKS_OF_A_SEQUENCE = f"products of chunks of {CHUNK} tokens, counted from the start of a sequence"


def _order(shape: Shape) -> str:
    """What fixes the bits of a sequence."""
    order = _CHUNKS_OF_A_SEQUENCE
    longer = ""
    if shape.may_split:
        order += f"; up to {FEW_HEADS} value heads, segments of {SEGMENT} begin with M S + B of the state S before"
        longer = f", unless it is longer than {SEGMENT} tokens"
    return f"{order}; cut after a whole number of chunks with the state carried on, a sequence keeps its bits{longer}"


def _kernel_promise(problem: Problem, name: str, **words: Any) -> Guarantee:
    """What the kernels promise of an output of the forward."""
    dtype = problem.dtypes[0]
    narrow = dtype != torch.float32
    products = "" if narrow else "; products are IEEE float32, those with M three of TF32 parts each"
    limits = "; new values and states stay below 65504" if dtype == torch.float16 else ""
    return Guarantee(
        repeatable=True,
        batch_invariant="sequence",
        prefix_invariant=True,
        device_invariant=False,
        accumulator="float32",
        roundings=_ROUNDINGS[name] if narrow else 0,
        error=Empirical(CEILINGS[dtype], _KERNEL_CASES, _FLOORS.get(dtype, 0.0)),
        domain=f"{DOMAIN}{limits}; {_order(Shape.of(problem))}{products}",
        **words,
    )


def _kernel_guarantee(problem: Problem) -> dict[str, Guarantee]:
    return {
        name: _kernel_promise(problem, name, **({} if name == "saved" else {"out_of_range": _OUT_OF_RANGE}))
        for name in ("o", "final_state", "saved")
    }


def _refuse_dtype(problem: Problem) -> str:
    """Why the kernels for Hopper cannot serve the types of a problem."""
    element = problem.dtypes[0]
    return "" if element in (torch.bfloat16, torch.float16) else f"takes 16-bit types, this is {element}"


def _refuse_hopper(problem: Problem) -> str:
    """Why the forward scan for Hopper cannot serve a problem."""
    shape = Shape.of(problem)
    if refusal := _refuse_dtype(problem):
        return refusal
    if shape.K not in (64, 128) or shape.V % 64 or not shape.V:
        return f"takes K of 64 or 128 and V of a multiple of 64, these are {shape.K} and {shape.V}"
    return refuse(problem)


BACKWARD_CEILINGS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of every gradient. The largest that was measured: 2.1e-6, 2.0e-2 and 1e-3, of dg where states are random and their
products ⟨S, dS⟩, of 16-bit numbers, cancel; on layers of 1024 tokens and more 7e-7, 1.3e-2 and 9e-4."""

_BACKWARD_ROUNDINGS = {"dq": 7, "dk": 8, "dv": 8, "dg": 8, "dbeta": 8, "dinitial_state": 6}
"""Of what a product takes or memory keeps, on the longest way to a gradient: T, S, the residual and v' as forward;
W, Tᵀ Pᵀ do, dS⁺, β·e^G·Y, Y; M or E; and the gradient itself."""


_THROUGH_M = 3
"""More on the way of what depends on dS, where it passes through the M of a segment: S, the residual and v'."""


def _kernel_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, shape = problem.dtypes[0], Shape.of(problem)
    narrow = dtype != torch.float32
    products = "" if narrow else ", in IEEE float32 or as three of TF32 parts"
    order = _CHUNKS_OF_A_SEQUENCE + products
    if shape.may_split:
        order += f"; up to {FEW_HEADS} value heads, sequences of more than {UNSPLIT_REVERSE} tokens are segments of "
        order += f"{REVERSE_SEGMENT} that end with Mᵀ dS + B of the gradient dS after"
    limits = "; new values, states and their gradients stay below 65504" if dtype == torch.float16 else ""
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="sequence",
            device_invariant=False,
            accumulator="float32",
            roundings=roundings + _THROUGH_M * (shape.may_split and name != "dq") if narrow else 0,
            error=Empirical(BACKWARD_CEILINGS[dtype], _KERNEL_CASES, _FLOORS.get(dtype, 0.0)),
            domain=f"{domain_of(name)}{limits}; {order}",
        )
        for name, roundings in _BACKWARD_ROUNDINGS.items()
    }


def _refuse_hopper_backward(problem: Problem) -> str:
    """Why the kernel of all gradients for Hopper cannot serve a problem."""
    shape = Shape.of(problem)
    if refusal := _refuse_dtype(problem):
        return refusal
    if shape.K not in (64, 128) or shape.V not in (64, 128):
        return f"takes K and V of 64 or 128, these are {shape.K} and {shape.V}"
    if not shape.has_output_gradient:
        return "takes a gradient of the outputs, and there is none"
    return refuse(problem)


# ------------------------------------------------------------------------------------------ candidates


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


def _on_kernels(
    kernel: str,
    direction: str,
    refuse: Callable[[Problem], str],
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    hopper: bool = False,
) -> Candidate:
    """A plan on kernels, in Triton alone or with those for Hopper."""

    def setup(setup: Setup) -> Execute:
        module = import_module(f"adjoint.ops.gated_delta.rule.{direction}")
        return getattr(module, direction)(setup, hopper)  # type: ignore[no-any-return]

    return Candidate(
        name="gluon.fused" if hopper else "triton.chunked",
        backend="triton",
        kernel=kernel,
        revision=2,
        refuse=refuse,
        guarantee=guarantee,
        setup=setup,
        targets=("sm_90",) if hopper else NVIDIA,
        schedules=_SCHEDULES,
        entry=lambda problem: _entry(problem, hopper),
    )


RULE = (
    _on_kernels("rule_forward_scan_hopper", "forward", _refuse_hopper, _kernel_guarantee, hopper=True),
    _on_kernels("rule_state_scan", "forward", refuse, _kernel_guarantee),
    eager_candidate("eager.chunked", _rule_guarantee, _rule, _chunks, _is_packed),
)
RULE_BACKWARD = (
    _on_kernels("rule_gradients_hopper", "backward", _refuse_hopper_backward, _kernel_backward_guarantee, hopper=True),
    _on_kernels("rule_reverse_scan", "backward", refuse, _kernel_backward_guarantee),
    eager_candidate("eager.chunked", _rule_backward_guarantee, _rule_backward, _chunks, _is_packed),
)
