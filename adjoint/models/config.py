"""The configuration of a hybrid language model, in the words of Hugging Face's config.json."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from adjoint.core.arguments import require_size
from adjoint.core.errors import ArgumentError, Unsupported

ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""The families by the model types of their text models, and the classes that transformers has for them."""

_MODELS_OF_SEVERAL_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

_MIXERS = ("linear_attention", "full_attention")

_HEADS = {"num_attention_heads": "num_key_value_heads", "linear_num_value_heads": "linear_num_key_heads"}
"""Numbers of heads, and those of the groups that share keys."""


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """What a `HybridLM` is made of. The names are those of config.json.

    Defaults are the same for all families here, and dense; `from_dict` and `from_folder` take transformers' for a value
    that config.json leaves out.

    Args:
        model_type: "qwen3_next", "qwen3_5_text" (dense) or "qwen3_5_moe_text".
        layer_types: "linear_attention" or "full_attention" for each layer; every fourth is full by default.
        intermediate_size: columns inside a dense feed-forward layer.
        num_experts: 0 for a dense model; then the sizes of experts mean nothing.
        decoder_sparse_step, mlp_only_layers: which layers of Qwen3-Next are sparse: every so many, but not these.
        norm_topk_prob: a token's weights add up to 1; always so in Qwen3.5-MoE.
        output_router_logits: `HybridLM` adds the routers' losses to its loss, without being asked in the call.
        router_aux_loss_coef: the factor of the load-balancing loss.
        router_z_loss_coef: the factor of the mean of the layers' z losses, which transformers does not have.
        partial_rotary_factor: which part of each head is rotated by position.

    Raises:
        ArgumentError: a size is not positive, or two do not go together.
        Unsupported: the model is of another family, or has a part that is not here; both are named.

    >>> config = HybridConfig(model_type="qwen3_5_text", num_hidden_layers=4)
    >>> config.layer_types
    ('linear_attention', 'linear_attention', 'linear_attention', 'full_attention')
    """

    model_type: str
    vocab_size: int = 248320
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 32
    layer_types: tuple[str, ...] = ()
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    attention_bias: bool = False
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str) or self.model_type not in ARCHITECTURES:
            raise Unsupported(
                f"HybridConfig: model_type must be one of {', '.join(ARCHITECTURES)}, got {self.model_type!r}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        self._check_kinds()
        if not self.layer_types:
            pattern = tuple(_MIXERS[(layer + 1) % 4 == 0] for layer in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", pattern)
        self._check()

    def _check_kinds(self) -> None:
        """Numbers are numbers, and what names several of something is a list."""
        for name, kind in HybridConfig.__annotations__.items():
            value = getattr(self, name)
            if kind is int:
                least, what = (0, "an integer from 0 on") if name == "num_experts" else (1, "a positive integer")
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ArgumentError(f"HybridConfig: {name} must be {what}, got {value!r}")
            elif kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ArgumentError(f"HybridConfig: {name} must be a number, got {value!r}")
            elif kind is float and not 0 <= value < math.inf:
                raise ArgumentError(f"HybridConfig: {name} must be a number from 0 on, got {value!r}")
            elif kind is bool and not isinstance(value, bool):
                raise ArgumentError(f"HybridConfig: {name} must be true or false, got {value!r}")
        for name in ("layer_types", "mlp_only_layers"):
            if (value := getattr(self, name)) is not None and not isinstance(value, tuple):
                raise ArgumentError(f"HybridConfig: {name} must be a list, got {value!r}")
        for layer in self.mlp_only_layers or ():
            if isinstance(layer, bool) or not isinstance(layer, int):
                raise ArgumentError(f"HybridConfig: mlp_only_layers must be numbers of layers, got {layer!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            several = value if name == "eos_token_id" and isinstance(value, tuple) else (value,)
            if value is not None and not all(type(token) is int for token in several):
                raise ArgumentError(f"HybridConfig: {name} must be a token id, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ArgumentError(f"HybridConfig: {name} must be positive, got {value!r}")

    def _check(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise ArgumentError(
                f"HybridConfig: layer_types must name all {self.num_hidden_layers} layers, got {len(self.layer_types)}"
            )
        for name in self.layer_types:
            if name not in _MIXERS:
                raise Unsupported(f"HybridConfig: layer_types must be {' or '.join(_MIXERS)}, got {name!r}")
        if self.model_type == "qwen3_5_moe_text" and not self.num_experts:
            raise ArgumentError(f"HybridConfig: num_experts of {self.model_type} cannot be {self.num_experts}")
        if self.model_type == "qwen3_5_text" and self.num_experts:
            raise ArgumentError(f"HybridConfig: qwen3_5_text is dense, got num_experts {self.num_experts}")
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ArgumentError(
                f"HybridConfig: num_experts_per_tok must be at most num_experts, {self.num_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        for heads, groups in _HEADS.items():
            if (several := getattr(self, heads)) % (each := getattr(self, groups)):
                raise ArgumentError(f"HybridConfig: {heads} must be a multiple of {groups}, {each}, got {several}")
        if self.rotary_size < 2 or self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise ArgumentError(
                f"HybridConfig: partial_rotary_factor {self.partial_rotary_factor} of head_dim {self.head_dim} must be "
                f"an even number of columns, from 2 on, got {self.rotary_size}"
            )

    @property
    def rotary_size(self) -> int:
        """Columns of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward part of a layer is a mixture of experts."""
        if self.num_experts == 0 or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "HybridConfig":
        """The configuration that config.json holds: that of a text model, or with one as its `text_config`."""
        kind = str(config.get("model_type"))
        _refuse(config)
        if isinstance(text := config.get("text_config"), Mapping):
            tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            config = {"model_type": _MODELS_OF_SEVERAL_PARTS.get(kind), **text, "tie_word_embeddings": tied}
            kind = str(config["model_type"])
        kind = _MODELS_OF_SEVERAL_PARTS.get(kind, kind)
        if kind not in ARCHITECTURES:
            known = ", ".join((*ARCHITECTURES, *_MODELS_OF_SEVERAL_PARTS))
            raise Unsupported(f"HybridConfig: model_type must be one of {known}, got {kind!r}")
        _refuse(config)
        known_names = {field.name for field in fields(cls)}
        values = _DEFAULTS[kind] | {name: value for name, value in config.items() if name in known_names}
        values = {name: value for name, value in values.items() if value is not None} | {"model_type": kind}
        rope = _rope(config)
        values |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
        if "layer_types" not in values and (interval := config.get("full_attention_interval")):
            require_size("HybridConfig", "full_attention_interval", interval)
            layers = range(require_size("HybridConfig", "num_hidden_layers", values["num_hidden_layers"]))
            values["layer_types"] = tuple(_MIXERS[(layer + 1) % interval == 0] for layer in layers)
        if kind == "qwen3_5_moe_text":
            values |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()}
        return cls(**values)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "HybridConfig":
        """The configuration of a checkpoint folder: config.json, and the stop tokens of generation_config.json if it is
        there.

        Raises:
            ArgumentError: there is no config.json, or it is not JSON; the file is named.
            Unsupported: the model is of another family, or has a part that is not here.
        """
        path = Path(folder) / "config.json"
        try:
            is_file, is_there = Path(folder).is_file(), os.path.lexists(folder)
        except (OSError, ValueError) as error:  # the name is too long, for one
            raise ArgumentError(f"HybridConfig: {str(folder)[:40]!r} is no folder: {error.args[-1]}") from None
        if is_file:
            raise ArgumentError(f"HybridConfig: {folder} is a file; a checkpoint is a folder")
        if not is_there:
            raise ArgumentError(
                f"HybridConfig: there is no file {path}, nor a folder {folder}; a checkpoint is opened from a local "
                f"folder, and nothing is downloaded"
            )
        try:
            config = read_json(path)
        except FileNotFoundError:
            inside = Path(folder) / "model"  # of a run of `adjoint train`
            hint = f"there is one in {inside}" if (inside / "config.json").exists() else "a checkpoint folder has one"
            raise ArgumentError(f"HybridConfig: there is no file {path}; {hint}") from None
        try:
            loaded = cls.from_dict(config)
        except (ArgumentError, Unsupported) as error:
            raise type(error)(f"{path}: {error}") from None
        return _with_stop_tokens(loaded, Path(folder) / "generation_config.json")

    def to_dict(self) -> dict[str, Any]:
        """What config.json of a text model holds, for transformers and for `from_dict`."""
        config: dict[str, Any] = {"architectures": [ARCHITECTURES[self.model_type]], "hidden_act": "silu"}
        for field in fields(self):
            value = getattr(self, field.name)
            config[field.name] = list(value) if isinstance(value, tuple) else value
        if not self.router_z_loss_coef:
            del config["router_z_loss_coef"]
        if self.model_type != "qwen3_next":
            for name in ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"):
                del config[name]
        if not self.num_experts:
            for name in (*_OF_EXPERTS, *_OF_ROUTERS) if self.model_type == "qwen3_5_text" else ():
                del config[name]
        elif self.model_type == "qwen3_5_moe_text":
            del config["intermediate_size"]
        rope = {"rope_type": "default"}
        config["rope_parameters"] = rope | {name: config.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        return config

    def replace(self, **changes: Any) -> "HybridConfig":
        """The same with some values changed."""
        return replace(self, **changes)


_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_OF_ROUTERS = ("output_router_logits", "router_aux_loss_coef")

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"vocab_size": 151936, "num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_text": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4, "num_hidden_layers": 32,
    },
    "qwen3_5_moe_text": {"num_hidden_layers": 40, "num_experts": 256},
}  # fmt: skip
"""What transformers takes for a value that config.json leaves out, where the families differ."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ArgumentError: it cannot be read, or holds something else; the file is named.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _with_stop_tokens(config: HybridConfig, path: Path) -> HybridConfig:
    """The configuration with the stop tokens that generation_config.json has, where there is one: transformers takes
    those, and of a chat model they are more."""
    try:
        stops = read_json(path).get("eos_token_id")
    except FileNotFoundError:
        return config
    try:
        return config if stops is None else config.replace(eos_token_id=stops)
    except ArgumentError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _rope(config: Mapping[str, Any]) -> Any:
    """The parameters of rotary positions. The older name goes first where a configuration has both, as in transformers:
    those who want longer texts add it to a config.json."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _refuse(config: Mapping[str, Any]) -> None:
    """Names what a configuration asks for that is not here."""
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise Unsupported(f"HybridConfig: quantized weights ({method}) are not supported; use the model in 16 bits")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise Unsupported(f"HybridConfig: hidden_act must be 'silu', got {activation!r}")
    dropout = config.get("attention_dropout") or 0.0
    if dropout != 0:
        raise Unsupported(f"HybridConfig: attention_dropout must be 0, got {dropout}")
    rope = _rope(config)
    if not isinstance(rope, Mapping):
        raise ArgumentError(f"HybridConfig: rope_parameters must be an object, got {rope!r}")
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise Unsupported(
            f"HybridConfig: rope_parameters must be those of all layers, got some of their own for {', '.join(nested)}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise Unsupported(f"HybridConfig: rope_type must be 'default', got {kind!r}")
