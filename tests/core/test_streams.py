"""Work side by side: both pieces run, and what follows sees both."""

import pytest
import torch

import adjoint
from adjoint.core.errors import Unsupported
from adjoint.core.launch import refuse_capture, run_concurrently


@pytest.mark.parametrize("worthwhile", [False, True])
def test_pieces_run_in_their_order_without_a_gpu(worthwhile: bool) -> None:
    ran: list[str] = []
    pieces = [lambda name=name: ran.append(name) for name in ("first", "second", "third")]
    run_concurrently(torch.device("cpu"), *pieces, worthwhile=worthwhile)
    assert ran == ["first", "second", "third"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_follows_waits_for_both_even_when_the_second_raises() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    left, right = (torch.zeros(1 << 20, device=device) for _ in range(2))

    def slowly() -> None:
        torch.cuda._sleep(50_000_000)
        left.fill_(1)

    run_concurrently(device, slowly, lambda: right.fill_(2), worthwhile=True)
    assert bool((left + right == 3).all())

    def fail() -> None:
        raise ValueError("on purpose")

    left.zero_()
    with pytest.raises(ValueError, match="on purpose"):
        run_concurrently(device, slowly, fail, worthwhile=True)
    assert bool((left == 1).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_captures_all() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    sums = [torch.zeros(16, device=device) for _ in range(3)]
    pieces = [lambda x=x: x.add_(1) for x in sums]
    run_concurrently(device, *pieces, worthwhile=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_concurrently(device, *pieces, worthwhile=True)
    for _ in range(3):
        graph.replay()
    assert all(bool((x == 4).all()) for x in sums)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_captures_one_within_another() -> None:
    """The inner pieces share the second stream with the outer one, in order."""
    device = torch.device("cuda", torch.cuda.current_device())
    left, right, beside = (torch.zeros(16, device=device) for _ in range(3))

    def inner() -> None:
        for _ in range(2):
            run_concurrently(device, lambda: left.add_(right), lambda: right.add_(0), worthwhile=True)
            right.add_(1)

    run_concurrently(device, inner, lambda: beside.add_(1), worthwhile=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_concurrently(device, inner, lambda: beside.add_(1), worthwhile=True)
    for _ in range(3):
        graph.replay()
    assert bool((left == sum(range(8))).all() and (right == 8).all() and (beside == 4).all())


def test_what_waits_cannot_be_recorded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    refuse_capture(torch.device("cuda", 0), "the plan eager.sorted", "take another")
    recording = True
    refuse_capture(torch.device("cpu"), "the plan eager.sorted", "take another")
    with pytest.raises(Unsupported, match=r"^the plan eager\.sorted waits for the device.*; take another$"):
        refuse_capture(torch.device("cuda", 0), "the plan eager.sorted", "take another")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_refused_recording_leaves_the_device_usable() -> None:
    x = torch.randn(8, 16, device="cuda").requires_grad_()
    indices = torch.zeros(8, 4, dtype=torch.int64, device="cuda")
    with (
        pytest.raises(Unsupported, match=r"eager\.sorted waits .* recorded: triton\."),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        taken = adjoint.take_along_axis(x, indices, 1, preference=adjoint.Preference(backend="eager"))
        torch.autograd.grad(taken, x, torch.ones_like(taken))
    torch.randn(4, device="cuda")
