"""Gradients beside the reverse scan of one sequence, in the model of Gluon: their bits are those of single launches."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.op.operator import forget
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.hopper import gradients_beside
from adjoint.ops.gated_delta.rule.hopper.gradients_beside import Sizes, sizes_of
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.reverse_scan import Upstream
from adjoint.ops.gated_delta.values import nearly_equal
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.model.translation import Modelled
from tests.gluon.rule.examples import Example

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

EXAMPLES: dict[str, tuple[Callable[[], Example], tuple[Sizes, ...]]] = {
    "states in and out": (lambda: Example.of((1, 300, 1, 2, 64, 64), decay=0.02), (Sizes(2, 1), Sizes(4, 4))),
    "whole chunks": (lambda: Example.of((1, 256, 1, 2, 64, 64), torch.float16, decay=0.02), (Sizes(1, 1),)),
    "neither state": (
        lambda: Example.of((1, 330, 2, 2, 64, 64), state=False, final=False, decay=0.02),
        (Sizes(1, 1), Sizes(5, 2)),
    ),
    "a final state alone": (lambda: Example.of((1, 129, 1, 2, 64, 64), state=False, decay=0.02), (Sizes(1, 1),)),
    "an initial state alone": (lambda: Example.of((1, 190, 1, 2, 64, 64), final=False, decay=0.02), (Sizes(2, 1),)),
    "two programs to a head": (lambda: Example.of((1, 321, 1, 2, 128, 128), decay=0.02), (Sizes(3, 3),)),
    "keys nearly equal": (
        lambda: Example.of((1, 449, 1, 2, 64, 64), keys=nearly_equal, decay=0.02, normalize=True),
        (Sizes(4, 3), Sizes(7, 1)),
    ),
}
"""Of tails of one token and more, and none; sizes from one chunk to all but one."""

PROGRAMS = 5
"""Multiprocessors: more than the programs of a reverse scan, so few that one of gradients has several items."""

Recorded = list[tuple[str, int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def many_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sequences of few heads are not split, so that few suffice."""
    monkeypatch.setattr(rule_shape, "FEW_HEADS", 0)
    forget()
    yield
    monkeypatch.undo()
    forget()


@cache
def kept(name: str) -> tuple[Tensor, ...]:
    """The outputs of an example, which its backward reads."""
    call = EXAMPLES[name][0]().call
    return hopper.run(call.operator, call.arguments, SCHEDULES[0])


def backward(name: str, parameters: dict[str, int], schedule: Schedule = SCHEDULES[0]) -> tuple[Tensor, ...]:
    example = EXAMPLES[name][0]()
    options = {"parameters": parameters, "programs": PROGRAMS}
    return hopper.run_backward(example.call, example.upstream(), kept(name), schedule, **options)


def beside(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: Sizes, schedule: Schedule = SCHEDULES[0]
) -> tuple[Tensor, ...]:
    monkeypatch.setattr(gradients_beside, "sizes_of", lambda shape, multiprocessors: sizes)
    return backward(name, hopper.BESIDE, schedule)


@cache
def alone(name: str) -> tuple[Tensor, ...]:
    """The gradients of an example by single launches."""
    return backward(name, {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The kernel, the programs and the arguments of each launch."""
    recorded: Recorded = []
    run = Modelled.__getitem__

    def record(self: Modelled, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            recorded.append((self.__name__, grid[0], dict(zip(self._kernel.types, arguments, strict=True))))
            run(self, grid)(*arguments, **constants)

        return launch

    monkeypatch.setattr(Modelled, "__getitem__", record)
    return recorded


@pytest.mark.parametrize("name", EXAMPLES)
def test_bits_are_those_of_single_launches(monkeypatch: pytest.MonkeyPatch, name: str, launches: Recorded) -> None:
    right = alone(name)
    chunks = -(-EXAMPLES[name][0]().inputs[0].shape[1] // 64)
    for sizes in EXAMPLES[name][1]:
        launches.clear()
        got = beside(monkeypatch, name, sizes)
        assert all(x.isfinite().all() for x in got)
        assert any(x.numel() for x in got) and all(map(torch.equal, got, right)), sizes
        scans = [(x["first_chunk"], x["part"]) for kernel, _, x in launches if kernel == "rule_reverse_scan_hopper"]
        assert scans == [(chunks - sizes.scanned, sizes.scanned), (0, chunks - sizes.scanned)]
        heads = EXAMPLES[name][0]().inputs[0].shape[2]
        (programs, last), (_, first) = [(n, x) for kernel, n, x in launches if kernel == "rule_gradients_hopper"]
        places = [x["chunk_indices"].storage_offset() // INDEX_WIDTH.value for x in (first, last)]
        assert places[1] - places[0] == chunks - sizes.beside, "the first chunk of either"
        assert first["items"] == (chunks - sizes.beside) * heads, "every chunk and key head of the first chunks"
        assert last["items"] == sizes.beside * heads, "and of the last ones"
        scanning = next(n for kernel, n, _ in launches if kernel == "rule_reverse_scan_hopper")
        assert programs + scanning <= PROGRAMS, "side by side"


@pytest.mark.parametrize("name", ["states in and out", "keys nearly equal"])
def test_schedules_change_no_bit(monkeypatch: pytest.MonkeyPatch, name: str, everything: bool) -> None:
    for schedule in SCHEDULES[1 : None if everything else 2]:
        other = beside(monkeypatch, name, EXAMPLES[name][1][0], schedule)
        assert other and all(map(torch.equal, alone(name), other))


@pytest.mark.parametrize("wrong", ["the final gradient again", "zeros"])
def test_a_wrong_gradient_between_the_parts_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def other(upstream: Upstream, dfinal_state: Any) -> Upstream:
        return upstream if wrong != "zeros" else Upstream(*upstream[:3], torch.zeros_like(dfinal_state), upstream.scale)

    monkeypatch.setattr(Upstream, "_replace", other)
    name = "states in and out"
    assert not all(map(torch.equal, beside(monkeypatch, name, Sizes(2, 1)), alone(name)))


def test_packed_sequences_have_single_launches(launches: Recorded) -> None:
    example = Example.of((1, 200, 1, 2, 64, 64), decay=0.02, cu_seqlens=(0, 200))
    outputs = hopper.run(example.call.operator, example.call.arguments, SCHEDULES[0])
    launches.clear()
    hopper.run_backward(example.call, example.upstream(), outputs, SCHEDULES[0], parameters=hopper.BESIDE)
    names = [kernel for kernel, *_ in launches]
    assert names.count("rule_reverse_scan_hopper") == names.count("rule_gradients_hopper") == 1


def shape_of(chunks: int, key_heads: int = 16, heads: int = 32) -> Shape:
    dtypes = (torch.bfloat16, torch.float32, torch.float32, None)
    return Shape(*dtypes, 1, 64 * chunks, 1, key_heads, heads, 128, 128)


def test_sizes_are_within_a_sequence() -> None:
    for key_heads, heads in ((16, 32), (2, 8), (5, 15), (16, 48)):
        for chunks in (*range(1, 600), 4096, 16384):
            scanned, beside = sizes_of(shape_of(chunks, key_heads, heads), 132)
            assert 0 < beside <= scanned < chunks or (scanned, beside) == (0, 0)


def test_sizes_that_the_docs_name() -> None:
    assert sizes_of(shape_of(512), 132) == (280, 161)
    assert sizes_of(shape_of(64), 132) == (35, 17)
    assert sizes_of(shape_of(256, 2, 8), 132) == (212, 212)


@pytest.mark.parametrize(
    ("shape", "multiprocessors"),
    [(shape_of(48), 132), (shape_of(512, 16, 64), 132), (shape_of(512, 16, 48), 132), (shape_of(512), 78)],
    ids=["short", "no multiprocessor idle", "few", "a smaller GPU"],
)
def test_where_it_does_not_pay(shape: Shape, multiprocessors: int) -> None:
    assert sizes_of(shape, multiprocessors) == (0, 0)
