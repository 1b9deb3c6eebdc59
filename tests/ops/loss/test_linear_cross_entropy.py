"""What only `linear_cross_entropy` knows: torch's composition, blocks, what the forward keeps, plans and their bits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import ArgumentError, Preference, Unsupported
from adjoint.ops.loss import reference
from adjoint.ops.loss.linear_cross_entropy import cases, eager, plans
from adjoint.verify.checks import bits
from tests.conftest import device_under_test
from tests.promises import broken

KERNELS = pytest.mark.kernels
PLANS = ["eager", pytest.param("triton.vendor", marks=KERNELS), pytest.param("triton.tiles", marks=KERNELS)]
every_plan = pytest.mark.parametrize("plan", PLANS)


def _layer(
    tokens: tuple[int, ...] = (3, 8), columns: int = 24, classes: int = 50, dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, tokens, generator=generator)
    labels.view(-1)[2::5] = -100
    device = device_under_test()

    def leaf(values: Tensor) -> Tensor:
        return values.to(dtype).to(device).requires_grad_()

    return {
        "hidden": leaf(torch.randn(*tokens, columns, generator=generator)),
        "weight": leaf(torch.randn(classes, columns, generator=generator) / 3),
        "labels": labels.to(device),
        "bias": leaf(torch.randn(classes, generator=generator)),
    }


def _gradients(loss: Tensor, layer: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, ...]:
    leaves = [x for x in layer.values() if x.requires_grad]
    return torch.autograd.grad(loss, leaves, torch.full_like(loss, scale), retain_graph=True)


GRADIENTS = ("dhidden", "dweight", "dbias")


def _exact(layer: dict[str, Tensor], scale: float, **options: Any) -> dict[str, Tensor]:
    """torch's loss and gradients in float64, by name; upstream gradients are what float32 makes of a scale."""
    wide = {name: x.detach().double().requires_grad_() if x.is_floating_point() else x for name, x in layer.items()}
    logits = F.linear(wide["hidden"], wide["weight"], wide["bias"]).flatten(0, -2)
    loss = F.cross_entropy(logits, wide["labels"].flatten(), **options)
    if options["reduction"] == "none":
        loss = loss.view(wide["labels"].shape)
    slopes = _gradients(loss, wide, torch.tensor(scale, dtype=torch.float32).item())
    return {"loss": loss.detach(), **dict(zip(GRADIENTS, slopes, strict=True))}


def _assert_promises(
    results: dict[str, Tensor], exact: dict[str, Tensor], plan: str, layer: dict[str, Tensor], scale: float,
    **options: Any,
) -> None:  # fmt: skip
    """Results are as near to exact ones as the plan of a layer promises."""
    *inputs, bias = layer.values()
    preference = Preference(plan=plan)
    chosen = adjoint.plan(adjoint.linear_cross_entropy, *inputs, bias=bias, preference=preference, **options)
    promises = {**chosen.guarantee, **chosen.adjoint.guarantee}  # type: ignore[union-attr]
    arguments = [x.detach().double() if x.is_floating_point() else x for x in layer.values()]
    upstream = torch.full_like(exact["loss"], torch.tensor(scale, dtype=torch.float32).item())
    for name, result in results.items():
        measured = promises[name].error.measure(
            result.detach(), exact[name], *([] if name == "loss" else [upstream]), *arguments
        )
        assert measured.holds, (name, measured)


@every_plan
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_torch_has_the_same_loss(plan: str, reduction: str, scale: float) -> None:
    """In float64, of what we compute in float32."""
    layer, options = _layer(), {"reduction": reduction, "label_smoothing": 0.1}
    ours = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan), **options)
    results = {"loss": ours, **dict(zip(GRADIENTS, _gradients(ours, layer, scale), strict=True))}
    _assert_promises(results, _exact(layer, scale, **options), plan, layer, scale, **options)


@every_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_of_rows_make_one_sum(
    plan: str, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks, and one: within twice the promise of each other, so no block is lost or added twice."""
    from adjoint.core.op.operator import forget
    from adjoint.ops.loss import eager

    layer, preference = _layer((37,), 24, 50, dtype), Preference(plan=plan)

    def results() -> tuple[Tensor, ...]:
        forget()
        loss = adjoint.linear_cross_entropy(**layer, reduction=reduction, preference=preference)
        return _gradients(loss, layer)

    whole = results()
    monkeypatch.setattr(plans, "ROW_STEP", 8)
    monkeypatch.setattr(plans, "BLOCK_BYTES", 8 * 64 * 4)
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", 8 * 50)
    blocks = results()
    forget()
    bound = adjoint.plan(adjoint.linear_cross_entropy, **layer, reduction=reduction, preference=preference).adjoint
    assert bound is not None
    wide = [x.detach().double() if x.is_floating_point() else x for x in layer.values()]
    upstream = torch.ones(37 if reduction == "none" else (), dtype=torch.float64, device=layer["hidden"].device)
    for name, one, many in zip(("dhidden", "dweight", "dbias"), whole, blocks, strict=True):
        limit = bound.guarantee[name].error.bound(upstream, *wide)  # type: ignore[union-attr]
        assert bool(((one.double() - many.double()).abs() <= 2 * limit).all()), name
    assert plans.block_rows(37, 64, dtype.itemsize, False) < 37


def test_a_block_has_the_rows_that_fit() -> None:
    assert plans.block_rows(8192, 151936, 2, False) == 4096
    assert plans.block_rows(8192, 151936, 2, True) == 2048
    assert plans.block_rows(5, 151936, 2, False) == plans.ROW_STEP
    assert plans.block_rows(0, 7, 2, False) == plans.ROW_STEP
    assert plans.block_rows(10**6, 2**18, 4, False) * 2**18 * 4 <= plans.BLOCK_BYTES


@every_plan
def test_a_forward_that_needs_no_gradient_keeps_none(plan: str) -> None:
    layer = {name: x.detach() for name, x in _layer().items()}
    call = adjoint.plan(adjoint.linear_cross_entropy, **layer, preference=Preference(plan=plan))
    with torch.no_grad():
        kept = call.operator.call(*layer.values(), -100, 0.0, 0.0, 0.0, "mean", False, False, 0, False, f"plan={plan}")
    assert [x.numel() for x in kept[5:]] == [0, 0, 0]
    with torch.no_grad():
        loss = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))
    assert loss.grad_fn is None


@every_plan
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias", "hidden weight"])
def test_what_needs_no_gradient_is_not_computed(plan: str, frozen: str) -> None:
    layer = _layer()
    preference = Preference(plan=plan)
    expected = dict(zip(("hidden", "weight", "bias"), _gradients(
        adjoint.linear_cross_entropy(**layer, preference=preference), layer), strict=True))  # fmt: skip
    for name in frozen.split():
        layer[name] = layer[name].detach()
    loss = adjoint.linear_cross_entropy(**layer, preference=preference)
    sizes = dict(zip(("hidden", "weight", "bias"), [x.numel() for x in loss.grad_fn.saved_tensors[:3]], strict=True))  # type: ignore[union-attr]
    assert all((sizes[name] == 0) == (name in frozen.split()) for name in sizes)
    wanted = [name for name in expected if name not in frozen.split()]
    for name, got in zip(wanted, _gradients(loss, layer), strict=True):
        assert torch.equal(got, expected[name])


@every_plan
def test_backward_may_run_twice(plan: str) -> None:
    layer = _layer()
    loss = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))
    first = [x.clone() for x in _gradients(loss, layer)]
    leaves = [x for x in layer.values() if x.requires_grad]
    for x in leaves:
        x.grad = None
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    third = _gradients(loss, layer)
    for once, again, leaf in zip(first, third, leaves, strict=True):
        assert torch.equal(once, again)
        assert torch.equal(leaf.grad, 2 * once)  # type: ignore[arg-type]


def test_an_upstream_gradient_of_one_is_not_multiplied_by_on_the_cpu() -> None:
    layer = {name: x.detach().cpu().requires_grad_(x.requires_grad) for name, x in _layer().items()}
    loss = adjoint.linear_cross_entropy(**layer)
    kept = loss.grad_fn.saved_tensors[1].data_ptr()  # type: ignore[union-attr]
    _, scaled, _ = _gradients(loss, layer, 2.0)
    (dweight,) = torch.autograd.grad(loss, layer["weight"])  # the last backward: nobody needs what was kept
    assert dweight.data_ptr() == kept
    assert scaled.data_ptr() != kept and torch.equal(scaled, 2 * dweight)


@every_plan
def test_gradients_belong_to_the_caller(plan: str) -> None:
    """What he does with them changes nothing for another backward of a graph that is kept."""
    layer = _layer()
    loss = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))
    leaves = [x for x in layer.values() if x.requires_grad]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [x.clone() for x in first]
    for x in first:
        x.zero_()
    for once, again in zip(copies, torch.autograd.grad(loss, leaves), strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("shift", [False, True])
def test_torchs_few_calls_give_the_loss_of_the_blocks(shift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loss of few logits on the CPU takes a way of its own: with labels to ignore, whatever their logits, and
    none at all, and wrong ones."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 5), (9, 5)))
    hidden[3] = 1e308  # logits that are infinite, and their logarithms NaN
    finite = hidden.clone()
    finite[3] = 0
    for values in ([0, 8, 3, -100, -100, 7], [-100] * 6):
        labels = torch.tensor(values)
        for reduction in ("mean", "sum"):
            options: dict[str, Any] = {"reduction": reduction, "shift": shift}
            (exact,) = reference.linear_cross_entropy(finite, weight, labels, **options)
            unit = torch.ones((), dtype=torch.float64)
            slopes = reference.linear_cross_entropy_backward((unit,), finite, weight, labels, **options)
            for is_plain in (True, False):
                monkeypatch.setattr(eager, "is_plain", lambda *_, value=is_plain: value)
                leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
                loss = adjoint.linear_cross_entropy(*leaves, labels, **options)
                found = loss, *torch.autograd.grad(loss, leaves)
                named = zip(("loss", "dhidden", "dweight"), zip(found, (exact, *slopes), strict=False), strict=True)
                inputs = hidden, weight, labels
                assert not broken(adjoint.linear_cross_entropy, inputs, dict(named), (unit,), **options)
                assert any(label >= 0 for label in values) or not any(x.any() for x in found)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="got 9 at position 1"):
        adjoint.linear_cross_entropy(hidden, weight, torch.tensor([0, 9, 1, 2, 3, 4]), shift=shift)


@pytest.mark.parametrize("tokens", [(4,), (2, 3), ()])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_hidden_without_columns_has_logits_of_zero(reduction: str, tokens: tuple[int, ...]) -> None:
    """Or those of the bias; and gradients without elements."""
    hidden, weight = torch.randn(*tokens, 0, requires_grad=True), torch.randn(5, 0, requires_grad=True)
    bias, labels = torch.randn(5, requires_grad=True), torch.ones(tokens, dtype=torch.int64)
    loss = adjoint.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)  # type: ignore[call-overload]
    expected = adjoint.cross_entropy(bias.expand(*tokens, 5), labels, reduction=reduction)  # type: ignore[call-overload]
    assert torch.equal(loss, expected)
    shapes = [x.shape for x in torch.autograd.grad(loss.sum(), (hidden, weight, bias))]
    assert shapes == [hidden.shape, weight.shape, bias.shape]


@every_plan
def test_checkpoints_compute_the_same(plan: str) -> None:
    layer = _layer()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return adjoint.linear_cross_entropy(
            hidden, weight, layer["labels"], bias=bias, preference=Preference(plan=plan)
        )

    inputs = layer["hidden"], layer["weight"], layer["bias"]
    plain = torch.autograd.grad(loss(*inputs), inputs)
    again = torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs)  # type: ignore[arg-type]
    assert all(map(torch.equal, plain, again))


@every_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_small_upstream_gradients_do_not_vanish(plan: str, dtype: torch.dtype) -> None:
    """A mean over many tokens, and upstream gradients, whose products with p float16 cannot hold."""
    layer = _layer((64,), 16, 40, dtype)
    for options, scale in (({"reduction": "mean"}, 2.0**-10), ({"reduction": "none"}, 2.0**-16)):
        loss = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan), **options)  # type: ignore[arg-type]
        found = _gradients(loss, layer, scale)
        wide = {name: x.detach().double() if x.is_floating_point() else x for name, x in layer.items()}
        exact = reference.linear_cross_entropy_backward(
            (torch.full_like(loss, scale, dtype=torch.float64),), *wide.values(), **options
        )
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        for got, right in zip(found, exact, strict=True):
            error = (got.double() - right).norm()
            assert error <= 0.02 * right.norm() + smallest * right.numel() ** 0.5


@every_plan
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_upstream_gradient_of_what_does_not_count_counts_for_nothing(plan: str, dtype: torch.dtype) -> None:
    """However large, and infinite; nor does an infinite one of another token reach it."""
    layer = _layer((5,), 8, 33, dtype)
    layer["labels"][2] = -100
    inputs = layer["hidden"], layer["weight"]
    loss = adjoint.linear_cross_entropy(**layer, reduction="none", preference=Preference(plan=plan))  # type: ignore[arg-type]
    ones = torch.ones_like(loss)
    right = torch.autograd.grad(loss, inputs, ones, retain_graph=True)
    for amount in (1e8, math.inf, math.nan):
        upstream = ones.clone()
        upstream[2] = amount
        assert all(map(torch.equal, torch.autograd.grad(loss, inputs, upstream, retain_graph=True), right))
    ones[1] = math.inf
    dhidden, _ = torch.autograd.grad(loss, inputs, ones)
    assert not dhidden[2].any() and not dhidden[1].isfinite().all()


@KERNELS
def test_repeatable_requests_take_products_of_our_own() -> None:
    layer = _layer(dtype=torch.bfloat16)
    default = adjoint.plan(adjoint.linear_cross_entropy, **layer, preference=Preference(backend="triton"))
    assert default.name == "triton.vendor" and not default.guarantee["loss"].repeatable
    repeatable = adjoint.plan(
        adjoint.linear_cross_entropy, **layer, preference=Preference(backend="triton", repeatable=True)
    )
    assert repeatable.name == "triton.tiles" and repeatable.adjoint is not None
    assert repeatable.adjoint.name == "triton.tiles"
    assert all(x.repeatable for x in repeatable.adjoint.guarantee.values())
    tokens = adjoint.plan(
        adjoint.linear_cross_entropy, **layer, reduction="none", preference=Preference(plan="triton.tiles")
    )
    assert tokens.guarantee["loss"].batch_invariant == "token"
    with pytest.raises(Unsupported, match="is not batch_invariant"):
        adjoint.linear_cross_entropy(**layer, preference=Preference(batch_invariant=True))


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_loss_has_its_own_bits(dtype: torch.dtype) -> None:
    """Alone, behind others, and in another order."""
    layer = {name: x.detach() for name, x in _layer((150,), 40, 300, dtype).items()}
    preference = Preference(plan="triton.tiles")

    def losses(tokens: Tensor) -> tuple[Tensor, Tensor]:
        return adjoint.linear_cross_entropy(
            layer["hidden"][tokens], layer["weight"], layer["labels"][tokens], bias=layer["bias"], reduction="none",
            return_log_probabilities=True, preference=preference,
        )  # fmt: skip

    every = torch.arange(150, device=layer["hidden"].device)
    whole = losses(every)
    for tokens in (every[77:78], every[140:], every.flip(0), every[::7]):
        for alone, among_all in zip(losses(tokens), whole, strict=True):
            assert torch.equal(alone, among_all[tokens])


@every_plan
def test_a_wrong_label_in_a_checked_block(plan: str) -> None:
    layer = _layer()
    layer["labels"][1, 3] = 50
    with (
        pytest.raises(ArgumentError, match=r"linear_cross_entropy: labels .* got 50 at position 11 "),
        adjoint.checked(),
    ):
        adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))


@every_plan
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_is_no_number_stays_with_its_token(plan: str, reduction: str) -> None:
    """A token that does not count has no loss and slopes of 0, whatever it holds, which dweight multiplies with its
    hidden; of one that counts NaN is the loss, its row of dhidden and all of dweight and dbias, while others keep
    theirs. One gradient is kept and scaled, the other computed again."""
    layer = _layer((8,))  # the labels 2 and 7 do not count
    exact = _exact(layer, 0.5, reduction=reduction)

    def run(token: int) -> dict[str, Tensor]:
        hidden = layer["hidden"].detach().clone()
        hidden[token] = torch.nan
        own = layer | {"hidden": hidden.requires_grad_()}
        loss = adjoint.linear_cross_entropy(**own, reduction=reduction, preference=Preference(plan=plan))
        return {"loss": loss.detach(), **dict(zip(GRADIENTS, _gradients(loss, own, 0.5), strict=True))}

    ignored = run(2)
    assert not ignored["dhidden"][2].any() and ignored.pop("dweight").isnan().all()
    _assert_promises(ignored, exact, plan, layer, 0.5, reduction=reduction)

    counted = run(3)
    assert counted.pop("dweight").isnan().all() and counted.pop("dbias").isnan().all()
    assert not counted["dhidden"][[2, 7]].any()
    if reduction == "mean":
        assert counted.pop("loss").isnan()
    for (
        name,
        result,
    ) in counted.items():  # what the others keep is held to the promise, in place of what is NaN the exact
        assert result[3].isnan().all()
        result[3] = exact[name][3]
    _assert_promises(counted, exact, plan, layer, 0.5, reduction=reduction)


@every_plan
@pytest.mark.parametrize("wrong", [50, -3])
def test_a_label_out_of_range_counts_for_nothing(plan: str, wrong: int) -> None:
    """At once an error on the CPU; on a GPU its token has the loss 0 and no gradient, until `check` raises."""

    layer = _layer((8,))
    layer["labels"][3] = -100
    exact = _exact(layer, 1.0, reduction="mean")
    labels = layer["labels"].clone()
    labels[3] = wrong
    with pytest.raises(ArgumentError, match=f"linear_cross_entropy: labels .* got {wrong} at position 3 "):
        loss = adjoint.linear_cross_entropy(**layer | {"labels": labels}, preference=Preference(plan=plan))
        results = {"loss": loss, **dict(zip(GRADIENTS, _gradients(loss, layer), strict=True))}
        _assert_promises(results, exact, plan, layer, 1.0, reduction="mean")
        adjoint.check()


@every_plan
def test_autocast_leaves_the_loss_as_it_is(plan: str) -> None:
    layer = _layer()
    plain = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))
    with torch.autocast(layer["hidden"].device.type, torch.bfloat16):
        under = adjoint.linear_cross_entropy(**layer, preference=Preference(plan=plan))
    assert torch.equal(plain, under)
    assert all(map(torch.equal, _gradients(plain, layer), _gradients(under, layer)))


@every_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bounds_survive_a_search(plan: str, dtype: torch.dtype) -> None:
    """Inputs that climb towards the largest error, in units of the bounds, never pass them."""
    generator = torch.Generator().manual_seed(7)
    options: dict[str, Any] = {"softcap": 15.0, "z_loss": 0.01, "label_smoothing": 0.05}
    device, preference = device_under_test(), Preference(plan=plan)
    labels = torch.randint(30, (6,), generator=generator).to(device)

    def shares(hidden: Tensor, weight: Tensor) -> dict[str, float]:
        named = {"hidden": hidden, "weight": weight}
        layer = {name: x.to(dtype).to(device).requires_grad_() for name, x in named.items()}
        chosen = adjoint.plan(adjoint.linear_cross_entropy, **layer, labels=labels, preference=preference, **options)
        loss = adjoint.linear_cross_entropy(**layer, labels=labels, preference=preference, **options)
        wide = [x.detach().double() for x in layer.values()]
        (exact,) = reference.linear_cross_entropy(*wide, labels, **options)
        found = {"loss": chosen.guarantee["loss"].error.measure(loss.detach(), exact, *wide, labels).value}
        upstream = torch.tensor(0.7, device=device).double()
        right = reference.linear_cross_entropy_backward((upstream,), *wide, labels, **options)
        assert chosen.adjoint is not None
        for name, got, value in zip(("dhidden", "dweight"), _gradients(loss, layer, 0.7), right, strict=True):
            error = chosen.adjoint.guarantee[name].error
            found[name] = error.measure(got, value, upstream, *wide, labels).value
        return found

    hidden, weight = torch.randn(6, 12, generator=generator), torch.randn(30, 12, generator=generator)
    reached = shares(hidden, weight)
    for step in range(25):
        scale = (0.05, 0.5, 4.0)[step % 3]
        moved = (x + scale * torch.randn(x.shape, generator=generator) for x in (hidden, weight))
        other = tuple(moved)
        found = shares(*other)
        assert max(found.values()) <= 1, f"a bound is passed: {found}"
        if sum(found.values()) > sum(reached.values()):
            (hidden, weight), reached = other, found
    assert max(reached.values()) > 1e-2, f"bounds that are all a hundred times too wide say nothing: {reached}"


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_of_our_own_have_an_item_s_bits_where_they_say_so(dtype: torch.dtype) -> None:
    """In float16 too, whose gradients of hidden say no such thing where each token has its upstream gradient."""
    rows = []
    for subject in cases.SUBJECTS:
        few = tuple(case for case in subject.cases if case.name in ("few tokens", "some do not count"))
        preference = Preference(plan="triton.tiles")
        rows += bits.invariance(replace(subject, cases=few), dtype, device_under_test(), preference)
    assert rows and all(row.passed for row in rows), [row.detail for row in rows]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_two_outputs_of_few_logits_are_one_tensor(dtype: torch.dtype, reduction: str) -> None:
    """Those without elements included, whatever is frozen: torch's compiler takes outputs for separate memory."""
    hidden, weight, labels = torch.randn(4, 3).to(dtype), torch.randn(5, 3).to(dtype), torch.tensor([0, 4, 2, 2])
    options = (-100, 0.0, 0.0, 0.0, reduction, False, False)
    for frozen in range(8):
        results = [*torch.ops.adjoint.linear_cross_entropy(hidden, weight, labels, None, *options, frozen, True, "")]
        assert len({id(x) for x in results}) == len({x.untyped_storage()._cdata for x in results}) == len(results)
    results = [*torch.ops.adjoint.cross_entropy(hidden, labels.clamp_max(2), *options, True, True, "")]
    assert len({id(x) for x in results}) == len({x.untyped_storage()._cdata for x in results}) == len(results)
