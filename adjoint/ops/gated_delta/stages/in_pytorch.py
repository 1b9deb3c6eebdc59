"""Candidates of stages in plain PyTorch, and what they promise."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, wide_dtype
from adjoint.ops.gated_delta.promises import DOMAIN, Promises, eager_candidate, promise

_CASES = "the family's cases: grouped heads, packed, tails"


_DOMAIN = f"{DOMAIN}; G finite, as cumulative_decay gives it"


def promised(
    ceiling: float,
    computed: torch.dtype | None = None,
    domain: str = _DOMAIN,
    special_values: str = "",
    *,
    bound: Callable[[Problem, str, dict[str, torch.dtype]], Derived],
    **kinds: int | str,
) -> Promises:
    """Guarantees by name. If a result's kind is a number, the result has the dtype of that input; if it is "wide",
    float32 or float64."""

    def promises(problem: Problem) -> dict[str, Guarantee]:
        wide = wide_dtype(problem.dtypes[0])
        dtypes = {name: wide if isinstance(kind, str) else problem.dtypes[kind] for name, kind in kinds.items()}
        words: dict[str, Any] = {"domain": domain, "special_values": special_values}
        return promise(
            problem, dtypes, ceiling, _CASES, computed, bound=lambda name: bound(problem, name, dtypes), **words
        )

    return promises


def forward(
    compute: Callable[..., None],
    promises: Promises,
    revision: int = 1,
    waits: Callable[[Problem], bool] = lambda problem: False,
) -> Candidate:
    """A candidate that runs `compute(*arguments, outputs)`."""

    def run(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        compute(*arguments, outputs)

    return eager_candidate("eager.chunks", promises, run, waits=waits, revision=revision)


def backward(
    compute: Callable[..., tuple[Tensor, ...]],
    promises: Promises,
    has_need: bool = True,
    revision: int = 1,
    waits: Callable[[Problem], bool] = lambda problem: False,
) -> Candidate:
    """A candidate that runs `compute(*upstream, *inputs, *options) -> gradients`.

    `has_need` says that the operator takes a mask of the gradients that are needed.
    """

    def run(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
        *inputs, need = arguments if has_need else (*arguments, 1)
        for bit, (target, gradient) in enumerate(zip(outputs, compute(*inputs), strict=True)):
            if need >> bit & 1:
                target.copy_(gradient)

    return eager_candidate("eager.chunks", promises, run, waits=waits, revision=revision)
