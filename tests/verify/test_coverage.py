"""Every promise of every plan is held by a check that every op goes through, or by a test named here, or is listed."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from adjoint.core import kernels
from adjoint.verify import jobs
from adjoint.verify.coverage import Promise, checked, made

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="where plans of both backends are there"),
]

Pattern = tuple[str, str, str]
"""Operator, or "operator of plan", output and promise, as `fnmatch` reads them."""

TAKE = "tests/ops/indexing/take_along_axis/test_take_along_axis.py"
LAYOUT = "tests/ops/moe/dispatch/test_dispatch.py::test_the_layout_is_the_stable_sort"
ROUTING = "tests/ops/moe/route/test_route.py::test_routing_is_a_stable_sort_of_the_logits"
DISPATCH = "tests/ops/moe/dispatch/test_dispatch.py::test_an_index_out_of_range_gives_a_zero_row_past_the_last_offset"
PREFIX = "tests/ops/gated_delta/rule/test_kernels.py::test_a_prefix_is_the_prefix"
BOUNDS = "tests/ops/gated_delta/rule/test_kernels.py::test_bounds_out_of_order_are_reported_and_put_in_order"
CONV = "tests/ops/conv/test_conv.py"

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
        (operator, "*", promise): _SEVERAL
        for operator in (
            "gated_delta_rule*", "moe_experts*", "recompute_w_u*", "rms_norm_residual*", "swiglu* of eager.float32"
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
    ("moe_combine*", "*", "special_values"): "no check: the sums are those of dispatch, whose bits are held",
    ("moe_dispatch*", "*", "special_values"): "no check: rows are copied, and bits of finite ones are held",
    ("moe_experts*", "*", "special_values"): "no check: what products give depends on their order",
    ("rms_norm_residual*", "*", "special_values"): "no check: the kernels of rms_norm, whose special values are held",
    ("swiglu_packed*", "*", "special_values"): "no check: the functions of swiglu, whose special values are held",
}  # fmt: skip
"""Promises that nothing holds by itself, and why."""


def _fits(promise: Promise, pattern: Pattern) -> bool:
    operator = f"{promise.operator} of {promise.plan}" if " of " in pattern[0] else promise.operator
    return all(map(fnmatch, (operator, promise.output, promise.promise), pattern))


def test_every_promise_is_covered() -> None:
    left = made("cpu") - checked(jobs(None, "cpu"), "cpu")
    patterns = [*HELD_BY, *NOT_HELD]
    uncovered = sorted(promise for promise in left if not any(_fits(promise, pattern) for pattern in patterns))
    assert not uncovered, "\n".join(map(str, uncovered))
    idle = [pattern for pattern in patterns if not any(_fits(promise, pattern) for promise in left)]
    assert not idle, f"exceptions that nothing needs: {idle}"


def test_a_check_that_disappears_is_missed() -> None:
    listed = jobs(["silu"], "cpu")
    every = checked(listed, "cpu")
    fewer = checked([job for job in listed if job.check != "batch invariance"], "cpu")
    assert {promise.promise for promise in every - fewer} == {"batch_invariant"}


def test_named_tests_exist() -> None:
    root = Path(__file__).parents[2]
    for place in HELD_BY.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (root / file).read_text(encoding="utf-8"), place
