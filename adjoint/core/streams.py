"""Work that runs beside other work on one GPU, and is joined before anyone can tell."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from adjoint.core.errors import Unsupported

_own = threading.local()


def _second(device: torch.device) -> torch.cuda.Stream:
    """This thread's second stream of a device."""
    streams: dict[int, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in streams:
        streams[index] = torch.cuda.Stream(index)
    return streams[index]


def run_concurrently(
    device: torch.device, first: Callable[[], Any], second: Callable[[], Any], worthwhile: bool
) -> None:
    """Launches two pieces of work that do not depend on each other; what follows waits for both.

    On a GPU, where that is worthwhile, the second goes to a stream of its own: neither fills the card alone, and the
    first has the choice of its places. It is joined even when one raises, so memory of the current stream may be used
    freely. Graphs capture it.

    Args:
        device: where both run.
        first, second: launch on the current stream.
        worthwhile: whether the work is long enough for what a second stream costs the host.
    """
    if device.type != "cuda" or not worthwhile:
        first()
        second()
        return
    main, side = torch.cuda.current_stream(device), _second(device)
    side.wait_stream(main)
    try:
        first()
        with torch.cuda.stream(side):
            second()
    finally:
        main.wait_stream(side)


def refuse_capture(device: torch.device, what: str, advice: str) -> None:
    """For what waits for the device: raises `Unsupported` while a CUDA graph is recorded.

    Torch would, but from somewhere inside, after which its random generators on the device cannot be used.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"{what} waits for the device, so a CUDA graph cannot record it; {advice}")
