"""The router: what only it knows. The shared checks are in test_contract."""

import math
from typing import Any, Literal

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint import ArgumentError, Preference, moe
from adjoint.core.kernels import interpreting
from adjoint.ops.moe.route import reference
from adjoint.verify.checks.bits import same_bits
from tests.ops.moe.routing import HALF, INFINITY, NAN, SINGLE, adversarial, wrongs
from tests.promises import broken

BACKENDS = [pytest.param("triton", marks=pytest.mark.kernels), pytest.param("eager")]
backends = pytest.mark.parametrize("backend", BACKENDS)

SHAPES = [(64, 10), (40, 5), (33, 33), (8, 8), (1, 1), (70, 40)]
"""Experts and k: within one slice of 32 and past it, k = 1, k = E, k past one group of slots and past unrolling."""

GROUPS = {"num_groups": 4, "groups_kept": 2}


def _bias(experts: int, device: torch.device) -> Tensor:
    return (torch.randn(experts, generator=torch.Generator().manual_seed(5)) * 0.3).to(device)


@backends
@pytest.mark.parametrize("dtype", [HALF, torch.float16, SINGLE])
@pytest.mark.parametrize(("experts", "k"), SHAPES)
def test_routing_is_a_stable_sort_of_the_logits(
    experts: int, k: int, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    assert not wrongs(adversarial(experts, dtype).to(device), k, backend)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_rows_without_equal_logits_are_selected_as_in_a_batch_with_them(renormalize: bool, dtype: torch.dtype) -> None:
    """In plain PyTorch a batch is sorted where equal logits, or NaN, are among its best; here each row has its own."""
    rows = torch.cat((adversarial(12, dtype), torch.randn(8, 12, generator=torch.Generator().manual_seed(3)).to(dtype)))
    rows[-1, 4], rows[-2, 3], rows[-3, 5] = INFINITY, -INFINITY, NAN
    options: dict[str, Any] = {"renormalize": renormalize, "preference": Preference(backend="eager")}
    for k in (1, 5, 12):
        together = moe.route(rows, k, **options)
        alone = [moe.route(row, k, **options) for row in rows]
        assert all(map(same_bits, together, map(torch.stack, zip(*alone, strict=True))))


MODES: dict[str, dict[str, Any]] = {
    "softmax over all": {"renormalize": False},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, as it is": {"score": "sigmoid", "renormalize": False},
    "softmax in groups": GROUPS,
    "sigmoid in groups": {"score": "sigmoid", "renormalize": False} | GROUPS,
    "every group": {"score": "sigmoid", "num_groups": 4, "groups_kept": 4},
    "groups of one": {"num_groups": 40, "groups_kept": 10},
}


@backends
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, biased: bool, backend: str, device: torch.device) -> None:
    bias = _bias(40, device) if biased else None
    dtype = SINGLE if "sigmoid" in mode else HALF
    assert not wrongs(adversarial(40, dtype).to(device), 6, backend, bias=bias, **MODES[mode])


# ----------------------------------------------------------------------------------------------- float64

DOUBLE = torch.float64


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("mode", ["softmax", *MODES])
def test_modes_in_float64(mode: str, biased: bool, device: torch.device) -> None:
    bias = _bias(40, device).double() if biased else None
    options = MODES.get(mode, {})
    logits = adversarial(40, DOUBLE).to(device)
    assert not wrongs(logits, 6, "eager", bias=bias, **options)
    weights, indices = moe.route(logits, 6, bias=bias, **options)
    assert weights.dtype == DOUBLE and indices.dtype == torch.int64


def test_float64_compares_what_float32_cannot_tell_apart(device: torch.device) -> None:
    """Sigmoids, sums with a bias and sums of groups that round to one float32."""
    close = torch.tensor([[2.0, 2.0 + 1e-12, 1.0, 1.0 + 1e-12]], dtype=DOUBLE, device=device)
    assert moe.route(close, 2, score="sigmoid")[1].tolist() == [[1, 0]]
    assert moe.route(close.float(), 2, score="sigmoid")[1].tolist() == [[0, 1]]
    bias = torch.tensor([0.0, 0.0, 5.0, 5.0], dtype=DOUBLE, device=device)
    assert moe.route(close, 2, bias=bias)[1].tolist() == [[3, 2]]
    groups = torch.tensor([[2.0, 1.0, 2.0, 1.0 + 1e-12]], dtype=DOUBLE, device=device)
    assert moe.route(groups, 2, num_groups=2, groups_kept=1)[1].tolist() == [[2, 3]]


def _in_many_digits(logits: list[Any], upstream: list[Any], chosen: list[int], score: str, renormalize: bool) -> Any:
    """Weights of the chosen experts of a row, and the gradient of its logits, by the formulas of the docs."""
    shares = [mpmath.exp(x) for x in logits]
    shares = [s / sum(shares) for s in shares] if score == "softmax" else [1 / (1 + mpmath.exp(-x)) for x in logits]
    total = sum(shares[e] for e in chosen) if renormalize else mpmath.mpf(1)
    weights = [shares[e] / total for e in chosen]
    dot = sum(w * dw for w, dw in zip(weights, upstream, strict=True))
    gradient = [mpmath.mpf(0)] * len(logits)
    if score == "softmax" and not renormalize:
        gradient = [-s * dot for s in shares]
    for e, w, dw in zip(chosen, weights, upstream, strict=True):
        slope = w * (dw - dot if renormalize else dw)
        gradient[e] += slope * (1 - shares[e] if score == "sigmoid" else 1)
    return weights, gradient


@pytest.mark.parametrize("scale", [1, 30, 1000])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_float64_is_inside_its_bound_of_many_digits(
    score: Literal["softmax", "sigmoid"], renormalize: bool, scale: float, device: torch.device
) -> None:
    source = torch.Generator().manual_seed(scale)
    logits = (scale * torch.randn(6, 9, generator=source, dtype=DOUBLE)).to(device).requires_grad_()
    upstream = torch.randn(6, 4, generator=source, dtype=DOUBLE).to(device)
    weights, indices = moe.route(logits, 4, score=score, renormalize=renormalize)
    (gradient,) = torch.autograd.grad(weights, logits, upstream)
    rows = logits.detach()
    plan = adjoint.plan(moe.route, rows, 4, score=score, renormalize=renormalize)
    assert plan.adjoint is not None
    limits = plan.guarantee["weights"].error.bound(rows), plan.adjoint.guarantee["dlogits"].error.bound(upstream, rows)  # type: ignore[union-attr]
    results = weights.detach(), gradient
    with mpmath.workdps(1500):  # e^−3000 beside 1
        for row in range(6):
            numbers = [[mpmath.mpf(x) for x in values[row].tolist()] for values in (rows, upstream)]
            exact = _in_many_digits(*numbers, indices[row].tolist(), score, renormalize)
            for got, truth, limit in zip(results, exact, limits, strict=True):
                for value, right, most in zip(got[row].tolist(), truth, limit[row].tolist(), strict=True):
                    assert abs(mpmath.mpf(value) - right) <= mpmath.mpf(most)


@backends
def test_a_bias_moves_the_selection_and_not_the_weights(backend: str, device: torch.device) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 5.0, 5.0], device=device)
    options: dict[str, Any] = {"score": "sigmoid", "preference": Preference(backend=backend), "renormalize": False}
    weights, indices = moe.route(logits, 2, bias=bias, **options)
    assert indices.tolist() == [[2, 3]]
    unbiased, _ = moe.route(logits[:, 2:], 2, **options)
    assert torch.equal(weights, unbiased)
    assert not wrongs(logits, 2, backend, bias=bias, score="sigmoid", renormalize=False)
    strided = torch.stack((bias, -bias), 1)[:, 0]
    assert same_bits(moe.route(logits, 2, bias=strided, **options)[0], weights)
    assert bias.requires_grad_() is not None
    (dbias,) = torch.autograd.grad(
        moe.route(logits.requires_grad_(), 2, bias=bias, **options)[0].sum() + bias.sum(), bias, allow_unused=True
    )
    assert torch.equal(dbias, torch.ones_like(bias)), "no gradient comes through the selection"


@backends
def test_experts_outside_the_kept_groups_are_never_chosen(backend: str, device: torch.device) -> None:
    """Even where everything inside them is worse than what is outside: as DeepSeek-V3, two best decide a group."""
    logits = torch.tensor([[9.0, -9.0, -9.0, 4.0, 4.0, -9.0, 3.0, 4.5, -9.0]], device=device)
    _, indices = moe.route(logits, 3, num_groups=3, groups_kept=1, preference=Preference(backend=backend))
    assert indices.tolist() == [[3, 4, 5]], "4 + 4 is more than 9 − 9 and than 3 + 4.5"


@backends
def test_special_rows(backend: str, device: torch.device) -> None:
    rows = torch.tensor(
        [[1.0, INFINITY, 0.0], [-INFINITY] * 3, [NAN, -INFINITY, 2.0], [NAN, NAN, 2.0], [-0.0, 0.0, -0.0]],
        device=device,
    )
    for score in ("softmax", "sigmoid"):
        weights, indices = moe.route(rows, 2, score=score, preference=Preference(backend=backend))
        assert weights[:2].isnan().all()
        assert indices[2].tolist() == [2, 1] and weights[2].tolist() == [1.0, 0.0]
        assert indices[3].tolist() == [2, 0] and weights[3].isnan().all()
        assert indices[4].tolist() == [0, 1] and weights[4].tolist() == [0.5, 0.5]
        assert indices[1].tolist() == [0, 1]


@backends
def test_very_negative_logits_keep_their_weights(backend: str, device: torch.device) -> None:
    """σ(−10000) is 0 in every format; the ratio of two of them is not."""
    logits = torch.tensor([[-10000.0, -10001.0, -20000.0]], device=device)
    weights, _ = moe.route(logits, 2, score="sigmoid", preference=Preference(backend=backend))
    expected = torch.tensor([[1 / (1 + math.exp(-1)), 1 / (1 + math.e)]], dtype=torch.float64, device=device)
    plan = adjoint.plan(moe.route, logits, 2, score="sigmoid", preference=Preference(backend=backend))
    assert plan.guarantee["weights"].error.measure(weights, expected, logits.double(), None).holds


@backends
@pytest.mark.parametrize("options", [{}, {"renormalize": False}, {"score": "sigmoid"}], ids=str)
def test_bits_do_not_depend_on_strides(options: dict[str, Any], backend: str, device: torch.device) -> None:
    if backend == "eager":
        pytest.skip("plain PyTorch does not promise it")
    logits, upstream = adversarial(40, HALF).to(device), torch.randn(11, 12, device=device)

    def answers(x: Tensor, dw: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        weights, indices = moe.route(x, 12, preference=Preference(backend=backend), **options)
        return weights.detach(), indices, torch.autograd.grad(weights, x, dw)[0]

    plain = answers(logits, upstream)
    turned = logits.T.contiguous().T, upstream.T.contiguous().T
    spread = torch.cat((logits, logits), 1)[:, :40], torch.stack((upstream, -upstream), -1)[..., 0]
    for other in (turned, spread):
        assert all(map(same_bits, answers(*other), plain))
    for row in (0, 5, 10):
        alone = answers(logits[row : row + 1], upstream[row : row + 1])
        assert all(same_bits(a, b[row : row + 1]) for a, b in zip(alone, plain, strict=True))


@backends
def test_leading_axes_are_kept(backend: str, device: torch.device) -> None:
    logits = adversarial(12, SINGLE, tokens=12).to(device).view(3, 4, 12)
    weights, indices = moe.route(logits, 3, preference=Preference(backend=backend))
    flat, _ = moe.route(logits.view(12, 12), 3, preference=Preference(backend=backend))
    assert weights.shape == indices.shape == (3, 4, 3)
    assert same_bits(weights.view(12, 3), flat)
    one, expert = moe.route(logits[2, 3], 1, preference=Preference(backend=backend))
    assert one.shape == (1,) and int(expert) == int(logits[2, 3].argmax())


@backends
@pytest.mark.parametrize("options", [{}, {"renormalize": False}], ids=str)
def test_rows_that_are_repeated_by_their_strides(options: dict[str, Any], backend: str, device: torch.device) -> None:
    """An outer axis with the stride 0, of the logits and of the upstream gradient."""
    preference = Preference(backend=backend)
    few, upstream = adversarial(12, SINGLE).to(device), torch.randn(11, 3, device=device)

    def answers(x: Tensor, dw: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        weights, _ = moe.route(x, 3, preference=preference, **options)
        return weights.detach(), torch.autograd.grad(weights, x, dw)[0]

    repeated = answers(few.expand(2, 11, 12), upstream.expand(2, 11, 3))
    for got, expected in zip(repeated, answers(few, upstream), strict=True):
        assert same_bits(got[0], expected) and same_bits(got[1], expected)
    mask = torch.ones(11, dtype=torch.bool, device=device)
    losses = [
        moe.z_loss(x, m, preference=preference)
        for x, m in ((few[9:].expand(2, 2, 12), mask[9:].expand(2, 2)), (few[9:].repeat(2, 1), None))
    ]
    assert same_bits(*losses)


@backends
def test_a_softmax_over_the_chosen_keeps_no_logits(backend: str, device: torch.device) -> None:
    def saved(**options: Any) -> set[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def keep(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        logits = torch.randn(5, 9, device=device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            moe.route(logits, 2, preference=Preference(backend=backend), **options)
        return set(shapes)

    assert saved() == {(5, 2)}
    assert saved(renormalize=False) == saved(score="sigmoid") == {(5, 2), (5, 9)}


@backends
def test_a_softmax_over_the_chosen_reads_no_logits(backend: str, device: torch.device) -> None:
    """The operator takes them in every mode, and its gradient is the same with them."""
    logits, text = torch.randn(5, 9, device=device), Preference(backend=backend).text
    weights, indices = moe.route(logits, 2)
    options = (9, 2, SINGLE, "softmax", True, text)
    saved = torch.randn_like(weights), weights, indices
    without, with_logits = (torch.ops.adjoint.moe_route_backward(*saved, x, *options) for x in (None, logits))
    assert same_bits(with_logits, without)


@backends
def test_a_backward_runs_one_operator(backend: str, device: torch.device) -> None:
    """Nothing is computed for the indices, which have no gradient."""
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    logits, upstream = torch.randn(5, 9, device=device, requires_grad=True), torch.ones(5, 2, device=device)
    weights, _ = moe.route(logits, 2, preference=Preference(backend=backend))
    with Record():
        torch.autograd.grad(weights, logits, upstream)
    assert [call for call in calls if "detach" not in call] == ["adjoint.moe_route_backward.default"]


@pytest.mark.kernels
@pytest.mark.parametrize("experts", [40, 512, 800])
def test_the_warps_of_a_row_in_groups_change_no_bit(experts: int, device: torch.device) -> None:
    logits = adversarial(experts, HALF).to(device)
    options: dict[str, Any] = {"bias": _bias(experts, device), "renormalize": False} | GROUPS
    plan = adjoint.plan(moe.route, logits, 6, preference=Preference(backend="triton"), **options)
    expected = plan.run(logits, options["bias"])
    for warps in {1, 2, 4, 8} - {plan.schedule["warps"]}:
        assert all(map(same_bits, plan.with_schedule(warps=warps).run(logits, options["bias"]), expected))


@pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_references_agree_with_finite_differences(score: str, renormalize: bool) -> None:
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    indices = reference.select(logits, 3, score, None)
    x = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reference.weights_of(x, indices, score, renormalize), x)
    upstream = torch.randn(4, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(reference.weights_of(x, indices, score, renormalize), x, upstream)
    ours = reference.route_backward(upstream, logits.detach(), indices, score, renormalize)
    # Two formulas in float64, of sums of 7 experts: fewer than 64 roundings of the largest number.
    limit = 64 * torch.finfo(torch.float64).eps * float(expected.abs().max())
    assert float((ours - expected).abs().max()) <= limit


@pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")
def test_as_a_router_is_written_in_pytorch() -> None:
    """softmax, top-k, divide by the sum: what the mixture blocks of Hugging Face's Qwen models do."""
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(7))
    values, chosen = torch.topk(torch.softmax(logits.double(), -1), 4, -1)
    weights, indices = moe.route(logits, 4)
    assert torch.equal(indices, chosen)
    for renormalize, exact in ((True, values / values.sum(-1, keepdim=True)), (False, values)):
        weights, _ = moe.route(logits, 4, renormalize=renormalize)
        assert not broken(moe.route, (logits,), {"weights": (weights, exact)}, k=4, renormalize=renormalize)


@pytest.mark.kernels
def test_a_plan_runs_into_memory_that_is_given(device: torch.device) -> None:
    logits = adversarial(12, HALF).to(device)
    strided = logits.T.contiguous().T
    plan = adjoint.plan(moe.route, strided, 3, preference=Preference(backend="triton")).prepare()
    assert plan.problem.layout == "logits copied" and plan.workspace_bytes
    out = torch.empty(11, 3, device=device), torch.empty(11, 3, dtype=torch.int64, device=device)
    plan.run(strided, None, out=out, workspace=torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device))
    assert all(map(same_bits, out, moe.route(logits, 3)))
    assert adjoint.plan(moe.route, logits, 3, preference=Preference(backend="triton")).workspace_bytes == 0


def test_plans_say_what_they_compare(device: torch.device) -> None:
    logits, bias = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    plain = adjoint.plan(moe.route, logits, 2).guarantee["indices"].ties
    assert "the logits as given" in plain and "bias" not in plain and "groups" not in plain
    ties = adjoint.plan(moe.route, logits, 2, score="sigmoid", bias=bias, num_groups=4, groups_kept=2)
    words = ties.guarantee["indices"].ties
    assert "the sigmoid in float64, rounded once to float32 plus the bias" in words and "2 of 4 groups" in words


def test_the_operator_checks_what_it_is_given(device: torch.device) -> None:
    weights, indices = torch.zeros(3, 2, device=device), torch.zeros(3, 2, dtype=torch.int64, device=device)
    backward = torch.ops.adjoint.moe_route_backward
    for changed, words in (
        ((weights.double(), weights, indices, None), "dweights must be float32"),
        ((weights, weights.double(), indices, None), "weights must be float32"),
        ((weights, weights, indices.int(), None), "indices must be int64"),
        ((weights[:2], weights, indices, None), "dweights must have the shape of weights"),
        ((weights, weights, indices, weights), "logits must have shape"),
    ):
        with pytest.raises(ArgumentError, match=words):
            backward(*changed, 5, 2, SINGLE, "softmax", True, "")
    with pytest.raises(ArgumentError, match="needs the logits"):
        backward(weights, weights, indices, None, 5, 2, SINGLE, "sigmoid", True, "")


def test_numbers_of_numpy_are_numbers() -> None:
    logits = torch.arange(8.0).view(2, 4)
    assert torch.equal(adjoint.moe.route(logits, np.int64(2))[1], adjoint.moe.route(logits, 2)[1])
