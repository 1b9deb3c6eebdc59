"""The conditions of a measurement: machine, versions, and the state of the source."""

import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from adjoint.bench.peers import PEERS, version
from adjoint.core.kernels import why_not_triton


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def slug(name: str) -> str:
    """A name in a form for files: lower-case letters and digits, joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def driver() -> str | None:
    """The version of the GPU driver, from its kernel module or else from its tool; None if neither is there."""
    module = Path("/proc/driver/nvidia/version")
    if module.exists():
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", module.read_text(encoding="utf-8"))
        if match:
            return match[1]
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


def commit() -> str | None:
    """The commit of the checkout that contains this package, with a "+" behind it if files of the package differ."""
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        # An installed package may be inside the checkout of another project, which does not track it.
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None


def digest_source() -> str:
    """A digest of the files of this package."""
    import adjoint

    folder = Path(adjoint.__file__).parent
    return digest(path.read_bytes() for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".json"))


def digest(parts: Iterable[bytes]) -> str:
    """A digest of parts, in their order."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.hexdigest()


def conditions(command: str) -> dict[str, Any]:
    """The conditions of a run of a command now: the date, the state of the source, and all versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": commit(),
        "source": digest_source()[:16],
        "versions": versions(),
    }


def cache_bytes(device: torch.device) -> int | None:
    """The bytes of a GPU's L2 cache."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).L2_cache_size


def machine() -> dict[str, Any]:
    """Versions, the CPU, the GPUs, and for each device and backend why it cannot run there; empty if it can."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = {f"cuda:{index}": torch.cuda.get_device_properties(index) for index in range(count)}
    return {
        "versions": versions(),
        "cpu": device_name(torch.device("cpu")),
        "gpus": {
            device: {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
            for device, gpu in properties.items()
        },
        "backends": {
            device: {"triton": why_not_triton(torch.device(device)), "eager": ""} for device in ("cpu", *properties)
        },
    }


def versions() -> dict[str, str | None]:
    """The versions of Python, adjoint, torch, triton, CUDA, the driver and the peers; None for those not there."""
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
