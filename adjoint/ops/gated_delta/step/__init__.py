"""A few tokens of decoding.   S ← e^{g_t}·S;   S ← S + k_t ⊗ β_t·(v_t − Sᵀk_t);   o_t = scale·Sᵀq_t

for up to 16 tokens of each row, from a state of its own. The adjoint, out of place only, is that of the whole rule,
token by token: see `eager.py`. Saves its inputs. In place is an op of its own, without an adjoint.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag, require_ids
from adjoint.core.errors import ArgumentError, is_checking
from adjoint.core.layout import empty_like, overlaps_itself
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.flops import recurrence, recurrence_backward
from adjoint.ops.gated_delta.step import plans

_OP = "gated_delta_step"

MAX_TOKENS = 16
"""The most tokens of a row that a step takes."""


def _check(*arguments: Any) -> None:
    q, k, v, g, beta, state, state_indices, *_ = arguments
    metadata.require_tokens(_OP, q, k, v, g, beta)
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise ArgumentError(
            f"{_OP}: takes 1 to {MAX_TOKENS} tokens of each row, got {q.shape[1]}: tokens go one after the other here; "
            f"gated_delta_rule takes long sequences by chunks"
        )
    metadata.require_axes(_OP, "state", state, "states, value heads, K, V")
    number = q.shape[0] if state_indices is None else state.shape[0]
    shape = (number, v.shape[2], q.shape[3], v.shape[3])
    dtypes = (torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)
    metadata.require_beside(_OP, "state", state, shape, "[states, value heads, K, V]", dtypes, q, tokens="q, k and v")
    if state_indices is not None:
        require_ids(_OP, "state_indices", state_indices, "q", q)
        metadata.require_shape(_OP, "state_indices", state_indices, (q.shape[0],), "one for each row")


def _check_in_place(*arguments: Any) -> None:
    _check(*arguments)
    _q, _k, _v, _g, _beta, state, *_ = arguments
    if overlaps_itself(state):
        raise ArgumentError(
            f"{_OP}: state, which in_place=True overwrites, has elements that share memory: shape "
            f"{tuple(state.shape)}, strides {state.stride()}; give it memory of its own, as by clone()"
        )


def _allocate(*arguments: Any) -> tuple[Tensor, ...]:
    q, _k, v, _g, _beta, state, _indices, _scale, _normalize_qk, all_states, *_ = arguments
    rows = q.shape[:2] if all_states else q.shape[:1]
    return empty_like(v), state.new_empty((*rows, v.shape[2], q.shape[3], v.shape[3]))


def _absent_in_place(*arguments: Any) -> tuple[str, ...]:
    _scale, _normalize_qk, all_states, *_ = arguments[len(_INPUTS) :]
    return () if all_states else ("states",)


def _allocate_in_place(*arguments: Any) -> tuple[Tensor, ...]:
    out, states = _allocate(*arguments)
    return out, states.new_empty(0) if _absent_in_place(*arguments) else states


def _describe(*arguments: Any) -> Facts:
    q, _k, v, g, beta, state, state_indices, *_ = arguments
    dtypes: tuple[torch.dtype, ...] = (q.dtype, g.dtype, beta.dtype, state.dtype)
    if state_indices is not None:
        dtypes = (*dtypes, state_indices.dtype)
    return Facts(dtypes, sizes=(q.shape[3], v.shape[3]))


def _describe_backward(do: Any, dnew_state: Any, *arguments: Any) -> Facts:
    """The facts of the forward, and the rows, tokens and heads on which the workspace depends."""
    _q, _k, v, *_ = arguments
    facts = _describe(*arguments)
    return facts._replace(sizes=(*facts.sizes, *v.shape[:3]))


_INPUTS = ("q", "k", "v", "g", "beta", "state", "state_indices?")
_OPTIONS = "float scale, bool normalize_qk, bool all_states"
_FORWARD: dict[str, Any] = {
    "inputs": _INPUTS,
    "options": f"{_OPTIONS}, bool checking",
    "describe": _describe,
    "flops": recurrence,
}

_step = Op(
    _OP,
    **_FORWARD,
    differentiable=_INPUTS[:6],
    outputs=("o", "new_state"),
    check=_check,
    allocate=_allocate,
    forward=lambda: plans.STEP,
    adjoint=Adjoint(
        lambda: plans.STEP_BACKWARD,
        _describe_backward,
        options=_OPTIONS,
        options_of=lambda *arguments: arguments[len(_INPUTS) : -1],
        flops=recurrence_backward,
    ),
)
_step_in_place = Op(
    f"{_OP}_in_place",
    **_FORWARD,
    label=_OP,
    differentiable=(),
    outputs=("o", "states"),
    absent=_absent_in_place,
    overwrites=("state",),
    check=_check_in_place,
    allocate=_allocate_in_place,
    forward=lambda: plans.STEP_IN_PLACE,
)


@_step.public
def gated_delta_step(
    q: Float[Tensor, "batch time key_heads K"],
    k: Float[Tensor, "batch time key_heads K"],
    v: Float[Tensor, "batch time value_heads V"],
    g: Float[Tensor, "batch time value_heads"],
    beta: Float[Tensor, "batch time value_heads"],
    state: Float[Tensor, "states value_heads K V"],
    *,
    scale: float | None = None,
    state_indices: Int[Tensor, " batch"] | None = None,
    in_place: bool = False,
    return_all_states: bool = False,
    normalize_qk: bool = False,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "batch time value_heads V"], Float[Tensor, "*states value_heads K V"]]:
    """The gated delta rule for the next 1 to 16 tokens of each row: their outputs, and the state after them.

    Everything is computed in float32 (float64 for float64). A state is rounded to its dtype once, after the last token;
    with `return_all_states` each state is rounded once.

    Args:
        q, k, v, g, beta, scale, normalize_qk: as for `gated_delta_rule`, time before heads.
        state: the state of each row, or a pool of states that `state_indices` picks from; float32 or bfloat16
            (float64 for float64).
        state_indices: int32 or int64, the state that each row reads and, in place, writes. −1 skips the row, whose
            outputs and new state are 0. Two rows of an in-place step must not share a state. Inside
            `adjoint.checked()` this is an error; elsewhere that state is undefined afterwards.
        in_place: whether to overwrite `state`, which is then returned, instead of returning the rows' new states. This
            is not differentiable.
        return_all_states: whether to return the states after each token, [batch, time, value heads, K, V], instead of
            the last ones.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, a gradient is asked of an in-place step, or (on the
            CPU) g is positive or an index is out of range; on a GPU `adjoint.check()` raises for values. Inside
            `adjoint.checked()` also for the values of g, beta and keys that `gated_delta_rule` refuses there.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> q = k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> v, g, beta = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5)
    >>> o, state = gated_delta_step(q, k, v, g, beta, torch.zeros(1, 1, 2, 1), scale=1.0)
    >>> o.flatten(), state.flatten()
    (tensor([0.5000]), tensor([0.5000, 0.0000]))
    """
    q, k, v, g, beta = metadata.autocast(q, k, v, g, beta)
    metadata.require_axes(_OP, "q", q, "batch, time, key heads, K")
    flags = (
        require_flag(_OP, "normalize_qk", normalize_qk),
        require_flag(_OP, "return_all_states", return_all_states),
    )
    options = (metadata.scale_of(_OP, scale, q.shape[3]), *flags, is_checking())
    arguments = (q, k, v, g, beta, state, state_indices, *options)
    if not require_flag(_OP, "in_place", in_place):
        return _step.call(*arguments, preference=preference)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments[:6]):
        raise ArgumentError(
            f"{_OP}: in_place=True overwrites the state its gradient would need, and an input requires a "
            f"gradient; call it under torch.no_grad(), or with in_place=False"
        )
    o, states = _step_in_place.call(*arguments, preference=preference)
    return o, states if return_all_states else state
