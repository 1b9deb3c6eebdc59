"""A hybrid model in plain torch, written from its equations: one sequence, token by token, of any dtype.

It shares no code with the library. `Weights` are a state dict by the names of Hugging Face's text models.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gated_delta_net(x: Tensor, w: Weights, config: Any) -> Tensor:
    """Tokens [T, D] of one sequence."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    K, V, shared = config.linear_key_head_dim, config.linear_value_head_dim, heads // groups
    if "in_proj_qkvz.weight" in w:
        rows = (x @ w["in_proj_qkvz.weight"].T).reshape(len(x), groups, -1)
        q, k, v, z = (part.reshape(len(x), -1) for part in rows.split([K, K, shared * V, shared * V], -1))
        b, a = (
            (x @ w["in_proj_ba.weight"].T)
            .reshape(len(x), groups, 2, shared)
            .transpose(1, 2)
            .reshape(len(x), 2, heads)
            .unbind(1)
        )
    else:
        q, k, v = (x @ w["in_proj_qkv.weight"].T).split([groups * K, groups * K, heads * V], -1)
        z, b, a = (x @ w[f"in_proj_{name}.weight"].T for name in "zba")
    channels = torch.cat((q, k, v), -1)
    taps = w["conv1d.weight"][:, 0]
    width = taps.shape[1]
    before = torch.cat((channels.new_zeros(width - 1, channels.shape[1]), channels))
    mixed = silu(sum(before[j : j + len(x)] * taps[:, j] for j in range(width)))  # type: ignore[arg-type]
    q, k, v = mixed.split([groups * K, groups * K, heads * V], -1)
    q, k = (part.reshape(len(x), groups, K) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    v = v.reshape(len(x), heads, V)
    decay = (-(w["A_log"].exp()) * torch.nn.functional.softplus(a + w["dt_bias"])).exp()
    strength = torch.sigmoid(b)
    outputs = []
    states = [x.new_zeros(K, V) for _ in range(heads)]
    for t in range(len(x)):
        row = []
        for head in range(heads):
            key, query = k[t, head // shared], q[t, head // shared]
            state = decay[t, head] * states[head]
            state = state + key[:, None] * (strength[t, head] * (v[t, head] - key @ state))[None]
            states[head] = state
            row.append(query @ state / math.sqrt(K))
        outputs.append(torch.stack(row))
    o = torch.stack(outputs)
    normed = norm(o, w["norm.weight"], config.rms_norm_eps) * silu(z.reshape(len(x), heads, V))
    return normed.reshape(len(x), -1) @ w["out_proj.weight"].T


def rotated(x: Tensor, config: Any) -> Tensor:
    """Tokens [T, heads, size] at positions 0, 1, …; the angles in float32, as the models were trained."""
    size = int(config.head_dim * config.partial_rotary_factor)
    frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, size, 2).float() / size))
    angles = (torch.arange(len(x)).float()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attention(x: Tensor, w: Weights, config: Any) -> Tensor:
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def project(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T
        return y + w[f"{name}_proj.bias"] if f"{name}_proj.bias" in w else y

    q, gate = project("q").reshape(len(x), heads, 2, size).unbind(2)
    k, v = (project(name).reshape(len(x), groups, size) for name in "kv")
    q = rotated(norm(q, 1 + w["q_norm.weight"], config.rms_norm_eps), config)
    k = rotated(norm(k, 1 + w["k_norm.weight"], config.rms_norm_eps), config)
    outputs = []
    for t in range(len(x)):
        row = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = (k[: t + 1, group] @ q[t, head]) / math.sqrt(size)
            row.append(torch.softmax(scores, 0) @ v[: t + 1, group])
        outputs.append(torch.cat(row))
    y = torch.stack(outputs) * torch.sigmoid(gate).reshape(len(x), -1)
    out = y @ w["o_proj.weight"].T
    return out + w["o_proj.bias"] if "o_proj.bias" in w else out


def mlp(x: Tensor, w: Weights) -> Tensor:
    return (silu(x @ w["gate_proj.weight"].T) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T


def below(w: Weights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}


def mixture(x: Tensor, w: Weights, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the router's probabilities and the experts of each token."""
    logits = x @ w["gate.weight"].T
    probabilities = torch.softmax(logits, -1)
    top = probabilities.topk(config.num_experts_per_tok, -1)
    weights = top.values / top.values.sum(-1, keepdim=True) if config.norm_topk_prob else top.values
    rows = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for slot, expert in enumerate(top.indices[t].tolist()):
            gate, up = (w["experts.gate_up_proj"][expert] @ x[t]).chunk(2)
            total = total + weights[t, slot] * (w["experts.down_proj"][expert] @ (silu(gate) * up))
        rows.append(total)
    shared = mlp(x, below(w, "shared_expert."))
    return torch.stack(rows) + torch.sigmoid(x @ w["shared_expert_gate.weight"].T) * shared, logits, top.indices


def logits_of(ids: Tensor, weights: Weights, config: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits [T, vocabulary] of one sequence, and the routers' logits and choices of each sparse layer."""
    x, routing = weights["model.embed_tokens.weight"][ids], []
    for layer in range(config.num_hidden_layers):
        w = below(weights, f"model.layers.{layer}.")
        normed = norm(x, 1 + w["input_layernorm.weight"], config.rms_norm_eps)
        if config.layer_types[layer] == "linear_attention":
            x = x + gated_delta_net(normed, below(w, "linear_attn."), config)
        else:
            x = x + attention(normed, below(w, "self_attn."), config)
        normed = norm(x, 1 + w["post_attention_layernorm.weight"], config.rms_norm_eps)
        if "mlp.gate.weight" in w:
            y, logits, indices = mixture(normed, below(w, "mlp."), config)
            routing.append((logits, indices))
            x = x + y
        else:
            x = x + mlp(normed, below(w, "mlp."))
    x = norm(x, 1 + weights["model.norm.weight"], config.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return x @ head.T, routing


def router_loss(routings: list[list[tuple[Tensor, Tensor]]], config: Any) -> Tensor:
    """Of all sequences: experts · Σ (how often each is chosen per token) · (its mean probability), over all layers."""
    layers = [layer for routing in routings for layer in routing]
    logits = torch.cat([logits for logits, _ in layers])
    indices = torch.cat([indices for _, indices in layers])
    counts = torch.stack([(indices == expert).sum() for expert in range(config.num_experts)]).to(logits.dtype)
    balance = config.num_experts * (counts / len(logits) * torch.softmax(logits, -1).mean(0)).sum()
    z = torch.logsumexp(logits, -1).square().mean()
    return config.router_aux_loss_coef * balance + config.router_z_loss_coef * z


def loss_of(sequences: list[Tensor], labels: list[Tensor], weights: Weights, config: Any) -> tuple[Tensor, Tensor]:
    """The loss of some sequences, the routers' included, and all logits one after the other."""
    results = [logits_of(ids, weights, config) for ids in sequences if len(ids)]
    logits = [rows for rows, _ in results]
    total, count = torch.zeros((), dtype=logits[0].dtype), 0
    for rows, targets in zip(logits, (targets for targets in labels if len(targets)), strict=True):
        for t in range(len(targets) - 1):
            if int(targets[t + 1]) != -100:
                total = total - torch.log_softmax(rows[t], -1)[targets[t + 1]]
                count += 1
    loss = total / max(count, 1)
    if config.num_experts and config.output_router_logits:
        loss = loss + router_loss([routing for _, routing in results], config)
    return loss, torch.cat(logits)
