"""Schedule parameters, which may depend on the GPU because they change no bit."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from adjoint.core.kernels import architecture


class Schedules:
    """Schedule parameters by kernel and GPU, from the reviewed JSON beside a family's kernels.

    A key of the file is the name of a GPU, an architecture ("sm_90"), "interpreter" (few, large programs), or "default"
    for GPUs that nobody tuned. A value has the parameters by kernel, or is another key that has the same parameters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _by_gpu(self) -> dict[str, dict[str, dict[str, int]]]:
        table: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return {name: table[entries] if isinstance(entries, str) else entries for name, entries in table.items()}

    def lookup(self, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        """The parameters of a kernel on a device; without a device, the default."""
        if device is not None and device.type == "cpu":
            return self.named(kernel, "interpreter")
        if device is not None and torch.cuda.is_available():
            return self.named(kernel, torch.cuda.get_device_name(device), architecture(device))
        return self.named(kernel)

    def named(self, kernel: str, *names: str) -> dict[str, int]:
        """The parameters of a kernel under the first of these names that has them, or else the default."""
        chosen = next((name for name in names if kernel in self._by_gpu.get(name, {})), "default")
        return dict(self._by_gpu[chosen][kernel])
