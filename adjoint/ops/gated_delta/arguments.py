"""Checks of what metadata shows about q, k, v, gates and states, and the value errors of the family."""

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError, Fault, register_fault, report
from adjoint.core.problem import short, wide_dtype

Shape = tuple[int, ...]

MAX_HEAD_SIZE = 256
"""The largest K and V. Kernels can keep a state of 256 × 256 in a processor's registers if it is split over V."""

MAX_CHUNK = 64
"""The largest chunk of the stages."""

EPSILON = 1e-6
"""The number that keeps the norm of q and k away from 0."""

RESET = {torch.float32: -104.0, torch.float64: -746.0}
"""A log decay g for which e^g is 0, by the type of the arithmetic.

A lower g, down to −inf, resets the state as well. But a running sum of such numbers has no digits left for the tokens
after them, or is −inf. So sums take RESET in place of lower numbers.
"""

NEED_Q, NEED_K, NEED_V, NEED_G, NEED_BETA, NEED_STATE = (1 << bit for bit in range(6))
"""The bits of the gradients in the mask of a backward."""


def require_shape(op: str, name: str, value: Tensor, shape: Shape, meaning: str) -> None:
    if value.shape != shape:
        raise ArgumentError(f"{op}: {name} must have shape {tuple(shape)}, {meaning}, got {tuple(value.shape)}")


def require_device(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")


def require_same(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Requires a floating tensor with the dtype and device of another tensor."""
    require_floating(op, name, value)
    if value.dtype != like.dtype:
        raise ArgumentError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {short(value.dtype)}"
        )
    require_device(op, name, value, like_name, like)


def require_axes(op: str, name: str, value: Tensor, axes: str) -> None:
    """Requires a floating tensor with as many axes as the words name."""
    require_floating(op, name, value)
    if value.dim() != len(axes.split(", ")):
        raise ArgumentError(f"{op}: {name} must have the axes [{axes}], got shape {tuple(value.shape)}")


def require_beside(
    op: str,
    name: str,
    value: Tensor,
    shape: Shape,
    axes: str,
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
    like_name: str = "q",
    tokens: str = "",
) -> None:
    """Requires a floating tensor with a shape and one of some dtypes, on the device of another tensor.

    Args:
        axes: the shape in words.
        like, like_name: the other tensor and its name.
        tokens: the names of the tensors whose dtype decides which dtypes are right; the error names them.
    """
    require_floating(op, name, value)
    require_shape(op, name, value, shape, axes)
    if value.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(map(short, dtypes)))
        beside = f" beside {short(like.dtype)} {tokens}" if tokens else ""
        raise ArgumentError(f"{op}: {name} must be {expected}{beside}, got {short(value.dtype)}")
    require_device(op, name, value, like_name, like)


def require_head_size(op: str, name: str, letter: str, size: int) -> None:
    if size > MAX_HEAD_SIZE:
        raise ArgumentError(
            f"{op}: {letter}, the last axis of {name}, is {size}; the cap is {MAX_HEAD_SIZE}, because a state of "
            f"K × V numbers must stay on a processor while the tokens of a sequence go by"
        )


def require_heads(op: str, keys: str, k: Tensor, values: str, v: Tensor) -> None:
    """Requires heads up to the largest size, and value heads in groups. `v` may be gates, whose heads have no size."""
    require_head_size(op, keys, "K", k.shape[3])
    if v.dim() == 4:
        require_head_size(op, values, "V", v.shape[3])
    key_heads, heads = k.shape[2], v.shape[2]
    if heads % key_heads if key_heads else heads:
        raise ArgumentError(
            f"{op}: the {heads} heads of {values} must be a multiple of the {key_heads} heads of {keys}: "
            f"value head h reads key head h // (H / Hg)"
        )


def require_values(op: str, name: str, v: Tensor, like_name: str, like: Tensor) -> None:
    """Requires values [B, T, H, V] with the batch, time, dtype and device of keys."""
    require_axes(op, name, v, "batch, time, value heads, V")
    if v.shape[:2] != like.shape[:2]:
        raise ArgumentError(
            f"{op}: {name} must begin with the batch and time of {like_name}, {tuple(like.shape[:2])}, got shape "
            f"{tuple(v.shape)}"
        )
    require_same(op, name, v, like_name, like)


def require_queries(op: str, q: Tensor, k: Tensor, v: Tensor, values: str = "v") -> None:
    """Requires q, k [B, T, Hg, K] and v [B, T, H, V] in one dtype on one device. `values` is the caller's name of v."""
    require_axes(op, "q", q, "batch, time, key heads, K")
    require_axes(op, "k", k, "batch, time, key heads, K")
    require_shape(op, "k", k, q.shape, "that of q")
    require_same(op, "k", k, "q", q)
    require_values(op, values, v, "q", q)
    require_heads(op, "q and k", q, values, v)


def require_tokens(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Requires q, k [B, T, Hg, K] and v [B, T, H, V] in one dtype, and g and beta [B, T, H] in it or in float32; all on
    one device."""
    require_queries(op, q, k, v)
    shape, dtypes = v.shape[:3], (torch.float32, q.dtype)
    for name, value in (("g", g), ("beta", beta)):
        require_beside(op, name, value, shape, "[batch, time, value heads]", dtypes, q)


def require_states(
    op: str, name: str, value: Tensor, shape: Shape, like: Tensor, like_name: str = "q", tokens: str = "q, k and v"
) -> None:
    """Requires states [N, H, K, V] in float32, or in float64 beside float64 tokens.

    `like_name` and `tokens` are the caller's names of the tensors beside them.
    """
    dtypes = (wide_dtype(like.dtype),)
    require_beside(op, name, value, shape, "[sequences, value heads, K, V]", dtypes, like, like_name, tokens)


def require_chunk(op: str, name: str, chunk: int) -> None:
    if chunk < 1 or chunk > MAX_CHUNK or chunk & (chunk - 1):
        raise ArgumentError(
            f"{op}: the chunk, the last axis of {name}, must be a power of two up to {MAX_CHUNK}, got {chunk}: the "
            f"chunk's matrix must fit on a processor beside its keys and values"
        )


def scale_of(op: str, scale: float | None, K: int) -> float:
    """The factor of the outputs: the caller's, or 1/sqrt(K)."""
    if scale is None:
        return max(1, K) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise ArgumentError(f"{op}: scale must be a number, or None for 1/sqrt(K), got {scale!r}")
    return float(scale)


def autocast(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Casts q, k and v to autocast's dtype. Gates keep their values, and are widened if their dtype no longer fits."""
    if not isinstance(q, Tensor) or q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v, g, beta
    low = torch.get_autocast_dtype(q.device.type)

    def cast(x: Tensor) -> Tensor:
        fits = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(low) if fits else x

    def widen(x: Tensor) -> Tensor:
        narrow = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) and x.dtype != low
        return x.float() if narrow else x

    return cast(q), cast(k), cast(v), widen(g), widen(beta)


# ---------------------------------------------------------------------------------------------- value errors

SEQUENCES_OUT_OF_ORDER = register_fault(
    "gated_delta: cu_seqlens must begin with 0, never descend, and end with the number of tokens, "
    "got {value} at position {position} of cu_seqlens"
)
POSITIVE_GATE = register_fault(
    "gated_delta: g is the logarithm of a decay and must be at most 0, got a positive number at position "
    "{position} (counted in order); a decay factor goes in as its logarithm"
)
NAN_GATE = register_fault(
    "gated_delta: g must be a number of at most 0, −inf included, got NaN at position {position} (counted in order); "
    "the state would be NaN from there on, so look for where g was computed"
)
STRENGTH_OUT_OF_RANGE = register_fault(
    "gated_delta: beta must be from 0 to 1, got a number outside of that, or NaN, at position {position} (counted in "
    "order); beta goes in after its sigmoid, and a model that means a beta of up to 2 runs without adjoint.checked()"
)
GROWING_STATE = register_fault(
    "gated_delta: a key makes the state grow at position {position} of beta (counted in order), where "
    "e^g·(beta·‖k‖² − 1) is more than 1; normalise the keys, as normalize_qk=True does"
)
STATE_INDEX_OUT_OF_RANGE = register_fault(
    "gated_delta_step: state_indices must be at least 0 and less than the number of states, or -1 for a row that is "
    "skipped, got {value} at position {position}"
)
STATE_INDEX_REPEATED = register_fault(
    "gated_delta_step: state_indices must not repeat, because two rows would write one state, got {value} again at "
    "position {position}"
)


_ROUNDING_OF_KEYS = 2.0**-6
"""The most that rounding a key to bfloat16 may add to beta·‖k‖² − 1 if that is 1 before."""


def report_values(k: Tensor, g: Tensor, beta: Tensor, normalized: bool, skipped: Tensor | None = None) -> None:
    """Reports values that `adjoint.checked()` refuses: gates that are NaN, beta outside of [0, 1], and keys that make a
    state grow.

    A token multiplies the part of the state along its key by e^g·(1 − β‖k‖²), and all other parts by at most e^g. So
    the state grows if that factor is below −1 by more than the rounding of keys explains.

    Args:
        normalized: whether keys are normalised, so that none is longer than 1.
        skipped: rows of the batch that are not computed and may have any values.
    """
    kind = wide_dtype(k.dtype)

    def report_in_rows(fault: Fault, values: Tensor, faulty: Tensor) -> None:
        report(fault, values, faulty if skipped is None else faulty & ~skipped[:, None, None])

    report_in_rows(NAN_GATE, g, g.isnan())
    report_in_rows(STRENGTH_OUT_OF_RANGE, beta, ~((beta >= 0) & (beta <= 1)))
    if not normalized:
        squares = k.to(kind).square().sum(-1).repeat_interleave(beta.shape[2] // max(1, k.shape[2]), 2)
        growth = g.to(kind).exp() * (beta.to(kind) * squares - 1)
        report_in_rows(GROWING_STATE, beta, growth > 1 + _ROUNDING_OF_KEYS)
