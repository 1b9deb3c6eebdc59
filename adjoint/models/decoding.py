"""`Decoder`: one more token of a cache's sequences, at fixed addresses, so that a CUDA graph can contain the step."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_integer
from adjoint.core.errors import ArgumentError
from adjoint.models.cache import Cache
from adjoint.nn.cache import KeyValueCache, Places

if TYPE_CHECKING:
    from adjoint.models.hybrid import HybridLM


class Decoder:
    """Appends a token to sequences of a cache, and returns the logits after it. `HybridLM.decoder` makes a decoder.

        decoder = model.decoder(cache)
        logits = decoder([5, 7, 1])             # a token of each sequence
        logits = decoder([4, 2], slots=[2, 0])  # of two of them; the others stay as they are

    Tokens, positions and slots are in memory that does not move. A step computes all sequences of the cache, and
    discards the results of those that get no token. So on a GPU one CUDA graph serves every step. The first step runs
    as usual and compiles kernels, and the second one is captured. It is captured again when the cache has moved to
    larger memory, which `Cache.reserve` avoids. On the CPU every step runs as usual.

    Attributes:
        captures: the number of captures.
    """

    @torch.inference_mode(False)  # its inputs are overwritten by every step, in whichever mode that runs
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
        self, tokens: Sequence[int] | Int[Tensor, " sequences"], slots: Sequence[int] | None = None
    ) -> Float[Tensor, "sequences vocabulary"]:
        """The logits after one more token for each slot; by default for all sequences of the cache.

        Raises:
            ArgumentError: the model was moved or cast, the number of tokens is not that of the slots or of the cache's
                sequences, a slot is named twice or does not exist, or a token is out of range.
        """
        cache, size = self._cache, self._model.config.vocab_size
        self._model.check_cache(cache)
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        if not isinstance(tokens, Collection):
            raise ArgumentError(f"Decoder: tokens must be a list of them, got {tokens!r}")
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
        """The addresses that a graph captures and that may change: those of keys and of the model."""
        keys = [layer.keys.data_ptr() for layer in self._cache.layers if isinstance(layer, KeyValueCache)]
        return (self._model.model.embed_tokens.weight.data_ptr(), *keys)

    def _compute(self) -> Tensor:
        """The logits of all sequences. Those with a state of −1 get a token 0 behind their last one; it is not used."""
        ids, positions, states = self._inputs
        rooms = [layer.room for layer in self._cache.layers if isinstance(layer, KeyValueCache)]
        past = (min(rooms, default=1) - 1,) * len(self._cache)  # attention reads all of the memory, whatever the length
        places = Places(self._rows, positions[:, None], past, (1,) * len(self._cache), states=states)
        hidden, _ = self._model.model.run(ids[:, None], None, self._cache, places)
        return self._model.lm_head(hidden[:, -1])  # type: ignore[no-any-return]
