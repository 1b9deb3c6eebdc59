"""Checks of what metadata shows about q, k, v, gates and states; shared by the whole op, its step and its stages."""

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short, wide_dtype

MAX_HEAD_SIZE = 256
"""The largest K and V: a state of 256 × 256 is what kernels can hold in a processor's registers, split over V."""


EPSILON = 1e-6
"""Keeps the norm of q and k away from 0."""

NEED_Q, NEED_K, NEED_V, NEED_G, NEED_BETA, NEED_STATE = (1 << bit for bit in range(6))
"""Bits of the gradients a backward computes."""


def _words(shape: tuple[object, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def require_shape(op: str, name: str, value: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != tuple(shape):
        raise ArgumentError(
            f"{op}: {name} must have shape {_words(shape)}, {meaning}, got {_words(tuple(value.shape))}"
        )


def require_same(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """A floating tensor of the dtype and device of another."""
    require_floating(op, name, value)
    if value.dtype != like.dtype:
        raise ArgumentError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {short(value.dtype)}"
        )
    require_device(op, name, value, like_name, like)


def require_device(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")


def require_axes(op: str, name: str, value: Tensor, axes: str) -> None:
    """A floating tensor with as many axes as the words name."""
    require_floating(op, name, value)
    if value.dim() != len(axes.split(", ")):
        raise ArgumentError(f"{op}: {name} must have the axes [{axes}], got shape {_words(tuple(value.shape))}")


def require_head_size(op: str, name: str, letter: str, size: int) -> None:
    if size > MAX_HEAD_SIZE:
        raise ArgumentError(
            f"{op}: {letter}, the last axis of {name}, is {size}; the cap is {MAX_HEAD_SIZE}, because a state of "
            f"K × V numbers must stay on a processor while the tokens of a sequence go by"
        )


def require_heads(op: str, key_name: str, key_heads: int, value_name: str, value_heads: int) -> None:
    if key_heads == 0 and value_heads == 0:
        return
    if key_heads == 0 or value_heads % key_heads:
        raise ArgumentError(
            f"{op}: the {value_heads} heads of {value_name} must be a multiple of the {key_heads} heads of {key_name}: "
            f"value head h reads key head h // (H / Hg)"
        )


def require_gate(op: str, name: str, value: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """[B, T, H] in float32, or the dtype of q, k and v."""
    require_floating(op, name, value)
    require_shape(op, name, value, shape, "[batch, time, value heads]")
    if value.dtype not in (torch.float32, like.dtype):
        expected = dict.fromkeys(("float32", short(like.dtype)))
        raise ArgumentError(f"{op}: {name} must be {' or '.join(expected)}, got {short(value.dtype)}")
    require_device(op, name, value, "q", like)


def require_queries(op: str, q: Tensor, k: Tensor, v: Tensor, values: str = "v") -> None:
    """q, k [B, T, Hg, K], v [B, T, H, V] of one dtype, one device; `values` is what the caller calls v."""
    require_axes(op, "q", q, "batch, time, key heads, K")
    batch, time, key_heads, K = q.shape
    require_axes(op, "k", k, "batch, time, key heads, K")
    require_shape(op, "k", k, (batch, time, key_heads, K), "that of q")
    require_same(op, "k", k, "q", q)
    require_axes(op, values, v, "batch, time, value heads, V")
    if tuple(v.shape[:2]) != (batch, time):
        raise ArgumentError(
            f"{op}: {values} must begin with the batch and time of q, {_words((batch, time))}, got shape "
            f"{_words(tuple(v.shape))}"
        )
    require_same(op, values, v, "q", q)
    require_head_size(op, "q and k", "K", K)
    require_head_size(op, values, "V", v.shape[3])
    require_heads(op, "q and k", key_heads, values, v.shape[2])


def require_tokens(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """q, k [B, T, Hg, K], v [B, T, H, V] of one dtype, g and beta [B, T, H]; one device."""
    require_queries(op, q, k, v)
    for name, value in (("g", g), ("beta", beta)):
        require_gate(op, name, value, tuple(v.shape[:3]), q)


def require_states(
    op: str,
    name: str,
    value: Tensor,
    shape: tuple[int, ...],
    like: Tensor,
    like_name: str = "q",
    tokens: str = "q, k and v",
) -> None:
    """[N, H, K, V] in float32, float64 beside float64; `like_name` and `tokens` are what the caller has beside it."""
    require_floating(op, name, value)
    require_shape(op, name, value, shape, "[sequences, value heads, K, V]")
    expected = wide_dtype(like.dtype)
    if value.dtype != expected:
        raise ArgumentError(
            f"{op}: {name} must be {short(expected)} beside {short(like.dtype)} {tokens}, got {short(value.dtype)}"
        )
    require_device(op, name, value, like_name, like)


def require_cu_seqlens(op: str, cu_seqlens: Tensor, like: Tensor, name: str = "q") -> None:
    """[N + 1] int32 or int64, and a batch of one row; `name` is what the caller calls `like`."""
    require_ids(op, "cu_seqlens", cu_seqlens, name, like)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ArgumentError(
            f"{op}: cu_seqlens must have one axis, the N + 1 bounds of N sequences, got shape "
            f"{_words(tuple(cu_seqlens.shape))}"
        )
    if like.shape[0] != 1:
        raise ArgumentError(
            f"{op}: cu_seqlens cuts the tokens of one row, so the batch of {name} must be 1, got {like.shape[0]}; "
            f"lay the rows one after the other"
        )


def scale_of(op: str, scale: float | None, K: int) -> float:
    """The factor of the outputs: as given, or 1/sqrt(K)."""
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


MAX_CHUNK = 64
"""The largest chunk of the stages."""


def require_chunk(op: str, name: str, chunk: int) -> None:
    if chunk < 1 or chunk > MAX_CHUNK or chunk & (chunk - 1):
        raise ArgumentError(
            f"{op}: the chunk, the last axis of {name}, must be a power of two up to {MAX_CHUNK}, got {chunk}: the "
            f"chunk's matrix must fit on a processor beside its keys and values"
        )
