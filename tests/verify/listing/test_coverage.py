"""Every promise of every plan is held by a check that every op goes through, or by a test named here, or is listed."""

from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint.core import kernels
from adjoint.core.preference import Preference
from adjoint.verify import jobs
from adjoint.verify.checks import framework
from adjoint.verify.listing.coverage import Promise, checked, implied, made
from adjoint.verify.listing.jobs import subjects
from tests.package import package_operators

in_the_interpreter = pytest.mark.skipif(not kernels.interpreting(), reason="where plans of both backends are there")

Pattern = tuple[str, str, str]
"""Operator, or "operator of plan", output and promise, as `fnmatch` reads them."""

TAKE = "tests/ops/indexing/take_along_axis/test_take_along_axis.py"
LAYOUT = "tests/ops/moe/dispatch/test_dispatch.py::test_the_layout_is_the_stable_sort"
ROUTING = "tests/ops/moe/route/test_route.py::test_routing_is_a_stable_sort_of_the_logits"
DISPATCH = "tests/ops/moe/dispatch/test_dispatch.py::test_an_index_out_of_range_gives_a_zero_row_past_the_last_offset"
SPECIAL_SUMS = "tests/ops/moe/dispatch/test_dispatch.py::test_special_values_of_rows_and_sums"
PREFIX = "tests/ops/gated_delta/rule/test_kernels.py::test_a_prefix_is_the_prefix"
BOUNDS = "tests/ops/gated_delta/rule/test_kernels.py::test_bounds_out_of_order_are_reported_and_put_in_order"
CONV = "tests/ops/conv/test_conv.py"
LOSS = "tests/ops/loss/test_cross_entropy.py"
LINEAR_LOSS = "tests/ops/loss/test_linear_cross_entropy.py"

HELD_BY: dict[Pattern, str] = {
    ("embedding*", "*", "out_of_range"): "tests/ops/embedding/embedding/test_embedding.py::test_zero_rows_out_of_range",
    ("take_along_axis*", "*", "out_of_range"): f"{TAKE}::test_out_of_range_is_zero_and_has_no_gradient",
    ("moe_dispatch*", "*", "out_of_range"): DISPATCH,
    ("moe_combine*", "*", "out_of_range"): DISPATCH,
    (
        "moe_experts*",
        "*",
        "out_of_range",
    ): "tests/ops/moe/experts/test_experts.py::test_an_index_out_of_range_adds_nothing",
    ("gated_delta_step", "*", "out_of_range"): "tests/ops/gated_delta/step/test_kernels.py::test_an_index_out_of_range",
    ("causal_conv1d_step*", "*", "out_of_range"): f"{CONV}::test_an_index_out_of_range_is_reported_and_skips_its_row",
    ("causal_conv1d*", "*", "out_of_range"): f"{CONV}::test_wrong_bounds_are_reported_and_harmless",
    ("gated_delta_rule", "*", "out_of_range"): BOUNDS,
    ("recompute_w_u*", "*", "out_of_range"): (
        "tests/ops/gated_delta/stages/w_u/test_kernels.py::test_bounds_are_put_in_order"
    ),
    ("embedding_bag*", "*", "special_values"): "tests/ops/embedding/bag/test_bag.py::test_sums_of_special_values",
    ("embedding*", "*", "special_values"): (
        "tests/ops/embedding/embedding/test_properties.py::test_no_sum_is_negative_zero"
    ),
    ("take_along_axis*", "*", "special_values"): f"{TAKE}::test_special_values_of_the_gradient",
    ("moe_dispatch*", "*", "special_values"): SPECIAL_SUMS,
    ("moe_combine", "*", "special_values"): SPECIAL_SUMS,
    ("moe_combine_backward", "*", "special_values"): (
        "tests/ops/moe/dispatch/test_dispatch.py::test_special_values_of_the_gradients_of_combine"
    ),
    ("moe_experts*", "*", "special_values"): (
        "tests/ops/moe/experts/test_experts.py::test_a_token_reaches_nobody_else"
    ),
    ("rms_norm_residual*", "*", "special_values"): (
        "tests/ops/norm/test_norm.py::test_special_values_of_a_sum_are_those_of_a_row"
    ),
    ("swiglu_packed*", "*", "special_values"): (
        "tests/ops/activation/test_activation.py::test_special_values_of_one_tensor_are_those_of_two"
    ),
    ("moe_route*", "*", "special_values"): "tests/ops/moe/route/test_route.py::test_special_rows",
    ("moe_*_loss*", "*", "special_values"): (
        "tests/ops/moe/losses/test_losses.py::test_what_does_not_count_counts_for_nothing"
    ),
    ("causal_conv1d_step*", "*", "special_values"): f"{CONV}::test_a_special_value_stays_within_its_row",
    ("causal_conv1d*", "*", "special_values"): f"{CONV}::test_a_special_value_stays_within_its_window",
    ("gated_delta_rule*", "*", "special_values"): (
        "tests/ops/gated_delta/rule/test_special_values.py::test_what_is_no_number_stays_within_its_chunk_and_after"
    ),
    ("gated_delta_step*", "*", "special_values"): (
        "tests/ops/gated_delta/step/test_special_values.py::test_what_is_no_number_reaches_its_row_from_its_token_on"
    ),
    ("cumulative_decay*", "*", "special_values"): (
        "tests/ops/gated_delta/stages/test_stages.py::test_the_stages_reset_the_state_as_the_rule_does"
    ),
    ("gated_delta_rule", "*", "prefix_invariant"): PREFIX,
    ("causal_conv1d_step", "*", "prefix_invariant"): f"{CONV}::test_a_prefill_and_steps_have_the_bits_of_the_whole",
    ("causal_conv1d*", "*", "prefix_invariant"): f"{CONV}::test_a_prefix_has_the_bits_of_the_whole",
    ("causal_conv1d_step", "new_state", "device_invariant"): f"{CONV}::test_states_are_copies_of_tokens",
    ("causal_conv1d*", "final_state", "device_invariant"): f"{CONV}::test_states_are_copies_of_tokens",
    ("gated_delta_step", "*", "prefix_invariant"): (
        "tests/ops/gated_delta/step/test_kernels.py::test_tokens_in_one_step_or_one_at_a_time"
    ),
    ("rotary*", "*", "prefix_invariant"): "tests/ops/rotary/test_rotary.py::test_a_prefix_is_the_prefix",
    ("rotary*", "*", "special_values"): "tests/ops/rotary/test_rotary.py::test_special_values",
    ("cross_entropy*", "*", "special_values"): f"{LOSS}::test_what_is_no_number_stays_with_its_token",
    ("cross_entropy", "*", "out_of_range"): f"{LOSS}::test_a_label_out_of_range_counts_for_nothing",
    ("linear_cross_entropy*", "*", "special_values"): f"{LINEAR_LOSS}::test_what_is_no_number_stays_with_its_token",
    ("linear_cross_entropy", "*", "out_of_range"): f"{LINEAR_LOSS}::test_a_label_out_of_range_counts_for_nothing",
    ("moe_dispatch", "*", "ties"): LAYOUT,
    ("moe_route", "*", "ties"): ROUTING,
    ("embedding_bag", "out", "ties"): "tests/ops/embedding/bag/test_bag.py::test_the_first_of_equal_entries_wins",
    **{
        (operator, output, promise): test
        for operator, output, test in (
            ("moe_dispatch", "inverse", LAYOUT),
            ("moe_dispatch", "offsets", LAYOUT),
            ("moe_dispatch", "permutation", LAYOUT),
            ("moe_route", "indices", ROUTING),
        )
        for promise in ("error", "batch_invariant", "device_invariant", "accumulator")
    },
}
"""The op's own test that holds a promise which no shared check does."""

_SEVERAL = "several roundings of terms: their number is what the error bound, which is held, is made of"
_KEPT = "kept for the backward alone, whose gradients are held; that it is written, and repeats, is checked"
NOT_HELD: dict[Pattern, str] = {
    **{
        (operator, output, promise): _SEVERAL
        for operator, output in (
            ("gated_delta_rule*", "*"),
            ("moe_experts*", "*"),
            ("recompute_w_u*", "*"),
            ("rms_norm_residual*", "*"),
            ("swiglu* of eager.float32", "*"),
            ("linear_cross_entropy of triton.vendor", "*"),
            ("linear_cross_entropy_backward* of triton.*", "*"),
            ("linear_cross_entropy_backward* of eager", "dhidden"),
        )
        for promise in ("accumulator", "roundings")
    },
    **{
        (operator, output, "*"): _KEPT
        for operator, output in (
            ("gated_delta_rule", "saved"),
            ("embedding_bag", "extra"),
            ("moe_load_balancing_loss", "load"),
            ("moe_z_loss", "tokens"),
        )
    },
    **{
        (operator, "*", "accumulator"): "a stage that has float32 results of float32 inputs alone: its error is held"
        for operator in ("solve", "solve_backward")
    },
    ("moe_load_balancing_loss", "loss", "out_of_range"): "an index out of range is refused, as the bad calls show",
}  # fmt: skip
"""Promises that nothing holds by itself, and why."""


def _fits(promise: Promise, pattern: Pattern) -> bool:
    operator = f"{promise.operator} of {promise.plan}" if " of " in pattern[0] else promise.operator
    return all(map(fnmatch, (operator, promise.output, promise.promise), pattern))


def _left(device: torch.device, ops: list[str] | None = None) -> set[Promise]:
    """Promises that no shared check holds; of another form of a call, that of the plain form which it follows from."""
    listed = jobs(ops, device)
    held, follows = checked(listed, device), implied(listed, device)
    return {follows.get(promise, promise) for promise in made(device, ops) - held} - held


def _uncovered(promises: set[Promise], *others: Pattern) -> str:
    patterns = [*HELD_BY, *NOT_HELD, *others]
    return "\n".join(str(one) for one in sorted(promises) if not any(_fits(one, pattern) for pattern in patterns))


@pytest.mark.kernels
@in_the_interpreter
def test_every_promise_is_covered() -> None:
    left = _left(torch.device("cpu"))
    assert not _uncovered(left), _uncovered(left)
    idle = [pattern for pattern in (*HELD_BY, *NOT_HELD) if not any(_fits(promise, pattern) for promise in left)]
    assert not idle, f"exceptions that nothing needs: {idle}"


ON_HOPPER = {
    ("gated_delta_rule", "gluon.fused"),
    ("gated_delta_rule_backward", "gluon.fused"),
    ("moe_experts", "gluon.grouped"),
    ("moe_experts_backward", "gluon.grouped"),
}
"""Plans that no CPU has."""

NOT_IN_THE_INTERPRETER = {("cross_entropy_backward_kept", "eager")}
"""Plans of a form of a call that is for plain PyTorch on the CPU; the tests without the interpreter check them."""


@pytest.mark.kernels
@in_the_interpreter
def test_every_plan_has_a_case() -> None:
    """An operator, or a plan, that no subject's cases reach would promise what nothing checks."""
    made_by = {(promise.operator, promise.plan) for promise in made("cpu")}
    every = {(operator.name, plan.name) for operator in package_operators().values() for plan in operator.candidates()}
    assert every - made_by == ON_HOPPER | NOT_IN_THE_INTERPRETER


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that there is not: plans are chosen for it, and none runs."""
    facts: dict[str, Any] = {
        "is_available": True, "current_device": 0, "get_device_capability": (9, 0), "get_device_name": "NVIDIA H200",
        "get_device_properties": SimpleNamespace(major=9, minor=0),
    }  # fmt: skip
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, fact=fact: fact)
    return torch.device("cuda", 0)


RULE = "gated_delta_rule"


@pytest.mark.skipif(kernels.interpreting(), reason="no interpreter pretends to be a GPU")
def test_every_promise_on_hopper_is_covered(hopper: torch.device) -> None:
    ops = [RULE, "moe.experts"]
    assert {(promise.operator, promise.plan) for promise in made(hopper, ops)} >= ON_HOPPER
    left = _left(hopper, ops)
    assert not _uncovered(left), _uncovered(left)


@pytest.mark.skipif(kernels.interpreting(), reason="no interpreter pretends to be a GPU")
def test_graphs_streams_and_compilers_meet_every_kernel_on_hopper(hopper: torch.device) -> None:
    """Few heads and many, packed and not, normalised or as they are, have kernels of their own."""
    chosen = {
        (subject.name, case.name)
        for subject in subjects([RULE])
        for case in framework.first_of_each_plan(subject, torch.bfloat16, hopper, Preference(backend="triton"))
    }
    normalised = f"{RULE}[normalize_qk]"
    assert chosen >= {
        (RULE, "a layer"), (RULE, "few heads of 64, packed"), (RULE, "many heads"), (RULE, "many heads, resets"),
        (RULE, "largest heads, packed"), (normalised, "a layer"), (normalised, "few heads of 64, packed"),
    }  # fmt: skip


@pytest.mark.kernels
@in_the_interpreter
def test_a_check_that_disappears_is_missed() -> None:
    listed = jobs(["silu"], "cpu")
    every = checked(listed, "cpu")
    fewer = checked([job for job in listed if job.check != "batch invariance"], "cpu")
    assert {promise.promise for promise in every - fewer} == {"batch_invariant"}


def test_named_tests_exist() -> None:
    root = Path(__file__).parents[3]
    for place in HELD_BY.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (root / file).read_text(encoding="utf-8"), place


@pytest.mark.kernels
@in_the_interpreter
def test_a_form_that_nobody_compares_is_missed() -> None:
    listed = jobs(["silu"], "cpu")
    held = checked(listed, "cpu")
    reused = {promise for promise in made("cpu", ["silu"]) if promise.operator == "silu_backward_reuse"}
    assert reused and not reused & held
    assert {implied(listed, "cpu")[promise].operator for promise in reused} == {"silu_backward"}
    assert not implied([job for job in listed if job.check != "forms"], "cpu")
