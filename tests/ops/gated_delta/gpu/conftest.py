"""What is done once for all tests on a GPU, and after each."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import adjoint
from tests.ops.gated_delta.gpu.examples import NAMES


@pytest.fixture(autouse=True, scope="session")
def compiled_concurrently() -> None:
    """One process for each plan and number of heads: compiling is most of the time here, and none of what is tested."""
    if not torch.cuda.is_available() or (os.cpu_count() or 1) < 8:
        return
    code = "import sys; from tests.ops.gated_delta.gpu.examples import warm; warm(*sys.argv[1:])"
    combinations = [(name, heads, "") for name in NAMES for heads in ("many", "few", "odd")]
    combinations += [(name, "few", "smaller") for name in NAMES]
    root = Path(__file__).parents[4]
    run = [sys.executable, "-c", code]
    processes = [subprocess.Popen([*run, *what], cwd=root, stderr=subprocess.DEVNULL) for what in combinations]
    for process in processes:
        process.wait()  # a plan that is refused, or fails, is the tests' affair


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    adjoint.check()
    torch.cuda.empty_cache()
