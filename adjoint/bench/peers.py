"""Other libraries that do the same work, by the names `Workload.peers` uses. Imported when timed.

To add one: a function from a `Task` to a `Contender` that calls the peer's own kernels, and a line in
`PEERS`.
"""

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from adjoint.bench import fla_w_u
from adjoint.bench.contenders import FORWARD, Builder, Contender, NotInstalled, Task, as_tuple


@dataclass(frozen=True)
class Peer:
    """A peer as shown in tables, the distribution it comes in, and how its contender is built."""

    label: str
    distribution: str
    build: Builder


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _liger_swiglu(task: Task) -> Contender:
    """Liger's kernels without its autograd wrapper. The backward overwrites gate and up."""
    try:
        from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
    except ImportError as error:
        raise NotInstalled("pip install liger-kernel") from error

    gate, up = task.inputs
    if task.direction == FORWARD:

        def forward() -> tuple[Tensor, ...]:
            result: Any = as_tuple(swiglu_forward(gate, up))
            return (result[-1],)  # the output alone, or gate, up and the output

        return Contender(forward)

    (upstream,) = task.upstream
    own_gate, own_up = torch.empty_like(gate), torch.empty_like(up)

    def restore() -> None:
        own_gate.copy_(gate)
        own_up.copy_(up)

    def backward() -> tuple[Tensor, ...]:
        result = swiglu_backward(own_gate, own_up, upstream)
        return (own_gate, own_up) if result is None else as_tuple(result)[:2]

    return Contender(backward, restore=restore)


PEERS = {
    "liger_swiglu": Peer("Liger", "liger-kernel", _liger_swiglu),
    "fla_recompute_w_u": Peer("FLA", "flash-linear-attention", fla_w_u.recompute_w_u),
}
