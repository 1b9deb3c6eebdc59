"""The identity of a plan, and the name of the architecture that is part of it."""

from typing import NamedTuple

import torch


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


def architecture(device: torch.device) -> str:
    """The architecture of a device, as kernels are built for it: "sm_90", "gfx942", or its type."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
