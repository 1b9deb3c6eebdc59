"""Checks of what metadata shows about q, k, v, gates and states, and the value errors of the family."""

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError, Fault, register_fault, report
from adjoint.core.problem import short, wide_dtype

Shape = tuple[int, ...]

MAX_HEAD_SIZE = 256
"""The largest K and V: a state of 256 × 256 is what kernels can hold in a processor's registers, split over V."""

MAX_CHUNK = 64
"""The largest chunk of the stages."""

EPSILON = 1e-6
"""Keeps the norm of q and k away from 0."""

RESET = {torch.float32: -104.0, torch.float64: -746.0}
"""By the type of the arithmetic, a log decay g whose e^g is 0 there.

A lower g, down to −inf, resets the state just as well. But a running sum of such numbers has no digits left for the
tokens after them, or is −inf: sums take RESET in their place.
"""

NEED_Q, NEED_K, NEED_V, NEED_G, NEED_BETA, NEED_STATE = (1 << bit for bit in range(6))
"""Bits of the gradients a backward computes."""


def require_shape(op: str, name: str, value: Tensor, shape: Shape, meaning: str) -> None:
    if value.shape != shape:
        raise ArgumentError(f"{op}: {name} must have shape {tuple(shape)}, {meaning}, got {tuple(value.shape)}")


def require_device(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")


def require_same(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """A floating tensor of the dtype and device of another."""
    require_floating(op, name, value)
    if value.dtype != like.dtype:
        raise ArgumentError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {short(value.dtype)}"
        )
    require_device(op, name, value, like_name, like)


def require_axes(op: str, name: str, value: Tensor, axes: str) -> None:
    """A floating tensor with as many axes as the words name."""
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
    """A floating tensor of a shape and one of some dtypes, on the device of another.

    Args:
        axes: what the shape is, in words.
        like, like_name: the other tensor.
        tokens: the tensors whose dtype the error names, where it decides which dtypes are right.
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
    """Sizes of heads below the cap, and value heads in groups; `v` may be gates, which have no size."""
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
    """[B, T, H, V] with the batch, time, dtype and device of keys."""
    require_axes(op, name, v, "batch, time, value heads, V")
    if v.shape[:2] != like.shape[:2]:
        raise ArgumentError(
            f"{op}: {name} must begin with the batch and time of {like_name}, {tuple(like.shape[:2])}, got shape "
            f"{tuple(v.shape)}"
        )
    require_same(op, name, v, like_name, like)


def require_queries(op: str, q: Tensor, k: Tensor, v: Tensor, values: str = "v") -> None:
    """q, k [B, T, Hg, K], v [B, T, H, V] of one dtype, one device; `values` is what the caller calls v."""
    require_axes(op, "q", q, "batch, time, key heads, K")
    require_axes(op, "k", k, "batch, time, key heads, K")
    require_shape(op, "k", k, q.shape, "that of q")
    require_same(op, "k", k, "q", q)
    require_values(op, values, v, "q", q)
    require_heads(op, "q and k", q, values, v)


def require_tokens(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """q, k [B, T, Hg, K], v [B, T, H, V] of one dtype, g and beta [B, T, H] of it or in float32; one device."""
    require_queries(op, q, k, v)
    shape, dtypes = v.shape[:3], (torch.float32, q.dtype)
    for name, value in (("g", g), ("beta", beta)):
        require_beside(op, name, value, shape, "[batch, time, value heads]", dtypes, q)


def require_states(
    op: str, name: str, value: Tensor, shape: Shape, like: Tensor, like_name: str = "q", tokens: str = "q, k and v"
) -> None:
    """[N, H, K, V] in float32, float64 beside float64; `like_name` and `tokens` are what the caller has beside it."""
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
    """q, k and v in the dtype autocast asks for; gates keep their values, widened where their dtype no longer fits."""
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
"""What a key of bfloat16 numbers may add to beta·‖k‖² − 1, where that is 1 before it is rounded."""


def report_values(k: Tensor, g: Tensor, beta: Tensor, normalized: bool, skipped: Tensor | None = None) -> None:
    """What `adjoint.checked()` asks of the values: gates that are numbers, beta from 0 to 1, and keys that let no state
    grow.

    A token multiplies what the state holds along its key with e^g·(1 − β‖k‖²), and nothing else with more than e^g: the
    state grows where that is below −1, beyond what the rounding of keys explains.

    Args:
        normalized: whether keys are normalised, and so no longer than 1.
        skipped: rows of the batch that are not computed, and may hold anything.
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
