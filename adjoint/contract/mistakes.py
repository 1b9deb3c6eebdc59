"""Plausible wrong answers that the checks must notice, made from formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.batching import Answers
from adjoint.contract.inputs import Inputs, differentiable, widened


def answers(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Answers]:
    """A wrong answer computed in float64 by formulas and rounded once: only the formula is wrong."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        wide = widened(inputs)
        outputs = _as_tuple(forward(*wide))
        gradients = _as_tuple(backward(*(t.double() for t in upstream), *wide))
        return _like(outputs, upstream), _like(gradients, differentiable(inputs))

    return answer


def _like(values: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.to(other.dtype) for value, other in zip(values, others, strict=True))


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def narrow_arithmetic(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Answers]:
    """Every operation rounded to bfloat16, or to float16 for float16 itself."""

    def answer(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
        dtype = inputs[0].dtype
        narrow = torch.float16 if dtype == torch.float16 else torch.bfloat16
        values = [t.to(narrow) for t in inputs]
        outputs = _as_tuple(forward(*values))
        gradients = _as_tuple(backward(*(t.to(narrow) for t in upstream), *values))
        return tuple(t.to(dtype) for t in outputs), tuple(t.to(dtype) for t in gradients)

    return answer


def zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return tuple(map(torch.zeros_like, upstream)), tuple(map(torch.zeros_like, differentiable(inputs)))
