"""A few tokens of decoding.   S ← e^{g_t}·S;   S ← S + k_t ⊗ β_t·(v_t − Sᵀk_t);   o_t = scale·Sᵀq_t

for up to 16 tokens of each row, from a state of its own. The adjoint, out of place only, is that of the whole rule,
token by token: see `eager_step.py`. Saves its inputs. In place is another operator, without an adjoint.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError, is_checking, second_derivative
from adjoint.core.layout import overlaps_itself
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem, short
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.step import plans as step_plans

_OP = "gated_delta_step"

MAX_TOKENS = 16
"""Tokens of a row a step takes."""


class _Given(NamedTuple):
    """The arguments of the operators, in place or not, in the order of their schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    state_indices: Tensor | None
    scale: float
    normalize_qk: bool
    all_states: bool
    checking: bool


class _Upstream(NamedTuple):
    """Those of the adjoint; `need` has a bit for each gradient that is wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    do: Tensor | None
    dstate: Tensor | None
    state_indices: Tensor | None
    scale: float
    normalize_qk: bool
    all_states: bool
    need: int


def _check_inputs(given: _Given | _Upstream) -> None:
    q, v, state, state_indices = given.q, given.v, given.state, given.state_indices
    metadata.require_tokens(_OP, *given[:5])
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise ArgumentError(
            f"{_OP}: takes 1 to {MAX_TOKENS} tokens of each row, got {q.shape[1]}: tokens go one after the other here; "
            f"gated_delta_rule takes long sequences by chunks"
        )
    require_floating(_OP, "state", state)
    if state.dim() != 4:
        raise ArgumentError(
            f"{_OP}: state must have the axes [states, value heads, K, V], got shape {tuple(state.shape)}"
        )
    number = q.shape[0] if state_indices is None else state.shape[0]
    metadata.require_shape(
        _OP, "state", state, (number, v.shape[2], q.shape[3], v.shape[3]), "[states, value heads, K, V]"
    )
    kinds = (torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)
    if state.dtype not in kinds:
        raise ArgumentError(
            f"{_OP}: state must be {' or '.join(map(short, kinds))} beside {short(q.dtype)} q, k and v, got "
            f"{short(state.dtype)}"
        )
    metadata.require_device(_OP, "state", state, "q", q)
    if state_indices is not None:
        require_ids(_OP, "state_indices", state_indices, "q", q)
        metadata.require_shape(_OP, "state_indices", state_indices, (q.shape[0],), "one for each row")


def _check(*arguments: Any) -> None:
    _check_inputs(_Given(*arguments))


def _check_in_place(*arguments: Any) -> None:
    given = _Given(*arguments)
    _check_inputs(given)
    if overlaps_itself(given.state):
        raise ArgumentError(
            f"{_OP}: state, which in_place=True overwrites, has elements that share memory: shape "
            f"{tuple(given.state.shape)}, strides {given.state.stride()}; give it memory of its own, as by clone()"
        )


def _check_backward(*arguments: Any) -> None:
    given = _Upstream(*arguments)
    _check_inputs(given)
    if given.do is not None:
        metadata.require_same(_OP, "do", given.do, "v", given.v)
        metadata.require_shape(_OP, "do", given.do, tuple(given.v.shape), "that of v")
    if given.dstate is not None:
        metadata.require_same(_OP, "dstate", given.dstate, "state", given.state)
        metadata.require_shape(_OP, "dstate", given.dstate, _states_shape(given), "that of the new states")


def _states_shape(given: _Given | _Upstream) -> tuple[int, ...]:
    q, v = given.q, given.v
    rows = q.shape[:2] if given.all_states else q.shape[:1]
    return (*rows, v.shape[2], q.shape[3], v.shape[3])


def _problem(op: str, given: _Given | _Upstream, options: tuple[Any, ...], sizes: tuple[int, ...] = ()) -> Problem:
    """`sizes`, beside those of heads, are what the adjoint's workspace depends on."""
    kinds: tuple[torch.dtype, ...] = (given.q.dtype, given.g.dtype, given.beta.dtype, given.state.dtype)
    if given.state_indices is not None:
        kinds = (*kinds, given.state_indices.dtype)
    return Problem(op, given.q.device, kinds, sizes=(given.q.shape[3], given.v.shape[3], *sizes), options=options)


def _describe(op: str) -> Callable[..., Problem]:
    return lambda *arguments: _problem(op, _Given(*arguments), arguments[7:])


def _describe_backward(*arguments: Any) -> Problem:
    return _problem(f"{_OP}_backward", _Upstream(*arguments), arguments[9:], tuple(arguments[2].shape[:3]))


def _allocate(*arguments: Any) -> tuple[Tensor, ...]:
    given = _Given(*arguments)
    return given.v.new_empty(given.v.shape), given.state.new_empty(_states_shape(given))


def _allocate_in_place(*arguments: Any) -> tuple[Tensor, ...]:
    given = _Given(*arguments)
    return given.v.new_empty(given.v.shape), given.state.new_empty(_states_shape(given) if given.all_states else (0,))


def _allocate_backward(*arguments: Any) -> tuple[Tensor, ...]:
    given = _Upstream(*arguments)
    return tuple(
        given.q.new_empty(x.shape if given.need >> bit & 1 else (0,), dtype=x.dtype)
        for bit, x in enumerate(arguments[:6])
    )


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"

_step = define(
    _OP,
    f"{_TENSORS}, Tensor state, Tensor? state_indices, float scale, bool normalize_qk, bool all_states, bool checking",
    "(Tensor, Tensor)",
    outputs=("o", "new_state"),
    tensors=("q", "k", "v", "g", "beta", "state", "state_indices"),
    check=_check,
    allocate=_allocate,
    describe=_describe(_OP),
    candidates=lambda: step_plans.STEP,
)
_step_in_place = define(
    f"{_OP}_in_place",
    f"{_TENSORS}, Tensor(a!) state, Tensor? state_indices, float scale, bool normalize_qk, bool all_states, "
    "bool checking",
    "(Tensor, Tensor)",
    outputs=("o", "states"),
    tensors=("q", "k", "v", "g", "beta", "state", "state_indices"),
    check=_check_in_place,
    allocate=_allocate_in_place,
    describe=_describe(f"{_OP}_in_place"),
    candidates=lambda: step_plans.STEP_IN_PLACE,
)
_step_backward = define(
    f"{_OP}_backward",
    f"{_TENSORS}, Tensor state, Tensor? do, Tensor? dstate, Tensor? state_indices, float scale, bool normalize_qk, "
    "bool all_states, int need",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    outputs=("dq", "dk", "dv", "dg", "dbeta", "dstate"),
    tensors=("q", "k", "v", "g", "beta", "state", "do", "dstate", "state_indices"),
    check=_check_backward,
    allocate=_allocate_backward,
    describe=_describe_backward,
    candidates=lambda: step_plans.STEP_BACKWARD,
)


class _GatedDeltaStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Of the operator's arguments and the preference."""
        given = _Given(*arguments[:-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[:7])
        ctx.options, ctx.preference = (given.scale, given.normalize_qk, given.all_states), arguments[-1]
        return _step(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative(_OP)
        if do is None and dstate is None:
            return (None,) * 12
        *given, state_indices = ctx.saved_tensors
        need = sum(1 << bit for bit in range(6) if ctx.needs_input_grad[bit])
        gradients = _step_backward(*given, do, dstate, state_indices, *ctx.options, need, ctx.preference)
        wanted = (gradient if need >> bit & 1 else None for bit, gradient in enumerate(gradients))
        return (*wanted, None, None, None, None, None, None)


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

    Everything is computed in float32 (float64 for float64); a state is rounded to its dtype once, after the last
    token, and each of all states once.

    Args:
        q, k, v, g, beta, scale, normalize_qk: as for `gated_delta_rule`.
        state: the state of each row, or a pool of states that `state_indices` picks from; float32 or bfloat16
            (float64 for float64).
        state_indices: int32 or int64, which state each row reads (and writes, in place); −1 skips the row, whose
            outputs and new state are 0. Two rows of one in-place step must not share a state: inside
            `adjoint.checked()` that is an error, elsewhere what is left of it is undefined.
        in_place: overwrites `state`, which is returned, instead of giving the rows' new states. Not differentiable.
        return_all_states: gives the state after each token, [batch, time, value heads, K, V], in place of the last.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or sizes are wrong, an in-place step is asked for a gradient, or (on the
            CPU) g is positive or an index out of range; on a GPU `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> q = k = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    >>> v, g, beta = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5)
    >>> o, state = gated_delta_step(q, k, v, g, beta, torch.zeros(1, 1, 2, 1), scale=1.0)
    >>> o.flatten(), state.flatten()
    (tensor([0.5000]), tensor([0.5000, 0.0000]))
    """
    arguments = _arguments(q, k, v, g, beta, state, scale, state_indices, return_all_states, normalize_qk)
    text = resolve(preference)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:6])
    if in_place:
        if wanted:
            raise ArgumentError(
                f"{_OP}: in_place=True overwrites the state its gradient would need, and an input requires a "
                f"gradient; call it under torch.no_grad(), or with in_place=False"
            )
        _check_in_place(*arguments)
        o, states = _step_in_place(*arguments, text)
        if not (torch.compiler.is_compiling() or state.is_inference()):
            torch.autograd.graph.increment_version(state)
        return o, states if return_all_states else state
    if wanted:
        return _GatedDeltaStep.apply(*arguments, text)  # type: ignore[no-any-return]
    return _step(*arguments, text)  # type: ignore[no-any-return]


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None,
    state_indices: Tensor | None,
    return_all_states: bool,
    normalize_qk: bool,
) -> tuple[Any, ...]:
    """The operator's arguments, checked."""
    q, k, v, g, beta = metadata.autocast(q, k, v, g, beta)
    metadata.require_tokens(_OP, q, k, v, g, beta)
    options = (metadata.scale_of(_OP, scale, q.shape[3]), bool(normalize_qk), bool(return_all_states), is_checking())
    arguments = (q, k, v, g, beta, state, state_indices, *options)
    _check(*arguments)
    return arguments


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    state_indices: Tensor | None = None,
    in_place: bool = False,
    return_all_states: bool = False,
    normalize_qk: bool = False,
) -> Call:
    arguments = _arguments(q, k, v, g, beta, state, scale, state_indices, return_all_states, normalize_qk)
    if in_place:
        _check_in_place(*arguments)
        return Call(_step_in_place, arguments, public_outputs=2 if return_all_states else 1)
    tensors, options = arguments[:6], arguments[7:10]
    return Call(
        _step,
        arguments,
        _step_backward,
        lambda upstream, outputs: (*tensors, *upstream, state_indices, *options, 63),
    )


publish(gated_delta_step, _bind)
