"""Jobs in several processes: each takes one job at a time, and a process that dies takes no other job with it.

A job does not travel between processes, because its inputs are functions. The listing travels, from which every process
makes the same jobs, and then the position of the job to run. Processes are spawned and not forked, because CUDA does
not survive a fork.
"""

import faulthandler
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TypeAlias

import torch

from adjoint.verify import interpreter
from adjoint.verify.listing.jobs import Job
from adjoint.verify.run import Row

Listing: TypeAlias = Callable[[], Sequence[Job]]
"""A function that lists the jobs. It is pickled, and lists the same jobs in every process."""

Results: TypeAlias = Generator[tuple[int, list[Row]], None, None]
"""Positions and rows of jobs, in the order in which the jobs end."""

FIRST_CHECKS = ("accuracy", "schedules", "upstream layouts", "batch invariance", "poison")
FIRST_OPS = ("gated_delta_rule", "moe.experts", "gated_delta_step")
"""Jobs start in the order in which their checks are listed here, and within a check in the order of their ops. Accuracy
comes first because it compiles most of the kernels, which other checks then find on disk. The other checks and ops here
take longest on a GPU, and must not be the ones that all processes wait for at the end."""

MEMORY_PER_PROCESS = 8 * 2**30
"""The bytes of GPU memory that a process may need. In a sample of the jobs on an H200, the largest was an accuracy
check of the gated delta rule, which took 7 GiB with CUDA's own memory."""

_POLL_SECONDS = 1.0
_FAREWELL_SECONDS = 10.0


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_processes(device: torch.device) -> int:
    """The default number of processes: one for each core, and on a GPU no more than its free memory has room for."""
    if device.type != "cuda":
        return usable_cores()
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(usable_cores(), free // MEMORY_PER_PROCESS))


def run_here(jobs: Sequence[Job], positions: Iterable[int], announce: Callable[[Job], None]) -> Results:
    """Runs jobs in this process, in order."""
    interpreter.correct()
    for position in positions:
        announce(jobs[position])
        yield position, jobs[position].run()


def run_in_processes(
    listing: Listing,
    jobs: Sequence[Job],
    positions: Iterable[int],
    announce: Callable[[Job], None],
    *,
    processes: int,
    device: torch.device,
    rank: Callable[[Job], tuple[int, ...]] | None = None,
) -> Results:
    """Runs jobs in worker processes, which end when the generator is closed.

    If the GPU has too little memory for a job beside the others, the job runs again, alone, after all others.

    Args:
        listing: lists `jobs` in every process.
        positions: the positions of the jobs to run.
        announce: a function that is called with each job when it starts.
        processes: the largest number of processes at a time.
        device: the device of the jobs.
        rank: gives the rank of a job; jobs of a smaller rank start first. By default the rank follows from the job's
            check, then from its op.
    """
    order = rank or _rank
    queue = deque(sorted(positions, key=lambda position: order(jobs[position])))
    alone: list[int] = []
    workers: list[_Worker] = []
    threads = max(1, usable_cores() // processes)

    def start_next(worker: _Worker) -> None:
        position = queue.popleft()
        announce(jobs[position])
        worker.start(position, jobs[position])

    try:
        while queue or workers or alone:
            if not queue and not workers:
                queue, alone, processes = deque(alone), [], 1
            while queue and len(workers) < processes:
                workers.append(_Worker(listing, device, threads))
                start_next(workers[-1])
            for worker in _await_answers(workers):
                rows, usable = worker.answer()
                if processes > 1 and any("OutOfMemoryError" in row.detail for row in rows):
                    alone.append(worker.position)
                else:
                    yield worker.position, rows
                if queue and usable:
                    start_next(worker)
                else:
                    workers.remove(worker)
                    worker.dismiss()
    finally:
        for worker in workers:
            worker.kill()


def _rank(job: Job) -> tuple[int, int]:
    """The default rank of a job."""
    return _place(job.check, FIRST_CHECKS), place_of_op(job)


def place_of_op(job: Job) -> int:
    """The place of a job's op in the order of `FIRST_OPS`."""
    return _place(job.op, FIRST_OPS)


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


class _Worker:
    """A process that runs one job after the other until its connection is closed."""

    def __init__(self, listing: Listing, device: torch.device, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, remote = context.Pipe()
        self.process = context.Process(target=_work, args=(remote, listing, device, threads))
        with _ignore_interrupts():
            self.process.start()
        remote.close()  # otherwise the end of the process would not be seen here

    def start(self, position: int, job: Job) -> None:
        """Tells the process to run a job."""
        self.position, self.job = position, job
        with suppress(OSError):  # it fails if the process has died, and then `answer` says so
            self.connection.send((position, job.label))

    def answer(self) -> tuple[list[Row], bool]:
        """The rows of the job, and whether the process can run another one. If it died, the row says how."""
        try:
            if self.connection.poll():
                rows, usable = self.connection.recv()
                return rows, usable
        except (EOFError, OSError):
            pass
        self.process.join(_FAREWELL_SECONDS)
        return [self.job.failure("its process died", _cause(self.process.exitcode))], False

    def dismiss(self) -> None:
        """Lets the process end; it must have no job."""
        self.connection.close()
        self.process.join(_FAREWELL_SECONDS)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _await_answers(workers: list[_Worker]) -> list[_Worker]:
    """Waits a moment for workers that have an answer or have died.

    A process that was forked in a worker may keep the connection open after the worker's death, so the connection
    alone does not show whether the worker has died.
    """
    ready = wait([worker.connection for worker in workers], _POLL_SECONDS)
    return [worker for worker in workers if worker.connection in ready or not worker.process.is_alive()]


def _cause(status: int | None) -> str:
    """Words that say how a process ended."""
    if status is None:
        return "it stopped answering"
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"{name}, as when the memory is used up" if name == "SIGKILL" else name


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Lets processes that start in this block ignore Ctrl-C, which a terminal sends to all of them.

    Only the process that waits for them obeys it.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _work(
    connection: "Connection[object, tuple[int, str]]", listing: Listing, device: torch.device, threads: int
) -> None:
    """The body of a worker process: runs jobs until the connection is closed."""
    faulthandler.enable()  # if the process crashes, its stack goes to stderr
    torch.set_num_threads(threads)
    interpreter.correct()
    jobs = listing()
    usable = True
    with suppress(EOFError, OSError):  # the connection was closed
        while usable:
            position, label = connection.recv()
            if jobs[position].label != label:
                raise RuntimeError(f"job {position} is {jobs[position].label!r} in a worker, and {label!r} elsewhere")
            rows = jobs[position].run()
            usable = _settle(device)
            connection.send((rows, usable))


def _settle(device: torch.device) -> bool:
    """Waits for the GPU, and frees its memory for the other processes.

    Returns False if the GPU no longer answers: after an illegal access every later call of the same process fails.
    """
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True
