"""`HybridLM`: a decoder of Gated DeltaNet and gated attention layers, with the parameters of Hugging Face's models."""

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.arguments import require_ids
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short
from adjoint.device.sequences import check_bounds, require_cu_seqlens
from adjoint.models.cache import Cache
from adjoint.models.config import HybridConfig
from adjoint.models.decoder import DecoderLayer, HybridModel
from adjoint.models.decoding import Decoder
from adjoint.models.generation import Prompts, Sampling, stream
from adjoint.models.packing import next_labels
from adjoint.nn.gated_delta_net import GatedDeltaNet
from adjoint.nn.moe import Routing
from adjoint.nn.plain import is_plain
from adjoint.nn.tokens import require_count
from adjoint.ops import moe
from adjoint.ops.loss import cross_entropy, linear_cross_entropy


class HybridOutput(NamedTuple):
    """The output of a `HybridLM`. It has losses if there are labels or routers' losses are asked for."""

    logits: Float[Tensor, "batch time vocabulary"] | None
    loss: Float[Tensor, ""] | None = None
    router_loss: Float[Tensor, ""] | None = None
    routing: tuple[Routing, ...] = ()


class HybridLM(nn.Module):
    """A hybrid language model: Qwen3-Next, Qwen3.5 or Qwen3.5-MoE, text only.

    Parameters have the names and shapes of transformers' text models, so each loads the state dict of the other.
    Sequences of different lengths are packed in one row and not padded: `pack` makes the row and its `cu_seqlens`.

    Args:
        config: the model's sizes.
        device, dtype: those of the parameters. On "meta" they have no memory until `to_empty` and `reset_parameters`.

    >>> from adjoint.models import pack
    >>> config = HybridConfig(
    ...     model_type="qwen3_5_text", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
    ...     linear_key_head_dim=8, linear_value_head_dim=8,
    ... )
    >>> model = HybridLM(config)
    >>> input_ids, cu_seqlens = pack([[1, 2, 3], [4, 5]])
    >>> model(input_ids, cu_seqlens=cu_seqlens).logits.shape
    torch.Size([1, 5, 50])
    >>> model(input_ids, cu_seqlens=cu_seqlens, labels=input_ids).loss.shape
    torch.Size([])
    """

    def __init__(
        self,
        config: HybridConfig,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.left_out: dict[str, tuple[str, ...]] = {}
        self.model = HybridModel(config, device=device, dtype=dtype)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype)
        self.tie_weights()
        if self.model.embed_tokens.weight.device.type != "meta":
            self.reset_parameters()

    def tie_weights(self) -> None:
        """Makes the last matrix the same parameter as that of the embedding, if the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self.tie_weights()
        return result

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As for every module. Tied weights stay one parameter, also with `assign=True`."""
        result = super().load_state_dict(*arguments, **options)
        self.tie_weights()
        return result

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all parameters as transformers does: matrices from a normal distribution, norms the identity."""
        deviation = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                module.reset_gates()
            elif module is not self and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=deviation)
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
        if (padding := self.model.embed_tokens.padding_idx) is not None:
            self.model.embed_tokens.weight[padding].zero_()

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: Int[Tensor, "batch time"],
        *,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        labels: Int[Tensor, "batch time"] | None = None,
        output_router_logits: bool | None = None,
        output_logits: bool | None = None,
        cache: Cache | None = None,
        slots: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> HybridOutput:
        """The logits of every token; with labels the loss, which never has all logits in memory
        (`linear_cross_entropy`).

        Args:
            input_ids: token ids; each row is a sequence, unless `cu_seqlens` says otherwise.
            cu_seqlens: int32 or int64, ascending from 0 to T: the bounds of sequences packed in the only row.
            labels: token ids, with −100 for tokens that do not count. The loss is the mean of −log p of each label that
                has an earlier token in its sequence. The first label of a sequence has none and does not count.
            output_router_logits: whether to add the routers' losses and return the routing of tokens; by default as the
                configuration says.
            output_logits: whether to return logits; by default only if there are no labels.
            cache: the states from which sequences go on. They are overwritten. A cache cannot have gradients.
            slots: the cache's sequences that these are; by default all of them, in order.
            last_only: whether to return only the logits of the last token of each sequence, [sequences, 1, vocabulary];
                not with labels.

        Raises:
            ArgumentError: a shape, dtype or device is wrong, a token id is out of range (on the CPU; on a GPU
                `adjoint.check()` raises), or the cache is of another model or other sequences.
        """
        self._check(input_ids, cu_seqlens, labels, cache, slots, last_only)
        hidden, routings = self.model(input_ids, cu_seqlens, cache, slots)
        if last_only:
            hidden = hidden[:, -1:] if cu_seqlens is None else hidden[0, cu_seqlens[1:] - 1][:, None]
        logits, loss = None, None
        if labels is None if output_logits is None else output_logits:
            logits = self.lm_head(hidden)
        if labels is not None:
            loss = self._loss(hidden, next_labels(labels, cu_seqlens), logits)
        with_routing = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if not with_routing or not routings:
            return HybridOutput(logits, loss)
        router_loss = self._router_loss(routings)
        return HybridOutput(logits, None if loss is None else loss + router_loss, router_loss, tuple(routings))

    def _loss(self, hidden: Tensor, targets: Tensor, logits: Tensor | None) -> Tensor:
        """The mean of −log p of the targets that count; 0, with gradients of 0, if none does."""
        head = self.lm_head
        if logits is None and is_plain(head, nn.Linear):
            return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias)
        logits = head(hidden) if logits is None else logits  # with an adapter on the head, for one
        return cross_entropy(logits, targets)

    def _router_loss(self, routings: Sequence[Routing]) -> Tensor:
        """The load-balancing loss of all layers together and the mean of their z losses, each times its factor."""
        layers = [routing.logits for routing in routings]
        loss = self.config.router_aux_loss_coef * moe.load_balancing_loss(
            layers, [routing.indices for routing in routings]
        )
        if self.config.router_z_loss_coef:
            loss = loss + self.config.router_z_loss_coef * moe.z_loss(torch.stack(layers))
        return loss

    def _check(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None,
        labels: Tensor | None,
        cache: Cache | None,
        slots: Sequence[int] | None,
        last_only: bool,
    ) -> None:
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            got = f"shape {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise ArgumentError(f"HybridLM: input_ids must be a tensor [batch, time], got {got}")
        require_cu_seqlens("HybridLM", cu_seqlens, input_ids, "input_ids")
        if cu_seqlens is not None and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_bounds("HybridLM", cu_seqlens.tolist(), input_ids.shape[1])
        if labels is not None:
            require_ids("HybridLM", "labels", labels, "input_ids", input_ids)
        if labels is not None and (labels.shape != input_ids.shape or last_only):
            reason = "with last_only" if last_only else f"shape {tuple(labels.shape)}"
            raise ArgumentError(
                f"HybridLM: labels must have the shape of input_ids, {tuple(input_ids.shape)}, and all logits; "
                f"got {reason}"
            )
        if last_only and input_ids.shape[1] == 0 and len(input_ids):
            raise ArgumentError("HybridLM: last_only needs a token of each sequence, and input_ids has none")
        if last_only and cu_seqlens is not None and not cu_seqlens.is_cuda and (cu_seqlens.diff() < 1).any():
            raise ArgumentError(
                f"HybridLM: last_only needs a token of each sequence, got cu_seqlens {cu_seqlens.tolist()}"
            )
        if slots is not None and cache is None:
            raise ArgumentError("HybridLM: slots name sequences of a cache, and cache is None")
        if cache is not None:
            self.check_cache(cache)
            if labels is not None and labels.is_cpu:  # before the cache is overwritten
                wrong = labels[(labels != -100) & ((labels < 0) | (labels >= self.config.vocab_size))]
                if wrong.numel():
                    raise ArgumentError(
                        f"HybridLM: labels must be -100 or from 0 to {self.config.vocab_size - 1}, got {int(wrong[0])}"
                    )
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
                raise ArgumentError("HybridLM: cache is overwritten, which has no gradient; call under torch.no_grad()")

    def new_cache(self, sequences: int, capacity: int = 0) -> Cache:
        """An empty cache for a number of sequences, with room for `capacity` tokens of each. It grows when they have
        more."""
        sequences = require_count("HybridLM.new_cache", "sequences", sequences)
        capacity = require_count("HybridLM.new_cache", "capacity", capacity)
        layers = [layer.new_cache(sequences, capacity) for layer in cast(list[DecoderLayer], list(self.model.layers))]
        return Cache(self, layers, [0] * sequences, self.dtype, self.device)

    def decoder(self, cache: Cache) -> Decoder:
        """The decoder of a cache, which appends one token at a time to its sequences. It is made once for each cache.

        Raises:
            ArgumentError: the cache is of another model.
        """
        self.check_cache(cache)
        if cache.decoder is None:
            cache.decoder = Decoder(self, cache)
        return cache.decoder

    def check_cache(self, cache: Cache) -> None:
        """Raises ArgumentError if a cache does not belong to this model, or is of its dtype or device of before."""
        if not isinstance(cache, Cache):
            raise ArgumentError(
                f"HybridLM: cache must be one of this model, from new_cache; got {type(cache).__name__}"
            )
        if not cache.belongs_to(self):
            raise ArgumentError("HybridLM: cache must be one of this model, from new_cache; got one of another")
        if (cache.dtype, cache.device) != (self.dtype, self.device):
            raise ArgumentError(
                f"HybridLM: cache must be made after the model is moved or cast; it is {short(cache.dtype)} on "
                f"{cache.device}, and the model is {short(self.dtype)} on {self.device}"
            )

    def gradient_checkpointing_enable(self, enable: bool = True) -> None:
        """Keeps only the streams between layers in training. A layer computes the rest again in its backward."""
        self.model.gradient_checkpointing = enable

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] | int | None = None,
        cache: Cache | None = None,
        prefill_chunk: int | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool | None = None,
    ) -> list[list[int]]:
        """The tokens that follow each prompt.

        Args:
            prompts: lists of token ids, or rows of a tensor; their lengths may differ.
            max_new_tokens: the most tokens for each prompt.
            temperature, top_k, top_p: see `Sampling`; by default the most likely token is taken.
            stop_tokens: tokens that end a sequence, as its last token; by default those of the configuration.
            cache: the sequences that the prompts continue. Afterwards it has seen all but the last token of each.
            prefill_chunk: the most tokens of each prompt at a time, which saves memory; by default all tokens.
            generator: the generator of random numbers.
            cuda_graph: whether to capture a step of decoding in a CUDA graph. It is captured once for a cache, so calls
                with the same cache capture it once. By default it is captured on a GPU.

        Raises:
            ArgumentError: a prompt is empty, a token or an option is out of range, or the cache is of another model or
                of other sequences.
        """
        steps = list(self.stream(
            prompts, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop_tokens=stop_tokens,
            cache=cache, prefill_chunk=prefill_chunk, generator=generator, cuda_graph=cuda_graph,
        ))  # fmt: skip
        return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]  # type: ignore[misc]

    def stream(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] | int | None = None,
        cache: Cache | None = None,
        prefill_chunk: int | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool | None = None,
    ) -> Iterator[list[int | None]]:
        """The tokens of `generate` as they come: of each step a list, None for a prompt that has got its last."""
        sampling = Sampling(temperature, top_k, top_p)
        return stream(self, prompts, max_new_tokens, sampling, stop_tokens, cache, prefill_chunk, generator, cuda_graph)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "HybridLM":
        """A model from a checkpoint folder of Hugging Face: config.json and safetensors files.

        The configuration may be that of a text model or hold one; weights may lie in one file or in several, under a
        `language_model` prefix or not, and experts in one tensor or one by one. Each tensor is read by itself, so that
        the checkpoint is never held beside the model. Weights of vision and of multi-token prediction are left out, and
        a log message and the model's `left_out` name them.

        Args:
            folder: a local folder.
            device: where parameters go; the CPU by default.
            dtype: of all parameters; by default the one that the configuration names, or float32.

        Raises:
            ArgumentError: a file is missing, truncated or no safetensors file, or a tensor is missing, unknown or of
                another shape; the file and the tensor are named.
            Unsupported: the model is of another family, or its weights are quantized.
        """
        from adjoint.models.checkpoint import load

        return load(cls, _path("from_pretrained", folder), device, dtype)

    def save_pretrained(self, folder: str | Path, *, max_shard_bytes: int = 5 * 2**30) -> None:
        """Writes a checkpoint folder that `from_pretrained` and transformers open: config.json and safetensors files.

        Args:
            folder: made if it is not there; the weights of an older checkpoint in it are replaced.
            max_shard_bytes: weights beyond this go into several files, with an index.
        """
        from adjoint.models.checkpoint import save

        save(self, _path("save_pretrained", folder), max_shard_bytes)


def _path(method: str, folder: object) -> Path:
    if not isinstance(folder, str | PathLike):
        raise ArgumentError(f"HybridLM.{method}: folder must be a path, got {type(folder).__name__}")
    return Path(folder)
