"""Results held to what their plans promise, for tests that have an exact result."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import widened


def broken(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: dict[str, tuple[Tensor, Tensor]],
    upstream: tuple[Tensor, ...] = (),
    preference: Preference | None = None,
    by_name: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, str]:
    """What is further from its exact result than a call's plan promises, by name; empty where every promise is kept.

    Args:
        inputs: tensors, by position.
        outputs: results and exact results by name, of the forward ("y") or of the backward ("dx").
        upstream: gradients of the outputs, for results of the backward.
        by_name: the inputs that go by name, in the order in which the reference takes them after the others.
    """
    plan = adjoint.plan(function, *inputs, preference=preference, **options)
    backward = plan.adjoint.guarantee if plan.adjoint is not None else {}
    everything = (*inputs, *(options.get(name) for name in by_name))
    wide = widened(tuple(x.detach() if isinstance(x, Tensor) else x for x in everything))
    measurements = {}
    for name, (result, exact) in outputs.items():
        arguments = wide if name in plan.guarantee else (*widened(upstream), *wide)
        promise = plan.guarantee.get(name) or backward[name]
        measured = promise.error.measure(result.detach(), exact.detach(), *arguments)
        if not measured.holds:
            measurements[name] = str(measured)
    return measurements
