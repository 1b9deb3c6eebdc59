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

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag
from adjoint.core.errors import ArgumentError, is_checking
from adjoint.core.layout import empty_like
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import wide_dtype
from adjoint.device.sequences import count_sequences, require_cu_seqlens
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.flops import recurrence, recurrence_backward
from adjoint.ops.gated_delta.packing import saved_states
from adjoint.ops.gated_delta.rule import plans
from adjoint.ops.gated_delta.rule.shape import describe

_OP = "gated_delta_rule"
_INPUTS = ("q", "k", "v", "g", "beta", "initial_state?", "cu_seqlens?")


def _state_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    return (count_sequences(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3])


def _saved_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return (saved_states(q.shape[0] * q.shape[1]), v.shape[2], q.shape[3], v.shape[3])


def _check(*arguments: Any) -> None:
    q, k, v, g, beta, initial_state, cu_seqlens, *_ = arguments
    metadata.require_tokens(_OP, q, k, v, g, beta)
    require_cu_seqlens(_OP, cu_seqlens, q)
    if initial_state is not None:
        metadata.require_states(_OP, "initial_state", initial_state, _state_shape(q, v, cu_seqlens), q)


def _check_backward(do: Tensor | None, dfinal_state: Tensor | None, *arguments: Any) -> None:
    q, _k, v, _g, _beta, initial_state, cu_seqlens, saved, _scale, _normalize_qk, need = arguments
    _check(*arguments)
    if do is not None:
        metadata.require_same(_OP, "do", do, "v", v)
        metadata.require_shape(_OP, "do", do, tuple(v.shape), "that of v")
    if dfinal_state is not None:
        metadata.require_states(_OP, "dfinal_state", dfinal_state, _state_shape(q, v, cu_seqlens), q)
    metadata.require_states(_OP, "saved", saved, _saved_shape(q, v), q)
    if need & NEED_STATE and initial_state is None:
        raise ArgumentError(f"{_OP}: need asks for the gradient of initial_state, and none is given")


def _allocate(*arguments: Any) -> tuple[Tensor, ...]:
    q, _k, v, _g, _beta, _initial_state, cu_seqlens, _scale, _normalize_qk, output_final_state, _checking, keep = (
        arguments
    )
    kind = wide_dtype(q.dtype)
    return (
        empty_like(v),
        v.new_empty(_state_shape(q, v, cu_seqlens) if output_final_state else (0,), dtype=kind),
        v.new_empty(_saved_shape(q, v) if keep else (0,), dtype=kind),
    )


def _describe(*arguments: Any) -> Facts:
    q, k, v, g, beta, initial_state, cu_seqlens, *_ = arguments
    return describe({"q": q, "k": k, "v": v, "g": g, "beta": beta}, {"initial_state": initial_state}, cu_seqlens)


def _describe_backward(do: Tensor | None, dfinal_state: Tensor | None, *arguments: Any) -> Facts:
    q, k, v, g, beta, initial_state, cu_seqlens, *_ = arguments
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "do": do}
    return describe(tokens, {"initial_state": initial_state, "dfinal_state": dfinal_state}, cu_seqlens)


def _absent(*arguments: Any) -> tuple[str, ...]:
    _scale, _normalize_qk, output_final_state, *_ = arguments[len(_INPUTS) :]
    return () if output_final_state else ("final_state",)


_rule = Op(
    _OP,
    inputs=_INPUTS,
    differentiable=("q", "k", "v", "g", "beta", "initial_state"),
    options="float scale, bool normalize_qk, bool output_final_state, bool checking",
    outputs=("o", "final_state"),
    kept=("saved",),
    absent=_absent,
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.RULE,
    flops=recurrence,
    adjoint=Adjoint(
        lambda: plans.RULE_BACKWARD,
        _describe_backward,
        options="float scale, bool normalize_qk",
        options_of=lambda *arguments: arguments[len(_INPUTS) : len(_INPUTS) + 2],
        check=_check_backward,
        flops=recurrence_backward,
    ),
)


@_rule.public
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
    """The gated delta rule over whole sequences: every token's output, and the state after the last token.

    Time comes before heads: [B, T, H, D]. Tensors with heads first, [B, H, T, D], give a wrong result without an error
    if their shapes allow it, which they do when there are as many key heads as value heads.

    Value head h reads key head h // (H / Hg). Under autocast q, k and v are cast to its dtype, unless they are float64;
    gates and states are not.

    Args:
        q, k: queries and keys; float64, float32, bfloat16 or float16, one dtype for q, k and v. K is at most 256.
        v: values; its heads are a multiple of those of q and k. V is at most 256.
        g: the logarithm of the decay, at most 0; float32 or the dtype of q. −inf resets the state: nothing before the
            token reaches it or a later token, and the gradient of this g is 0.
        beta: the strength, from 0 to 1; float32 or the dtype of q.
        scale: a factor of the outputs; 1/sqrt(K) by default.
        initial_state: the first state of each sequence, float32 (float64 for float64); 0 by default.
        output_final_state: whether to return the final states; otherwise None is returned in their place.
        cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of sequences that are packed in the only row of
            the batch. Without it every row is a sequence.
        normalize_qk: whether to divide q and k by sqrt(Σx² + 1e-6) first.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, or (on the CPU) g is positive or cu_seqlens is out of
            order; on a GPU `adjoint.check()` raises for values. Inside `adjoint.checked()` also if g is NaN, beta is
            not from 0 to 1, or, without normalize_qk, a key makes the state grow: e^g·(β‖k‖² − 1) is more than 1 + 2⁻⁶.
            Then I − βkkᵀ has an eigenvalue below −1. The decay does not compensate it, and the rounding of keys does
            not explain it.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> q = k = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2)
    >>> v, g, beta = torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1), torch.full((1, 3, 1), 0.5)
    >>> o, state = gated_delta_rule(q, k, v, g, beta, scale=1.0, output_final_state=True)
    >>> o.flatten(), state.flatten()
    (tensor([0.5000, 0.7500, 0.8750]), tensor([0.8750, 0.0000]))
    """
    q, k, v, g, beta = metadata.autocast(q, k, v, g, beta)
    metadata.require_axes(_OP, "q", q, "batch, time, key heads, K")
    scale = metadata.scale_of(_OP, scale, q.shape[3])
    flags = (
        require_flag(_OP, "normalize_qk", normalize_qk),
        require_flag(_OP, "output_final_state", output_final_state),
    )
    options = (scale, *flags, is_checking())
    o, final_state = _rule.call(q, k, v, g, beta, initial_state, cu_seqlens, *options, preference=preference)
    return o, final_state if output_final_state else None
