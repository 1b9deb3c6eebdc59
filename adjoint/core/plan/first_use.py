"""The first-use check: before a plan's kernels first serve a call, they compute a small case with a known answer.

The check is off by default. This module has the switch, and the record of what this process has checked.
`known_answers` has the cases and the comparison, and is imported when a plan is first checked.
"""

import threading
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from adjoint.core.plan import Plan


class _Switch:
    """Whether the check is on: for the process, or while a block is open in any of its threads.

    Attributes:
        enabled: whether the check is on; every call reads it.
    """

    def __init__(self) -> None:
        self.enabled, self._for_process, self._blocks = False, False, 0
        self._lock = threading.Lock()

    def change(self, *, for_process: bool | None = None, blocks: int = 0) -> None:
        with self._lock:
            self._for_process = self._for_process if for_process is None else for_process
            self._blocks += blocks
            self.enabled = self._for_process or self._blocks > 0


switch = _Switch()


def set_first_use_check(enabled: bool) -> None:
    """Switches the first-use check on or off for the process: see `first_use_check`."""
    switch.change(for_process=bool(enabled))


@contextmanager
def first_use_check() -> Iterator[None]:
    """Checks every plan that runs in this block, before its first run in the process.

    Before a plan first runs on a device, and in `plan.prepare()`, the plan computes a small case of its op, and the
    check compares the result with the float64 reference. If an output is not within its guarantee, `WrongResult` is
    raised and the call computes nothing. docs/concepts.md says which case it is, and what the check costs. While a CUDA
    graph is recorded nothing is checked, and a plan that was not checked before warns. A block applies to all threads,
    because autograd runs the backward on a thread of its own. `set_first_use_check(True)` is for the whole process.
    """
    switch.change(blocks=1)
    try:
        yield
    finally:
        switch.change(blocks=-1)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.is_checking = False


_of_thread = _OfThread()
_checking = threading.Lock()
_passed: set[Hashable] = set()
_warned: set[Hashable] = set()


def forget() -> None:
    """Forgets which plans were checked, so that the next use of every plan is again the first."""
    with _checking:
        _passed.clear()
        _warned.clear()


def _key(plan: "Plan") -> Hashable:
    """The key of one check: a plan's SKU, its device, and the variants of the kernels that it may launch."""
    return str(plan.sku), plan.problem.device, frozenset(launch.variant for launch in plan.launches)


def check(plan: "Plan") -> None:
    """Compares a plan's result with a known answer, unless that was done; raises `WrongResult` if it is wrong."""
    if _of_thread.is_checking:  # the check itself runs this plan
        return
    key = _key(plan)
    if key in _passed:
        return
    device = plan.problem.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _warn_once(key, plan, "is recorded in a CUDA graph without it; call plan.prepare(), or run the op once, before")
        return
    from adjoint.known_answers import compare

    with _checking:  # one thread checks, and others wait for its result
        if key in _passed:
            return
        _of_thread.is_checking = True
        try:
            if not compare(plan):
                _warn_once(key, plan, "runs without it: no case of its op has this element type and can take it")
        finally:
            _of_thread.is_checking = False
        _passed.add(key)


def _warn_once(key: Hashable, plan: "Plan", words: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(f"first-use check: {plan!r} {words}", UserWarning, stacklevel=2)
