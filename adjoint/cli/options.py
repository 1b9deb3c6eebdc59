"""Options that several commands share."""

from typing import TYPE_CHECKING, Annotated

import typer

from adjoint.cli.terminal import refuse

if TYPE_CHECKING:
    import torch

Json = Annotated[bool, typer.Option("--json", help="Print only data, as JSON.")]


def device_of(name: str | None) -> "torch.device":
    """The named device, or the GPU if there is one."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        refuse(f"unknown device {name!r}; devices are cpu, cuda and cuda:N")
    return device


def require_present(device: "torch.device") -> "torch.device":
    """Refuses a device that is not present."""
    import torch

    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        refuse(f"torch sees {torch.cuda.device_count()} GPUs here, and {device} is none of them; use --device cpu")
    return device


def dtype_of(command: str, name: str | None) -> "torch.dtype | None":
    """The named dtype of weights; None if there is no name."""
    import torch

    kind = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        refuse(f"{command}: --dtype must be float64, float32, bfloat16 or float16, got {name!r}")
    return kind
