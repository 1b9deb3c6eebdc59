"""Tensors that kernels cannot read as they lie are copied into the workspace first; a problem's layout names them."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.launch import Setup


def layout_of(copied: list[str]) -> str:
    """The layout of a problem of which these tensors are copied."""
    return f"{', '.join(copied)} copied" if copied else ""


def copied_names(layout: str) -> list[str]:
    """The tensors that a layout names."""
    return [name for name in layout.removesuffix(" copied").split(", ") if name]


def add_copies(setup: Setup, **tensors: tuple[torch.dtype, int]) -> None:
    """Adds a region for each tensor that is copied; dtypes and numbers of elements are given for all."""
    setup.scratch(**{f"copied_{name}": tensors[name] for name in copied_names(setup.problem.layout)})


def memory_of(setup: Setup, workspace: Tensor | None) -> Any:
    """The regions of a workspace; without any, nothing is allocated."""
    return setup.memory(workspace) if setup.regions.bytes else {}


def readable(name: str, tensor: Tensor, memory: Any) -> Tensor:
    """The tensor, or its copy."""
    region = f"copied_{name}"
    return memory.tensor(region).view(tensor.shape).copy_(tensor) if region in memory else tensor  # type: ignore[no-any-return]
