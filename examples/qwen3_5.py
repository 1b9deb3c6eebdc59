"""A small Qwen3.5 of transformers, its gated delta rule exchanged for ours: logits, decoding with a cache, gradients.

The exchange is two assignments: the model looks both functions up in its module at every call, and ours have the names
and meanings of flash-linear-attention's arguments. Needs transformers 5.17 or newer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

from adjoint.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


def small_model(device: str | torch.device = "cpu") -> nn.Module:
    """Three layers of linear attention and one of attention; 2 key heads serve 4 value heads."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        pad_token_id=0,
    )
    model: nn.Module = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # decays of a trained model: states that remember
            nn.init.uniform_(parameter, -4, 0)
    return model.to(device)


@contextmanager
def exchanged(modeling: ModuleType) -> Iterator[None]:
    """Inside, the models of a module of transformers run our gated delta rule."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    before = {name: getattr(modeling, name) for name in names}
    modeling.__dict__.update(zip(names, (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule), strict=True))
    try:
        yield
    finally:
        modeling.__dict__.update(before)


def logits_of(model: nn.Module, ids: Tensor, prefill: int) -> Tensor:
    """The logits of every token: the first ones at once, the others one at a time from the cache."""
    with torch.no_grad():
        first = model(ids[:, :prefill], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for t in range(prefill, ids.shape[1]):
            step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
    return torch.cat(logits, 1)


def gradients_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The gradients of a step of training."""
    model.zero_grad()
    loss: Tensor = model(ids, labels=ids).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def main() -> None:
    try:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    except ImportError:
        print("needs transformers 5.17 or newer: pip install transformers")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_model(device)
    ids = torch.randint(1, 64, (2, 100), device=device)
    theirs, their_gradients = logits_of(model, ids, 90), gradients_of(model, ids)
    with exchanged(modeling):
        ours, our_gradients = logits_of(model, ids, 90), gradients_of(model, ids)
        wide = small_model(device).double()
        exact, exact_gradients = logits_of(wide, ids, 90), gradients_of(wide, ids)
    print("distance from float64")
    for whose, logits, gradients in (("ours", ours, our_gradients), ("theirs", theirs, their_gradients)):
        worst = max(distance(gradients[name], gradient) for name, gradient in exact_gradients.items())
        print(f"  {whose:6s}  logits {distance(logits, exact):.1e}   gradients {worst:.1e} at most")


if __name__ == "__main__":
    main()
