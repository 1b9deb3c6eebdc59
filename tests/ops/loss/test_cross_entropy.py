"""What only `cross_entropy` knows: torch's own loss as a second formulation, shifts, labels, and a search."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import adjoint
from adjoint import ArgumentError, Preference, Unsupported
from adjoint.ops.loss import eager, reference
from tests.conftest import device_under_test
from tests.promises import broken

BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def _logits(*shape: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return values.to(device_under_test())


def _labels(*shape: int, classes: int, ignored: bool = True) -> Tensor:
    labels = torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))
    if ignored:
        labels.view(-1)[1::3] = -100
    return labels.to(device_under_test())


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_torch_has_the_same_loss(backend: str, reduction: str, smoothing: float) -> None:
    """In float64, of what we compute in float32."""
    logits, labels = _logits(9, 33).float().requires_grad_(), _labels(9, classes=33)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    preference, wide = Preference(backend=backend), logits.detach().double().requires_grad_()
    ours = adjoint.cross_entropy(logits, labels, preference=preference, **options)
    theirs = F.cross_entropy(wide, labels, **options)
    upstream = torch.linspace(1, 2, ours.numel(), device=ours.device).view(ours.shape)
    pairs = {
        "loss": (ours, theirs),
        "dlogits": (
            torch.autograd.grad(ours, logits, upstream)[0],
            torch.autograd.grad(theirs, wide, upstream.double())[0],
        ),
    }
    assert not broken(adjoint.cross_entropy, (logits, labels), pairs, (upstream,), preference, **options)


@pytest.mark.skipif(device_under_test().type != "cpu", reason="torch's calls are for few logits on the CPU")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_plain_loss_of_few_logits_has_the_bits_of_torch_s(reduction: str) -> None:
    logits, labels = _logits(64, 1000).float(), _labels(64, classes=1000)
    eager_plan = Preference(backend="eager")
    ours = adjoint.cross_entropy(logits, labels, reduction=reduction, preference=eager_plan)  # type: ignore[call-overload]
    assert torch.equal(ours, F.cross_entropy(logits, labels, reduction=reduction))


@every_backend
def test_a_shift_is_that_of_each_sequence(backend: str) -> None:
    """As Hugging Face's models shift: logits without the last position, labels without the first."""
    logits, labels, preference = _logits(3, 6, 20).float(), _labels(3, 6, classes=20), Preference(backend=backend)
    wide, of_shift = logits.double(), {"shift": True}
    shifted = adjoint.cross_entropy(logits, labels, preference=preference, **of_shift)
    expected = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    pairs = {"loss": (shifted, expected)}
    assert not broken(adjoint.cross_entropy, (logits, labels), pairs, preference=preference, **of_shift)
    of_sum: dict[str, Any] = {"shift": True, "reduction": "sum"}
    one_row = adjoint.cross_entropy(logits[0], labels[0], preference=preference, **of_sum)
    pairs = {"loss": (one_row, F.cross_entropy(wide[0, :-1], labels[0, 1:], reduction="sum"))}
    assert not broken(adjoint.cross_entropy, (logits[0], labels[0]), pairs, preference=preference, **of_sum)


@every_backend
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignore_index_that_labels_cannot_have_ignores_none(backend: str, shift: bool, reduction: str) -> None:
    """2^40 has the same low 32 bits as a label of 0, which an int32 has."""
    logits, labels = _logits(3, 6, 20).float().requires_grad_(), _labels(3, 6, classes=20, ignored=False).int()
    labels[:, 2] = 0
    options: dict[str, Any] = {"shift": shift, "reduction": reduction, "preference": Preference(backend=backend)}
    losses, gradients = [], []
    for ignored in (2**40, -100):
        losses.append(adjoint.cross_entropy(logits, labels, ignore_index=ignored, **options))
        gradients.append(torch.autograd.grad(losses[-1].sum(), logits)[0])
    assert torch.equal(*losses) and torch.equal(*gradients)


@every_backend
def test_packed_sequences_are_silent_where_they_meet(backend: str) -> None:
    """The first label of each packed sequence is ignore_index: then packed is the sum of the parts."""
    logits, labels = _logits(1, 11, 20).float(), _labels(1, 11, classes=20, ignored=False)
    bounds = [0, 4, 5, 11]
    packed = labels.clone()
    packed[0, bounds[:-1]] = -100
    options: dict[str, Any] = {"shift": True, "reduction": "sum"}
    preference = Preference(backend=backend)
    loss = adjoint.cross_entropy(logits, packed, preference=preference, **options)
    wide = logits.double()
    parts = [F.cross_entropy(wide[0, a : b - 1], labels[0, a + 1 : b], reduction="sum") for a, b in pairwise(bounds)]
    pairs = {"loss": (loss, torch.stack(parts).sum())}
    assert not broken(adjoint.cross_entropy, (logits, packed), pairs, preference=preference, **options)


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_labels_loss_and_gradient_are_zero(backend: str, reduction: str) -> None:
    logits = torch.full((4, 7), float("nan"), device=device_under_test(), requires_grad=True)
    labels = torch.full((4,), -100, device=device_under_test())
    loss = adjoint.cross_entropy(logits, labels, reduction=reduction, preference=Preference(backend=backend))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros_like(gradient))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_with_its_token(backend: str, dtype: torch.dtype) -> None:
    """IEEE arithmetic where a token counts, 0 where it does not; other tokens keep their bits."""
    labels = torch.tensor([1, -100, 2, 0, 3, 2], device=device_under_test())
    plain = _logits(6, 5).to(dtype)
    special = plain.clone()
    special[1] = torch.nan  # does not count
    special[2, 4] = torch.nan
    special[3, 1] = torch.inf
    special[4] = -torch.inf
    special[5, 0] = -torch.inf  # a class of no probability

    def run(logits: Tensor) -> tuple[Tensor, ...]:
        own = logits.clone().requires_grad_()
        outputs = adjoint.cross_entropy(
            own, labels, reduction="none", return_log_probabilities=True, preference=Preference(backend=backend)
        )
        (gradient,) = torch.autograd.grad(outputs, own, [torch.full_like(x, 0.5) for x in outputs])
        return (*(x.detach() for x in outputs), gradient)

    (loss, logs, slopes), (plain_loss, plain_logs, plain_slopes) = run(special), run(plain)
    assert loss[1] == 0 and logs[1] == 0 and not slopes[1].any()
    assert loss[2:5].isnan().all() and logs[2:5].isnan().all() and slopes[2:5].isnan().any(1).all()
    assert torch.equal(loss[0], plain_loss[0]) and torch.equal(logs[0], plain_logs[0])
    assert torch.equal(slopes[0], plain_slopes[0])
    inputs = (special[5:, 1:].contiguous(), labels[5:] - 1)
    exact = F.cross_entropy(inputs[0].double(), inputs[1], reduction="none")
    of_none: dict[str, Any] = {"reduction": "none", "preference": Preference(backend=backend)}
    assert not broken(adjoint.cross_entropy, inputs, {"loss": (loss[5:], exact)}, **of_none)
    assert slopes[5, 0] == 0 and slopes[5].isfinite().all()


@every_backend
@pytest.mark.parametrize("wrong", [5, -3])
def test_a_label_out_of_range_counts_for_nothing(backend: str, wrong: int) -> None:
    """At once an error on the CPU; on a GPU its token has the loss 0 and no gradient, until `check` raises."""
    logits, preference = _logits(4, 5).float(), Preference(backend=backend)

    def run(label: int) -> tuple[Tensor, Tensor]:
        own = logits.clone().requires_grad_()
        labels = torch.tensor([1, label, 0, 4], device=own.device)
        loss = adjoint.cross_entropy(own, labels, preference=preference)
        return loss.detach(), torch.autograd.grad(loss, own)[0]

    expected = run(-100)
    with pytest.raises(ArgumentError, match=f"cross_entropy: labels .* got {wrong} at position 1 "):
        assert all(map(torch.equal, run(wrong), expected))
        adjoint.check()


@every_backend
def test_log_probabilities_alone_have_gradients(backend: str) -> None:
    logits, labels = _logits(5, 12).float().requires_grad_(), _labels(5, classes=12)
    options: dict[str, Any] = {"return_log_probabilities": True}
    preference = Preference(backend=backend)
    loss, logs = adjoint.cross_entropy(logits, labels, preference=preference, **options)
    (dlogits,) = torch.autograd.grad(logs.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    chosen = F.log_softmax(wide, -1)[labels >= 0].gather(1, labels[labels >= 0][:, None])
    (exact,) = torch.autograd.grad(chosen.sum(), wide)
    upstream = (torch.zeros_like(loss), torch.ones_like(logs))
    pairs = {"dlogits": (dlogits, exact)}
    assert not broken(adjoint.cross_entropy, (logits, labels), pairs, upstream, preference, **options)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_written_over_the_logits_on_request(backend: str, dtype: torch.dtype) -> None:
    labels, preference = _labels(4, 6, classes=40), Preference(backend=backend)
    layouts: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x,
        lambda x: torch.cat((x, x), -1)[..., :40],
        lambda x: torch.stack((x, x), -1)[..., 0],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for layout in layouts:
        first = layout(_logits(4, 6, 40).to(dtype))
        plain = first.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad(adjoint.cross_entropy(plain, labels, preference=preference), plain)
        reused = first.detach().requires_grad_()
        loss = adjoint.cross_entropy(reused, labels, reuse_inputs=True, preference=preference)
        (got,) = torch.autograd.grad(loss, reused, retain_graph=True)
        assert torch.equal(got, expected)
        assert got.untyped_storage().data_ptr() == reused.untyped_storage().data_ptr()
        with pytest.raises(Unsupported, match="a second backward"):
            torch.autograd.grad(loss, reused)


def test_labels_are_never_overwritten_and_parameters_not_either() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="logits, a parameter"):
        adjoint.cross_entropy(parameter, torch.zeros(2, dtype=torch.int64), reuse_inputs=True)


@every_backend
def test_a_wrong_label_in_a_checked_block(backend: str) -> None:
    logits, labels = _logits(3, 4, 9).float(), _labels(3, 4, classes=9)
    labels[2, 1] = 9
    with pytest.raises(ArgumentError, match="got 9 at position 9 "), adjoint.checked():
        adjoint.cross_entropy(logits, labels, preference=Preference(backend=backend))


@every_backend
def test_the_bound_survives_a_search(backend: str) -> None:
    """Logits that climb towards the largest error, in units of the bound, never pass it."""
    preference, dtype = Preference(backend=backend), torch.float32
    generator = torch.Generator().manual_seed(5)
    device = device_under_test()
    labels = torch.randint(70, (8,), generator=generator).to(device)
    options: dict[str, Any] = {"reduction": "none", "z_loss": 0.05, "label_smoothing": 0.1, "softcap": 20.0}

    def share(logits: Tensor) -> tuple[float, float]:
        plan = adjoint.plan(adjoint.cross_entropy, logits, labels, preference=preference, **options)
        exact = adjoint.cross_entropy(logits.double(), labels, **options)
        error = plan.guarantee["loss"].error
        measured = error.measure(adjoint.cross_entropy(logits, labels, preference=preference, **options), exact,
                                 logits.double(), labels)  # fmt: skip
        own, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
        upstream = torch.ones(8, device=device)
        (got,) = torch.autograd.grad(
            adjoint.cross_entropy(own, labels, preference=preference, **options), own, upstream
        )
        (right,) = torch.autograd.grad(adjoint.cross_entropy(wide, labels, **options), wide, upstream.double())
        assert plan.adjoint is not None
        promise = plan.adjoint.guarantee["dlogits"].error
        return measured.value, promise.measure(got, right, upstream.double(), logits.double(), labels).value

    best = torch.randn(8, 70, generator=generator).to(dtype).to(device) * 10
    reached = share(best)
    for step in range(60):
        scale = (0.1, 1.0, 8.0)[step % 3]
        moved = best + scale * torch.randn(8, 70, generator=generator).to(device)
        found = share(moved)
        assert max(found) <= 1, f"the bound is passed: {found}"
        if sum(found) > sum(reached):
            best, reached = moved, found
    assert max(reached) > 1e-3, "a bound a thousand times too wide says nothing"


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("upstream", [2.0**-126, 3e-40, 2.0**-149])
def test_the_bound_holds_where_gradients_are_subnormal(backend: str, dtype: torch.dtype, upstream: float) -> None:
    """Products below the smallest normal number are rounded by half of the smallest one, however small they are."""
    logits, labels = _logits(6, 40, scale=9.0).to(dtype), _labels(6, classes=40)
    preference, of_loss = Preference(backend=backend), torch.tensor(upstream, device=logits.device)
    for options in ({"reduction": "sum"}, {"softcap": 4.0, "z_loss": 50.0, "label_smoothing": 0.1}):
        leaf = logits.clone().requires_grad_()
        loss = adjoint.cross_entropy(leaf, labels, preference=preference, **options)  # type: ignore[call-overload]
        (slopes,) = torch.autograd.grad(loss, leaf, of_loss)
        exact = reference.cross_entropy_backward((of_loss.double(),), logits.double(), labels, **options)  # type: ignore[arg-type]
        pairs = {"dlogits": (slopes, exact)}
        assert not broken(adjoint.cross_entropy, (logits, labels), pairs, (of_loss,), preference, **options)


@every_backend
@pytest.mark.parametrize("softcap", [2.0**-126, 1e-30, 1e30, 2.0**127])
def test_the_smallest_and_the_largest_softcap(backend: str, softcap: float) -> None:
    logits, labels = _logits(6, 40).float(), _labels(6, classes=40)
    logits[:, ::4] = 0
    preference, upstream = Preference(backend=backend), torch.ones((), device=logits.device)
    leaf, options = logits.clone().requires_grad_(), {"softcap": softcap}
    loss = adjoint.cross_entropy(leaf, labels, softcap=softcap, preference=preference)
    pairs = {
        "loss": (loss, reference.cross_entropy(logits.double(), labels, **options)[0]),  # type: ignore[arg-type]
        "dlogits": (
            torch.autograd.grad(loss, leaf)[0],
            reference.cross_entropy_backward((upstream.double(),), logits.double(), labels, **options),  # type: ignore[arg-type]
        ),
    }
    assert not broken(adjoint.cross_entropy, (logits, labels), pairs, (upstream,), preference, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    logits, labels = _logits(6, 40), _labels(6, classes=40)
    options = {"ignore_index": numpy.int64(3), "label_smoothing": numpy.float32(0.25), "z_loss": numpy.float64(0.5)}
    loss = adjoint.cross_entropy(logits, labels.clamp_min(0), softcap=numpy.float32(2.0), **options)
    plain = {"ignore_index": 3, "label_smoothing": 0.25, "z_loss": 0.5, "softcap": 2.0}
    assert torch.equal(loss, adjoint.cross_entropy(logits, labels.clamp_min(0), **plain))  # type: ignore[arg-type]


def test_a_bound_without_the_error_of_its_sums_is_passed() -> None:
    """The search can fail: a bound that knows of one rounding alone does not hold."""
    logits, labels = _logits(4, 300, scale=9.0).float(), _labels(4, classes=300, ignored=False)
    plan = adjoint.plan(adjoint.cross_entropy, logits, labels, reduction="none")
    loss = adjoint.cross_entropy(logits, labels, reduction="none").double()
    exact = adjoint.cross_entropy(logits.double(), labels, reduction="none")
    limit = plan.guarantee["loss"].error.bound(logits.double(), labels)
    assert bool(((loss - exact).abs() <= limit).all())
    assert not bool(((loss - exact).abs() <= limit * 1e-4).all())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("labels", [(0, 8, 3, -100, -100, 7), (-100,) * 6, (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_torchs_few_calls_give_the_loss_of_the_blocks(
    shift: bool, reuse: bool, labels: tuple[int, ...], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loss of few logits on the CPU takes a way of its own: what it gives and keeps is what blocks give and
    keep, also for labels to ignore, whatever their logits, and of logits that do not lie row by row."""
    logits = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64).permute(1, 2, 0)
    if -100 in labels:
        logits[1, 0] = torch.nan
    target, options = torch.tensor(labels).view(2, 3), {"reduction": reduction, "shift": shift}
    used = torch.cat((target[:, 1:], torch.full((2, 1), -100)), 1).flatten() if shift else target.flatten()
    unit, finite = torch.tensor(3.0, dtype=torch.float64), logits.nan_to_num()
    (exact,) = reference.cross_entropy(finite, target, **options)  # type: ignore[arg-type]
    slopes = reference.cross_entropy_backward((unit,), finite, target, **options)  # type: ignore[arg-type]
    for is_plain in (True, False):
        monkeypatch.setattr(eager, "is_plain", lambda *_, value=is_plain: value)
        leaf = logits.clone(memory_format=torch.preserve_format).requires_grad_()
        loss = adjoint.cross_entropy(leaf * 1.0, target, **options, reuse_inputs=reuse)  # type: ignore[call-overload]
        named = {"loss": (loss, exact), "dlogits": (torch.autograd.grad(loss, leaf, unit)[0], slopes)}
        assert not broken(adjoint.cross_entropy, (logits, target), named, (unit,), **options)
        _, _, targets, sizes, count, _ = torch.ops.adjoint.cross_entropy(
            logits, target, -100, 0.0, 0.0, 0.0, reduction, shift, False, False, True, ""
        )
        counted = used >= 0
        assert torch.equal(targets, torch.where(counted, used, -1)) and targets.dtype == torch.int32
        assert count.tolist() == [max(1, int(counted.sum()))]
        own = finite.reshape(6, 9)[counted], used[counted]
        logs = own[0].gather(1, own[1][:, None])[:, 0] - sizes[counted]  # the log-probabilities, of L as it is kept
        assert not sizes[~counted].any()
        with_logs = {"reduction": "none", "return_log_probabilities": True}
        right = reference.cross_entropy(*own, **with_logs)[1]  # type: ignore[arg-type]
        assert not broken(adjoint.cross_entropy, own, {"log_probabilities": (logs, right)}, **with_logs)
    assert any(label >= 0 for label in labels) or not named["dlogits"][0].any()
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="got 9 at position 1"):
        adjoint.cross_entropy(logits, torch.tensor([[-100 if shift else 0, 9, 1], [2, 3, 4]]), shift=shift)


LIKE_TORCH: tuple[dict[str, Any], ...] = (
    {}, {"reduction": "sum", "shift": True}, {"reduction": "none"},
    {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.1},
)  # fmt: skip
on_the_cpu = pytest.mark.skipif(device_under_test().type != "cpu", reason="a GPU keeps no gradients in the forward")


@on_the_cpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", LIKE_TORCH)
def test_few_logits_on_the_cpu_give_their_gradient_in_the_forward(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The forward keeps one tensor of the size of the logits, in the wide type, and nothing else; `reuse_inputs`, whose
    backward starts from the logits, has the same bits for every upstream gradient."""
    logits = _logits(4, 6, 40).to(dtype).cpu().requires_grad_()
    labels = _labels(4, 6, classes=40).cpu()
    loss = adjoint.cross_entropy(logits, labels, **options)
    (kept,) = [x for x in loss.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
    assert kept.shape == logits.shape and kept.dtype == (dtype if dtype.itemsize > 2 else torch.float32)
    for scale in (1.0, 0.3):
        upstream = torch.full_like(loss, scale) * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
        (gradient,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
        reused = logits.detach().clone().requires_grad_()
        again = adjoint.cross_entropy(reused, labels, **options, reuse_inputs=True)
        assert torch.equal(loss, again)
        assert torch.equal(gradient, torch.autograd.grad(again, reused, upstream)[0])
    assert torch.equal(loss, adjoint.cross_entropy(logits.detach(), labels, **options))


@on_the_cpu
def test_an_upstream_gradient_of_one_is_not_multiplied_by_on_the_cpu() -> None:
    logits, labels = _logits(4, 40).float().cpu().requires_grad_(), _labels(4, classes=40).cpu()
    loss = adjoint.cross_entropy(logits, labels)
    kept = loss.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert first.data_ptr() != kept.data_ptr()  # the caller's own: the graph is asked again
    first.zero_()
    (last,) = torch.autograd.grad(loss, logits)
    assert last.data_ptr() == kept.data_ptr() and last.any()


@on_the_cpu
def test_many_logits_and_log_probabilities_keep_eight_bytes_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = _logits(4, 40).float().cpu().requires_grad_(), _labels(4, classes=40).cpu()
    _, logs = adjoint.cross_entropy(logits, labels, return_log_probabilities=True)
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", 4 * 40 - 1)
    loss = adjoint.cross_entropy(logits, labels)
    for output in (logs, loss):
        read, targets, sizes, _ = output.grad_fn.saved_tensors
        assert read.data_ptr() == logits.data_ptr()
        assert targets.nbytes + sizes.nbytes == 8 * 4


@on_the_cpu
@pytest.mark.parametrize("options", LIKE_TORCH)
@pytest.mark.parametrize("is_plain", [True, False])
def test_labels_that_are_next_to_impossible_have_their_loss(
    options: dict[str, Any], is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probability below the smallest normal number of float32 says nothing of its own logarithm."""
    monkeypatch.setattr(eager, "is_plain", lambda *_: is_plain and options == {})
    logits = _logits(1, 4, 9).float().cpu()
    logits[..., 3] += torch.tensor([86.0, 95.0, 110.0, 2000.0])
    labels, options = torch.tensor([[0, 1, 2, 4]]), {**options, "softcap": None}
    leaf = logits.requires_grad_()
    loss = adjoint.cross_entropy(leaf, labels, **options)
    upstream = torch.ones_like(loss)
    named = {
        "loss": (loss, reference.cross_entropy(logits.detach().double(), labels, **options)[0]),
        "dlogits": (
            torch.autograd.grad(loss, leaf, upstream)[0],
            reference.cross_entropy_backward((upstream.double(),), logits.detach().double(), labels, **options),
        ),
    }
    assert not broken(adjoint.cross_entropy, (logits.detach(), labels), named, (upstream,), **options)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_tracer_sees_the_backward(mode: str) -> None:
    """Also where an upstream gradient of 1 would hand on what the forward has kept, in silence."""

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        loss = adjoint.linear_cross_entropy(hidden, weight, labels) + adjoint.cross_entropy(hidden, labels)
        return torch.autograd.grad(loss, (hidden, weight))

    inputs = [torch.randn(n, 6, requires_grad=True) for n in (4, 5)]
    labels = torch.arange(4)
    traced = make_fx(step, tracing_mode=mode)(*inputs, labels)
    called = [str(node.target) for node in traced.graph.nodes if "backward" in str(node.target)]
    assert len(called) == 2 and all(name.startswith("adjoint.") for name in called)
    for got, right in zip(traced(*inputs, labels), step(*inputs, labels), strict=True):
        assert torch.equal(got, right)


def test_a_plan_for_a_gpu_is_that_of_tensors_which_are_there() -> None:
    """What the CPU does with few logits says nothing of a GPU, whatever the device of the tensors that are shown."""
    logits, labels = torch.randn(4, 9), torch.arange(4)
    shown = adjoint.plan(adjoint.cross_entropy, logits, labels, target="sm_90")
    on_none = adjoint.plan(adjoint.cross_entropy, logits.to("meta"), labels=labels.to("meta"), target="sm_90")
    for plan, other in ((shown, on_none), (shown.adjoint, on_none.adjoint)):
        assert plan is not None and other is not None
        assert plan.name == other.name == "triton.rows" and plan.sku == other.sku
    with_name = adjoint.plan(adjoint.cross_entropy, logits, labels=labels, target="sm_90")
    assert with_name.sku == shown.sku


@every_backend
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "softcap": 5.0}])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("upstream", [float("inf"), float("nan")])
def test_a_token_that_does_not_count_has_no_gradient_whatever_that_of_its_loss(
    backend: str, options: dict[str, Any], reuse: bool, upstream: float
) -> None:
    """A loss that is divided by the number of labels of its row, for example, where a row has none."""
    logits, labels = (
        _logits(4, 9).float().requires_grad_(),
        torch.tensor([1, -100, 3, -100], device=device_under_test()),
    )
    preference = Preference(backend=backend)
    keywords: dict[str, Any] = {"reduction": "none", "reuse_inputs": reuse, "preference": preference, **options}
    loss = adjoint.cross_entropy(logits * 1.0, labels, **keywords)
    weights = torch.tensor([0.5, upstream, 2.0, upstream], device=logits.device)
    (gradient,) = torch.autograd.grad(loss, logits, weights, retain_graph=not reuse)
    assert not gradient[1].any() and not gradient[3].any()
    assert gradient[0].isfinite().all() and gradient[0].any() and gradient[2].any()
