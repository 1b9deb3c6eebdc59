"""What the interpreter leaves to the ordinary process and the GPU, and how calls are compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from adjoint.core.kernels import interpreting


@pytest.fixture
def quick(everything: bool) -> bool:
    """Whether kernels run in the interpreter and not all of them must: a test then takes its telling cases."""
    return interpreting() and not everything


@pytest.fixture
def compiled(quick: bool) -> Iterator[Callable[..., Any]]:
    """`torch.compile` without graph breaks, from a clean slate."""
    if quick:
        pytest.skip("the contract compiles, and the ordinary process")
    torch._dynamo.reset()
    yield lambda function, **options: torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    torch._dynamo.reset()
