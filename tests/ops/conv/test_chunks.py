"""Plain PyTorch computes a batch in chunks: their bounds change nothing, wherever they fall."""

import pytest
import torch

import adjoint
from adjoint import Preference
from adjoint.ops.conv import batches
from adjoint.ops.conv.shape import Shape
from tests.ops.conv.test_conv import broken_conv, leaves, normal, torch_conv

EAGER = Preference(backend="eager")
CPU = torch.device("cpu")


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("split", [None, (2, 0, 3)])
@pytest.mark.parametrize(
    ("batch", "time", "width"), [(2, 50, 4), (1, 33, 8), (3, 17, 2), (2, 49, 1), (5, 3, 8), (7, 1, 4)]
)
def test_chunks_change_nothing(
    batch: int, time: int, width: int, split: tuple[int, ...] | None, activation: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Chunks of 16 tokens: the last of 50 has two, fewer than a state; rows of 3 go five together."""
    monkeypatch.setattr(batches, "CHUNK", 16 * 5)
    shapes = ((batch, time, 5), (5, width), (5,), (batch, 5, width - 1))
    inputs = leaves(CPU, *(normal(*shape, seed=n) for n, shape in enumerate(shapes)))
    x, weight, bias, state = inputs
    *parts, final = adjoint.causal_conv1d(
        x, weight, bias, activation=activation, initial_state=state, output_final_state=True, split=split,
        preference=EAGER,
    )  # fmt: skip
    expected = torch_conv(x, weight, bias, state, activation)
    tail = torch.cat((state, x.transpose(1, 2)), -1)[..., time:]
    dy, dfinal = normal(batch, time, 5, seed=7), normal(batch, 5, width - 1, seed=8)
    upstream = dy.split(split, -1) if split else (dy,)
    ours = torch.autograd.grad((*parts, final), inputs, (*upstream, dfinal))
    theirs = torch.autograd.grad((expected, tail), inputs, (dy, dfinal))
    assert torch.equal(final, tail)
    options = {"activation": activation, "initial_state": state, "output_final_state": True}
    results, exact = (torch.cat(parts, -1), *ours), (expected, *theirs)
    assert not broken_conv((x, weight, bias), results, exact, (dy, dfinal), "eager", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("channels", "width"), [(1, 4), (5, 8), (100, 4), (5000, 3), (33, 1)])
def test_a_prefill_and_steps_have_the_bits_of_the_whole(
    channels: int, width: int, threads: int, activation: str | None, dtype: torch.dtype
) -> None:
    """Also where sizes are no multiples of torch's vectors, and where torch gives a call to several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shapes = ((2, 47, channels), (channels, width), (channels,))
        x, weight, bias = (normal(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes))
        whole, last = adjoint.causal_conv1d(
            x, weight, bias, activation=activation, output_final_state=True, preference=EAGER
        )
        y, state = adjoint.causal_conv1d(
            x[:, :29], weight, bias, activation=activation, output_final_state=True, preference=EAGER
        )
        parts = [y]
        for begin, end in ((29, 30), (30, 31), (31, 34), (34, 47)):
            step = adjoint.causal_conv1d_step(
                x[:, begin:end], state, weight, bias, activation=activation, preference=EAGER
            )
            y, state = step
            parts.append(y)
        assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(state, last)
        rows = torch.cat((x[:1, :9], x[1:, :0], x[1:]), 1)
        packed = adjoint.causal_conv1d(
            rows, weight, bias, activation=activation, cu_seqlens=torch.tensor([0, 9, 9, 56]), preference=EAGER
        )
        assert torch.equal(packed, torch.cat((whole[:1, :9], whole[1:]), 1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("time", [0, 2])
def test_short_rows_hand_their_states_on(time: int) -> None:
    """The final state of fewer tokens than it has holds part of the initial one, and its gradient goes there."""
    x, weight, state = leaves(CPU, normal(2, time, 3), normal(3, 5, seed=1), normal(2, 3, 4, seed=2))
    _, final = adjoint.causal_conv1d(x, weight, initial_state=state, output_final_state=True, preference=EAGER)
    dfinal = normal(2, 3, 4, seed=3)
    (dstate,) = torch.autograd.grad(final, state, dfinal)
    assert torch.equal(final[..., : 4 - time], state[..., time:])
    assert torch.equal(dstate[..., time:], dfinal[..., : 4 - time]) and not dstate[..., :time].any()


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Between x and y lies a chunk in float32, whatever the number of tokens, and never all of x in float32."""
    made = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor) and not result._is_view():
                made.append(result.untyped_storage().nbytes())
            return result

    x, weight = torch.randn(1, 2048, 256, dtype=torch.bfloat16), torch.randn(256, 4, dtype=torch.bfloat16)
    problem = adjoint.plan(adjoint.causal_conv1d, x, weight, preference=EAGER).problem
    y = torch.empty_like(x)
    with Sizes():
        batches.forward(batches.Sequences(Shape.of(problem), x, weight, None, None), [y], x.new_empty(0))
    own = {x.untyped_storage().nbytes(), y.untyped_storage().nbytes()}
    assert max(size for size in made if size not in own) <= 5 * batches.CHUNK
