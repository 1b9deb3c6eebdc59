"""Sizes of models, from one that a CPU trains in two minutes to a billion parameters, and how each is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjoint.models.config import HybridConfig


@dataclass(frozen=True)
class Preset:
    """A model's sizes, as fields of `HybridConfig` without a vocabulary, and the options for its training."""

    model: Mapping[str, Any]
    training: Mapping[str, Any]

    def config(self, vocabulary: int) -> "HybridConfig":
        from adjoint.models.config import HybridConfig

        return HybridConfig(vocab_size=vocabulary, **self.model)


def _dense(
    hidden: int, layers: int, heads: int, head_size: int, linear_heads: int, width: int, **more: Any
) -> dict[str, Any]:
    """The sizes of a model with a dense MLP in each layer.

    By default there are three Gated DeltaNet layers for each layer of attention. Attention has four query heads for
    each key head, and Gated DeltaNet has two value heads for each key head.
    """
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": head_size,
        "linear_num_key_heads": linear_heads,
        "linear_num_value_heads": 2 * linear_heads,
        "linear_key_head_dim": head_size // 2 if head_size > 64 else head_size,
        "linear_value_head_dim": head_size // 2 if head_size > 64 else head_size,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        **more,
    }  # fmt: skip


def _training(rows: int, length: int, steps: int, rate: float, heldout: int) -> dict[str, Any]:
    return {
        "batch_rows": rows, "sequence_length": length, "steps": steps, "learning_rate": rate, "heldout_bytes": heldout,
    }  # fmt: skip


_EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}

_SMALL = {
    "layer_types": ("linear_attention", "full_attention"),
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.08,
}
"""The sizes of the small models. They have two layers, because in two minutes steps are worth more than depth. Their
initial weights are about 1/√hidden, as suits narrow models."""

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        _dense(128, 2, 4, 32, 2, 384, **_SMALL),
        _training(4, 256, 900, 8e-3, 32 * 2**10),
    ),
    "tiny-moe": Preset(
        _dense(128, 2, 4, 32, 2, 384, **_SMALL, **_EXPERTS),
        _training(4, 256, 900, 8e-3, 32 * 2**10),
    ),
    "small": Preset(_dense(512, 8, 8, 64, 4, 1536), _training(32, 1024, 5000, 1.5e-3, 2**20)),
    "medium": Preset(_dense(768, 16, 12, 64, 8, 2304), _training(64, 2048, 20000, 8e-4, 4 * 2**20)),
    "large": Preset(_dense(1280, 24, 10, 128, 10, 3584), _training(128, 4096, 50000, 5e-4, 8 * 2**20)),
    "1b": Preset(_dense(2048, 16, 8, 256, 16, 5632), _training(128, 4096, 100000, 3e-4, 16 * 2**20)),
}  # fmt: skip

FINE_TUNING: dict[str, Any] = _training(8, 1024, 1000, 2e-5, 64 * 2**10)
"""The options for training a model from a folder, whatever its size."""
