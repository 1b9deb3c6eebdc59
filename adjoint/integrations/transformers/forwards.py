"""The forwards that `patch` gives to modules of transformers: their arguments and results, and our operations inside.

A forward calls the module's submodules, so that adapters, hooks and quantised projections keep working; a last matrix
with any of these is called too. The weights of a convolution are read, as transformers' own forward reads them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from adjoint.core.errors import Unsupported
from adjoint.integrations.transformers.families import class_of
from adjoint.integrations.transformers.positions import by_name, with_bounds
from adjoint.models.packing import next_labels
from adjoint.nn.attention import causal_attention
from adjoint.nn.plain import beside, is_plain
from adjoint.ops.activation import sigmoid_gate, swiglu
from adjoint.ops.conv import causal_conv1d
from adjoint.ops.embedding import embedding
from adjoint.ops.gated_delta import gate, gated_delta_rule, gated_delta_step
from adjoint.ops.gated_delta.step import MAX_TOKENS
from adjoint.ops.loss import linear_cross_entropy
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
    with _loaded(self.conv1d) as conv:
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


@contextmanager
def _loaded(module: Any) -> Iterator[Any]:
    """Has the weights of a module that is not called where a call has them: a hook of accelerate may load them."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield module
    finally:
        if hook is not None:
            hook.post_forward(module, ())


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
    if cu_seqlens is not None and past_key_values is None and not dropout:
        y = causal_attention(q, k, v, cu_seqlens)
    else:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        implementation = self.config._attn_implementation or ""
        if cu_seqlens is not None and dropout and "flash" not in implementation:
            _require_packed_mask(self, cu_seqlens, kwargs.get("position_ids"))
        modeling: Any = sys.modules[class_of(self).__module__]
        attention = modeling.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling.eager_attention_forward
        )
        y, weights = attention(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return self.o_proj(sigmoid_gate(y.reshape(gate.shape), gate).flatten(-2)), weights


def _require_packed_mask(self: Any, cu_seqlens: Tensor, positions: Tensor | None) -> None:
    """Transformers' attention, which alone has dropout, learns of packed sequences from positions that begin again."""
    begins = cu_seqlens[1:-1].long()
    is_told = positions is not None and positions.shape[-1] >= int(cu_seqlens[-1])
    if not is_told or bool((cast(Tensor, positions)[..., begins] != 0).any()):
        raise Unsupported(
            f"{type(self).__name__}: with attention_dropout, packed sequences need position_ids that begin again at 0, "
            f"beside cu_seq_lens_q, for transformers' own attention"
        )


def _has_own_loss(self: Any) -> bool:
    """Whether its loss is that of transformers' causal models, and no other that a user has set."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return self.loss_function is ForCausalLMLoss


def training_loss(self: Any, *arguments: Any, **kwargs: Any) -> Any:
    """The forward of a causal model that, in training, gives the loss and no logits: they are never held at once."""
    kwargs = by_name(self, arguments, kwargs) if arguments else kwargs
    labels = kwargs.pop("labels", None)
    keep = kwargs.get("logits_to_keep")  # how many, or which
    partly = isinstance(keep, Tensor) or bool(keep)
    if (
        not self.training
        or labels is None
        or partly
        or kwargs.get("return_dict") is False
        or kwargs.get("ignore_index", -100) != -100
        or not _has_own_loss(self)
        or not is_plain(self.lm_head, nn.Linear)
    ):
        return type(self).forward(self, labels=labels, **kwargs)
    for name in ("return_dict", "logits_to_keep", "ignore_index"):
        kwargs.pop(name, None)
    modeling: Any = sys.modules[class_of(self).__module__]
    shifted, count = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    sparse = hasattr(self, "router_aux_loss_coef")
    if sparse and kwargs.get("output_router_logits") is None:
        kwargs["output_router_logits"] = self.config.output_router_logits
    kwargs = with_bounds(self.model, (), kwargs)[1]  # no sequence's last token has a label in the next
    outputs = self.model(**kwargs)
    targets = next_labels(cast(Tensor, labels), kwargs.get("cu_seq_lens_q")) if shifted is None else shifted
    hidden, (weight, bias) = outputs.last_hidden_state, (self.lm_head.weight, self.lm_head.bias)
    if torch.is_autocast_enabled(hidden.device.type) and weight.dtype.itemsize == 2:
        hidden = hidden.to(weight.dtype)  # a sum of both 16-bit types is float32; autocast rounds it before a product
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="mean" if count is None else "sum")
    if count is not None:
        loss = loss / count
    if not sparse:
        return modeling.CausalLMOutputWithPast(
            loss=loss, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )  # fmt: skip
    balance = None
    if kwargs["output_router_logits"]:
        balance = modeling.load_balancing_loss_func(
            outputs.router_logits, self.num_experts, self.num_experts_per_tok, kwargs.get("attention_mask")
        )
        loss = loss + self.router_aux_loss_coef * balance.to(loss.device)
    return modeling.MoeCausalLMOutputWithPast(
        loss=loss, aux_loss=balance, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states,
        attentions=outputs.attentions, router_logits=outputs.router_logits,
    )  # fmt: skip
