"""Plausible wrong answers that the checks must notice, made from formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.batching import Answers
from adjoint.contract.inputs import as_tuple

Formula = Callable[..., Any]


def answers(
    forward: Formula, backward: Formula, arithmetic: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.float64
) -> Callable[..., Answers]:
    """A wrong answer computed in float64 by formulas and rounded once: only the formula is wrong."""

    def answer(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
        dtype = inputs[0].dtype
        values, dy = ([t.to(arithmetic(dtype)) for t in tensors] for tensors in (inputs, upstream))
        results = as_tuple(forward(*values)), as_tuple(backward(*dy, *values))
        outputs, gradients = (tuple(t.to(dtype) for t in part) for part in results)
        return outputs, gradients

    return answer


def narrow_arithmetic(forward: Formula, backward: Formula) -> Callable[..., Answers]:
    """Every operation rounded to bfloat16, or to float16 for float16 itself."""
    return answers(forward, backward, lambda dtype: torch.float16 if dtype == torch.float16 else torch.bfloat16)


def zeros(upstream: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> Answers:
    return tuple(torch.zeros_like(t) for t in upstream), tuple(torch.zeros_like(t) for t in inputs)
