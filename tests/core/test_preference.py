"""Preferences: strings, nesting, threads, torch.compile, and the deterministic flag."""

import threading

import pytest
import torch

import adjoint
from adjoint import Preference
from adjoint.core import kernels
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


def test_the_deterministic_flag_asks_for_repeatable_plans() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert resolve(None) == "repeatable"
        assert resolve(Preference(backend="eager")) == "backend=eager,repeatable"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"backend": "metal"}, "backend must be one of 'triton', 'eager', got 'metal'"),
        ({"max_workspace_bytes": -1}, "max_workspace_bytes must be an integer ≥ 0"),
        ({"plan": "a,b"}, "plan must be the name of a plan"),
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
