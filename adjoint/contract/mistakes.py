"""Plausible wrong answers that the checks must notice, made from formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.batching import Answers
from adjoint.contract.inputs import Inputs, as_tuple, differentiable, each

Formula = Callable[..., Any]


def answers(
    forward: Formula, backward: Formula, arithmetic: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.float64
) -> Callable[..., Answers]:
    """A wrong answer that formulas compute in float64 and that is rounded once, so only the formulas are wrong.

    `arithmetic` chooses another type for the computation, by the dtype of the inputs.
    """

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        slopes = differentiable(inputs)
        computed = arithmetic(slopes[0].dtype)
        values = each(lambda x: x.to(computed) if x.is_floating_point() else x, inputs)
        outputs = as_tuple(forward(*values))
        gradients = as_tuple(backward(*(dy.to(computed) for dy in upstream), *values))
        return _like(outputs, upstream), _like(gradients, slopes)

    return answer


def _like(values: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.to(other.dtype) for value, other in zip(values, others, strict=True))


def narrow_arithmetic(forward: Formula, backward: Formula) -> Callable[..., Answers]:
    """An answer in which every operation is rounded to bfloat16; for float16 inputs, to float16."""
    return answers(forward, backward, lambda dtype: torch.float16 if dtype == torch.float16 else torch.bfloat16)


def zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return tuple(map(torch.zeros_like, upstream)), tuple(map(torch.zeros_like, differentiable(inputs)))
