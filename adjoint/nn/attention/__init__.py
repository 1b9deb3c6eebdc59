"""`GatedAttention`: softmax attention with normalised heads, partial rotary positions and an output gate."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cache as cached
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from adjoint.core.arguments import require_size
from adjoint.core.errors import ArgumentError
from adjoint.device.sequences import check_bounds, require_cu_seqlens
from adjoint.nn.attention.packed import packed_attention, parts_of
from adjoint.nn.cache import ROOM, KeyValueCache, Places
from adjoint.nn.norm import RMSNorm
from adjoint.nn.tokens import require_count, require_tokens, weight_of
from adjoint.ops.activation import sigmoid_gate
from adjoint.ops.rotary import rotary

HALVES = (torch.bfloat16, torch.float16)


class GatedAttention(nn.Module):
    """o_proj · (attention(rotary(norm(q)), rotary(norm(k)), v) · σ(gate)); one projection gives q and gate.

    Each head of q and k is normalised by an RMS norm with weight 1 + w, and its first columns are rotated by the
    token's position. Query head h reads key-value head h // (heads / key-value heads). Attention is causal within each
    sequence.

    The state dict has the names and shapes of Hugging Face's `Qwen3NextAttention` and `Qwen3_5Attention`:

        q_proj.weight             [heads · 2 · head size, hidden]: query and gate of each head
        k_proj.weight, v_proj.weight  [key-value heads · head size, hidden]
        q_norm.weight, k_norm.weight  [head size]
        o_proj.weight             [hidden, heads · head size]

    Sequences never see each other, and no mask of T × T is made. On CUDA packed sequences in 16 bits go through torch's
    attention for sequences of different lengths; elsewhere they are computed one after the other. Rows are computed as
    one batch; `prefers_cudnn` says by which library.

    Args:
        hidden_size: the number of columns of a token.
        num_heads: the number of query heads, a multiple of the key-value heads.
        num_key_value_heads: the number of key-value heads.
        head_dim: the number of columns of a head.
        bias: whether the projections have biases.
        eps: the eps of the norms.
        device, dtype: those of the parameters.

    Raises:
        ArgumentError: a size is not positive, or the number of query heads is no multiple of the key-value heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = require_size("GatedAttention", "hidden_size", hidden_size)
        num_heads = require_size("GatedAttention", "num_heads", num_heads)
        num_key_value_heads = require_size("GatedAttention", "num_key_value_heads", num_key_value_heads)
        head_dim = require_size("GatedAttention", "head_dim", head_dim)
        if num_heads % num_key_value_heads:
            raise ArgumentError(
                f"GatedAttention: num_heads must be a multiple of num_key_value_heads, {num_key_value_heads}, "
                f"got {num_heads}"
            )
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_key_value_heads, self.head_dim = num_key_value_heads, head_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, 2 * num_heads * head_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias, **factory)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias, **factory)
        self.q_norm = RMSNorm(head_dim, eps, offset=1.0, **factory)
        self.k_norm = RMSNorm(head_dim, eps, offset=1.0, **factory)

    @torch.inference_mode(False)
    def new_cache(self, sequences: int, capacity: int = 0) -> KeyValueCache:
        """An empty cache for a number of sequences, with room for `capacity` tokens of each."""
        sequences = require_count("GatedAttention.new_cache", "sequences", sequences)
        shape, weight = (sequences, self.num_key_value_heads, 0, self.head_dim), self.k_proj.weight
        keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        cache = KeyValueCache(keys, values)
        cache.reserve(require_count("GatedAttention.new_cache", "capacity", capacity))
        return cache

    def forward(
        self,
        x: Float[Tensor, "batch time hidden"],
        cos: Float[Tensor, "*batch time half"],
        sin: Float[Tensor, "*batch time half"],
        *,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        cache: KeyValueCache | None = None,
        places: Places | None = None,
    ) -> Float[Tensor, "batch time hidden"]:
        """The layer for each row, or for the sequences that `cu_seqlens` packs into the only row.

        Args:
            x: the tokens.
            cos, sin: those of the angles of each token's position, see `adjoint.rotary`.
            cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of packed sequences.
            cache: the keys and values of earlier tokens, after which the sequences go on; needs `places`.
            places: the places of the tokens in the cache.
        """
        require_tokens("GatedAttention", x, self.hidden_size, weight_of(self.q_proj), 3)
        require_cu_seqlens("GatedAttention", cu_seqlens, x, "x")
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ArgumentError(f"GatedAttention: cache must be of its new_cache, got {type(cache).__name__}")
        queries = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim))
        q, gate = queries.split(self.head_dim, dim=-1)
        heads = (self.num_key_value_heads, self.head_dim)
        k, v = self.k_proj(x).unflatten(-1, heads), self.v_proj(x).unflatten(-1, heads)
        q, rotated = rotary(self.q_norm(q), self.k_norm(k), cos, sin, rotary_dim=2 * cos.shape[-1])
        k = cast(Tensor, rotated)
        if cache is None:
            y = causal_attention(q, k, v, cu_seqlens)
        elif places is None:
            raise ArgumentError("GatedAttention: cache needs places, which say where its tokens belong; it is None")
        else:
            cache.append(k, v, places)
            y = cached_attention(q, k, v, cache, places, cu_seqlens).to(gate.dtype)
        return self.o_proj(sigmoid_gate(y, gate).flatten(-2))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.num_heads} heads of {self.head_dim}, {self.num_key_value_heads} of keys and values"


def causal_attention(
    q: Float[Tensor, "batch time heads size"],
    k: Float[Tensor, "batch time key_value_heads size"],
    v: Float[Tensor, "batch time key_value_heads size"],
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Float[Tensor, "batch time heads size"]:
    """Causal softmax attention of each row, or of each packed sequence."""
    if cu_seqlens is None or cu_seqlens.is_meta:  # on meta there are shapes alone
        return _attend(q, k, v)
    if q.is_cuda and q.dtype in HALVES:
        return _packed_on_cuda(q, k, v, cu_seqlens)
    if q.is_cpu and torch.compiler.is_compiling():
        return packed_attention(q, k, v, cu_seqlens)
    bounds = cu_seqlens.tolist()
    if not torch.compiler.is_compiling():
        check_bounds("GatedAttention", bounds, q.shape[1])
    parts = [_attend(q[:, part], k[:, part], v[:, part]) for part in parts_of(bounds)]
    return torch.cat(parts, 1) if parts else q


def cached_attention(
    q: Float[Tensor, "batch time heads size"],
    k: Float[Tensor, "batch time key_value_heads size"],
    v: Float[Tensor, "batch time key_value_heads size"],
    cache: KeyValueCache,
    places: Places,
    cu_seqlens: Int[Tensor, " bounds"] | None,
) -> Float[Tensor, "batch time heads size"]:
    """Attention of each token of a call to itself and all earlier tokens. The cache has k and v already."""
    if not any(places.past):
        return causal_attention(q, k, v, cu_seqlens)
    q = q.to(cache.keys.dtype)  # under autocast the cache has the parameters' dtype
    if cu_seqlens is None and q.shape[1] == 1:
        return _attend_once(q, cache, places)
    parts, begin = [], 0
    for sequence, (past, count) in enumerate(zip(places.past, places.counts, strict=True)):
        row, end = (sequence, count) if cu_seqlens is None else (0, begin + count)
        slot = sequence if places.slots is None else places.slots[sequence]
        keys, values = (x[slot, :, : past + count].transpose(0, 1)[None] for x in (cache.keys, cache.values))
        if count:
            parts.append(_attend(q[row : row + 1, begin:end], keys, values))
        begin = begin if cu_seqlens is None else end
    if not parts:
        return q
    return torch.cat(parts, 0 if cu_seqlens is None else 1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of all rows. If there are fewer queries than keys, the queries are those of the last tokens."""
    mask = None
    if q.shape[1] != k.shape[1]:
        visible = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)
        mask = torch.arange(k.shape[1], device=q.device) <= visible[:, None]
    if q.is_cuda and (mask is not None or q.dtype in (torch.float32, torch.float64)):
        # The kernels that take grouped heads take neither a mask nor these dtypes. Torch would keep scores of T × T.
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    with _cudnn_first(q) if mask is None else nullcontext():
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
    return y.transpose(1, 2)


def prefers_cudnn(
    dtype: torch.dtype, head_dim: int, *, deterministic: bool, capability: tuple[int, int], cudnn: int
) -> bool:
    """Whether cuDNN should compute the causal attention of a batch of rows on a GPU; otherwise torch chooses.

    On Hopper, with heads of 256 columns, it takes half the time of torch's flash attention in the forward and two
    thirds of it in the backward. It adds its gradients in any order, and torch has no deterministic form of it, so it
    is not for deterministic mode. It plans every shape anew, so it is not for packed sequences, whose lengths change.
    Before version 9.15.1 it was wrong for rows whose length is no multiple of 128.

    Args:
        dtype: the dtype of the heads.
        head_dim: the number of columns of a head.
        deterministic: whether `torch.use_deterministic_algorithms` is in force.
        capability: the GPU's compute capability.
        cudnn: the version, as `torch.backends.cudnn.version()` counts it; 0 if there is none.
    """
    return dtype in HALVES and head_dim == 256 and not deterministic and capability == (9, 0) and cudnn >= 91501


def _cudnn_first(q: Tensor) -> AbstractContextManager[None]:
    """A block in which torch tries cuDNN's attention first, if `prefers_cudnn` says so and cuDNN is enabled."""
    if not q.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    capability, cudnn = _versions(q.device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not prefers_cudnn(q.dtype, q.shape[-1], deterministic=deterministic, capability=capability, cudnn=cudnn):
        return nullcontext()
    allowed = [backend for backend, is_enabled in _FUSED.items() if is_enabled()]
    if SDPBackend.CUDNN_ATTENTION not in allowed:
        return nullcontext()
    return sdpa_kernel(allowed, set_priority=True)


_FUSED = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
"""The backends of attention in the order in which they are tried, each with a function that says if it is enabled."""


@cached
def _versions(device: torch.device) -> tuple[tuple[int, int], int]:
    """A GPU's compute capability, and the version of cuDNN."""
    return torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0


def _attend_once(q: Tensor, cache: KeyValueCache, places: Places) -> Tensor:
    """Attention of one token of each row. The query heads of a key-value head become its queries, so no head is
    repeated."""
    # On CUDA all of the memory is read in place, without a copy, so that no shape differs from step to step.
    length = places.longest
    if q.is_cuda:
        length = cache.room if places.slots is None else -(-length // ROOM) * ROOM
    keys, values = (places.of_cache(x[:, :, :length]) for x in (cache.keys, cache.values))
    seen = torch.arange(length, device=q.device) <= places.positions
    queries = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
    if q.is_cuda:
        return attend_in_pieces(queries, keys, values, seen).view(q.shape)
    y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None, None])
    return y.reshape(q.shape)


def attend_in_pieces(
    q: Float[Tensor, "batch heads queries size"],
    k: Float[Tensor, "batch heads time size"],
    v: Float[Tensor, "batch heads time size"],
    seen: Bool[Tensor, "batch time"],
) -> Float[Tensor, "batch heads queries size"]:
    """Softmax attention of few queries to many keys. Values are summed in pieces, so that all of a GPU has work.

    Torch's attention gives each head of each row to one block, which then reads all keys alone. For 16-bit inputs the
    scores, their softmax and the sums are float32, and the weights are rounded to the dtype of the values.
    """
    (batch, heads, queries, size), time = q.shape, k.shape[2]
    scores = _product(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * size**-0.5
    scores = scores.view(batch, heads * queries, time).masked_fill(~seen[:, None], -torch.inf)
    weights = scores.softmax(-1).to(v.dtype)
    pieces = time // ROOM if time % ROOM == 0 else 1
    weights = weights.view(batch * heads, queries, pieces, -1).transpose(1, 2).flatten(0, 1)
    parts = _product(weights, v.reshape(batch * heads * pieces, -1, size))
    return parts.view(batch, heads, pieces, queries, size).sum(2).to(q.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The products of two batches of matrices. Those of 16-bit matrices stay in float32, in which they are summed."""
    if a.dtype in HALVES:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)


def _packed_on_cuda(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in _options() else {"is_causal": True}
    if q.shape[2] != k.shape[2]:
        if "enable_gqa" in _options():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    bounds, time = cu_seqlens.to(torch.int32), q.shape[1]  # the row's length bounds all lengths, without a wait
    y: Any = varlen_attn(q[0], k[0], v[0], bounds, bounds, time, time, **options)
    return y[None]  # type: ignore[no-any-return]


@cached
def _options() -> frozenset[str]:
    """The parameters of torch's attention for sequences of different lengths, which differ between versions."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
