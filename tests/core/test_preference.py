"""Preferences: strings, nesting, threads, torch.compile, and the deterministic flag."""

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import adjoint
from adjoint import Preference
from adjoint.core import kernels
from adjoint.core.op.operator import forget
from adjoint.core.preference import merge, parse, resolve

EXAMPLES = [
    Preference(),
    Preference(backend="eager"),
    Preference(plan="triton.rows", repeatable=True),
    Preference(plan="triton.rows+triton.sequential"),
    Preference(batch_invariant=True, device_invariant=True, max_workspace_bytes=0),
    Preference(backend="triton", repeatable=True, max_workspace_bytes=1 << 40),
]


@pytest.mark.parametrize("preference", EXAMPLES)
def test_text_round_trips(preference: Preference) -> None:
    assert parse(preference.text) == preference


def test_what_is_asked_replaces_and_the_rest_is_kept() -> None:
    outer = Preference(backend="eager", max_workspace_bytes=8).text
    assert parse(merge(outer, Preference(repeatable=True, max_workspace_bytes=0).text)) == Preference(
        backend="eager", repeatable=True, max_workspace_bytes=0
    )
    assert parse(merge(outer, Preference(backend="triton").text)).backend == "triton"


def test_blocks_nest_and_end() -> None:
    with adjoint.prefer(backend="eager"):
        with adjoint.prefer(Preference(repeatable=True)):
            assert resolve(None) == "backend=eager,repeatable"
        assert resolve(None) == "backend=eager"
    assert resolve(None) == ""


def test_a_block_ends_when_it_raises() -> None:
    with pytest.raises(KeyError), adjoint.prefer(backend="eager"):
        raise KeyError
    assert resolve(None) == ""


def test_other_threads_are_left_alone() -> None:
    seen: list[str] = []
    with adjoint.prefer(backend="eager"):
        worker = threading.Thread(target=lambda: seen.append(resolve(None)))
        worker.start()
        worker.join()
    assert seen == [""]


# -------------------------------------------------------------------------------- deterministic algorithms


@pytest.fixture
def flag() -> Iterator[Callable[..., None]]:
    """Sets torch's flag; puts it back, and forgets who has warned, before and after."""
    forget()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)
    forget()


def test_the_deterministic_flag_asks_for_repeatable_plans(flag: Callable[..., None]) -> None:
    flag(True)
    assert resolve(None) == "repeatable"
    assert resolve(Preference(backend="eager")) == "backend=eager,repeatable"


def test_a_flag_that_only_warns_leaves_an_alternative(flag: Callable[..., None]) -> None:
    flag(True, warn_only=True)
    assert resolve(None) == "repeatable|"
    assert resolve(Preference(backend="eager")) == "backend=eager,repeatable|backend=eager"
    assert resolve(Preference(repeatable=True)) == "repeatable"
    with adjoint.prefer(repeatable=True):
        assert resolve(Preference(backend="eager")) == "backend=eager,repeatable"


def _experts(device: torch.device, preference: Preference | None) -> Callable[[], None]:
    """A step through the expert layer, whose grouped product of torch promises no bits, and whose others do."""
    source = torch.Generator().manual_seed(0)
    shapes = (6, 8), (4, 16, 8), (4, 8, 8)
    layer = [torch.randn(shape, generator=source).bfloat16().to(device).requires_grad_() for shape in shapes]
    indices = torch.randint(4, (6, 2), generator=source).to(device)
    weights = torch.rand(6, 2, generator=source).to(device)

    def step() -> None:
        adjoint.moe.experts(*layer, indices, weights, preference=preference).sum().backward()

    return step


def _warnings_of(step: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    ours = [warning for warning in caught if "moe_" in str(warning.message)]  # on a GPU torch's products warn, too
    assert all(warning.category is UserWarning for warning in ours)
    return [str(warning.message).partition(":")[0] for warning in ours]


UNREPEATABLE = Preference(plan="eager.grouped_mm")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_flag_that_only_warns_warns_once_for_each_operator_and_runs(
    flag: Callable[..., None], compiled: bool, device: torch.device
) -> None:
    torch._dynamo.reset()
    step = _experts(device, UNREPEATABLE)
    if compiled:
        step = torch.compile(step, backend="aot_eager")
    assert _warnings_of(step) == []
    flag(True, warn_only=True)
    assert _warnings_of(step) == ["moe_experts", "moe_experts_backward"]
    assert _warnings_of(step) == []
    flag(True)
    with pytest.raises(adjoint.Unsupported, match=r"moe_experts: .* meets the preference .*repeatable"):
        step()
    flag(False)
    assert _warnings_of(step) == []
    torch._dynamo.reset()


def test_a_flag_that_only_warns_takes_a_repeatable_plan_where_there_is_one(
    flag: Callable[..., None], device: torch.device
) -> None:
    flag(True, warn_only=True)
    assert _warnings_of(_experts(device, None)) == []


def test_an_explicit_request_raises_whatever_the_flag_says(flag: Callable[..., None], device: torch.device) -> None:
    flag(True, warn_only=True)
    with pytest.raises(adjoint.Unsupported, match="y is not repeatable"):
        _experts(device, Preference(plan="eager.grouped_mm", repeatable=True))()
    with adjoint.prefer(repeatable=True), pytest.raises(adjoint.Unsupported, match="y is not repeatable"):
        _experts(device, UNREPEATABLE)()


def test_the_alternative_is_no_way_around_another_request(flag: Callable[..., None], device: torch.device) -> None:
    flag(True, warn_only=True)
    with pytest.raises(adjoint.Unsupported, match="batch_invariant"):
        _experts(device, Preference(plan="eager.grouped_mm", batch_invariant=True))()


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backend": "metal"}, "backend must be one of 'triton', 'eager', got 'metal'"),
        ({"max_workspace_bytes": -1}, "max_workspace_bytes must be an integer ≥ 0"),
        ({"plan": "a,b"}, "plan must be the name of a plan"),
        ({"plan": "a|b"}, "plan must be the name of a plan"),
        ({"plan": "a+"}, r"or several joined by '\+', got 'a\+'"),
        ({"plan": ""}, "plan must be the name of a plan"),
        ({"speed": 1}, "unknown speed; a Preference has backend"),
    ],
)
def test_bad_preferences_say_why(fields: dict[str, object], words: str) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        adjoint.prefer(**fields)


def _unsatisfiable(function: object) -> None:
    """No activation plan promises device invariance, so a preference that is honoured raises."""
    x = torch.ones(3, requires_grad=True)
    with adjoint.prefer(device_invariant=True), pytest.raises(Exception, match="device_invariant"):
        function(x)  # type: ignore[operator]


def test_prefer_holds_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(adjoint.silu, fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()  # compiled without a preference first
    _unsatisfiable(compiled)
    compiled(x).sum().backward()  # and honoured again after


def test_prefer_inside_a_compiled_function_holds() -> None:
    torch._dynamo.reset()

    def inner(x: torch.Tensor) -> torch.Tensor:
        with adjoint.prefer(device_invariant=True):
            return adjoint.silu(x)

    with pytest.raises(Exception, match="device_invariant"):
        torch.compile(inner, fullgraph=True, backend="aot_eager")(torch.ones(3))
    assert resolve(None) == ""


def test_an_argument_holds_under_compile() -> None:
    torch._dynamo.reset()
    asked = Preference(plan="fastest")
    compiled = torch.compile(lambda x: adjoint.silu(x, preference=asked), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="asks for the plan fastest"):
        compiled(torch.ones(3))


def test_the_backward_keeps_the_preference_of_its_forward() -> None:
    """The block has ended, and autograd's thread never saw it."""
    x = torch.ones(3, requires_grad=True)
    operator = adjoint.plan(adjoint.silu, x).adjoint.operator  # type: ignore[union-attr]
    operator.plans.clear()
    with adjoint.prefer(repeatable=True, backend="eager"):
        y = adjoint.silu(x)
    y.sum().backward()
    assert [text for _, text in operator.plans] == ["backend=eager,repeatable"]


@pytest.mark.kernels
@pytest.mark.parametrize("compiled", [False, True])
def test_the_backend_asked_for_runs_in_both_directions(compiled: bool, device: torch.device) -> None:
    """Counted by launches: eager launches no kernel, triton one forward and one backward, compiled or not."""
    torch._dynamo.reset()
    function = torch.compile(adjoint.silu, fullgraph=True, backend="aot_eager") if compiled else adjoint.silu
    x = torch.ones(3, requires_grad=True, device=device)

    def launched(backend: str) -> list[str]:
        before = kernels.launches()
        with adjoint.prefer(backend=backend):
            y = function(x)
        y.sum().backward()  # after the block, and on autograd's own thread on a GPU
        after = kernels.launches()
        return sorted(sku.split("/")[0] for sku in after if after[sku] != before.get(sku, 0))

    assert launched("eager") == []
    assert launched("triton") == ["silu", "silu_backward"]
    assert launched("eager") == []
