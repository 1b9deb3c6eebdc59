"""Two processes run these tests: an ordinary one, and one with Triton's interpreter (TRITON_INTERPRET=1).

Tests marked `kernels` execute Triton kernels: they need the interpreter or a GPU, and are skipped
elsewhere. Where the interpreter is on, nothing but them is worth running again.
"""

import gc
import hashlib
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import adjoint
from adjoint.core import kernels
from adjoint.verify import interpreter

# Some virtual machines say that they have AMX and trap on it: torch's own bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the whole product of ops, dtypes, checks and targets")
    parser.addoption("--commit", default=None, help="the commit whose part of mutants and builds is tried: hexadecimal")


def pytest_report_header(config: pytest.Config) -> str:
    return f"mutants and builds: the part of commit {commit_of(config)} (--commit tries that of another)"


def commit_of(config: pytest.Config) -> str:
    """The commit that chooses mutants and builds: the one checked out, or, without git, one for each version."""
    named = config.getoption("--commit")
    return str(named) if named else _checked_out() or hashlib.sha256(adjoint.__version__.encode()).hexdigest()[:12]


@cache
def _checked_out() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def pytest_configure(config: pytest.Config) -> None:
    interpreter.correct()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps Python's garbage collector from walking, again and again, through what stays until the end: millions of
    objects of torch, Triton, transformers and the tests. It goes through what tests leave behind, and less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GARBAGE)
        gc.enable()


GARBAGE = 20_000
"""The number of new objects after which garbage is collected; 700, Python's own, finds a few kilobytes of it."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = kernels.why_not_triton(device_under_test())
    for item in items:
        if reason and item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def device_under_test() -> torch.device:
    if torch.cuda.is_available() and not kernels.interpreting():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture
def device() -> torch.device:
    return device_under_test()


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--all"))


@pytest.fixture
def commit(request: pytest.FixtureRequest) -> str:
    """Chooses the variants of kernels that are built."""
    return commit_of(request.config)
