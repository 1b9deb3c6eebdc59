"""`GatedDeltaNet`: the recurrent mixer of hybrid models, as Qwen3-Next and Qwen3.5 have it."""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.arguments import require_integer
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import wide_dtype
from adjoint.nn.cache import RecurrentCache
from adjoint.nn.conv import CausalConv1d
from adjoint.nn.norm import GatedRMSNorm
from adjoint.nn.tokens import require_count, require_tokens, weight_of
from adjoint.ops.gated_delta import gate, gated_delta_rule, gated_delta_step
from adjoint.ops.gated_delta.step import MAX_TOKENS

Projections = Literal["separate", "interleaved"]


class GatedDeltaNet(nn.Module):
    """out_proj · gated_rms_norm(gated_delta_rule(q, k, v, g, β), z), where q, k and v come from a causal convolution.

    q, k, v, z, a and b are projections of a token. The convolution ends in SiLU. q and k are divided by their norms,
    g = −e^{A_log}·softplus(a + dt_bias), and β = σ(b). Value head h reads key head h // (value heads / key heads), so q
    and k are never repeated.

    The state dict has the names and shapes of Hugging Face's `Qwen3_5GatedDeltaNet`, with "separate" projections, or of
    `Qwen3NextGatedDeltaNet`, with "interleaved" ones:

        in_proj_qkv.weight        [2 · key heads · K + value heads · V, hidden]: q, k and v
        in_proj_z.weight          [value heads · V, hidden]
        in_proj_b.weight, in_proj_a.weight  [value heads, hidden]
        in_proj_qkvz.weight, in_proj_ba.weight  the same rows, interleaved: q, k, v, z (b, a) of each key head
        conv1d.weight             [2 · key heads · K + value heads · V, 1, width]
        A_log, dt_bias            [value heads]
        norm.weight               [V]
        out_proj.weight           [hidden, value heads · V]

    Args:
        hidden_size: the number of columns of a token.
        num_key_heads: the number of heads of q and k.
        num_value_heads: the number of heads of v, a multiple of those of q and k.
        key_head_dim: K, at most 256.
        value_head_dim: V, at most 256.
        conv_width: the number of tokens that the convolution reads, 1 to 8.
        projections: "separate" or "interleaved".
        eps: the eps of the norm.
        device, dtype: those of the parameters.

    Raises:
        ArgumentError: a size is out of range, or the number of value heads is no multiple of the key heads.

    >>> import torch
    >>> layer = GatedDeltaNet(8, 1, 2, 4, 4)
    >>> layer(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        *,
        conv_width: int = 4,
        projections: Projections = "separate",
        eps: float = 1e-6,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        limits = {
            "hidden_size": (hidden_size, None),
            "num_key_heads": (num_key_heads, None),
            "num_value_heads": (num_value_heads, None),
            "key_head_dim": (key_head_dim, 256),
            "value_head_dim": (value_head_dim, 256),
            "conv_width": (conv_width, 8),
        }
        for name, (size, limit) in limits.items():
            if require_integer("GatedDeltaNet", name, size) < 1 or (limit is not None and size > limit):
                span = "at least 1" if limit is None else f"from 1 to {limit}"
                raise ArgumentError(f"GatedDeltaNet: {name} must be {span}, got {size}")
        if num_value_heads % num_key_heads:
            raise ArgumentError(
                f"GatedDeltaNet: num_value_heads must be a multiple of num_key_heads, {num_key_heads}, "
                f"got {num_value_heads}"
            )
        if projections not in get_args(Projections):
            names = " or ".join(map(repr, get_args(Projections)))
            raise ArgumentError(f"GatedDeltaNet: projections must be {names}, got {projections!r}")
        self.hidden_size, self.conv_width, self.projections = hidden_size, conv_width, projections
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_head_dim, self.value_head_dim = key_head_dim, value_head_dim
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = num_key_heads * key_head_dim, num_value_heads * value_head_dim
        self.sizes_qkv = (keys, keys, values)
        channels = sum(self.sizes_qkv)
        if projections == "separate":
            self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False, **factory)
            self.in_proj_z = nn.Linear(hidden_size, values, bias=False, **factory)
            self.in_proj_b = nn.Linear(hidden_size, num_value_heads, bias=False, **factory)
            self.in_proj_a = nn.Linear(hidden_size, num_value_heads, bias=False, **factory)
        else:
            self.in_proj_qkvz = nn.Linear(hidden_size, channels + values, bias=False, **factory)
            self.in_proj_ba = nn.Linear(hidden_size, 2 * num_value_heads, bias=False, **factory)
        self.conv1d = CausalConv1d(channels, conv_width, **factory)
        self.A_log = nn.Parameter(torch.empty(num_value_heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads, **factory))
        self.norm = GatedRMSNorm(value_head_dim, eps, **factory)
        self.out_proj = nn.Linear(values, hidden_size, bias=False, **factory)
        self.reset_gates()

    def reset_gates(self) -> None:
        """Draws e^{A_log} from 0.01 to 16, and sets dt_bias to 1, as Hugging Face's modules do."""
        with torch.no_grad():
            self.A_log.uniform_(0.01, 16).log_()
            self.dt_bias.fill_(1)

    @torch.inference_mode(False)
    def new_cache(self, sequences: int) -> RecurrentCache:
        """The state before the first token of each sequence."""
        sequences, weight = require_count("GatedDeltaNet.new_cache", "sequences", sequences), self.conv1d.weight
        past = (sequences, sum(self.sizes_qkv), self.conv_width - 1)
        state = (sequences, self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return RecurrentCache(
            torch.zeros(past, dtype=weight.dtype, device=weight.device),
            torch.zeros(state, dtype=wide_dtype(weight.dtype), device=weight.device),
        )

    def forward(
        self,
        x: Float[Tensor, "batch time hidden"],
        *,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        cache: RecurrentCache | None = None,
        slots: Int[Tensor, " sequences"] | None = None,
    ) -> Float[Tensor, "batch time hidden"]:
        """The layer for each row, or for the sequences that `cu_seqlens` packs into the only row.

        Args:
            x: the tokens.
            cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of packed sequences.
            cache: the states from which the sequences go on. They are overwritten by the states after the last tokens.
            slots: the cache's rows of the sequences; by default all rows in order.

        Raises:
            ArgumentError: an operation refuses its arguments, a gradient would have to go through the cache, or (on the
                CPU) the cache does not have one of the slots.
        """
        first = self.in_proj_qkv if self.projections == "separate" else self.in_proj_qkvz
        require_tokens("GatedDeltaNet", x, self.hidden_size, weight_of(first), 3)
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise ArgumentError(f"GatedDeltaNet: cache must be of its new_cache, got {type(cache).__name__}")
        qkv, z, b, a = self._project(x)
        g, beta = gate(a, b, self.A_log, self.dt_bias)
        if cache is not None:  # the cache has the parameters' dtype, under autocast too
            qkv = qkv.to(cache.conv.dtype)
        if cache is not None and cu_seqlens is None and 1 <= x.shape[1] <= MAX_TOKENS:
            y, _ = self.conv1d.step(qkv, cache.conv, state_indices=slots, in_place=True)
            q, k, v = self._heads(*y.to(z.dtype).split(self.sizes_qkv, dim=-1))
            o, _ = gated_delta_step(
                q, k, v, g, beta, cache.state, state_indices=slots, in_place=True, normalize_qk=True
            )
        else:
            keep = cache is not None
            if cache is not None:
                self._check_cache(cache, slots, qkv.requires_grad or g.requires_grad)
            start = cache if cache is None or slots is None else cache.select(slots)
            past, state = (None, None) if start is None else (start.conv, start.state)
            parts = self.conv1d(
                qkv, initial_state=past, output_final_state=keep, cu_seqlens=cu_seqlens, split=self.sizes_qkv
            )
            q, k, v = self._heads(*(part.to(z.dtype) for part in parts[:3]))
            o, final_state = gated_delta_rule(
                q, k, v, g, beta, initial_state=state, output_final_state=keep, cu_seqlens=cu_seqlens,
                normalize_qk=True,
            )  # fmt: skip
            if cache is not None and final_state is not None:
                cache.write(parts[3], final_state, slots)
        return self.out_proj(self.norm(o, z).flatten(-2))  # type: ignore[no-any-return]

    def _check_cache(self, cache: RecurrentCache, slots: Tensor | None, needs_gradient: bool) -> None:
        """Refuses the arguments that the operations for a few tokens would refuse themselves."""
        if needs_gradient:
            raise ArgumentError(
                "GatedDeltaNet: cache is overwritten, which has no gradient; call under torch.no_grad(), or without one"
            )
        rows = len(cache.state)
        if slots is not None and slots.is_cpu and bool(((slots < 0) | (slots >= rows)).any()):
            raise ArgumentError(
                f"GatedDeltaNet: slots of more than {MAX_TOKENS} tokens must be rows of the cache, from 0 to "
                f"{rows - 1}, got {slots.tolist()}"
            )

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z [.., value heads, V], b and a [.., value heads]."""
        groups, heads, width = self.num_key_heads, self.num_value_heads, self.value_head_dim
        if self.projections == "separate":
            z = self.in_proj_z(x).unflatten(-1, (heads, width))
            return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)
        shared = heads // groups * width
        of_a_group = (self.key_head_dim, self.key_head_dim, shared, shared)
        *qkv, z = self.in_proj_qkvz(x).unflatten(-1, (groups, sum(of_a_group))).split(of_a_group, dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (groups, 2, heads // groups)).unbind(-2)
        z = z.reshape(*x.shape[:-1], heads, width)
        return torch.cat([part.flatten(-2) for part in qkv], -1), z, b.flatten(-2), a.flatten(-2)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys = (self.num_key_heads, self.key_head_dim)
        return (
            q.unflatten(-1, keys),
            k.unflatten(-1, keys),
            v.unflatten(-1, (self.num_value_heads, self.value_head_dim)),
        )

    def extra_repr(self) -> str:
        heads = f"{self.num_key_heads} key heads of {self.key_head_dim}"
        return f"{heads}, {self.num_value_heads} value heads of {self.value_head_dim}, {self.projections} projections"
