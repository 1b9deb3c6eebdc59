"""Clocks: GPU time with a cold cache, CPU time, and the large copy whose rate is the memory ceiling."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

Action = Callable[[], Any]

WARM_UP_MILLISECONDS, REPEAT_MILLISECONDS = 10, 40
HEAD_START_CYCLES = 500_000
"""The fewest cycles that a GPU idles before a timed call, about 0.3 ms. The host may take longer to start a kernel than
the GPU takes to run it. It is done by then, so only the GPU's work is timed."""

_CYCLES_PER_SECOND = 2_000_000_000
"""No GPU's clock is faster."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _BeforeEachRun:
    """Runs an action where `do_bench` clears the gradient of a tensor: before every timed run, outside its time."""

    def __init__(self, action: Action) -> None:
        self._action = action

    @property
    def grad(self) -> None:
        return None

    @grad.setter
    def grad(self, value: None) -> None:
        self._action()


def time_gpu(function: Action, restore: Action | None = None) -> list[float]:
    """The milliseconds of GPU time of many calls, each with a cold L2.

    Args:
        function: launches the work on the current stream.
        restore: for a function that overwrites its own inputs: runs before every timed call. Otherwise later calls
            would work on the results of earlier ones, and soon on zeros or infinities.
    """
    from triton.testing import do_bench

    head_start = _head_start(function, restore)

    def before_each_run() -> None:
        if restore is not None:
            restore()
        torch.cuda._sleep(head_start)

    durations = {"warmup": WARM_UP_MILLISECONDS, "rep": REPEAT_MILLISECONDS}
    return list(do_bench(function, **durations, return_mode="all", grad_to_none=[_BeforeEachRun(before_each_run)]))


def _head_start(function: Action, restore: Action | None) -> int:
    """The cycles that a GPU must idle so that the host has started all kernels of a call."""
    function()  # compiles and fills caches
    if restore is not None:
        restore()
    torch.cuda.synchronize()
    begin = perf_counter()
    function()
    seconds = perf_counter() - begin
    torch.cuda.synchronize()
    return max(HEAD_START_CYCLES, int(1.5 * seconds * _CYCLES_PER_SECOND))


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Runs a block, on a GPU, on a stream that is not the default one.

    Autograd runs the backward on the stream of the forward, and the default stream cannot be recorded.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
    torch.cuda.synchronize(device)


def recorded(function: Action) -> Action:
    """Records the launches of a call in a CUDA graph and returns its replay; raises if they cannot be recorded.

    This must be called within `own_stream`.
    """
    function()  # compiles and fills caches
    torch.cuda.synchronize()
    # Waits for the device are looked for first: found while recording, one would leave torch's allocator recording.
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return graph.replay


def time_cpu(function: Action, restore: Action | None = None) -> list[float]:
    """The milliseconds of wall time of many calls on the CPU, after a warm-up."""
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 5 or (perf_counter() - begin) * 1e3 < REPEAT_MILLISECONDS:
        if restore is not None:
            restore()
        start = perf_counter()
        function()
        times.append((perf_counter() - start) * 1e3)
    warm_up = len(times) // 5
    return times[warm_up:]


def time_on(device: torch.device, function: Action) -> float:
    """The median of the milliseconds that a call takes on a device."""
    return statistics.median(times_on(device, function))


def times_on(device: torch.device, function: Action, restore: Action | None = None) -> list[float]:
    """The milliseconds of many calls on a device."""
    if device.type != "cuda":
        return time_cpu(function, restore)
    with torch.cuda.device(device):
        return time_gpu(function, restore)


def matrix_ceiling(device: torch.device) -> float:
    """TF/s of one large product of bfloat16 matrices, on random data."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    target = torch.empty_like(left)
    return 2 * size**3 / time_on(device, lambda: torch.mm(left, right, out=target)) / 1e9


def copy_ceiling(device: torch.device) -> float:
    """GB/s of one large bfloat16 copy, with read and written bytes together: 1 GiB on a GPU, 64 MiB on a CPU.

    The data are random, because zeros can move faster than real data.
    """
    elements = 2**29 if device.type == "cuda" else 2**25
    source = torch.randn(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    milliseconds = time_on(device, lambda: target.copy_(source))
    return 2 * source.numel() * source.element_size() / milliseconds / 1e6
