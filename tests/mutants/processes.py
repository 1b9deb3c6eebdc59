"""The process of its own that each mutant is tried in: how long it may take, and what its end means."""

import faulthandler
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tests.mutants.calls import gluon as gluon_calls
from tests.mutants.checks import Noticed, load, unbroken
from tests.mutants.trees import Mutant, source_of

_NOTICED, _UNNOTICED, _UNDECIDED = 0, 7, 8
"""How a process that tries a mutant exits."""
SECONDS, BYTES = 60, 8 * 2**30
"""Of its time on a processor, and of memory beside what it begins with: a mutant may loop for ever, and allocate."""

KILLED, SURVIVED, TIMED_OUT, UNDECIDED = "killed", "survived", "timed out", "undecided"
"""Outcomes. A mutant that takes too long is noticed; an undecided one could not be tried."""


def start(mutant: Mutant, noticed: Noticed, before: Iterable[str] = (), seconds: int = SECONDS) -> int:
    """Starts a process that runs a mutant through checks, after loading the sources of modules before it as they are;
    its number."""
    child = os.fork()
    if child == 0:
        end = _UNDECIDED  # what fails before the checks run says nothing about the mutant
        try:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _limit(seconds)
            torch.set_num_threads(1)  # a pool of threads does not survive a fork
            for name in before:
                load(name, source_of(name))
            if mutant.module not in gluon_calls.MODULES:  # whose functions the model is given
                load(mutant.module, mutant.source)
            with np.errstate(all="ignore"):
                end = _NOTICED if noticed(mutant) else _UNNOTICED
        finally:
            os._exit(end)
    return child


def _limit(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    threading.Thread(target=_end_after, args=(seconds,), daemon=True).start()
    signal.alarm(4 * SECONDS)  # for one that sleeps
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_after(seconds: int) -> None:
    """Ends this process when its threads have taken so long: some systems limit the time of each thread alone, and the
    model of Gluon starts many."""
    while time.process_time() < seconds:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGXCPU)


def judge(mutant: Mutant, noticed: Noticed) -> str:
    """The outcome of a mutant: one that hangs is given some times as long as the module as it is takes."""
    verdict, _ = _end(start(mutant, noticed, seconds=FEW_SECONDS))
    if verdict != TIMED_OUT:
        return verdict
    seconds = min(SECONDS, math.ceil(TIMES * _seconds(mutant.module, noticed)))
    return _end(start(mutant, noticed, seconds=seconds))[0] if seconds > FEW_SECONDS else verdict


FEW_SECONDS, TIMES = 10, 5
"""What most mutants take less than; and of how many times as long as their module takes, those that take longer."""


@cache
def _seconds(module: str, noticed: Noticed) -> float:
    """What checks of a module as it is take of a processor's time."""
    verdict, seconds = _end(start(unbroken(module), noticed))
    if verdict != SURVIVED:
        raise RuntimeError(f"{module}: the checks fail on the kernels as they are ({verdict})")
    return seconds


def _end(process: int) -> tuple[str, float]:
    """The outcome of a process, and the processor's time that it took."""
    _, status, usage = os.wait4(process, 0)
    return outcome(status)[0], usage.ru_utime + usage.ru_stime


def outcome(status: int) -> tuple[str, str]:
    """What the end of such a process, as `waitpid` tells it, means for its mutant, and what noticed it."""
    if os.WIFSIGNALED(status):
        ended_by = signal.Signals(os.WTERMSIG(status))
        late = ended_by in (signal.SIGXCPU, signal.SIGALRM)
        return (TIMED_OUT if late else KILLED), ended_by.name
    ends = {_NOTICED: (KILLED, "results"), _UNNOTICED: (SURVIVED, "")}
    return ends.get(os.WEXITSTATUS(status), (UNDECIDED, ""))
