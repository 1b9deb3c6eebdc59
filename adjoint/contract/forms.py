"""Other forms of a call: they write to memory of the caller or return gradients of another kind, with the same numbers.

A form is compared with the plain call on the same inputs, bit for bit. So it keeps every promise that the plain form
keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from adjoint.contract.inputs import Inputs, differentiable


class Outcome(NamedTuple):
    """What a call in another form gave.

    Attributes:
        outputs: floating ones of the public function.
        gradients: one per floating input, None where the form gives none; empty where it has no backward.
        inputs: as the call left them.
        keywords: those of the form, as the call left them.
        before: the inputs as they were.
    """

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    inputs: Inputs
    keywords: Mapping[str, Any]
    before: Inputs


def _as_given(outcome: Outcome) -> tuple[Tensor | None, ...]:
    return *outcome.outputs, *outcome.gradients


@dataclass(frozen=True)
class Form:
    """Another form of a subject's function.

    Attributes:
        name: as shown in tables.
        keywords: what the call takes besides the inputs, from those; the form may write to the tensors among them.
        overwrites: names of the inputs that it writes to.
        results: the outputs and gradients of the plain form, from what this one gave; raises where they are not there.
        is_differentiable: whether there is a backward.
        names: the names of its operators' outputs where they are not those of the plain form, by the latter.
        takes: whether it can be called with inputs; rows that share a state cannot be written in place, for example.
        exact: where it adds to numbers that are there, `(upstream, inputs, keywords) -> (exact, arguments), ...` in
            float64, one for each result: instead of the plain form's bits, results are within their error statements,
            which take these arguments.
    """

    name: str
    keywords: Callable[[Inputs], Mapping[str, Any]]
    overwrites: tuple[str, ...] = ()
    results: Callable[[Outcome], tuple[Tensor | None, ...]] = _as_given
    is_differentiable: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    takes: Callable[[Inputs], bool] = lambda inputs: True
    exact: Callable[[tuple[Tensor, ...], Inputs, Mapping[str, Any]], tuple[tuple[Tensor, Inputs], ...]] | None = None

    def output(self, name: str) -> str:
        """The name of its own for an output of the plain form."""
        return self.names.get(name, name)


def reuse_inputs(*inputs: str) -> Form:
    """The backward writes gradients over the inputs, and gives that memory."""

    def results(outcome: Outcome) -> tuple[Tensor | None, ...]:
        for name, gradient, x in zip(inputs, outcome.gradients, differentiable(outcome.inputs), strict=True):
            if gradient is None or gradient.data_ptr() != x.data_ptr():
                raise ValueError(f"the gradient of {name} is not in the memory of {name}")
        return _as_given(outcome)

    return Form("reuse_inputs", lambda given: {"reuse_inputs": True}, inputs, results)
