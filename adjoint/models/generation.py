"""Text from a `HybridLM`: a prefill of packed prompts, and then one token at a time with the cache."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_integer
from adjoint.core.errors import ArgumentError
from adjoint.models.cache import Cache
from adjoint.models.packing import pack

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
        ArgumentError: a value is out of range.

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


@torch.no_grad()
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
    """See `HybridLM.stream`."""
    rows = _checked(model, prompts, max_new_tokens, prefill_chunk)
    if model.device.type == "meta":
        raise ArgumentError("generate: the model is on the meta device and has no values")
    if cuda_graph and model.device.type != "cuda":
        raise ArgumentError(f"generate: cuda_graph needs a model on a GPU, and this one is on {model.device}")
    if isinstance(stop_tokens, int):
        stop_tokens = (stop_tokens,)
    elif isinstance(stop_tokens, Iterable):
        stop_tokens = list(stop_tokens)  # an iterator can be read only once
    if stop_tokens is not None and not (
        isinstance(stop_tokens, Iterable) and all(isinstance(token, int) for token in stop_tokens)
    ):
        raise ArgumentError(f"generate: stop_tokens must be token ids, got {stop_tokens}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(f"generate: generator must be a torch.Generator, got {type(generator).__name__}")
    stops = set(model.config.stop_tokens if stop_tokens is None else stop_tokens)
    is_kept = cache is not None
    if cache is None:
        cache = model.new_cache(len(rows))
    model.check_cache(cache)
    if len(cache) != len(rows):
        raise ArgumentError(f"generate: cache holds {len(cache)} sequences, and prompts are {len(rows)}")
    decode = _decoder(model, cache, cuda_graph)
    if not rows:
        return
    if max_new_tokens == 0:
        if is_kept:  # afterwards the caller's cache has seen all tokens but the last one of each prompt
            _prefill(model, [row[:-1] for row in rows], cache, prefill_chunk)
        return
    cache.reserve(max(past + len(row) for past, row in zip(cache.lengths, rows, strict=True)) + max_new_tokens)
    logits = cast(Tensor, _prefill(model, rows, cache, prefill_chunk))
    active = list(range(len(rows)))
    for step in range(max_new_tokens):
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
    rows = [_token_ids(prompt, number) for number, prompt in enumerate(prompts)]
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
        if value is None and name == "prefill_chunk":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"generate: {name} must be a whole number, got {value!r}")
        if value < least:
            raise ArgumentError(f"generate: {name} must be at least {least}, got {value}")
    return rows


def _token_ids(prompt: Sequence[int] | Tensor, number: int) -> Tensor:
    """One prompt as int64 on the CPU."""
    wrong = f"generate: prompts must be lists of token ids, or rows of a tensor of them, and number {number} is"
    try:
        row = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{wrong} {str(prompt)[:40]!r}") from None
    if row.dim() != 1:
        raise ArgumentError(f"{wrong} of shape {tuple(row.shape)}")
    if row.numel() and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool):
        raise ArgumentError(f"{wrong} of {str(row.dtype).removeprefix('torch.')}")
    return row.long()
