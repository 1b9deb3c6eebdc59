"""`Decoder`: a token at a time at fixed addresses, beside the whole forward; in a CUDA graph on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import adjoint
from adjoint.models import Decoder, HybridLM, generation, pack
from adjoint.nn.attention import attend_in_pieces
from adjoint.nn.cache import ROOM, KeyValueCache
from tests.models.small import ANOTHER_WAY, CONFIGS, distance, sequences, small_model
from tests.stated import stated

families = pytest.mark.parametrize("name", CONFIGS)


def texts() -> list[list[int]]:
    return [row.tolist() for row in sequences((9, 14, 6))]


@families
def test_steps_of_some_sequences_are_those_of_the_whole_forward(name: str) -> None:
    """Sequences come in turns; the one that waits keeps its state, and so does an empty slot."""
    model = small_model(name, torch.float64).eval()
    with torch.no_grad():
        whole = [model(torch.tensor([text])).logits[0] for text in texts()]
        cache = model.new_cache(4)
        ids, cu_seqlens = pack([texts()[0][:3], texts()[1][:2]])
        model(ids, cu_seqlens=cu_seqlens, cache=cache, slots=[3, 0])
        decoder = model.decoder(cache)
        assert model.decoder(cache) is decoder
        for t in range(3, 6):
            logits = decoder([texts()[1][t - 1], texts()[0][t]], slots=[0, 3])
            assert distance(logits, torch.stack((whole[1][t - 1], whole[0][t]))) <= ANOTHER_WAY
        for t in range(6):
            assert distance(decoder([texts()[2][t]], slots=[1])[0], whole[2][t]) <= ANOTHER_WAY
        assert cache.lengths == (5, 6, 0, 6)
        for t in range(6, 9):
            logits = decoder([texts()[0][t], texts()[1][t - 1]], slots=[3, 0])
            assert distance(logits, torch.stack((whole[0][t], whole[1][t - 1]))) <= ANOTHER_WAY
        assert (
            distance(model(torch.tensor([texts()[1][8:]]), cache=cache, slots=[0]).logits[0], whole[1][8:])
            <= ANOTHER_WAY
        )


def test_what_a_step_gives_is_not_overwritten_by_the_next() -> None:
    model = small_model("qwen3_5").eval()
    decoder = model.decoder(model.new_cache(2))
    first = decoder([1, 2])
    kept = first.clone()
    decoder([3, 4])
    assert torch.equal(first, kept) and first.shape == (2, 61) and not first.requires_grad
    assert decoder([], slots=[]).shape == (0, 61)


def test_a_cache_that_is_full_grows() -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    text = sequences((ROOM + 3,))[0]
    with torch.no_grad():
        whole = model(text[None]).logits[0]
        cache = model.new_cache(2, ROOM - 1)
        attention = next(layer for layer in cache.layers if isinstance(layer, KeyValueCache))
        assert attention.room == ROOM
        model(text[None, : ROOM - 1], cache=cache, slots=[1])
        for t in range(ROOM - 1, ROOM + 3):
            assert distance(model.decoder(cache)([int(text[t])], slots=[1])[0], whole[t]) <= ANOTHER_WAY
    assert attention.room > ROOM and attention.room % ROOM == 0


def test_snapshots_and_cleared_slots_of_a_cache_with_a_decoder() -> None:
    model = small_model("qwen3_5_moe", torch.float64).eval()
    cache, text = model.new_cache(1), texts()[1]
    decoder = model.decoder(cache)
    with torch.no_grad():
        whole = model(torch.tensor([text])).logits[0]
        for token in text[:4]:
            decoder([token])
        kept = cache.snapshot()
        decoder([7]), decoder([8])
        cache.rollback(kept)
        assert distance(decoder([text[4]])[0], whole[4]) <= ANOTHER_WAY
        cache.clear([0])
        assert distance(decoder([text[0]])[0], whole[0]) <= ANOTHER_WAY
    assert cache.copy().decoder is None


@families
def test_generation_by_a_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does by default: rows that have met their stop token stay as they are."""
    model = small_model(name, torch.float64).eval()
    plain = model.generate(texts(), 7)
    stop = plain[1][3]
    caches = [model.new_cache(3), model.new_cache(3)]
    expected = model.generate(texts(), 7, stop_tokens=[stop], cache=caches[0])
    monkeypatch.setattr(generation, "_decoder", lambda model, cache, _: model.decoder(cache))
    assert model.generate(texts(), 7) == plain
    assert model.generate(texts(), 7, stop_tokens=[stop], cache=caches[1]) == expected
    assert caches[0].lengths == caches[1].lengths and len(set(map(len, expected))) > 1
    following = [[row[-1], 3] for row in expected]
    assert model.generate(following, 3, cache=caches[1]) == model.generate(following, 3, cache=caches[0])


def test_prompts_of_many_tokens_go_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    together = model.generate(texts(), 4)
    calls: list[tuple[int, ...]] = []
    forward = HybridLM.forward

    def watched(self: HybridLM, input_ids: torch.Tensor, **options: Any) -> Any:
        calls.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(HybridLM, "forward", watched)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 16)
    assert model.generate(texts(), 4) == together
    assert calls[:3] == [(1, 9), (1, 14), (1, 6)]
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 23)
    assert model.generate(texts(), 4, prefill_chunk=10) == together


@pytest.mark.parametrize("time", (2 * ROOM, 37))
def test_attention_in_pieces(time: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (4, time, time))
    seen = torch.arange(time) <= torch.tensor([[5], [time - 3]])
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
    assert distance(attend_in_pieces(q, k, v, seen), right) <= stated("models", "| attention in pieces, float64 |")


BAD: dict[str, tuple[Any, str]] = {
    "count": (lambda d: d([1]), "holds 2 sequences, and input_ids are of 1"),
    "slots": (lambda d: d([1], slots=[2]), "slots must be from 0 to 1, got 2"),
    "twice": (lambda d: d([1, 2], slots=[1, 1]), "slots must name another slot"),
    "one token": (lambda d: d(1), "tokens must be a list of them, got 1"),
    "token": (lambda d: d([61], slots=[1]), "from 0 to 60, got 61"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_are_named(case: str) -> None:
    model = small_model("qwen3_5")
    decoder = model.decoder(model.new_cache(2))
    call, words = BAD[case]
    with pytest.raises(adjoint.ArgumentError, match=words):
        call(decoder)


def test_a_graph_needs_a_gpu_and_a_decoder_its_own_cache() -> None:
    model = small_model("qwen3_5")
    with pytest.raises(adjoint.ArgumentError, match="cuda_graph needs a model on a GPU"):
        model.generate([[1]], 2, cuda_graph=True)
    with pytest.raises(adjoint.ArgumentError, match="another"):
        model.decoder(small_model("qwen3_5").new_cache(1))


# ------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def on_gpu() -> HybridLM:
    model = small_model("qwen3_5_moe", torch.bfloat16, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64)
    return model.eval().cuda()


@pytest.mark.gpu
def test_a_graph_gives_the_bits_of_plain_steps(on_gpu: HybridLM) -> None:
    caches = [on_gpu.new_cache(3, 64), on_gpu.new_cache(3, 64)]
    plain, captured = on_gpu.decoder(caches[0]), on_gpu.decoder(caches[1])
    plain._step = plain._compute  # type: ignore[method-assign]
    with torch.no_grad():
        for cache in caches:
            on_gpu(*pack(texts(), "cuda")[:1], cu_seqlens=pack(texts(), "cuda")[1], cache=cache)
        for step in range(8):
            slots = [0, 1, 2] if step % 3 else [2, 0]
            tokens = [step + slot for slot in slots]
            assert torch.equal(plain(tokens, slots), captured(tokens, slots)), step
    assert captured.captures == 1 and plain.captures == 0
    for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
        if not isinstance(mine, KeyValueCache) and not isinstance(other, KeyValueCache):
            assert torch.equal(mine.state, other.state) and torch.equal(mine.conv, other.conv)


@pytest.mark.gpu
def test_generation_captures_once_for_a_cache(on_gpu: HybridLM) -> None:
    expected = on_gpu.generate(texts(), 12, cuda_graph=False)
    cache = on_gpu.new_cache(3, 200)
    empty = cache.snapshot()
    for _ in range(3):
        assert on_gpu.generate(texts(), 12, cache=cache) == expected
        cache.rollback(empty)
    decoder = cache.decoder
    assert isinstance(decoder, Decoder) and decoder.captures == 1
