"""Small models of the three families, random weights far from any tie, and sequences for them."""

import torch
from torch import Tensor, nn

from adjoint.models import HybridConfig, HybridLM
from tests.stated import stated

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "initializer_range": 0.3,
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
CONFIGS = {
    "qwen3_next": HybridConfig(
        model_type="qwen3_next", mlp_only_layers=(1,), norm_topk_prob=False, pad_token_id=0, **SIZES, **EXPERTS
    ),
    "qwen3_5": HybridConfig(model_type="qwen3_5_text", tie_word_embeddings=True, attention_bias=True, **SIZES),
    "qwen3_5_moe": HybridConfig(model_type="qwen3_5_moe_text", **SIZES, **EXPERTS),
}


def small_model(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> HybridLM:
    torch.manual_seed(0)
    model = HybridLM(CONFIGS[name].replace(**changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):  # decays of a trained model: states that remember
                nn.init.uniform_(parameter, -4, 0)
            elif key.endswith(("norm.weight", "dt_bias", ".bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype)


def sequences(lengths: tuple[int, ...] = (9, 1, 0, 14, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]


LOGITS = stated("models", "| logits, float32 |")
PACKED_LOGITS = stated("models", "| logits of packed sequences, float32 |")
GRADIENTS = stated("models", "| gradients of parameters, float32 |")
EXACT_LOGITS = stated("models", "| logits, float64 |")
EXACT_GRADIENTS = stated("models", "| gradients of parameters, float64 |")
ANOTHER_WAY = stated("models", "| packed, in chunks or in steps, float64 |")
"""How far results may be from the exact ones, of their norm."""
SAME_LOSS = stated("models", "| a loss with its logits and without, float64 |")


def distance(result: Tensor, exact: Tensor) -> float:
    """‖result − exact‖ / ‖exact‖."""
    return float((result.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())
