"""Text from a `HybridLM`: a prefill of packed prompts, and then one token at a time with the cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import as_int, require_integer
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short
from adjoint.models.cache import Cache
from adjoint.models.packing import pack, token_ids

if TYPE_CHECKING:
    from adjoint.models.hybrid import HybridLM

Prompts = Sequence[Sequence[int]] | Sequence[Tensor] | Tensor


@dataclass(frozen=True)
class Sampling:
    """The choice of a next token from its logits.

    Args:
        temperature: logits are divided by it; 0 takes the largest one.
        top_k: only the k largest logits may be chosen.
        top_p: only the largest logits may be chosen: as many as it takes for their probabilities to add up to p.

    Raises:
        ArgumentError: a value is out of range, or top_k or top_p has no temperature.

    >>> import torch
    >>> Sampling()(torch.tensor([[1.0, 3.0, 2.0]]))
    tensor([1])
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ArgumentError(f"generate: temperature must be a number from 0 on, got {self.temperature!r}")
        if self.top_k is not None and require_integer("generate", "top_k", self.top_k) < 1:
            raise ArgumentError(f"generate: top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ArgumentError(f"generate: top_p must be above 0 and at most 1, got {self.top_p!r}")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ArgumentError(
                    f"generate: {name} restricts what is drawn, and temperature 0 draws nothing; set a temperature"
                )

    def __call__(
        self, logits: Float[Tensor, "sequences vocabulary"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " sequences"]:
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def probabilities(self, logits: Float[Tensor, "sequences vocabulary"]) -> Float[Tensor, "sequences vocabulary"]:
        """The probabilities from which a token is drawn; 0 for tokens that may not be chosen."""
        logits = logits.float()
        # A small temperature makes −∞ of what is below the largest, and no ∞, which has no softmax.
        below = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, torch.finfo(torch.float32).tiny)
        scores, order = below.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            scores[:, self.top_k :] = -torch.inf
        if self.top_p is not None:
            shares = scores.softmax(-1)
            scores = scores.masked_fill(shares.cumsum(-1) - shares >= self.top_p, -torch.inf)
        return torch.zeros_like(scores).scatter_(-1, order, scores.softmax(-1))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def stream(
    model: "HybridLM",
    prompts: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    stop_tokens: Sequence[int] | int | None,
    cache: Cache | None,
    prefill_chunk: int | None,
    generator: torch.Generator | None,
    cuda_graph: bool | None,
) -> Iterator[list[int | None]]:
    """See `HybridLM.stream`. Mistakes raise here, and not when the first tokens are asked for."""
    rows = _checked(model, prompts, max_new_tokens, prefill_chunk)
    if model.device.type == "meta":
        raise ArgumentError("generate: the model is on the meta device and has no values")
    if cuda_graph and model.device.type != "cuda":
        raise ArgumentError(f"generate: cuda_graph needs a model on a GPU, and this one is on {model.device}")
    stops = _stops(model, stop_tokens)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generate: generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and generator.device.type != model.device.type:
        raise ArgumentError(
            f"generate: generator must be on the model's device, {model.device}, got one on {generator.device}; "
            f"make it by torch.Generator({str(model.device)!r})"
        )
    if cache is not None:
        model.check_cache(cache)
        if len(cache) != len(rows):
            raise ArgumentError(f"generate: cache holds {len(cache)} sequences, and prompts are {len(rows)}")
    return _steps(model, rows, max_new_tokens, sampling, stops, cache, prefill_chunk, generator, cuda_graph)


AHEAD = 4096
"""The most new tokens for which a cache gets memory before they are there. It grows as more come."""

LOOK_EVERY = 64
"""Steps from one look at whether logits are numbers to the next. A look waits for the GPU; a NaN in a state stays."""


@torch.no_grad()
def _steps(
    model: "HybridLM",
    rows: list[Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    stops: frozenset[int],
    cache: Cache | None,
    prefill_chunk: int | None,
    generator: torch.Generator | None,
    cuda_graph: bool | None,
) -> Iterator[list[int | None]]:
    if not rows:
        return
    if max_new_tokens == 0:
        if cache is not None:  # afterwards the caller's cache has seen all tokens but the last one of each prompt
            _prefill(model, [row[:-1] for row in rows], cache, prefill_chunk)
        return
    cache = model.new_cache(len(rows)) if cache is None else cache
    decode = _decoder(model, cache, cuda_graph)
    longest = max(past + len(row) for past, row in zip(cache.lengths, rows, strict=True))
    cache.reserve(longest + min(max_new_tokens, AHEAD))
    logits = cast(Tensor, _prefill(model, rows, cache, prefill_chunk))
    active = list(range(len(rows)))
    for step in range(max_new_tokens):
        if step % LOOK_EVERY == 0 or step + 1 == max_new_tokens:
            _require_numbers(model, logits, active, step)
        tokens = sampling(logits, generator).tolist()
        chosen: list[int | None] = [None] * len(rows)
        for slot, token in zip(active, tokens, strict=True):
            chosen[slot] = token
        yield chosen
        following = [(slot, token) for slot, token in zip(active, tokens, strict=True) if token not in stops]
        if not following or step + 1 == max_new_tokens:
            return
        active = [slot for slot, _ in following]
        logits = decode([token for _, token in following], None if len(active) == len(rows) else active)


def _stops(model: "HybridLM", stop_tokens: Sequence[int] | Tensor | int | None) -> frozenset[int]:
    """The tokens that end a sequence."""
    if stop_tokens is None:
        return frozenset(model.config.stop_tokens)
    several = stop_tokens.tolist() if isinstance(stop_tokens, Tensor) else stop_tokens
    several = list(several) if isinstance(several, Iterable) else [several]
    for token in map(as_int, several):
        if type(token) is not int:
            raise ArgumentError(f"generate: stop_tokens must be token ids, got {token!r}")
    return frozenset(map(as_int, several))


def _require_numbers(model: "HybridLM", logits: Tensor, slots: Sequence[int], step: int) -> None:
    """Raises ArgumentError if the largest logit of a sequence is none, from which no token can be chosen."""
    if not (right := logits.amax(-1).isfinite()).all():
        slot = slots[right.tolist().index(False)]
        raise ArgumentError(
            f"generate: the logits of prompt {slot} after {step} new tokens are not finite; the model has weights that "
            f"are not, or numbers beyond the range of {short(model.dtype)}"
        )


Decode = Callable[[list[int], list[int] | None], Tensor]
"""A function that gives the logits after one more token of all sequences, or of those in some slots."""


def _decoder(model: "HybridLM", cache: Cache, cuda_graph: bool | None) -> Decode:
    """By default a CUDA graph, on a GPU."""
    if cuda_graph or (cuda_graph is None and model.device.type == "cuda"):
        return model.decoder(cache)

    def decode(tokens: list[int], slots: list[int] | None) -> Tensor:
        ids = torch.tensor([[token] for token in tokens], device=model.device)
        return _logits(model, ids, cache, slots)

    return decode


PREFILL_TOKENS = 65536
"""The most tokens of prompts that go through the model together."""


def _prefill(model: "HybridLM", rows: list[Tensor], cache: Cache, chunk: int | None) -> Tensor | None:
    """The logits after each prompt that has a token. Prompts go in packed, with at most `prefill_chunk` tokens of each
    at a time."""
    longest = max(map(len, rows))
    chunk = max(1, longest) if chunk is None else chunk
    last: list[Tensor | None] = [None] * len(rows)
    for begin in range(0, longest, chunk):
        pieces = {slot: row[begin : begin + chunk] for slot, row in enumerate(rows) if len(row) > begin}
        for slots in _groups(pieces):
            ids, cu_seqlens = (x.to(model.device) for x in pack([pieces[slot] for slot in slots]))
            logits = _logits(model, ids, cache, slots, cu_seqlens)
            for number, slot in enumerate(slots):
                last[slot] = logits[number]
    return torch.stack(there) if (there := [row for row in last if row is not None]) else None


def _groups(pieces: dict[int, Tensor]) -> list[list[int]]:
    """Groups of slots, in order, whose pieces have at most `PREFILL_TOKENS` tokens. A single slot may have more."""
    groups: list[list[int]] = [[]]
    room = PREFILL_TOKENS
    for slot, piece in pieces.items():
        if len(piece) > room and groups[-1]:
            groups.append([])
            room = PREFILL_TOKENS
        groups[-1].append(slot)
        room -= len(piece)
    return groups


def _logits(
    model: "HybridLM", ids: Tensor, cache: Cache, slots: list[int] | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The logits after the last token of each sequence."""
    logits = model(ids, cu_seqlens=cu_seqlens, cache=cache, slots=slots, last_only=True).logits
    return logits[:, -1]  # type: ignore[no-any-return]


def _checked(model: "HybridLM", prompts: Prompts, max_new_tokens: int, prefill_chunk: int | None) -> list[Tensor]:
    """Prompts as token ids on the CPU."""
    is_number = isinstance(prompts, Tensor) and prompts.dim() == 0
    if is_number or not hasattr(prompts, "__len__"):
        got = "one number" if is_number else type(prompts).__name__
        raise ArgumentError(f"generate: prompts must be lists of token ids, or rows of a tensor of them, got {got}")
    rows = [token_ids("generate: prompts", prompt, number, "cpu") for number, prompt in enumerate(prompts)]
    for number, row in enumerate(rows):
        if row.numel() == 0:
            raise ArgumentError(f"generate: prompts must have a token each, and number {number} has none")
        wrong = row[(row < 0) | (row >= model.config.vocab_size)]
        if wrong.numel():
            raise ArgumentError(
                f"generate: token ids must be from 0 to {model.config.vocab_size - 1}, got {int(wrong[0])} in prompt "
                f"{number}"
            )
    for name, value, least in (("max_new_tokens", max_new_tokens, 0), ("prefill_chunk", prefill_chunk, 1)):
        value = as_int(value)
        if value is None and name == "prefill_chunk":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"generate: {name} must be a whole number, got {value!r}")
        if value < least:
            raise ArgumentError(f"generate: {name} must be at least {least}, got {value}")
    return rows
