"""What a family says about its ops so that tests, `verify`, `bench` and docs can exercise them.

A family's `cases.py` lists its `SUBJECTS`, `BAD_CALLS`, `WORKLOADS` and `builds()`. Nothing else is
needed for a new op to go through every check: see `adjoint.verify`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.dtype, torch.device, torch.Generator], tuple[Tensor, ...]]


def random_upstream(output: Tensor, generator: torch.Generator) -> Tensor:
    """A gradient like an output: normal, same dtype."""
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)


@dataclass(frozen=True)
class Case:
    """Inputs for a subject: `make` gives them for a dtype and device, `upstream` a gradient for an output."""

    name: str
    make: Make
    upstream: Callable[[Tensor, torch.Generator], Tensor] = random_upstream


@dataclass(frozen=True)
class Special:
    """Inputs whose outputs are stated exactly, signs of zeros included; NaN matches NaN.

    `dtypes` are those the statement is for; all of the subject's when empty.
    """

    name: str
    inputs: tuple[float, ...]
    upstream: float
    outputs: tuple[float, ...]
    gradients: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...] = ()


Answers = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs and gradients."""


@dataclass(frozen=True)
class Subject:
    """One op, or one mode of it, under test.

    Attributes:
        name: as shown in tables.
        function: the public function.
        keywords: the keywords of the mode.
        inputs: names of the differentiable tensor arguments, in order.
        reference: float64 inputs -> outputs.
        reference_backward: upstream gradients, then inputs, all float64 -> a gradient per input.
        cases: layouts, sizes and values.
        exhaustive: for 16-bit dtypes, cases that together hold every value; empty where that is out of reach.
        mistakes: plausible wrong answers by name, `(upstream, inputs) -> Answers`, in the
            inputs' dtype; each must fail the accuracy check, or the check proves nothing.
        specials: elementwise special values.
        batch_axis: the axis of every input along which items follow each other, for batch invariance.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    reference: Callable[..., tuple[Tensor, ...]]
    reference_backward: Callable[..., tuple[Tensor, ...]]
    cases: tuple[Case, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    exhaustive: Callable[[torch.dtype], Iterable[Case]] = lambda dtype: ()
    mistakes: Mapping[str, Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], Answers]] = field(default_factory=dict)
    specials: tuple[Special, ...] = ()
    batch_axis: int = 0

    def __call__(self, *inputs: Tensor, **keywords: Any) -> Any:
        return self.function(*inputs, **self.keywords, **keywords)


@dataclass(frozen=True)
class BadCall:
    """A call that must raise, and words its message must contain."""

    name: str
    call: Callable[[torch.device], Any]
    error: type[Exception]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Workload:
    """A problem to time: what it moves, what torch would do, and how it is checked.

    Attributes:
        name: as shown in tables.
        subject: what is timed and checked.
        make: its inputs.
        forward_bytes, backward_bytes: the fewest bytes each direction must move.
        baseline: the same work in torch's own functions, `(*inputs) -> output`.
        peers: names of entries in `adjoint.bench.peers` that do the same work.
    """

    name: str
    subject: Subject
    make: Make
    forward_bytes: int
    backward_bytes: int
    baseline: Callable[..., Tensor]
    peers: tuple[str, ...] = ()
