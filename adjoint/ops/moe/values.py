"""What the family's cases, workloads and bad calls are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint

EXPERTS = 6
"""The number of experts in cases of dispatch and combine."""

SHAPES = ((32768, 2048, 8, 128), (32768, 2048, 10, 512))
"""The tokens, columns, slots and experts of the workloads of dispatch and combine."""


def values(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int, scale: float = 1.0
) -> Tensor:
    """Normal values, drawn in float64 on the CPU, so that they are the same on every device."""
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)


def of_device(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """A generator on a device, for values that would take long to draw elsewhere."""
    return torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))


def indices_of(generator: torch.Generator, tokens: tuple[int, ...], slots: int, hot: bool = False) -> Tensor:
    """Experts in random order of frequency. Expert 1 gets no token, and with `hot` expert 4 gets most."""
    indices = torch.randint(EXPERTS - 1, (*tokens, slots), generator=generator)
    indices = torch.where(indices >= 1, indices + 1, indices)
    if hot:
        indices[torch.rand(indices.shape, generator=generator) < 0.7] = 4
    return indices


def distinct_experts(tokens: int, slots: int, experts: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Distinct experts for each token, uniformly."""
    scores = torch.rand(tokens, experts, device=device, generator=of_device(device, generator))
    return scores.topk(slots, -1).indices


def random_values(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, generator=of_device(device, generator))


def laid_across(tensor: Tensor, *axes: int) -> Tensor:
    """The tensor with its axes in another order in memory. The permutation must be its own inverse."""
    return tensor.permute(axes).contiguous().permute(axes)


# ------------------------------------------------------------------------------------------ bad calls


def changing(
    function: Callable[..., Any], inputs: Callable[[torch.device], dict[str, Any]]
) -> Callable[..., Callable[[torch.device], None]]:
    """Makes bad calls from a right one: `changed(name=change, ...)` replaces some of its arguments.

    A change is the new argument, or a function that makes it from the right one.
    """

    def changed(**changes: Any) -> Callable[[torch.device], None]:
        def call(device: torch.device) -> None:
            arguments = inputs(device)
            for name, change in changes.items():
                arguments[name] = change(arguments[name]) if callable(change) else change
            function(**arguments)
            adjoint.check()

        return call

    return changed


def shaped(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.new_ones(shape)


def with_index(
    tokens: int, experts: int, position: int, value: int, dtype: torch.dtype = torch.int64
) -> Callable[[Tensor], Tensor]:
    """Makes indices of two experts for each token, all of them right but one."""

    def change(indices: Tensor) -> Tensor:
        wrong = torch.arange(2 * tokens, device=indices.device).remainder(experts).to(dtype)
        wrong[position] = value
        return wrong.view(tokens, 2)

    return change
