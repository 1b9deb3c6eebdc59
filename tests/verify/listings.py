"""Lists of jobs that other processes can make again, for the tests of workers: each ends in its own way."""

import os
import signal
import time
from collections.abc import Callable

import torch

from adjoint.core import kernels
from adjoint.verify import Job, Row


def job(name: str, body: Callable[[], bool], check: str = "accuracy") -> Job:
    """A job with one row, which shows the process that it ran in."""

    def run() -> list[Row]:
        return [Row("toy", name, "float32", "eager", "stated", str(os.getpid()), body())]

    return Job(f"toy: {name}", "toy", check, "float32", "eager", run)


def succeed() -> bool:
    return True


def fail() -> bool:
    return False


def throw() -> bool:
    raise ValueError("on purpose")


def crash() -> bool:
    os.kill(os.getpid(), signal.SIGSEGV)
    return succeed()


def leave() -> bool:
    os._exit(3)


def wait() -> bool:
    time.sleep(600)
    return succeed()


def ignores_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def interrupt() -> bool:
    """Presses Ctrl-C, as the process that started this one sees it."""
    os.kill(os.getppid(), signal.SIGINT)
    return wait()


def lose_the_gpu() -> bool:
    """What an illegal access does: every later call raises."""

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.synchronize = synchronize
    return fail()


def has_a_gpu() -> bool:
    """As if there were one, which answers."""
    torch.cuda.synchronize = lambda device: None
    torch.cuda.empty_cache = lambda: None
    return succeed()


def has_three_threads() -> bool:
    return torch.get_num_threads() == 3


def rounds_bfloat16() -> bool:
    """Whether Triton's interpreter is corrected here."""
    from triton.runtime.interpreter import InterpreterBuilder

    return kernels.interpreting() and getattr(InterpreterBuilder, "bfloat16_corrected", False)


def find_memory_later(trace: str) -> bool:
    """Finds no memory the first time."""
    if not os.path.exists(trace):
        open(trace, "w").close()
        raise torch.OutOfMemoryError("CUDA out of memory")
    return succeed()


def list_scarcity(trace: str) -> list[Job]:
    return [job("large", lambda: find_memory_later(trace)), job("small", succeed), job("smaller", succeed)]


def list_sound() -> list[Job]:
    checks = ("modes", "poison", "capture", "accuracy", "bad input", "schedules", "streams")
    return [job(check, succeed, check) for check in checks]


def list_troubles() -> list[Job]:
    bodies = {"first": succeed, "fails": fail, "throws": throw, "crashes": crash, "leaves": leave}
    return [*(job(name, body) for name, body in bodies.items()), job("last", has_three_threads)]


def list_interruption(*arguments: object) -> list[Job]:
    return [job("first", ignores_interrupts), job("waits", wait), job("interrupts", interrupt), job("last", succeed)]


def list_gpu_fault() -> list[Job]:
    """Their names tell the order in which they start, which is not that of the list."""
    return [
        job("last", has_a_gpu, "modes"),
        job("first", has_a_gpu, "accuracy"),
        job("third", has_a_gpu, "poison"),
        job("second, a fault", lose_the_gpu, "schedules"),
    ]


def list_interpreter_checks() -> list[Job]:
    return [job("first", rounds_bfloat16), job("last", rounds_bfloat16)]


def list_own_process() -> list[Job]:
    """Other jobs in another process than in the one that asks for them."""
    return [job(f"of {os.getpid()}", succeed)]
