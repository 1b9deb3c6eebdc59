"""The promises of plans of the gated delta rule: bounds evaluated in float64 beside the reference, for the very inputs.

The package `bound` evaluates them, and docs/gated-delta-error.md proves them. This module has the arithmetic of a plan,
on which they depend, and the ceilings that are recorded for the op's cases.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Empirical, EvaluatedOnce, Guarantee
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.promises import BACKWARD, CASES, CHECKED, DOMAIN, FORWARD, RESETS, empirical_error
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.shape import FEW_HEADS, Shape

if TYPE_CHECKING:
    from adjoint.ops.gated_delta.rule.bound import Arithmetic

_OUT_OF_RANGE = (
    "g above 0 and cu_seqlens out of order are reported: at once on the CPU, by adjoint.check() on a GPU, where g is "
    f"then taken as it is, cu_seqlens as what lies within bounds, and tokens of no sequence give 0; {CHECKED}"
)

_SPECIAL_VALUES = (
    f"{RESETS}; any other NaN or infinity of a token may reach every output of its heads from the first token of its "
    f"chunk of {CHUNK} on, of q its own alone, and one of a state every output of its sequence and head; but no chunk "
    "before, no other head, and no other sequence"
)
_SPECIAL_GRADIENTS = (
    f"{RESETS}; any other NaN or infinity may reach every gradient of its own sequence and heads, and no other's; one "
    f"in the gradient of an output none of a later chunk of {CHUNK}"
)

CEILINGS = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
"""Recorded ceilings of o, final and saved states on kernels. docs/gated-delta.md has the largest measured errors."""

BACKWARD_CEILINGS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Recorded ceilings of every gradient. The largest measured errors are 2.1e-6, 2.0e-2 and 1e-3. They are those of dg
for random states, whose products ⟨S, dS⟩ of 16-bit numbers cancel. On layers of 1024 tokens and more the largest are
7e-7, 1.3e-2 and 9e-4."""

_ROUNDINGS = {
    "o": 5, "final_state": 4, "saved": 4,
    "dq": 7, "dk": 8, "dv": 8, "dg": 8, "dbeta": 8, "dinitial_state": 6,
}  # fmt: skip
"""The number of roundings to the storage type on the longest way to a result: of operands of products, and of memory.

Forward: T, the state, the residual, the new values, and for o the result itself. Backward: T, S, the residual and v' as
in the forward; W, Tᵀ Pᵀ do, dS⁺, β·e^G·Y, Y; M or E; and the gradient itself.
"""

_WITHOUT_W = 2
"""The fewer roundings on Hopper for results that depend on dS: those of W and Tᵀ Pᵀ do."""

_THROUGH_M = 3
"""The further roundings for results that depend on a dS that passes through the M of a segment: those of S, the
residual and v'."""

_FLOORS = {torch.float16: torch.finfo(torch.float16).smallest_normal}
"""Numbers in memory between kernels lose digits if they are smaller than this."""

_OF = {
    "o": "the outputs of a token", "final_state": "a state", "saved": "a state", "dq": "dq of a token and key head",
    "dk": "dk of a token and key head", "dv": "dv of a token", "dg": "dg of a token", "dbeta": "dbeta of a token",
    "dinitial_state": "the gradient of a state",
}  # fmt: skip
"""The results that have one number of a bound each: of the Euclidean norm of an error, or of the Frobenius norm."""

_AXES = {"o": 1, "final_state": 2, "saved": 2, "dq": 1, "dk": 1, "dv": 1, "dinitial_state": 2}


def _kinds(problem: Problem) -> dict[str, torch.dtype]:
    """The dtypes of the results."""
    dtype, g, beta = problem.dtypes[:3]
    state = wide_dtype(dtype)
    if not problem.op.endswith("backward"):
        return {"o": dtype, "final_state": state, "saved": state}
    return {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dinitial_state": state}


_INPUTS = 7
"""The number of inputs of the rule and its reference: q, k, v, g, beta, initial states and bounds of sequences."""


def _evaluate(problem: Problem, hopper: bool | None, *inputs: Tensor | None) -> dict[str, Tensor]:
    """The bounds of all results. `inputs` are those of the reference; for gradients, upstream gradients come first."""
    from adjoint.ops.gated_delta.rule.bound import Call

    scale, normalize, *_ = problem.options
    call = Call(arithmetic_of(problem, hopper), scale, normalize)
    if not problem.op.endswith("backward"):
        return call.forward(_kinds(problem), *inputs)  # type: ignore[arg-type]
    if len(inputs) == _INPUTS + 1:  # a call without final states, which then have no gradient
        inputs = (inputs[0], None, *inputs[1:])
    return call.backward(_kinds(problem), *inputs)  # type: ignore[arg-type]


def arithmetic_of(problem: Problem, hopper: bool | None) -> "Arithmetic":
    """The arithmetic of a plan: on kernels, for Hopper or not, or, if `hopper` is None, in plain PyTorch."""
    from adjoint.ops.gated_delta.rule.bound import TF32_PRODUCT, Arithmetic

    shape, normalize = Shape.of(problem), problem.options[1]
    wide = wide_dtype(shape.element)
    if hopper is None:
        plain = Arithmetic(wide)
        return Arithmetic(wide, normalized=plain.sum_of(shape.K) if normalize else 0.0)
    split: dict[str, Any] = {}
    if shape.may_split:
        split = {
            "segment": packing.SEGMENT,
            "reverse_segment": sizes.REVERSE_SEGMENT,
            "unsplit_reverse": shape.unsplit_reverse,
        }
    of_norms = Arithmetic(wide, cut=True).sum_of(shape.K)
    if shape.is_float32:
        return Arithmetic(
            wide, cut=True, block=2, gradient_product=TF32_PRODUCT, normalized=of_norms if normalize else 0.0, **split
        )
    u, half = torch.finfo(shape.element).eps / 2, 2.0**-8  # half: of the bfloat16 parts that merges multiply
    settings: dict[str, Any] = {"score": u**2, "new_value": u, "row_product": u, "block": 2}
    if hopper:
        block = 2 if shape.heads % 2 else 32
        settings = {"score": u, "new_value": u**2, "inverse": half**2, "block": block, "without_W": True}
    return Arithmetic(
        wide, storage=shape.element, cut=True, merge=3 * half**2, short_sums=True,
        normalized=u + of_norms if normalize else 0.0, **settings, **split,
    )  # fmt: skip


def _promises(problem: Problem, hopper: bool | None, **words: Any) -> dict[str, Guarantee]:
    bounds = EvaluatedOnce(partial(_evaluate, problem, hopper))

    def error(name: str) -> Derived:
        words = f"a bound evaluated for the inputs, of the norm of the error of {_OF[name]}: docs/gated-delta-error.md"
        expected = partial(_expected, problem, hopper, name) if _has_expected(problem, hopper, name) else None
        return Derived(words, lambda *inputs: bounds(*inputs)[name], _AXES.get(name, 0), expected)

    return {
        name: Guarantee(error=error(name), **{key: of(name) if callable(of) else of for key, of in words.items()})
        for name in _kinds(problem)
    }


def _special_values(problem: Problem) -> str:
    return _SPECIAL_GRADIENTS if problem.op.endswith("backward") else _SPECIAL_VALUES


def _has_expected(problem: Problem, hopper: bool | None, name: str) -> bool:
    """Whether there is a model of a result's roundings.

    There is one for outputs and final states in 16 bits, if q and k are not normalised and no sequence is split.
    """
    shape = Shape.of(problem)
    narrow = hopper is not None and not shape.is_float32
    return narrow and name in ("o", "final_state") and not (problem.options[1] or shape.is_split)


@torch.no_grad()
def _expected(problem: Problem, hopper: bool | None, name: str, *inputs: Tensor | None) -> Tensor:
    """The root mean square of an error that a model of its roundings expects: see `bound/expected.py`."""
    from adjoint.ops.gated_delta.rule.bound import Call

    call: Any = Call(arithmetic_of(problem, hopper), problem.options[0], normalize=False)
    return call.expected(_kinds(problem), *inputs)[name]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- in plain PyTorch


def in_pytorch(problem: Problem) -> dict[str, Guarantee]:
    kinds, wide = _kinds(problem), wide_dtype(problem.dtypes[0])
    ceiling = BACKWARD if problem.op.endswith("backward") else FORWARD
    return _promises(
        problem,
        None,
        repeatable=problem.device.type == "cpu",
        batch_invariant="",
        device_invariant=False,
        accumulator=short(wide),
        roundings=lambda name: int(kinds[name] != wide),
        recorded=lambda name: empirical_error(kinds[name], wide, ceiling),
        domain=lambda name: "what the backward begins its segments with" if name == "saved" else DOMAIN,
        special_values=lambda name: "" if name == "saved" else _special_values(problem),
        out_of_range=lambda name: _OUT_OF_RANGE if name in ("o", "final_state") else "",
    )


# ------------------------------------------------------------------------------------------- on kernels


def on_kernels(problem: Problem, hopper: bool) -> dict[str, Guarantee]:
    dtype, backward = problem.dtypes[0], problem.op.endswith("backward")
    may_split = Shape.of(problem).may_split
    ceiling = (BACKWARD_CEILINGS if backward else CEILINGS)[dtype]

    def roundings(name: str) -> int:
        extra = (_THROUGH_M * may_split - _WITHOUT_W * hopper) * (backward and name != "dq")
        return _ROUNDINGS[name] + extra if dtype != torch.float32 else 0

    return _promises(
        problem,
        hopper,
        repeatable=True,
        batch_invariant="sequence",
        device_invariant=False,
        prefix_invariant=not backward,
        accumulator="float32",
        roundings=roundings,
        recorded=Empirical(ceiling, f"{CASES}; K and V up to 256", _FLOORS.get(dtype, 0.0)),
        domain=DOMAIN
        + (_range_of_float16(backward, hopper) if dtype == torch.float16 else "")
        + (_backward_domain if backward else _forward_domain)(dtype, may_split),
        special_values=_special_values(problem),
        out_of_range=lambda name: _OUT_OF_RANGE if name in ("o", "final_state") else "",
    )


def _range_of_float16(backward: bool, hopper: bool) -> str:
    """Words about the numbers that are rounded to float16 and may overflow. `bound/overflow.py` evaluates where."""
    domain = (
        "; float16 rounds 65520 and more to infinity: the bound is infinite, and nothing promised, from the chunk on "
        "where a state, β v − β e^G k S, a new value v' or q·k, with its scale or without, may be as large"
    )
    if backward:
        of_scan = "e^{Γ−G} k dS + Pᵀ do" if hopper else "P T, Tᵀ Pᵀ do"
        domain += (
            f" (not of dv and dinitial_state), from the chunk back where dS, Y, {of_scan} or scale·e^G do may, "
            "of dq_i and dk_j where scale·(do_i·v'_j) e^{G_i−G_j} may, and of dk_i and dk_j where "
            "β_i (Y_i·v'_j) e^{G_i−G_j} may"
        )
    if backward and not hopper:
        domain += (
            "; of a chunk's dg where either of these times q_i·k_j or k_i·k_j, or a row of e^G do Sᵀ, e^G Y Sᵀ or "
            "e^{Γ−G} v' dSᵀ may, and of a token's dbeta where its e^G Y Sᵀ may"
        )
    return domain


def _forward_domain(dtype: torch.dtype, may_split: bool) -> str:
    domain = f"; products of chunks of {CHUNK} tokens, counted from the start of a sequence"
    if may_split:
        domain += (
            f"; up to {FEW_HEADS} value heads, segments of {packing.SEGMENT} begin with M S + B of the state S before"
        )
    domain += "; cut after a whole number of chunks with the state carried on, a sequence keeps its bits"
    domain += f", unless it is longer than {packing.SEGMENT} tokens" if may_split else ""
    if dtype == torch.float32:
        domain += "; products are IEEE float32, those with M three of TF32 parts each"
    return domain


def _backward_domain(dtype: torch.dtype, may_split: bool) -> str:
    domain = f"; products of chunks of {CHUNK} tokens, counted from the start of a sequence"
    domain += ", in IEEE float32 or as three of TF32 parts" if dtype == torch.float32 else ""
    if may_split:
        domain += (
            f"; up to {FEW_HEADS} value heads, sequences of more than {sizes.UNSPLIT_REVERSE} tokens are segments "
        )
        domain += f"of {sizes.REVERSE_SEGMENT} that end with Mᵀ dS + B of the gradient dS after"
    return domain
