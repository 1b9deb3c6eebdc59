"""The processes of a run: one, or those that torchrun starts, over which model, optimizer and data are shared out."""

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from adjoint.core.errors import ArgumentError
from adjoint.train.step.objective import Objective
from adjoint.train.stops import RankLost


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        device: the device of this process.
        mesh: the mesh of all ranks; None if there is only one process and torchrun did not start it.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes for all."""
        return self.rank == 0

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        if self.mesh is None:
            return x
        x = x.clone()
        dist.all_reduce(x)
        return x

    def add_up_number(self, number: int) -> int:
        """The sum of an integer over all ranks."""
        return number if self.mesh is None else int(self.add_up(torch.tensor(number, device=self.device)))

    def gather(self, value: Any) -> list[Any]:
        """The Python values of all ranks, on every rank."""
        if self.mesh is None:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return self.gather(value)[0]

    def wait(self) -> None:
        """Returns when all ranks are here."""
        if self.mesh is not None:
            dist.barrier()

    def shard(self, objective: Objective, precision: torch.dtype) -> None:
        """Shards each layer's parameters, then the others, over the ranks (FSDP2). Gradients are added in float32."""
        assert self.mesh is not None
        kind = None if precision is torch.float32 else precision
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
        shared: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        for layer in objective.model.model.layers:
            fully_shard(layer, **shared)
        fully_shard(objective, **shared)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The named device, or the GPU if there is one.

    Raises:
        ArgumentError: there is no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"train: there is no device {name!r}; devices are auto, cpu, cuda and cuda:N")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise ArgumentError(f"train: torch sees {count} GPUs here, and cuda:{index} is none of them")
        device = torch.device("cuda", index)
    return device


@contextmanager
def start_ranks(device: str, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Ranks]:
    """Gives this process its place in the run: as torchrun states it, or as the only process.

    Raises:
        RankLost: another process has ended during the block.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, choose_device(device))
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if local.type == "cuda":
        torch.cuda.set_device(local)
    _end_when_told(rank)
    try:
        dist.init_process_group("nccl" if local.type == "cuda" else "gloo", timeout=timeout)
        yield Ranks(rank, size, local, init_device_mesh(local.type, (size,)))
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, dist.DistError) or _is_connection(error):
            raise RankLost(f"train: rank {rank} of {size} stops: another rank has ended ({_reason(error)})") from error
        raise
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _is_connection(error: RuntimeError) -> bool:
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo", "NCCL", "Timed out", "timed out")
    return any(word in str(error) for word in words)


def _reason(error: BaseException) -> str:
    """The first sentence of torch's message, without the place in its source.

    >>> _reason(RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:3209. This is typically so."))
    'Connection closed by peer [127.0.0.1]:3209'
    """
    line = str(error).strip().splitlines()[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).partition(". ")[0]


def _end_when_told(rank: int) -> None:
    """Ends this process with a sentence on SIGTERM, which torchrun sends to the other ranks when one has died.

    This works even while a collective waits, when Python's own signal handlers do not run.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        keep = sender  # the socket lives as long as the thread
        while signal.SIGTERM not in receiver.recv(16):
            pass
        del keep
        print(f"train: rank {rank} was told to end, because another rank has ended; --resume goes on", file=sys.stderr)
        sys.stderr.flush()
        os._exit(143)

    threading.Thread(target=watch, daemon=True).start()
