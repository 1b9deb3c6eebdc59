"""Candidates in plain PyTorch, what they promise, and the words that all guarantees of the family share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Empirical, Guarantee
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype

Promises = Callable[[Problem], dict[str, Guarantee]]
Compute = Callable[[tuple[Any, ...], tuple[Tensor, ...]], None]
"""`compute(arguments, outputs)` writes the outputs."""

DOMAIN = (
    "‖k‖ ≤ 1 up to rounding, 0 ≤ beta ≤ 1, g ≤ 0 and −inf too, where the recurrence cannot diverge; results that are "
    "below the smallest number of the accumulator may be 0; where a sum on the way, or for float64 the square of a "
    "number, may pass the accumulator's largest number, the bound of what it reaches is infinite"
)

RESETS = (
    "a g of −inf multiplies the state with 0, which NaN and infinities in it survive; dg is 0 there if nothing else is "
    "NaN or infinite"
)
"""Words about special values, for the whole op and for a step."""

CHECKED = "inside adjoint.checked(), so are NaN in g, beta outside [0, 1] and keys that make the state grow"
"""Words about values that are reported only inside of `adjoint.checked()`."""

RESIDUALS = (
    "the error of dbeta, a sum of products with v − Sᵀk, is relative to the same sum with |v| where values are close "
    "to what the state holds of them: that difference has lost the digits its terms agree in"
)
"""Words about the domain of dbeta."""

CASES = "the family's cases: random, nearly equal and orthogonal keys, no decay, strong decay and resets, packed"

FORWARD, BACKWARD = 2e-6, 1e-5
"""Ceilings for results in float32: several times the errors of the cases, and about a tenth of those of a mistake."""

_IN_FLOAT64 = 1e-8
"""The ceiling of the same computation in float64, as a share of these."""


def domain_of(result: str) -> str:
    return f"{DOMAIN}; {RESIDUALS}" if result == "dbeta" else DOMAIN


def empirical_error(kind: torch.dtype, computed: torch.dtype, ceiling: float, cases: str = CASES) -> Empirical:
    """A ceiling for results of a dtype: that of the computation, plus half a unit of the storage type."""
    rounding = torch.finfo(kind).eps / 2 if kind != computed else 0.0
    return Empirical(ceiling * (_IN_FLOAT64 if computed == torch.float64 else 1.0) + rounding, cases)


def promise(
    problem: Problem,
    dtypes: dict[str, torch.dtype],
    ceiling: float,
    cases: str = CASES,
    computed: torch.dtype | None = None,
    order: str = "",
    bound: Callable[[str], Derived] | None = None,
    **words: Any,
) -> dict[str, Guarantee]:
    """Guarantees for results of these dtypes.

    Args:
        bound: gives the promised bound of a result's error, by its name. The ceiling is then recorded beside it.
        computed: the type of the arithmetic; by default float32, or float64 for float64.
        order: words that say what fixes the bits, for the domain.
        words: other promises in place of those that torch's matrix products allow. With these products, equal calls
            give equal bits on the CPU, but a sequence's bits may depend on the rest of its batch, because the shape of
            a product may decide its kernel.
    """
    kind = computed or wide_dtype(problem.dtypes[0])
    bits: dict[str, Any] = {
        "repeatable": problem.device.type == "cpu",
        "batch_invariant": "",
        "device_invariant": False,
    }
    return {
        name: Guarantee(
            accumulator=short(kind),
            roundings=int(dtype != kind),
            error=empirical_error(dtype, kind, ceiling, cases) if bound is None else bound(name),
            recorded=None if bound is None else empirical_error(dtype, kind, ceiling, cases),
            **({**bits, "domain": domain_of(name) + order} | words),
        )
        for name, dtype in dtypes.items()
    }


def eager_candidate(
    name: str,
    guarantee: Promises,
    compute: Compute,
    numeric: Callable[[Problem], dict[str, Any]] = lambda problem: {},
    waits: Callable[[Problem], bool] = lambda problem: False,
    revision: int = 1,
) -> Candidate:
    """A candidate in plain PyTorch, for every problem and layout."""

    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
        device = plan.problem.device.type
        if not torch.is_autocast_enabled(device):
            compute(arguments, outputs)
            return
        with torch.autocast(device, enabled=False):  # which would round operands
            compute(arguments, outputs)

    return in_pytorch(name, guarantee, allocating_outputs(run, many_calls=True), numeric, waits, revision)
