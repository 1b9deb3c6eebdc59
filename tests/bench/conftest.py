"""Quick times, a pretended GPU, and a family with one workload."""

from collections.abc import Callable, Iterator

import pytest

from adjoint import ops
from adjoint.bench.measurement import run, timing
from adjoint.bench.report import results
from adjoint.contract.cases import Workload
from adjoint.ops.activation.swiglu import cases


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEAT_MILLISECONDS", 0)
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(results.environment, "device_name", lambda device: "NVIDIA H200")
    yield


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload], None]:
    """Makes a workload the only one, and the ceiling quick."""
    monkeypatch.setattr(run, "copy_ceiling", lambda device: 10.0)
    for module in ops.cases():
        if module is not cases:
            monkeypatch.setattr(module, "WORKLOADS", ())
    return lambda workload: monkeypatch.setattr(cases, "WORKLOADS", (workload,))
