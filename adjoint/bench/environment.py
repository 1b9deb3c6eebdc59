"""The conditions of a measurement: machine and versions."""

import platform
import re
import subprocess
from pathlib import Path

import torch

from adjoint.bench.peers import PEERS, version


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def slug(name: str) -> str:
    """A name fit for a file: lower-case letters and digits, joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def driver() -> str | None:
    """The version of the GPU driver; None where no tool tells."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(answer.stdout.split()), None)


def versions() -> dict[str, str | None]:
    """Python, adjoint, torch, triton, CUDA, the driver, and the peers; None for what is not there."""
    import adjoint

    peers = {peer.distribution: version(peer.distribution) for peer in PEERS.values()}
    return {
        "python": platform.python_version(),
        "adjoint": adjoint.__version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": driver() if torch.cuda.is_available() else None,
    } | peers
