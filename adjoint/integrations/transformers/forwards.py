"""The forwards that `patch` gives to modules of transformers: their arguments and results, and our operations inside.

A forward calls the module's submodules, so that adapters, hooks and quantised projections keep working. The weights of
a convolution are read, as transformers' own forward reads them.
"""

import sys
from typing import Any, cast

import torch
from torch import Tensor

from adjoint.core.errors import Unsupported
from adjoint.integrations.transformers.families import class_of
from adjoint.integrations.transformers.instance import loaded
from adjoint.nn.attention import causal_attention
from adjoint.nn.plain import beside
from adjoint.ops.activation import sigmoid_gate, swiglu
from adjoint.ops.conv import causal_conv1d
from adjoint.ops.embedding import embedding
from adjoint.ops.gated_delta import gate, gated_delta_rule, gated_delta_step
from adjoint.ops.gated_delta.step import MAX_TOKENS
from adjoint.ops.norm import gated_rms_norm, rms_norm
from adjoint.ops.rotary import rotary


def embed(self: Any, input: Tensor) -> Tensor:
    return embedding(input, self.weight, padding_idx=self.padding_idx)


def normalize(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, beside(self.weight, x), eps=self.eps, offset=1.0)  # type: ignore[return-value]


def normalize_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    weight = beside(self.weight, hidden_states)
    return gated_rms_norm(hidden_states, gate, weight, eps=self.variance_epsilon, round_before_gate=True)


def feed_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def mix_by_delta_rule(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The forward of a Gated DeltaNet. Packed sequences come as `cu_seq_lens_q`; q and k are not repeated."""
    cu_seqlens, time = kwargs.get("cu_seq_lens_q"), hidden_states.shape[1]
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    layer = None if cache_params is None else cache_params.layers[self.layer_idx]
    if layer is not None and cu_seqlens is not None:
        raise Unsupported(f"{type(self).__name__}: packed sequences cannot fill a cache; pass use_cache=False")
    state = layer.recurrent_states[0] if layer is not None and layer.has_previous_state[0] else None
    qkv, z, b, a = _projections(self, hidden_states)
    g, beta = gate(a, b, self.A_log, self.dt_bias)
    if layer is not None:  # the last tokens before, and then these
        width = self.conv_kernel_size
        qkv = cache_params.update_conv_state(qkv.transpose(1, 2), self.layer_idx, conv_kernel_size=width)
        qkv = qkv.transpose(1, 2)
    sizes = (self.key_dim, self.key_dim, self.value_dim)
    with loaded(self.conv1d) as conv:
        weight, bias = beside(conv.weight.squeeze(1), qkv), None if conv.bias is None else beside(conv.bias, qkv)
        parts = causal_conv1d(qkv, weight, bias, cu_seqlens=cu_seqlens, split=sizes)
    widths = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
    q, k, v = (x[:, -time:].unflatten(-1, (-1, width)) for x, width in zip(parts, widths, strict=True))
    if state is not None and 1 <= time <= MAX_TOKENS:
        o, final = gated_delta_step(q, k, v, g, beta, state.to(g.dtype), normalize_qk=True)
    else:
        o, final = gated_delta_rule(  # type: ignore[assignment]
            q, k, v, g, beta, initial_state=None if state is None else state.to(g.dtype), cu_seqlens=cu_seqlens,
            output_final_state=layer is not None, normalize_qk=True,
        )  # fmt: skip
    if layer is not None:
        cache_params.update_recurrent_state(final, self.layer_idx)
    y = self.norm(o.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
    return self.out_proj(y.view(*hidden_states.shape[:-1], self.value_dim))  # type: ignore[no-any-return]


def _projections(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v side by side, z, b and a: in matrices of their own, or in two, interleaved by key head."""
    if hasattr(self, "in_proj_qkv"):
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
    q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
    return torch.cat([part.flatten(2) for part in (q, k, v)], -1), z, b, a


def attend(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of gated attention: transformers' own attention inside, or ours where sequences are packed."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries = self.q_proj(hidden_states).view(*hidden_states.shape[:-1], -1, 2 * self.head_dim)
    q, gate = queries.split(self.head_dim, dim=-1)
    k, v = self.k_proj(hidden_states).view(shape), self.v_proj(hidden_states).view(shape)
    cos, sin = (beside(table, q) for table in position_embeddings)
    q, rotated = rotary(self.q_norm(q), self.k_norm(k), cos, sin)
    k = cast(Tensor, rotated)
    cu_seqlens, weights = kwargs.get("cu_seq_lens_q"), None
    dropout = self.attention_dropout if self.training else 0.0
    implementation = self.config._attn_implementation or "eager"
    if cu_seqlens is not None and past_key_values is None and not dropout and not _returns_weights(self, kwargs):
        y = causal_attention(q, k, v, cu_seqlens)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        elif cu_seqlens is not None and "flash" not in implementation:
            attention_mask = _packed_mask(self, implementation, cu_seqlens, q)
        modeling: Any = sys.modules[class_of(self).__module__]
        attention = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling.eager_attention_forward
        )
        y, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return self.o_proj(sigmoid_gate(y.reshape(gate.shape), gate).flatten(-2)), weights


def _returns_weights(self: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the caller wants the weights of attention, and gets them of the one that is configured."""
    flag = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
    return bool(flag) and self.config._attn_implementation == "eager"


def _packed_mask(self: Any, implementation: str, cu_seqlens: Tensor, q: Tensor) -> Tensor:
    """What each token of packed sequences sees, as transformers' own attention takes it: its sequence up to itself."""
    if implementation not in ("eager", "sdpa"):
        raise Unsupported(
            f"{type(self).__name__}: with attention_dropout, packed sequences need eager, sdpa or flash attention, and "
            f"the model is configured with {implementation}"
        )
    tokens = torch.arange(q.shape[2], device=q.device)
    sequence = torch.searchsorted(cu_seqlens.to(tokens), tokens, right=True)
    visible = ((sequence[:, None] == sequence) & (tokens[:, None] >= tokens))[None, None]
    if implementation == "sdpa":
        return visible
    return torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
