"""The module makes the tables that Hugging Face's modules make, from positions or packed sequences."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.nn import Rotary


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tables_of_hugging_face(
    dim: int, base: float, factor: float, position_ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As transformers' `default` rope computes them, written out."""
    size = int(dim * factor)
    inv_freq = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.int64).to(dtype=torch.float) / size))
    frequencies = (inv_freq[None, :, None].float() @ position_ids[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((frequencies, frequencies), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated_by_hugging_face(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary_pos_emb` for partial heads, with tokens before heads."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    columns, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = columns.chunk(2, -1)
    return torch.cat((columns * cos + torch.cat((-second, first), dim=-1) * sin, rest), dim=-1)


@pytest.mark.parametrize(("dim", "base", "factor"), [(256, 1e7, 0.25), (64, 10000.0, 1.0), (80, 5e5, 0.4)])
def test_it_is_hugging_face_s(dim: int, base: float, factor: float) -> None:
    q, k = normal(2, 7, 3, dim), normal(2, 7, 1, dim)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 5, 100, 32767, 262143]])
    cos, sin = tables_of_hugging_face(dim, base, factor, positions, torch.float32)
    module = Rotary(dim, base, partial_rotary_factor=factor)
    half = cos.shape[-1] // 2
    assert all(map(torch.equal, module.tables(positions), (cos[..., :half], sin[..., :half])))
    for result, x in zip(module(q, k, positions), (q, k), strict=True):
        assert torch.equal(result, rotated_by_hugging_face(x, cos, sin))


def test_tables_can_be_rounded_as_hugging_face_s() -> None:
    q, positions = normal(1, 5, 2, 16).bfloat16(), torch.arange(5)
    expected = [t[0, :, :8] for t in tables_of_hugging_face(16, 10000.0, 1.0, positions[None], torch.bfloat16)]
    module = Rotary(16, table_dtype=torch.bfloat16)
    assert all(map(torch.equal, module.tables(positions), expected))
    assert torch.equal(module(q)[0], adjoint.rotary(q, None, *expected, rotary_dim=16)[0])


def test_positions_default_to_those_of_one_sequence() -> None:
    q, module = normal(2, 7, 3, 8), Rotary(8)
    assert torch.equal(module(q)[0], module(q, position_ids=torch.arange(7))[0])
    assert torch.equal(module(q)[0], module(q, None, torch.arange(7).expand(2, 7))[0])
    assert module(q)[1] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_rotated_as_if_alone(dtype: torch.dtype) -> None:
    """Those without a token, and of one, among them."""
    lengths = [3, 0, 1, 5, 0, 2]
    q, k, module = normal(1, 11, 3, 8), normal(1, 11, 1, 8), Rotary(8, partial_rotary_factor=0.75)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=dtype)
    together = module(q, k, cu_seqlens=bounds)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        alone = module(q[:, begin:end], k[:, begin:end])
        for one, all_of in zip(alone, together, strict=True):
            assert torch.equal(one, all_of[:, begin:end])


def test_interleaved_pairs_are_passed_on() -> None:
    q = normal(1, 4, 2, 6)
    module = Rotary(6, interleaved=True)
    expected, _ = adjoint.rotary(q, None, *module.tables(torch.arange(4)), rotary_dim=6, interleaved=True)
    assert torch.equal(module(q)[0], expected)
    assert not torch.equal(module(q)[0], Rotary(6)(q)[0])


def test_in_place_is_passed_on() -> None:
    q, k, module = normal(1, 4, 2, 6), normal(1, 4, 1, 6), Rotary(6)
    expected = module(q, k)
    results = module(q, k, in_place=True)
    assert results[0] is q and results[1] is k
    assert all(map(torch.equal, results, expected))


def test_gradients_reach_q_and_k() -> None:
    q, k = normal(1, 3, 2, 6).double().requires_grad_(), normal(1, 3, 1, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(Rotary(6, partial_rotary_factor=2 / 3), (q, k))


def test_there_is_nothing_in_the_state_dict() -> None:
    module = Rotary(8)
    assert module.state_dict() == {} and list(module.parameters()) == []
    module.load_state_dict({})


def test_frequencies_stay_float32_and_survive_to_empty() -> None:
    expected = Rotary(8).inv_freq
    assert expected.dtype == torch.float32
    for module in (Rotary(8).bfloat16(), Rotary(8).double(), Rotary(8, device="meta").to_empty(device="cpu")):
        assert torch.equal(module.inv_freq, expected)
    assert Rotary(8, device="meta").inv_freq.is_meta


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_keep_every_option(copied: object) -> None:
    module = Rotary(8, 100.0, partial_rotary_factor=0.5, interleaved=True, table_dtype=torch.bfloat16)
    twin, q = copied(module), normal(1, 4, 2, 8).bfloat16()  # type: ignore[operator]
    assert repr(twin) == repr(module)
    assert repr(module) == (
        "Rotary(8, base=100, partial_rotary_factor=0.5, interleaved=True, table_dtype=torch.bfloat16)"
    )
    assert torch.equal(twin(q)[0], module(q)[0])


def test_compiles_whole() -> None:
    module, q = Rotary(8), normal(1, 6, 2, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q)[0], module(q)[0])
    bounds = torch.tensor([0, 2, 6])
    assert torch.equal(compiled(q, cu_seqlens=bounds)[0], module(q, cu_seqlens=bounds)[0])


def test_preference_is_passed_on() -> None:
    with pytest.raises(adjoint.Unsupported, match="no_such_plan"):
        Rotary(8, preference=adjoint.Preference(plan="no_such_plan"))(normal(1, 4, 2, 8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(8, partial_rotary_factor=0.4), "even, from 2 to the 8 columns of a head, got 3"),
        (lambda: Rotary(8, partial_rotary_factor=1.5), "got 12"),
        (lambda: Rotary(8, partial_rotary_factor=0.0), "got 0"),
        (lambda: Rotary(8, 0.0), "base must be a positive number, got 0"),
        (lambda: Rotary(8.5), "dim must be an integer, got 8.5"),  # type: ignore[arg-type]
        (lambda: Rotary(8, table_dtype=torch.int32), "table_dtype must be a floating torch.dtype, got torch.int32"),
        (lambda: Rotary(8)(normal(1, 4, 2, 8), cu_seqlens=torch.tensor([0, 3])), r"tokens, 4, got \[0, 3\]"),
        (lambda: Rotary(8)(normal(1, 4, 2, 8), cu_seqlens=torch.tensor([0, 3, 2, 4])), "never descend"),
        (lambda: Rotary(8)(normal(1, 4, 8)), r"\[batch, time, heads, D\], got \(1, 4, 8\)"),
        (lambda: Rotary(8)(normal(1, 4, 2, 8), None, torch.arange(3)), r"position_ids must have shape .* got \(3,\)"),
        (lambda: Rotary(8)(normal(2, 4, 2, 8), None, torch.zeros(3, 4).long()), r"position_ids .* got \(3, 4\)"),
        (lambda: Rotary(8)(normal(1, 4, 2, 8), None, torch.zeros(4)), "position_ids must be int32 or int64"),
        (lambda: Rotary(8)(normal(2, 4, 2, 8), cu_seqlens=torch.tensor([0, 4])), "batch of q must be 1, got 2"),
        (
            lambda: Rotary(8)(normal(1, 4, 2, 8), None, torch.arange(4), cu_seqlens=torch.tensor([0, 4])),
            "position_ids and cu_seqlens",
        ),
        (lambda: Rotary(10)(normal(1, 4, 2, 8)), "rotary_dim.* 8 columns of a head, got 10"),
    ],
)
def test_bad_calls(make: object, words: str) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        make()  # type: ignore[operator]


def test_frequencies_that_were_changed_move_with_the_module() -> None:
    """Casts are undone; a module on meta, which has no values, has its own after `to_empty`."""
    module = Rotary(8)
    module.inv_freq.div_(4)
    changed = module.inv_freq.clone()
    assert torch.equal(module.to("cpu").inv_freq, changed) and torch.equal(module.half().inv_freq, changed)
    assert module.share_memory().inv_freq.is_shared()
    assert torch.equal(Rotary(8, device="meta").to_empty(device="cpu").inv_freq, Rotary(8).inv_freq)


@pytest.mark.parametrize("name", ("base", "partial_rotary_factor"))
@pytest.mark.parametrize("value", (None, "1", float("nan"), float("inf"), -1.0, True))
def test_numbers_that_are_none_are_named(name: str, value: Any) -> None:
    with pytest.raises(adjoint.ArgumentError, match=f"{name} must be a positive number"):
        Rotary(8, **{name: value})
    with pytest.raises(adjoint.ArgumentError, match="positions must be a tensor of whole numbers"):
        Rotary(8).tables(value)
