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
    """The results of a call in another form.

    Attributes:
        outputs: the floating outputs of the public function.
        gradients: one for each floating input, None where the form gives none; empty where it has no backward.
        inputs: the inputs after the call.
        keywords: the form's keywords after the call.
        before: the inputs before the call.
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
        name: the name in tables.
        keywords: gives the further keywords of the call, from the inputs; the form may write to tensors among them.
        overwrites: the names of the inputs that the form writes to.
        results: finds the outputs and gradients of the plain form in the outcome of this one; raises if they are not
            there, for example not in the memory of the inputs.
        is_differentiable: whether there is a backward.
        names: the names of its operators' outputs that differ from those of the plain form, by the plain form's names.
        takes: whether the form can be called with some inputs. For example, rows that share a state cannot be written
            in place.
        exact: for a form that adds to existing numbers. Its results do not have the plain form's bits, but are within
            their error statements. `(upstream, inputs, keywords) -> (exact, arguments), ...`, in float64, gives for
            each result the exact one and the arguments of its error statement.
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
        """This form's name for an output of the plain form."""
        return self.names.get(name, name)


def reuse_inputs(*inputs: str) -> Form:
    """The form whose backward writes gradients over these inputs and returns that memory."""

    def results(outcome: Outcome) -> tuple[Tensor | None, ...]:
        for name, gradient, x in zip(inputs, outcome.gradients, differentiable(outcome.inputs), strict=True):
            if gradient is None or gradient.data_ptr() != x.data_ptr():
                raise ValueError(f"the gradient of {name} is not in the memory of {name}")
        return _as_given(outcome)

    return Form("reuse_inputs", lambda given: {"reuse_inputs": True}, inputs, results)
