"""Schedule parameters: what may depend on the GPU, because it changes no bit."""

import json
from functools import cached_property
from pathlib import Path

import torch


class Schedules:
    """Schedule parameters by kernel and GPU, from the reviewed JSON beside a family's kernels.

    The file maps a GPU's name, "interpreter" (few, large programs), or "default" for a GPU nobody
    tuned, to parameters by kernel.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _by_gpu(self) -> dict[str, dict[str, dict[str, int]]]:
        table: dict[str, dict[str, dict[str, int]]] = json.loads(self._path.read_text(encoding="utf-8"))
        return table

    def lookup(self, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        """The parameters of a kernel on a device; without one, those of a GPU nobody tuned."""
        name = "default"
        if device is not None and device.type == "cpu":
            name = "interpreter"
        elif device is not None and torch.cuda.is_available():
            name = torch.cuda.get_device_name(device)
        return self.named(kernel, name)

    def named(self, kernel: str, name: str) -> dict[str, int]:
        """The parameters of a kernel on a GPU of that name."""
        return dict(self._by_gpu.get(name, {}).get(kernel) or self._by_gpu["default"][kernel])
