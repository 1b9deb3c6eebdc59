"""The gated delta rule.   S ← e^{g_t}·S;   S ← S + k_t ⊗ β_t·(v_t − Sᵀk_t);   o_t = scale·Sᵀq_t

Per value head, with a state S [K, V] that begins as the initial state of its sequence, or 0. The adjoint runs
backwards, dS beginning as the gradient of the final state:

    dS ← dS + scale·q_t ⊗ do_t,   dq_t = scale·S do_t                 S as it is after token t
    e_t = v_t − Sᵀk_t,   de_t = β_t·dSᵀk_t                            S as it is after its decay
    dv_t = de_t,   dβ_t = e_t·(dSᵀk_t),   dk_t = β_t·dS e_t − S de_t
    dS ← dS − k_t ⊗ de_t,   dg_t = ⟨S, dS⟩,   dS ← e^{g_t}·dS

dq and dk are summed over the value heads that share a key head. It is computed by chunks: see `eager.py`.

Saves its inputs, and the state at the beginning of every segment of `packing.SEGMENT` tokens but a sequence's
first; the backward computes everything else again, a segment at a time.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.packing import saved_states
from adjoint.ops.gated_delta.rule import plans
from adjoint.ops.gated_delta.rule.shape import describe

_OP = "gated_delta_rule"

# ----------------------------------------------------------------------------------------- arguments


class _Given(NamedTuple):
    """The arguments of the operator, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    normalize_qk: bool
    output_final_state: bool
    save: bool


class _Upstream(NamedTuple):
    """Those of its adjoint; `need` has a bit for each gradient that is wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor | None
    dfinal_state: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    saved: Tensor
    scale: float
    normalize_qk: bool
    need: int


def _state_shape(given: _Given | _Upstream) -> tuple[int, ...]:
    q, v, cu_seqlens = given.q, given.v, given.cu_seqlens
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (sequences, v.shape[2], q.shape[3], v.shape[3])


def _saved_shape(given: _Given | _Upstream) -> tuple[int, ...]:
    q, v = given.q, given.v
    return (saved_states(q.shape[0] * q.shape[1]), v.shape[2], q.shape[3], v.shape[3])


def _check_inputs(given: _Given | _Upstream) -> None:
    metadata.require_tokens(_OP, *given[:5])
    if given.cu_seqlens is not None:
        metadata.require_cu_seqlens(_OP, given.cu_seqlens, given.q)
    if given.initial_state is not None:
        metadata.require_states(_OP, "initial_state", given.initial_state, _state_shape(given), given.q)


def _check(*arguments: Any) -> None:
    _check_inputs(_Given(*arguments))


def _check_backward(*arguments: Any) -> None:
    given = _Upstream(*arguments)
    _check_inputs(given)
    if given.do is not None:
        metadata.require_same(_OP, "do", given.do, "v", given.v)
        metadata.require_shape(_OP, "do", given.do, tuple(given.v.shape), "that of v")
    if given.dfinal_state is not None:
        metadata.require_states(_OP, "dfinal_state", given.dfinal_state, _state_shape(given), given.q)
    metadata.require_states(_OP, "saved", given.saved, _saved_shape(given), given.q)
    if given.need & NEED_STATE and given.initial_state is None:
        raise ArgumentError(f"{_OP}: need asks for the gradient of initial_state, and none is given")


# ----------------------------------------------------------------------------------------- operators

_TOKENS = ("q", "k", "v", "g", "beta")


def _describe(*arguments: Any) -> Problem:
    given = _Given(*arguments)
    tokens = {name: getattr(given, name) for name in _TOKENS}
    return describe(_OP, tokens, {"initial_state": given.initial_state}, given.cu_seqlens, given[7:])


def _describe_backward(*arguments: Any) -> Problem:
    given = _Upstream(*arguments)
    tokens = {name: getattr(given, name) for name in (*_TOKENS, "do")}
    states = {"initial_state": given.initial_state, "dfinal_state": given.dfinal_state}
    return describe(f"{_OP}_backward", tokens, states, given.cu_seqlens, given[10:])


def _allocate(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = _Given(*arguments)
    v, kind = given.v, metadata.state_dtype(given.q.dtype)
    return (
        v.new_empty(v.shape),
        v.new_empty(_state_shape(given) if given.output_final_state else (0,), dtype=kind),
        v.new_empty(_saved_shape(given) if given.save else (0,), dtype=kind),
    )


def _allocate_backward(*arguments: Any) -> tuple[Tensor, ...]:
    given = _Upstream(*arguments)
    q, need = given.q, given.need
    return tuple(
        q.new_empty(x.shape, dtype=x.dtype) if x is not None and need >> bit & 1 else q.new_empty((0,))
        for bit, x in enumerate((*given[:5], given.initial_state))
    )


_rule = define(
    _OP,
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, float scale, "
    "bool normalize_qk, bool output_final_state, bool save",
    "(Tensor, Tensor, Tensor)",
    outputs=("o", "final_state", "saved"),
    tensors=("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens"),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    candidates=lambda: plans.RULE,
)
_rule_backward = define(
    f"{_OP}_backward",
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? do, Tensor? dfinal_state, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor saved, float scale, bool normalize_qk, int need",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"),
    tensors=("q", "k", "v", "g", "beta", "do", "dfinal_state", "initial_state", "cu_seqlens", "saved"),
    check=_check_backward,
    allocate=_allocate_backward,
    describe=_describe_backward,
    candidates=lambda: plans.RULE_BACKWARD,
)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Of the operator's arguments but `save`, and the preference."""
        *given, preference = arguments
        o, final_state, saved = _rule(*given, True, preference)
        *tensors, scale, normalize_qk, output_final_state = given
        ctx.set_materialize_grads(False)  # an output nobody used costs nothing
        ctx.save_for_backward(*tensors, saved)
        ctx.options, ctx.preference, ctx.has_final = (scale, normalize_qk), preference, output_final_state
        if not output_final_state:
            ctx.mark_non_differentiable(final_state)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative(_OP)
        if not ctx.has_final:  # a compiler makes zeros of a gradient that nobody gave
            dfinal = None
        if do is None and dfinal is None:
            return (None,) * 11
        q, k, v, g, beta, initial_state, cu_seqlens, saved = ctx.saved_tensors
        need = sum(1 << bit for bit in range(6) if ctx.needs_input_grad[bit])
        gradients = _rule_backward(
            q, k, v, g, beta, do, dfinal, initial_state, cu_seqlens, saved, *ctx.options, need, ctx.preference
        )
        wanted = (gradient if need >> bit & 1 else None for bit, gradient in enumerate(gradients))
        return (*wanted, None, None, None, None, None)


# ------------------------------------------------------------------------------------------- public


def gated_delta_rule(
    q: Float[Tensor, "batch time key_heads K"],
    k: Float[Tensor, "batch time key_heads K"],
    v: Float[Tensor, "batch time value_heads V"],
    g: Float[Tensor, "batch time value_heads"],
    beta: Float[Tensor, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "sequences value_heads K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    normalize_qk: bool = False,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "batch time value_heads V"], Float[Tensor, "sequences value_heads K V"] | None]:
    """The gated delta rule over whole sequences: every token's output, and the state after the last.

    Value head h reads key head h // (H / Hg). Under autocast q, k and v are cast to its dtype, unless they are
    float64; gates and states are left alone.

    Args:
        q, k: queries and keys; float64, float32, bfloat16 or float16, one dtype for q, k and v. K is at most 256.
        v: values; its heads are a multiple of those of q and k. V is at most 256.
        g: the logarithm of the decay, at most 0; float32 or the dtype of q.
        beta: the strength, from 0 to 1; float32 or the dtype of q.
        scale: a factor of the outputs; 1/sqrt(K) by default.
        initial_state: the state each sequence begins with, float32 (float64 for float64); 0 by default.
        output_final_state: whether the final states are wanted; None is returned in their place otherwise.
        cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of sequences that are packed in the only row
            of the batch. Without it every row is a sequence.
        normalize_qk: divides q and k by sqrt(Σx² + 1e-6) first.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, or (on the CPU) g is positive or cu_seqlens out
            of order; on a GPU `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> q = k = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    >>> v, g, beta = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1), torch.full((1, 3, 1), 0.5)
    >>> o, state = gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)
    >>> o.flatten(), state.flatten()
    (tensor([0.5000, 0.7500, 0.8750]), tensor([0.8750, 0.0000]))
    """
    arguments = _arguments(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, normalize_qk)
    text = resolve(preference)
    differentiable = (*arguments[:5], initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable):
        o, final_state = _GatedDeltaRule.apply(*arguments, text)
    else:
        o, final_state, _ = _rule(*arguments, False, text)
    return o, final_state if output_final_state else None


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    normalize_qk: bool,
) -> tuple[Any, ...]:
    """The operator's arguments but the last, checked."""
    q, k, v, g, beta = metadata.autocast(q, k, v, g, beta)
    metadata.require_tokens(_OP, q, k, v, g, beta)
    arguments = (
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        cu_seqlens,
        metadata.scale_of(_OP, scale, q.shape[3]),
        bool(normalize_qk),
        bool(output_final_state),
    )
    _check(*arguments, True)
    return arguments


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize_qk: bool = False,
) -> Call:
    arguments = _arguments(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, normalize_qk)
    tokens, options = arguments[:5], arguments[7:9]
    need = 2 * NEED_STATE - 1 if initial_state is not None else NEED_STATE - 1

    def backward(upstream: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        dfinal = upstream[1] if output_final_state else None
        return (*tokens, upstream[0], dfinal, initial_state, cu_seqlens, outputs[2], *options, need)

    return Call(_rule, (*arguments, True), _rule_backward, backward, public_outputs=2 if output_final_state else 1)


publish(gated_delta_rule, _bind)
