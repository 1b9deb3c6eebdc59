"""`Decoder`: one more token of a cache's sequences, at fixed addresses, so that a CUDA graph can hold the step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_integer
from adjoint.core.errors import ArgumentError
from adjoint.models.cache import Cache
from adjoint.nn.cache import KeyValueCache, Places

if TYPE_CHECKING:
    from adjoint.models.hybrid import HybridLM


class Decoder:
    """Gives the next token to any of a cache's sequences, and their logits. `HybridLM.decoder` makes one.

        decoder = model.decoder(cache)
        logits = decoder([5, 7, 1])             # a token of each sequence
        logits = decoder([4, 2], slots=[2, 0])  # of two of them; the others stay as they are

    Tokens, positions and slots lie in memory that stays where it is, and a step computes all sequences of the cache,
    those that get no token for nothing. So on a GPU one CUDA graph serves every step: the first runs as usual, and
    compiles what is not compiled; the second is captured. It is captured anew when the cache has moved to larger
    memory, which `Cache.reserve` avoids. On the CPU every step runs as usual.

    Attributes:
        captures: how often a step was captured.
    """

    def __init__(self, model: "HybridLM", cache: Cache) -> None:
        self.captures = 0
        self._model, self._cache = model, cache
        self._inputs = torch.zeros(3, len(cache), dtype=torch.int64, device=model.device)
        self._rows = torch.arange(len(cache), device=model.device)[:, None]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._addresses: tuple[int, ...] = ()

    @torch.no_grad()
    def __call__(
        self, tokens: Sequence[int], slots: Sequence[int] | None = None
    ) -> Float[Tensor, "sequences vocabulary"]:
        """The logits after one more token of each slot, all of them by default.

        Raises:
            ArgumentError: there are not as many tokens as slots, or as the cache has sequences, a slot is named twice
                or is none, or a token is out of range.
        """
        cache, size = self._cache, self._model.config.vocab_size
        cache.check(len(tokens), slots)
        for token in tokens:
            if not 0 <= require_integer("Decoder", "tokens", token) < size:
                raise ArgumentError(f"Decoder: tokens must be from 0 to {size - 1}, got {token}")
        chosen = list(range(len(cache)) if slots is None else slots)
        if not chosen:
            return self._model.lm_head.weight.new_zeros(0, size)
        cache.reserve(max(cache.lengths) + 1)
        ids, states = [0] * len(cache), [-1] * len(cache)
        for slot, token in zip(chosen, tokens, strict=True):
            ids[slot], states[slot] = token, slot
        self._inputs.copy_(torch.tensor((ids, list(cache.lengths), states)))
        logits = self._step()
        cache.count([1] * len(chosen), chosen)
        return logits.clone() if slots is None else logits[torch.tensor(chosen, device=logits.device)]

    def _step(self) -> Tensor:
        if self._inputs.device.type != "cuda":
            return self._compute()
        addresses = self._where()
        if addresses != self._addresses:
            self._addresses, self._graph = addresses, None
            return self._compute()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._logits = self._compute()
            self.captures += 1
        self._graph.replay()
        assert self._logits is not None
        return self._logits

    def _where(self) -> tuple[int, ...]:
        """The addresses that a graph has captured and that may change: of keys, and of the model."""
        keys = [layer.keys.data_ptr() for layer in self._cache.layers if isinstance(layer, KeyValueCache)]
        return (self._model.model.embed_tokens.weight.data_ptr(), *keys)

    def _compute(self) -> Tensor:
        """The logits of all sequences: those of a state −1 get a token 0 after their last, which nobody sees."""
        ids, positions, states = self._inputs
        rooms = [layer.room for layer in self._cache.layers if isinstance(layer, KeyValueCache)]
        past = (min(rooms, default=1) - 1,) * len(self._cache)  # attention reads all of the memory, whatever the length
        places = Places(self._rows, positions[:, None], past, (1,) * len(self._cache), states=states)
        hidden, _ = self._model.model.run(ids[:, None], None, self._cache, places)
        return self._model.lm_head(hidden[:, -1])  # type: ignore[no-any-return]
