"""What plans launch, for tests to look at."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adjoint.core.kernels import Variant
from adjoint.core.op.operator import operators


def record_launches(patch: pytest.MonkeyPatch) -> list[tuple[Variant, tuple[int, ...]]]:
    """The variants that are launched from now on, each with its grid; plans are chosen anew."""
    launched: list[tuple[Variant, tuple[int, ...]]] = []
    prepare = Variant.prepare

    def prepare_recording(self: Variant, device: torch.device) -> Callable[..., None]:
        start = prepare(self, device)

        def start_recording(grid: tuple[int, ...], *arguments: Any) -> None:
            launched.append((self, grid))
            start(grid, *arguments)

        return start_recording

    patch.setattr(Variant, "prepare", prepare_recording)
    for operator in operators():
        operator.plans.clear()
    return launched
