"""Whole numbers of numpy are taken wherever Python's are, and what is none is named; so is what is no truth value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError
from adjoint.core.arguments import as_int, require_integer, require_size

numpy = pytest.importorskip("numpy")


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64"])
def test_whole_numbers_of_numpy(kind: str) -> None:
    three = getattr(numpy, kind)(3)
    assert type(as_int(three)) is int and as_int(three) == require_integer("op", "size", three) == 3
    x = torch.arange(48.0).view(2, 3, 8)
    indices = torch.zeros(2, 3, 1, dtype=torch.int64)
    two = getattr(numpy, kind)(2)
    assert torch.equal(adjoint.take_along_axis(x, indices, two), x[..., :1])
    parts = adjoint.causal_conv1d(x, torch.ones(8, 2), split=(three, 5))
    assert [part.shape[-1] for part in parts] == [3, 5]
    cos, sin = torch.ones(3, 1), torch.zeros(3, 1)
    assert torch.equal(adjoint.rotary(x[:, :, None], None, cos, sin, rotary_dim=two)[0], x[:, :, None])
    assert adjoint.moe.route(x, two)[1].shape == (2, 3, 2)


@pytest.mark.parametrize("value", [2.0, "2", None, True, torch.tensor(2), numpy.float64(2), numpy.array([2])], ids=repr)
def test_what_is_no_whole_number_is_named(value: object) -> None:
    assert as_int(value) is value
    with pytest.raises(ArgumentError, match="op: size must be an integer, got"):
        require_size("op", "size", value)
    with pytest.raises(ArgumentError, match="op: size must be at least 1, got 0"):
        require_size("op", "size", 0)


def _rows(*shape: int) -> Tensor:
    return torch.ones(shape)


def _step(**flags: Any) -> Any:
    q, gates = _rows(1, 1, 1, 2), torch.zeros(1, 1, 1)
    return adjoint.gated_delta_step(q, q, q, gates, gates, torch.zeros(1, 1, 2, 2), **flags)


def _rule(**flags: Any) -> Any:
    q, gates = _rows(1, 3, 1, 2), torch.zeros(1, 3, 1)
    return adjoint.gated_delta_rule(q, q, q, gates, gates, **flags)


FLAGS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "causal_conv1d": (lambda **f: adjoint.causal_conv1d(_rows(1, 3, 2), _rows(2, 2), **f), ("output_final_state",)),
    "causal_conv1d_step": (
        lambda **f: adjoint.causal_conv1d_step(_rows(1, 1, 2), _rows(1, 2, 1), _rows(2, 2), **f),
        ("in_place",),
    ),
    "rotary": (
        lambda **f: adjoint.rotary(_rows(1, 3, 1, 2), None, _rows(3, 2), _rows(3, 2), **f),
        ("interleaved", "in_place"),
    ),
    "gated_delta_rule": (_rule, ("output_final_state", "normalize_qk")),
    "gated_delta_step": (_step, ("in_place", "normalize_qk", "return_all_states")),
    "gated_rms_norm": (lambda **f: adjoint.gated_rms_norm(_rows(2), _rows(2), _rows(2), **f), ("round_before_gate",)),
    "embedding": (lambda **f: adjoint.embedding(torch.tensor([1]), _rows(3, 2), **f), ("sparse",)),
    "embedding_bag": (
        lambda **f: adjoint.embedding_bag(torch.tensor([1]), _rows(3, 2), torch.tensor([0, 1]), **f),
        ("include_last_offset",),
    ),
    "linear_cross_entropy": (
        lambda **f: adjoint.linear_cross_entropy(_rows(3, 2), _rows(4, 2), torch.tensor([0, 1, 2]), **f),
        ("shift", "return_log_probabilities"),
    ),
    "take_along_axis": (
        lambda **f: adjoint.take_along_axis(_rows(3, 2), torch.zeros(3, 1, dtype=torch.int64), **f),
        ("distinct",),
    ),
}


@pytest.mark.parametrize(("op", "flag"), [(op, flag) for op, (_, flags) in FLAGS.items() for flag in flags])
def test_what_is_no_truth_value_is_named(op: str, flag: str) -> None:
    """The text "no" would be as good as True: a state would be overwritten."""
    call = FLAGS[op][0]
    call(**{flag: True})
    for value in ("no", None, 1):
        with pytest.raises(ArgumentError, match=f"{op}: {flag} must be True or False, got {value!r}"):
            call(**{flag: value})


@pytest.mark.parametrize(("kind", "allowed"), [(torch.float32, "float32"), (torch.bfloat16, "float32 or bfloat16")])
def test_the_dtypes_of_a_parameter_are_named_once(kind: torch.dtype, allowed: str) -> None:
    x, wrong = _rows(1, 3, 2).to(kind), torch.ones(2, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=f"causal_conv1d: bias must be {allowed}, as x is, got float16"):
        adjoint.causal_conv1d(x, _rows(2, 2), wrong)
    with pytest.raises(ArgumentError, match=f"rms_norm: weight must be {allowed}, as x is, got float16"):
        adjoint.rms_norm(x, wrong)


def test_sizes_that_torch_traces_stay_what_they_are() -> None:
    """A number that stands for any size is not asked for its value."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x.shape[2] // 2
        return adjoint.causal_conv1d(x, torch.ones(x.shape[2], 2), split=(half, x.shape[2] - half))  # type: ignore[no-any-return]

    compiled = torch.compile(split, fullgraph=True, dynamic=True, backend="eager")
    for columns in (6, 8, 10):
        x = torch.randn(1, 4, columns)
        assert all(map(torch.equal, compiled(x), split(x)))
