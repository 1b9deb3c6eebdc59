"""Whole numbers of numpy are taken wherever Python's are, and what is none is named."""

import pytest
import torch

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


def test_sizes_that_torch_traces_stay_what_they_are() -> None:
    """A number that stands for any size is not asked for its value."""

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x.shape[2] // 2
        return adjoint.causal_conv1d(x, torch.ones(x.shape[2], 2), split=(half, x.shape[2] - half))  # type: ignore[no-any-return]

    compiled = torch.compile(split, fullgraph=True, dynamic=True, backend="eager")
    for columns in (6, 8, 10):
        x = torch.randn(1, 4, columns)
        assert all(map(torch.equal, compiled(x), split(x)))
