"""Decoding from a cache beside the whole forward: chunks, slots, copies, snapshots; sampling, stops, streams."""

from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import adjoint
from adjoint.cli import app
from adjoint.models import Cache, HybridLM, Sampling, generation, pack
from tests.models.small import ANOTHER_WAY, CONFIGS, distance, sequences, small_model

families = pytest.mark.parametrize("name", CONFIGS)


def next_logits(model: HybridLM, ids: list[int]) -> Tensor:
    """By the whole forward, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]  # type: ignore[no-any-return]


def greedy(model: HybridLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(next_logits(model, ids).argmax()))
    return ids[len(prompt) :]


def prompts() -> list[list[int]]:
    return [row.tolist() for row in sequences((7, 1, 23, 4))]


@families
@pytest.mark.parametrize("chunk", (None, 1, 5, 17), ids=str)
def test_greedy_decoding_is_that_of_the_whole_forward(name: str, chunk: int | None) -> None:
    model = small_model(name, torch.float64).eval()
    expected = [greedy(model, prompt, 6) for prompt in prompts()]
    assert model.generate(prompts(), 6, prefill_chunk=chunk) == expected
    assert model.generate(torch.tensor([prompts()[0]]), 6) == expected[:1]


@families
def test_cached_logits_are_those_of_the_whole_forward(name: str) -> None:
    """Packed, in rows of several tokens, in single tokens, and in slots."""
    model = small_model(name, torch.float64).eval()
    texts = [row.tolist() for row in sequences((30, 26))]
    with torch.no_grad():
        whole = [model(torch.tensor([text])).logits[0] for text in texts]
        cache = model.new_cache(3)
        ids, cu_seqlens = pack([texts[0][:4], texts[1][:9]])
        first = model(ids, cu_seqlens=cu_seqlens, cache=cache, slots=[2, 0]).logits[0]
        assert distance(first, torch.cat((whole[0][:4], whole[1][:9]))) <= ANOTHER_WAY
        assert cache.lengths == (9, 0, 4)
        alone = model(torch.tensor([texts[0][4:9]]), cache=cache, slots=[2]).logits[0]
        assert distance(alone, whole[0][4:9]) <= ANOTHER_WAY
        for t in range(9, 12):
            ids = torch.tensor([[texts[1][t]], [texts[0][t]]])
            step = model(ids, cache=cache, slots=[0, 2]).logits[:, 0]
            assert distance(step, torch.stack((whole[1][t], whole[0][t]))) <= ANOTHER_WAY
        ids, cu_seqlens = pack([texts[1][12:], texts[0][12:30]])
        rest = model(ids, cu_seqlens=cu_seqlens, cache=cache, slots=[0, 2]).logits[0]
        assert distance(rest, torch.cat((whole[1][12:], whole[0][12:]))) <= ANOTHER_WAY
        assert cache.lengths == (26, 0, 30)
        last = model(torch.tensor([texts[0][:3]]), cache=cache, slots=[1], last_only=True).logits
        assert last.shape == (1, 1, 61) and distance(last[0, 0], whole[0][2]) <= ANOTHER_WAY


@families
def test_copies_snapshots_and_cleared_slots(name: str) -> None:
    model = small_model(name, torch.float64).eval()
    text, other = (row.tolist() for row in sequences((20, 12)))
    with torch.no_grad():
        cache = model.new_cache(1)

        def go_on(cache: Cache, tokens: list[int]) -> Tensor:
            return model(torch.tensor([tokens]), cache=cache).logits[0]  # type: ignore[no-any-return]

        whole = model(torch.tensor([text])).logits[0]
        go_on(cache, text[:8])
        copied, kept = cache.copy(), cache.snapshot()
        assert distance(go_on(cache, other), model(torch.tensor([text[:8] + other])).logits[0, 8:]) <= ANOTHER_WAY
        later = cache.snapshot()
        cache.rollback(kept)
        assert cache.lengths == (8,)
        assert distance(go_on(cache, text[8:]), whole[8:]) <= ANOTHER_WAY
        assert distance(go_on(copied, text[8:9]), whole[8:9]) <= ANOTHER_WAY
        with pytest.raises(adjoint.ArgumentError, match="not forgotten"):
            cache.rollback(later)
        with pytest.raises(adjoint.ArgumentError, match="one of this cache"):
            copied.rollback(kept)
        cache.rollback(kept)
        assert distance(go_on(cache, text[8:10]), whole[8:10]) <= ANOTHER_WAY, "a snapshot may be come back to again"
        twice = cache.select([0, 0])
        ids = torch.tensor([[text[10]], [other[0]]])
        assert distance(model(ids, cache=twice).logits[0, 0], whole[10]) <= ANOTHER_WAY and twice.lengths == (11, 11)
        cache.clear([0])
        assert cache.lengths == (0,) and distance(go_on(cache, text), whole) <= ANOTHER_WAY
        with pytest.raises(adjoint.ArgumentError, match="forgotten"):
            cache.rollback(kept)
        with pytest.raises(adjoint.ArgumentError, match="slots must be from 0 to 0, got 1"):
            cache.clear([1])


BAD_CACHES: dict[str, tuple[Callable[[Cache], Any], str]] = {
    "clear": (lambda c: c.clear(0), "slots must be a list of them, got 0"),  # type: ignore[arg-type]
    "select": (lambda c: c.select(0), "slots must be a list of them, got 0"),  # type: ignore[arg-type]
    "reserve": (lambda c: c.reserve("x"), "capacity must be an integer, got 'x'"),  # type: ignore[arg-type]
    "rollback": (lambda c: c.rollback(None), "snapshot must be one of this cache"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_bad_calls_of_a_cache_are_named(case: str) -> None:
    call, words = BAD_CACHES[case]
    with pytest.raises(adjoint.ArgumentError, match=words):
        call(small_model("qwen3_5").new_cache(2))


@pytest.mark.parametrize(("before", "after"), ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)))
@pytest.mark.parametrize("count", (1, 30))
def test_a_cache_of_a_model_that_was_cast_since_is_refused(before: torch.dtype, after: torch.dtype, count: int) -> None:
    """A cache of fewer bits was gone on with, and its keys kept fewer bits than the model has."""
    model = small_model("qwen3_5", before).eval()
    cache = model.new_cache(1)
    decoder = model.decoder(cache)
    decoder([1])
    model.to(after)
    names = " and the model is ".join(f"{str(dtype)[6:]} on cpu," for dtype in (before, after))
    with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match=names.rstrip(",")):
        model(torch.ones(1, count, dtype=torch.int64), cache=cache)
    with pytest.raises(adjoint.ArgumentError, match="after the model is moved or cast"):
        decoder([1])
    with pytest.raises(adjoint.ArgumentError, match="after the model is moved or cast"):
        model.generate([[1]], 2, cache=cache.copy())


def test_a_cache_of_no_sequences_takes_none() -> None:
    model = small_model("qwen3_5").eval()
    ids, cu_seqlens = pack([])
    with torch.no_grad():
        assert model(ids, cu_seqlens=cu_seqlens, cache=model.new_cache(0)).logits.shape == (1, 0, 61)


@pytest.mark.parametrize("duplicate", (copy, deepcopy))
def test_python_copies_a_cache_as_it_copies_itself(duplicate: Callable[[Any], Any]) -> None:
    """With memory of its own and the same model; where that is copied along, it is of the copy."""
    model = small_model("qwen3_5", torch.float64).eval()
    with torch.no_grad():
        cache = model.new_cache(1)
        model(torch.tensor([[3, 1, 4]]), cache=cache)
        other = duplicate(cache)
        ours, theirs = (model(torch.tensor([[1, 5]]), cache=each).logits for each in (cache, other))
    assert torch.equal(ours, theirs) and other.belongs_to(model)
    twin, of_twin = deepcopy((model, cache))
    assert of_twin.belongs_to(twin) and not of_twin.belongs_to(model)


@families
def test_caches_under_autocast(name: str) -> None:
    """They have the dtype of the parameters, and what passes has another: a prefill in pieces, then a step."""
    model = small_model(name, initializer_range=0.15).eval()
    ids = torch.randint(1, 60, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            whole, cache = model(ids).logits, model.new_cache(2)
            pieces = [model(piece, cache=cache).logits for piece in ids.split((20, 9, 1), 1)]
    assert distance(torch.cat(pieces, 1), exact) <= 2 * distance(whole, exact)


def test_a_cache_that_is_given_is_gone_on_from() -> None:
    model = small_model("qwen3_5_moe", torch.float64).eval()
    cache = model.new_cache(2)
    first = model.generate(prompts()[:2], 3, cache=cache)
    assert cache.lengths == (7 + 2, 1 + 2), "all but the last token"
    again = model.generate([[row[-1], 5] for row in first], 4, cache=cache)
    for prompt, row, result in zip(prompts(), first, again, strict=False):
        assert result == greedy(model, [*prompt, *row, 5], 4)


def test_stop_tokens_end_a_row_and_no_other() -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    free = model.generate(prompts(), 8)
    stop = free[0][2]
    ended = model.generate(prompts(), 8, stop_tokens=[stop])
    for row, whole in zip(ended, free, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert len(ended[0]) < 8
    configured = small_model("qwen3_5", torch.float64, eos_token_id=stop).eval()
    assert configured.generate(prompts(), 8) == ended
    assert configured.generate(prompts(), 8, stop_tokens=()) == free


def test_one_stop_token_needs_no_list() -> None:
    model = small_model("qwen3_5").eval()
    first = model.generate(prompts(), 1)[0][0]
    assert model.generate(prompts(), 4, stop_tokens=first) == model.generate(prompts(), 4, stop_tokens=(first,))


def test_a_stream_gives_tokens_as_they_come() -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    whole = model.generate(prompts(), 5)
    steps = model.stream(prompts(), 5)
    assert next(steps) == [row[0] for row in whole]
    assert torch.is_grad_enabled(), "the stream's own mode stays inside"
    assert [list(column) for column in zip(*[[row[0] for row in whole], *steps], strict=True)] == whole
    assert model.generate(prompts(), 0) == [[], [], [], []] and model.generate([], 3) == []


# ------------------------------------------------------------------------------------------- sampling


def test_probabilities_of_sampling() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    largest_first = logits[:, [0, 2, 1, 3]]
    two = largest_first[:, :2].softmax(-1)[:, [0, 0, 1, 0]] * torch.tensor([1, 0, 1, 0])
    assert torch.equal(Sampling(1.0).probabilities(logits)[:, [0, 2, 1, 3]], largest_first.softmax(-1))
    assert torch.equal(Sampling(0.5).probabilities(logits)[:, [0, 2, 1, 3]], (2 * largest_first).softmax(-1))
    assert torch.equal(Sampling(1.0, top_k=2).probabilities(logits), two)
    assert Sampling(1.0, top_k=9).probabilities(logits).count_nonzero() == 4
    assert torch.equal(Sampling(1.0, top_p=0.6).probabilities(logits), two)
    assert Sampling(1.0, top_p=1e-9).probabilities(logits).tolist() == [[1.0, 0, 0, 0]]
    assert Sampling(1.0, top_k=3, top_p=0.9).probabilities(logits).tolist()[0][3] == 0, "ties go to the lower id"


@pytest.mark.parametrize("temperature", (1e-30, 1e-38, 1e-40, 1e-320))
def test_a_small_temperature_takes_the_most_likely(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [-5.0, -7.0, -5.0, 0.0], [-9.0, -8.0, -8.5, -9.5]])
    assert torch.equal(Sampling(temperature)(logits), logits.argmax(-1))
    assert Sampling(temperature).probabilities(torch.tensor([[1.0, 1.0, 0.0]])).tolist() == [[0.5, 0.5, 0.0]]


def test_sampling_follows_its_probabilities_and_its_generator() -> None:
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).expand(4000, 6)
    sampling = Sampling(0.7, top_k=4)
    tokens = sampling(logits, torch.Generator().manual_seed(3))
    assert torch.equal(tokens, sampling(logits, torch.Generator().manual_seed(3)))
    expected = sampling.probabilities(logits[:1])[0]
    counts = torch.bincount(tokens, minlength=6) / len(tokens)
    deviation = (expected * (1 - expected) / len(tokens)).sqrt()
    assert ((counts - expected).abs() <= 5 * deviation).all()


def test_random_generation_repeats_with_its_seed() -> None:
    model = small_model("qwen3_5").eval()
    runs = [
        model.generate(prompts(), 6, temperature=1.0, top_p=0.95, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2]


BAD: dict[str, tuple[Callable[[HybridLM], Any], str]] = {
    "empty": (lambda m: m.generate([[1], []], 2), "number 1 has none"),
    "token": (lambda m: m.generate([[1], [61]], 2), "from 0 to 60, got 61 in prompt 1"),
    "negative": (lambda m: m.generate([[-1]], 2), "got -1"),
    "temperature": (lambda m: m.generate([[1]], 2, temperature=-1.0), "temperature"),
    "no temperature": (lambda m: m.generate([[1]], 2, temperature=None), "temperature must be a number"),
    "whole top_k": (lambda m: m.generate([[1]], 2, temperature=1.0, top_k=1.5), "top_k must be an integer, got 1.5"),
    "true top_k": (lambda m: m.generate([[1]], 2, temperature=1.0, top_k=True), "top_k must be an integer, got True"),
    "text top_p": (lambda m: m.generate([[1]], 2, temperature=1.0, top_p="x"), "top_p must be above 0"),
    "one stop token": (lambda m: m.generate([[1]], 2, stop_tokens=3.0), "stop_tokens must be token ids, got 3.0"),
    "no prompts": (lambda m: m.generate(None, 2), "prompts must be lists of token ids.*got NoneType"),
    "a number": (lambda m: m.generate(torch.tensor(3), 2), "rows of a tensor of them, got one number"),
    "a seed": (lambda m: m.generate([[1]], 2, temperature=1.0, generator=3), "must be a torch.Generator, got int"),
    "no cache": (lambda m: m.generate([[1]], 2, cache=3), "cache must be one of this model, from new_cache; got int"),
    "top_k": (lambda m: m.generate([[1]], 2, temperature=1.0, top_k=0), "top_k"),
    "top_k of nothing": (lambda m: m.generate([[1]], 2, top_k=3), "top_k restricts what is drawn.*set a temperature"),
    "top_p of nothing": (lambda m: m.generate([[1]], 2, top_p=0.5), "top_p restricts what is drawn"),
    "true stop token": (lambda m: m.generate([[1]], 2, stop_tokens=True), "stop_tokens must be token ids, got True"),
    "a stream": (lambda m: m.stream([[1], [61]], 2), "got 61 in prompt 1"),
    "top_p": (lambda m: m.generate([[1]], 2, temperature=1.0, top_p=1.5), "top_p"),
    "count": (lambda m: m.generate([[1]], -2), "max_new_tokens must be at least 0, got -2"),
    "no whole count": (lambda m: m.generate([[1]], 2.5), "max_new_tokens must be a whole number, got 2.5"),
    "text": (lambda m: m.generate("abc", 2), "lists of token ids, or rows of a tensor of them, and number 0 is 'a'"),
    "numbers": (lambda m: m.generate([1, 2], 2), r"number 0 is of shape \(\)"),
    "no whole token": (lambda m: m.generate([[1], [1.5]], 2), "number 1 is of float32"),
    "stop tokens": (lambda m: m.generate([[1]], 2, stop_tokens=["x"]), "stop_tokens must be token ids"),
    "chunk": (lambda m: m.generate([[1]], 2, prefill_chunk=0), "prefill_chunk"),
    "cache": (lambda m: m.generate([[1]], 2, cache=m.new_cache(2)), "holds 2 sequences"),
    "model": (lambda m: m.generate([[1]], 2, cache=small_model("qwen3_5").new_cache(1)), "another"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_are_named(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(adjoint.ArgumentError, match=words):
        call(small_model("qwen3_5"))


def test_a_generator_of_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = small_model("qwen3_5"), torch.device("cuda")
    monkeypatch.setattr(HybridLM, "device", device)
    with pytest.raises(
        adjoint.ArgumentError, match=r"on the model's device, cuda, got one on cpu; .*Generator\('cuda'"
    ):
        model.generate([[1]], 2, temperature=1.0, generator=torch.Generator())


@pytest.mark.parametrize("options", ({}, {"temperature": 1.0}), ids=("greedy", "drawn"))
@pytest.mark.parametrize("weight", (torch.nan, torch.inf))
def test_logits_that_are_no_numbers_are_named(options: dict[str, Any], weight: float) -> None:
    """The second prompt alone meets the token whose embedding is spoiled."""
    model = small_model("qwen3_5_moe").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = weight
    with pytest.raises(adjoint.ArgumentError, match="logits of prompt 1 after 0 new tokens are not finite"):
        model.generate([[1, 2], [9]], 3, **options)


def test_logits_that_stop_being_numbers_are_named_by_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at every step would cost a GPU a wait each."""
    model = small_model("qwen3_5_moe").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[model.generate([[1, 2]], 1)[0][0]] = torch.nan
    with pytest.raises(adjoint.ArgumentError, match="logits of prompt 0 after 5 new tokens are not finite"):
        model.generate([[1, 2]], 6)
    monkeypatch.setattr(generation, "LOOK_EVERY", 2)
    with pytest.raises(adjoint.ArgumentError, match="after 2 new tokens are not finite"):
        model.generate([[1, 2]], 6)


def test_stop_tokens_and_counts_may_be_of_numpy_and_torch() -> None:
    model = small_model("qwen3_5").eval()
    whole = model.generate(prompts(), 6)
    (stopped,) = (model.generate(prompts(), 6, stop_tokens=[whole[0][1], 3]),)
    for stops in (torch.tensor([whole[0][1], 3]), np.array([3, whole[0][1]])):
        assert model.generate(prompts(), np.int64(6), stop_tokens=stops) == stopped  # type: ignore[arg-type]
    one = model.generate(prompts(), 6, stop_tokens=whole[0][1])
    for stop in (torch.tensor(whole[0][1]), np.int64(whole[0][1])):
        assert model.generate(prompts(), 6, stop_tokens=stop) == one  # type: ignore[arg-type]


@families
def test_many_new_tokens_reserve_no_memory_before_they_come(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(name).eval()
    stop = model.generate(prompts()[:1], 3)[0][2]
    assert len(model.generate(prompts()[:1], 10**15, stop_tokens=stop)[0]) <= 3
    expected = model.generate(prompts(), 6)
    monkeypatch.setattr(generation, "AHEAD", 1)
    assert model.generate(prompts(), 6) == expected


def test_a_cache_of_inference_mode_goes_on_outside() -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    expected = model.generate(prompts(), 8)
    with torch.inference_mode():
        cache = model.new_cache(4)
        first = model.generate(prompts(), 3, cache=cache)
        copies = [cache.copy(), cache.select([0, 1, 2, 3])]
        kept, decoder = cache.snapshot(), model.decoder(cache)
    for each in (cache, *copies):
        rest = model.generate([[row[-1]] for row in first], 5, cache=each)
        assert [a + b for a, b in zip(first, rest, strict=True)] == expected
    cache.rollback(kept)
    with torch.no_grad():
        logits = decoder(torch.tensor([row[-1] for row in first]))
    assert logits.argmax(-1).tolist() == [row[3] for row in expected]
    cache.reserve(2000)
    assert cache.lengths == tuple(len(row) + 3 for row in prompts())


# ---------------------------------------------------------------------------------------- the command


def test_the_command_generates_from_token_ids(tmp_path: Path) -> None:
    model = small_model("qwen3_5").eval()
    model.save_pretrained(tmp_path)
    expected = model.generate([[3, 1, 4]], 5)[0]
    done = CliRunner().invoke(
        app, ["generate", str(tmp_path), "3 1 4", "--tokens", "--max-new-tokens", "5", "--device", "cpu"]
    )
    assert done.exit_code == 0 and [int(word) for word in done.output.split()] == expected


def test_the_command_generates_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = small_model("qwen3_5").eval()
    model.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "w3 w1 w4", "--max-new-tokens", "4", "--device", "cpu"])
    assert done.exit_code == 0
    assert done.output.split() == [f"w{token}" for token in model.generate([[3, 1, 4]], 4)[0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["nowhere", "1", "--tokens"], "there is no file nowhere"),
        (["nowhere", "text"], "there is no file nowhere"),
        (["FOLDER", "x", "--tokens"], "token ids"),
        (["FOLDER", "99", "--tokens"], "got 99"),
        (["FOLDER", "1", "--tokens", "--temperature", "-1"], "temperature"),
        (["FOLDER", "text"], "tokenizer"),
        (["FOLDER", "1", "--tokens", "--dtype", "int8"], "dtype"),
        (["FOLDER", "text\udcff"], "must be UTF-8 text"),
        (["FOLDER", "1", "--tokens", "--seed", str(2**64)], "--seed must have at most 64 bits"),
    ),
)
def test_mistakes_of_the_command_are_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    small_model("qwen3_5").save_pretrained(tmp_path)
    arguments = [str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]
    done = CliRunner().invoke(app, ["generate", *arguments, "--device", "cpu"])
    assert done.exit_code == 2 and words in done.output.replace("\n", " ")


def test_stop_tokens_may_be_had_only_once() -> None:
    model = small_model("qwen3_5").eval()
    (first,) = model.generate(prompts()[:1], 6)
    (stopped,) = model.generate(prompts()[:1], 6, stop_tokens=iter([first[0]]))
    assert stopped == first[:1]


@pytest.mark.parametrize("chunk", (None, 3))
def test_a_cache_has_seen_all_but_the_last_token_without_new_ones_too(chunk: int | None) -> None:
    model = small_model("qwen3_5", torch.float64).eval()
    cache = model.new_cache(4)
    assert model.generate(prompts(), 0, cache=cache, prefill_chunk=chunk) == [[]] * 4
    assert cache.lengths == tuple(len(row) - 1 for row in prompts())
    last = [row[-1:] for row in prompts()]
    assert model.generate(last, 3, cache=cache) == model.generate(prompts(), 3)


def test_tokenizers_that_cannot_be_read_and_bytes_that_are_none(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from adjoint.models.byte_text import ByteText
    from adjoint.models.text import Text

    assert "".join(ByteText().decode([110, 300, 195, 169])) == "n\N{REPLACEMENT CHARACTER}é"
    for content in ("{", "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(adjoint.ArgumentError, match=r"tokenizer\.json is no tokenizer"):
            Text(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(adjoint.ArgumentError, match="does not take 'unknown'"):
        Text(tmp_path).encode("unknown")
