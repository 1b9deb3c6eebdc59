"""The problem, which has all that a choice of plan may depend on, and the identity of the plan that was chosen."""

from typing import Any, NamedTuple

import torch

from adjoint.core.kernels import architecture


class Problem(NamedTuple):
    """All facts on which a choice of plan may depend. It is hashable and cheap to build.

    `sizes` has only the sizes on which the choice or the workspace depends: an op whose plans fit every size leaves it
    empty. `options` are the operator's arguments behind its tensors. `target` is the architecture of a GPU that need
    not be present; it is empty for a problem on the device itself.
    """

    op: str
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    layout: str = ""
    sizes: tuple[int, ...] = ()
    options: tuple[Any, ...] = ()
    target: str = ""

    @property
    def architecture(self) -> str:
        """The architecture that kernels are built for: "sm_90", "gfx942"; the device type where there is none."""
        return self.target or architecture(self.device)

    def __str__(self) -> str:
        parts = [f"{self.op} on {self.target or self.device}", "/".join(map(short, self.dtypes))]
        parts += [self.layout] * bool(self.layout) + [f"sizes {self.sizes}"] * bool(self.sizes)
        return ", ".join(parts + [f"options {self.options}"] * bool(self.options))

    def differences(self, other: "Problem") -> list[str]:
        """Sentences that name each field in which another problem differs."""
        return [
            f"{name} is {_words(theirs)}, the plan was made for {_words(ours)}"
            for name, ours, theirs in zip(self._fields, self, other, strict=True)
            if ours != theirs
        ]


class Sku(NamedTuple):
    """The identity of a plan: plans with equal SKUs give equal bits."""

    op: str
    backend: str
    kernel: str
    revision: int
    arch: str
    elements: str
    layout: str
    numeric: str

    def __str__(self) -> str:
        return "/".join((self.op, self.backend, self.kernel, f"r{self.revision}", *filter(None, self[4:])))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_words, value)) + ")"
    return short(value) if isinstance(value, torch.dtype) else str(value) or "none"
