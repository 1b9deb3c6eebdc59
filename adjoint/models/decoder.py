"""`HybridModel`: embedding, decoder layers and the last norm of a hybrid language model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adjoint.core.problem import wide_dtype
from adjoint.models.cache import Cache
from adjoint.models.config import HybridConfig
from adjoint.nn.attention import GatedAttention
from adjoint.nn.cache import KeyValueCache, Places, RecurrentCache
from adjoint.nn.embedding import Embedding
from adjoint.nn.gated_delta_net import GatedDeltaNet
from adjoint.nn.mlp import DenseMLP
from adjoint.nn.moe import Routing, SparseMoE
from adjoint.nn.norm import RMSNorm


class Stream(NamedTuple):
    """The tokens between layers: the sum so far, and the update that the previous layer adds to it."""

    residual: Float[Tensor, "batch time hidden"]
    update: Float[Tensor, "batch time hidden"] | None


class DecoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). The norm of the next layer computes the second sum, in the same pass.

    Args:
        config: the configuration of the model.
        layer: the number of this layer, from 0.
    """

    def __init__(self, config: HybridConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if config.layer_types[layer] == "linear_attention":
            self.linear_attn = GatedDeltaNet(
                hidden,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
                conv_width=config.linear_conv_kernel_dim,
                projections="interleaved" if config.model_type == "qwen3_next" else "separate",
                eps=eps,
                **factory,
            )
        else:
            self.self_attn = GatedAttention(
                hidden,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                bias=config.attention_bias,
                eps=eps,
                **factory,
            )
        self.mlp: SparseMoE | DenseMLP
        if config.is_sparse(layer):
            self.mlp = SparseMoE(
                hidden,
                config.moe_intermediate_size,
                config.num_experts,
                config.num_experts_per_tok,
                shared_expert_size=config.shared_expert_intermediate_size,
                renormalize=config.norm_topk_prob,
                **factory,
            )
        else:
            self.mlp = DenseMLP(hidden, config.intermediate_size, **factory)
        self.input_layernorm = RMSNorm(hidden, eps, offset=1.0, **factory)
        self.post_attention_layernorm = RMSNorm(hidden, eps, offset=1.0, **factory)

    @property
    def is_recurrent(self) -> bool:
        return hasattr(self, "linear_attn")

    def new_cache(self, sequences: int, capacity: int) -> RecurrentCache | KeyValueCache:
        """An empty cache of this layer for a number of sequences."""
        if self.is_recurrent:
            return self.linear_attn.new_cache(sequences)
        return self.self_attn.new_cache(sequences, capacity)

    def forward(
        self,
        stream: Stream,
        angles: tuple[Tensor, Tensor],
        cu_seqlens: Tensor | None = None,
        cache: RecurrentCache | KeyValueCache | None = None,
        places: Places | None = None,
    ) -> tuple[Stream, Routing | None]:
        """The stream after the layer, and for a sparse layer the routing of its tokens."""
        x, normed = normalize(self.input_layernorm, stream)
        if self.is_recurrent:
            slots = None if places is None else places.state_indices
            mixed = self.linear_attn(normed, cu_seqlens=cu_seqlens, cache=cache, slots=slots)
        else:
            mixed = self.self_attn(normed, *angles, cu_seqlens=cu_seqlens, cache=cache, places=places)
        x, normed = normalize(self.post_attention_layernorm, Stream(x, mixed))
        if isinstance(self.mlp, SparseMoE):
            update, routing = self.mlp(normed, return_routing=True)
            return Stream(x, update), routing
        return Stream(x, self.mlp(normed)), None


def normalize(norm: RMSNorm, stream: Stream) -> tuple[Tensor, Tensor]:
    """The sum of a stream, and its norm. Under autocast a layer's update has fewer bits than the sum."""
    if stream.update is None:
        return stream.residual, norm(stream.residual)
    normed, total = norm(stream.update.to(stream.residual.dtype), residual=stream.residual)
    return total, normed


class HybridModel(nn.Module):
    """The embedding, the decoder layers and the last norm, which is everything before the logits."""

    def __init__(self, config: HybridConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.pad_token_id, **factory)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, **factory) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0, **factory)
        # A module's numbers are constants for a compiler. Those of the configuration may become symbols.
        self.rotary_size, self.rope_theta = config.rotary_size, config.rope_theta
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Int[Tensor, "batch time"],
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        slots: Sequence[int] | None = None,
    ) -> tuple[Float[Tensor, "batch time hidden"], list[Routing]]:
        """The hidden state of each token, and the routing of the sparse layers."""
        if cache is None:
            return self.run(input_ids, cu_seqlens)
        places = cache.place(input_ids, cu_seqlens, slots)
        result = self.run(input_ids, cu_seqlens, cache, places)
        cache.advance(places, slots)
        return result

    def run(
        self,
        input_ids: Int[Tensor, "batch time"],
        cu_seqlens: Tensor | None = None,
        cache: Cache | None = None,
        places: Places | None = None,
    ) -> tuple[Float[Tensor, "batch time hidden"], list[Routing]]:
        """The forward for tokens whose places in the cache are known. It does not add them to the cache's lengths."""
        x = self.embed_tokens(input_ids)
        angles = self._angles(_positions(input_ids, cu_seqlens) if places is None else places.positions, x.dtype)
        stream, routings = Stream(x, None), []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and cache is None:
                stream, routing = checkpoint(layer, stream, angles, cu_seqlens, use_reentrant=False)
            else:
                stream, routing = layer(stream, angles, cu_seqlens, layer_cache, places)
            if routing is not None:
                routings.append(routing)
        _, hidden = normalize(self.norm, stream)
        return hidden, routings

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's angles, in float32 as transformers computes them."""
        size = self.rotary_size
        steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions[..., None].float() * (1.0 / (self.rope_theta**steps))
        return angles.cos().to(wide_dtype(dtype)), angles.sin().to(wide_dtype(dtype))


def _positions(input_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each token in its sequence, [time], which is the same for all rows, or that of the packed row."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    if cu_seqlens is None:
        return index
    bounds = cu_seqlens.to(index.dtype)
    return index - bounds[torch.searchsorted(bounds, index, right=True) - 1]
