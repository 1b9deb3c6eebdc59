"""The facts on which a run's bits depend besides its options: versions, device, threads, plans; and the mode of torch
in which results are repeatable."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import adjoint
from adjoint.core.op.operator import operators


@contextmanager
def set_up(deterministic: bool, threads: int) -> Iterator[None]:
    """Sets the number of threads and, for repeatable bits, torch's deterministic mode, cuBLAS's workspace and the kinds
    of attention.

    cuBLAS reads its variable on first use, so this comes before anything runs on the GPU. On leaving, torch's settings
    are as before; the variable of cuBLAS stays set.
    """
    mode, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill, benchmark = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark  # type: ignore[attr-defined]
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        if not deterministic:
            yield
            return
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no bit depends on it
        torch.backends.cudnn.benchmark = False
        # Flash attention's backward has a deterministic form, which this mode selects. Other fused ones have none.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(before)


def describe(device: torch.device) -> dict[str, Any]:
    """The facts, besides their options, that two runs must share to have equal bits."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    facts: dict[str, Any] = {
        "adjoint": adjoint.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cpu":
        facts["instructions"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def used_skus() -> list[str]:
    """The SKUs, with revisions, of all plans that this process has chosen."""
    return sorted({str(plan.sku) for operator in operators() for plan in operator.plans.values()})


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences that name each fact that has changed."""
    return [f"{name} was {then.get(name)} and is {now.get(name)}" for name in now if then.get(name) != now.get(name)]


def changed_skus(then: list[str], now: list[str]) -> list[str]:
    """Sentences about operators that a run has used and that now have another kernel, revision or architecture."""
    before: dict[str, set[str]] = {}
    for sku in then:
        before.setdefault(sku.split("/")[0], set()).add(_kernel(sku))
    changes = {}
    for sku in now:
        known = before.get(sku.split("/")[0])
        if known and _kernel(sku) not in known:
            changes[_kernel(sku)] = f"{_kernel(sku)} runs, where the run had {', '.join(sorted(known))}"
    return list(changes.values())


def _kernel(sku: str) -> str:
    """The part of a SKU that does not depend on the problem: operator, backend, kernel, revision and architecture."""
    return "/".join(sku.split("/")[:5])


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
