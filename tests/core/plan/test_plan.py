"""The plan contract on a toy operator with a workspace, and on the activations."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint import Preference
from adjoint.core.guarantee import Empirical, Guarantee
from adjoint.core.op.operator import Operator, register
from adjoint.core.plan import Call, Candidate, Plan, bind, publish, select, selection
from adjoint.core.problem import Problem
from adjoint.ops import cases
from tests.lookup import BACKWARD, FORWARD, lookup

NEEDED = 256


def _promise(**flags: object) -> Guarantee:
    fields: dict[str, object] = {
        "repeatable": True,
        "batch_invariant": "",
        "device_invariant": False,
        "accumulator": "float32",
        "roundings": 1,
        "error": Empirical(1e-6, "the toy's cases"),
    }
    return Guarantee(**(fields | flags))  # type: ignore[arg-type]


def _candidate(name: str, workspace: int | None, refusal: str = "", **flags: object) -> Candidate:
    def run(plan: Plan, arguments: tuple, outputs: tuple[Tensor, ...] | None, scratch: Tensor | None):  # type: ignore
        outputs = outputs or plan.allocate(arguments)
        outputs[0].copy_(arguments[0] * 2)
        return outputs

    return Candidate(
        name,
        "eager",
        "double",
        3,
        refuse=lambda problem: refusal,
        guarantee=lambda problem: {"y": _promise(**flags)},
        run=run,
        numeric=lambda problem: {"tile": 64},
        workspace_bytes=lambda problem: workspace,
    )


CANDIDATES = (
    _candidate("fast", NEEDED, repeatable=False),
    _candidate("steady", NEEDED, batch_invariant="row"),
    _candidate("frugal", 0),
    _candidate("vendor", None),
    _candidate("never", 0, refusal="the moon is in the wrong phase"),
)


def _toy(x: Tensor) -> Tensor:
    return x * 2


TOY = register(
    Operator(
        "toy_double",
        outputs=("y",),
        tensors=("x",),
        check=lambda x: None,
        allocate=lambda x: (torch.empty_like(x),),
        describe=lambda x: Problem("toy_double", x.device, (x.dtype,), sizes=(x.numel(),)),
        candidates=lambda: CANDIDATES,
    ),
    tensors=("x",),
    options="",
    results=1,
)
publish(_toy, lambda x: Call(TOY, (x,)))

X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("preference", "taken"),
    [
        (Preference(), "fast"),
        (Preference(repeatable=True), "steady"),
        (Preference(repeatable=True, max_workspace_bytes=NEEDED - 1), "frugal"),
        (Preference(max_workspace_bytes=0), "frugal"),
        (Preference(batch_invariant=True), "steady"),
        (Preference(plan="vendor"), "vendor"),
        (Preference(plan="backward.only+vendor+frugal"), "vendor"),
    ],
)
def test_the_first_that_fits_is_taken(preference: Preference, taken: str) -> None:
    assert adjoint.plan(_toy, X, preference=preference).name == taken


def test_the_deterministic_flag_is_honoured() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert adjoint.plan(_toy, X).name == "steady"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_preference_nothing_meets_lists_every_candidate() -> None:
    with pytest.raises(adjoint.Unsupported) as caught:
        adjoint.plan(_toy, X, preference=Preference(device_invariant=True))
    message = str(caught.value)
    assert all(f"  {candidate.name}: " in message for candidate in CANDIDATES)
    assert "the moon is in the wrong phase" in message
    assert message.count("y is not device_invariant") == 4


@pytest.mark.parametrize("plan", ["backward.only", "backward.only+another", "backward.only+never+frugal"])
def test_a_named_plan_never_falls_back(plan: str) -> None:
    """The first name that is a candidate is the one that is meant, even where it refuses."""
    with pytest.raises(adjoint.Unsupported) as caught:
        adjoint.plan(_toy, X, preference=Preference(plan=plan))
    assert f"fast: the preference asks for the plan {plan}" in str(caught.value)


def test_max_workspace_is_explained() -> None:
    with pytest.raises(adjoint.Unsupported) as caught:
        adjoint.plan(_toy, X, preference=Preference(batch_invariant=True, max_workspace_bytes=8))
    assert f"steady: needs a workspace of {NEEDED} bytes, the preference allows 8" in str(caught.value)


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(adjoint.Unsupported, match="its backend is eager, the preference asks for triton"):
        adjoint.plan(_toy, X, preference=Preference(backend="triton"))


def test_print_says_why_each_was_or_was_not_taken() -> None:
    text = str(adjoint.plan(_toy, X, preference=Preference(repeatable=True)))
    assert "steady: the first of 5 candidates" in text
    assert "fast: y is not repeatable" in text
    assert "frugal: would do, but ranks after steady" in text
    assert "never: the moon is in the wrong phase" in text
    assert "repeatable, batch_invariant(row)" in text


def test_the_sku_names_what_decides_bits() -> None:
    sku = adjoint.plan(_toy, X).sku
    assert (sku.op, sku.backend, sku.kernel, sku.revision) == ("toy_double", "eager", "double", 3)
    assert str(sku) == "toy_double/eager/double/r3/cpu/float32/tile=64"


def test_run_takes_out_and_workspace() -> None:
    plan = adjoint.plan(_toy, X)
    out = torch.full_like(X, float("nan"))
    result = plan.run(X, out=out, workspace=torch.empty(NEEDED, dtype=torch.uint8))
    assert result is out
    assert torch.equal(out, X * 2)


def test_a_workspace_too_small_names_both_sizes() -> None:
    with pytest.raises(adjoint.ArgumentError, match=f"{NEEDED} bytes are needed, got {NEEDED - 4}"):
        adjoint.plan(_toy, X).run(X, workspace=torch.empty(NEEDED // 4 - 1))


def test_a_library_plan_takes_no_workspace() -> None:
    plan = adjoint.plan(_toy, X, preference=Preference(plan="vendor"))
    with pytest.raises(adjoint.ArgumentError, match="allocates its own"):
        plan.run(X, workspace=torch.empty(64))


@pytest.mark.parametrize("like", [torch.empty(7), torch.empty(6).double(), torch.empty(12)[::2]])
def test_a_wrong_out_is_named(like: Tensor) -> None:
    with pytest.raises(adjoint.ArgumentError, match="toy_double: out= for y must"):
        adjoint.plan(_toy, X).run(X, out=like)


def test_another_problem_names_each_difference() -> None:
    with pytest.raises(adjoint.Unsupported) as caught:
        adjoint.plan(_toy, X).run(torch.empty(5).double())
    assert "dtypes is (float64), the plan was made for (float32)" in str(caught.value)
    assert "sizes is (5), the plan was made for (6)" in str(caught.value)


def test_meta_tensors_plan_for_a_device() -> None:
    meta = torch.empty(6, device="meta")
    assert adjoint.plan(_toy, meta, device="cpu").problem.device == torch.device("cpu")
    with pytest.raises(adjoint.ArgumentError, match="device= is for meta tensors"):
        adjoint.plan(_toy, X, device="cpu")


def test_what_is_not_an_op_is_named() -> None:
    with pytest.raises(adjoint.ArgumentError, match=r"'len' is not an op; ops are .*silu"):
        adjoint.plan(len, X)


def test_selection_is_cached_and_the_cache_is_bounded() -> None:
    problem = TOY.describe(X)
    assert select(TOY, problem, "") is select(TOY, problem, "")
    for size in range(selection._CACHED_PLANS + 10):
        select(TOY, problem._replace(sizes=(size,)), "")
    assert len(TOY.plans) <= selection._CACHED_PLANS


# ------------------------------------------------------------------- optional tensors, hidden outputs

IDS, WEIGHT = torch.tensor([1, 0, 1]), torch.arange(8.0).reshape(2, 4)


def test_binding_gives_the_arguments_of_both_directions() -> None:
    call = bind(lookup, IDS, WEIGHT)
    assert call.operator is FORWARD and call.arguments == (IDS, WEIGHT, None, True)
    assert call.public_outputs == 1 and call.adjoint_arguments is not None
    out, rows = call.operator.allocate(*call.arguments)
    assert call.adjoint_arguments((out,), (out, rows)) == (out, rows, WEIGHT, None, 1), (
        "the gradient of the weight alone"
    )
    with pytest.raises(adjoint.ArgumentError, match="lookup: missing a required argument: 'weight'"):
        bind(lookup, IDS)


def test_a_plan_runs_without_its_optional_tensors() -> None:
    plan = adjoint.plan(lookup, IDS, WEIGHT)
    plan.can_implement(IDS, WEIGHT, None)
    out, rows = plan.run(IDS, WEIGHT, None)
    assert torch.equal(out, WEIGHT[IDS]) and torch.equal(rows, IDS)
    memory = (torch.empty(3, 4), torch.empty(3, dtype=torch.int64))
    plan.run(IDS, WEIGHT, None, out=memory)
    assert torch.equal(memory[0], out) and torch.equal(memory[1], rows)
    assert plan.adjoint is not None
    dweight, dscale = plan.adjoint.run(torch.ones(3, 4), rows, WEIGHT, None)
    assert torch.equal(dweight[:, 0], torch.tensor([1.0, 2.0])) and dscale.numel() == 0


def test_a_hidden_output_takes_no_upstream_gradient() -> None:
    """Meta tensors as well: there the upstream gradients are made from the public outputs alone."""
    plan = adjoint.plan(lookup, IDS.to("meta"), WEIGHT.to("meta"), device="cpu")
    assert plan.adjoint is not None and plan.adjoint.operator is BACKWARD


def test_each_direction_takes_the_plan_that_is_its_own() -> None:
    plan = adjoint.plan(lookup, IDS, WEIGHT, preference=Preference(plan="eager.other_bits+eager"))
    assert plan.adjoint is not None and (plan.name, plan.adjoint.name) == ("eager", "eager.other_bits")
    with pytest.raises(adjoint.Unsupported, match="test_lookup_backward: no plan"):
        adjoint.plan(lookup, IDS, WEIGHT, preference=Preference(plan="eager.unwritten"))


def test_the_dispatcher_takes_none_for_an_optional_tensor() -> None:
    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Listening():
        out = lookup(IDS, WEIGHT)
    assert torch.equal(out, WEIGHT[IDS])
    with forward_ad.dual_level(), pytest.raises(adjoint.Unsupported, match="forward-mode"):
        FORWARD(IDS, forward_ad.make_dual(WEIGHT, torch.ones_like(WEIGHT)), None, True, "")


def test_unknown_schedule_parameters_are_named() -> None:
    with pytest.raises(adjoint.ArgumentError, match="no schedule parameter stages"):
        adjoint.plan(adjoint.silu, X).with_schedule(stages=3)


def test_the_registered_operator_honours_the_preference_string() -> None:
    with pytest.raises(adjoint.Unsupported, match="device_invariant"):
        torch.ops.adjoint.toy_double(X, "device_invariant")
    assert torch.equal(torch.ops.adjoint.toy_double(X, "repeatable"), X * 2)


def test_a_guarantee_that_is_not_there_says_which_are() -> None:
    plan = adjoint.plan(adjoint.silu, torch.empty(4))
    with pytest.raises(
        KeyError, match=r"silu has no output 'dx'; its outputs are y, and gradients are in plan.adjoint"
    ):
        plan.guarantee["dx"]
    assert plan.adjoint is not None and "dx" in plan.adjoint.guarantee


# ------------------------------------------------------------------------------------ what a plan says, and targets


def test_the_representation_of_a_plan_is_a_line() -> None:
    chosen = adjoint.plan(adjoint.swiglu, torch.ones(4, 8), torch.ones(4, 8))
    assert repr(chosen) == f"<Plan of swiglu: {chosen.name}, {chosen.sku}>"
    assert "\n" not in repr(chosen) and str(chosen).count("\n") > 10


def experts(rows: int = 64) -> list[Tensor]:
    shapes = ((rows, 128), (4, 256, 128), (4, 128, 128), (rows, 2), (rows, 2))
    dtypes = (torch.bfloat16,) * 3 + (torch.int64, torch.bfloat16)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]


def test_a_plan_for_a_target_needs_no_gpu_and_is_not_run() -> None:
    x = torch.ones(4, 8)
    chosen = adjoint.plan(adjoint.swiglu, x, x, target="sm_90")
    backward = chosen.adjoint
    assert backward is not None
    assert chosen.name == backward.name == "triton.rows" and chosen.sku.arch == backward.sku.arch == "sm_90"
    assert chosen.launches and chosen.guarantee["y"].batch_invariant == "element"
    assert str(chosen.problem) == "swiglu on sm_90, float32, rows"
    chosen.can_implement(x.to("meta"), x.to("meta"))
    for attempt in (chosen.prepare, lambda: chosen.run(x, x), lambda: chosen.can_implement(x, x)):
        with pytest.raises(adjoint.Unsupported, match=r"made for (the target )?sm_90|target is none"):
            attempt()


def test_the_target_decides_which_plans_there_are() -> None:
    reasons = {
        target: dict(adjoint.plan(adjoint.moe.experts, *experts(), target=target).others)
        for target in ("sm_80", "sm_90", "gfx950")
    }
    assert "needs sm_90" in reasons["sm_80"]["eager.grouped_mm"]
    assert "ranks after" in reasons["sm_90"]["eager.grouped_mm"]
    for target, others in reasons.items():
        limited = adjoint.plan(
            adjoint.moe.experts, *experts(), target=target, preference=Preference(max_workspace_bytes=2**30)
        )
        first = "gluon.grouped" if target == "sm_90" else "triton.grouped"
        assert limited.name == first and limited.workspace_bytes, (target, others)


def test_every_op_has_a_plan_for_every_target() -> None:
    """What is decided by the device is decided by the target too: nothing asks for a GPU."""
    for subject in (subject for module in cases() for subject in module.SUBJECTS):
        inputs = subject.cases[0].make(subject.dtypes[-1], torch.device("cpu"), torch.Generator().manual_seed(0))
        positional, named = subject.arguments(inputs)
        for target in ("sm_80", "sm_120", "gfx942"):
            chosen = adjoint.plan(subject.function, *positional, target=target, **named)
            assert str(chosen) and chosen.sku.arch == target
            assert chosen.adjoint is not None and chosen.adjoint.sku.arch == target


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_can_be_asked_about() -> None:
    chosen = adjoint.plan(adjoint.moe.experts, *experts(), device="cuda")
    assert chosen.backend == "eager" and "torch sees no GPU" in dict(chosen.others)["triton.grouped"]


@pytest.mark.parametrize(
    ("options", "words"), [({"target": "sm_91"}, "unknown target"), ({"target": "sm_90", "device": "cpu"}, "not both")]
)
def test_targets_that_make_no_sense_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        adjoint.plan(adjoint.silu, torch.ones(4), **options)  # type: ignore[arg-type]
