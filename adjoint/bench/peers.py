"""Other libraries that do the same work, by the names `Workload.peers` uses. Imported when timed.

To add one: a function from a `Task` to a `Contender` that calls the peer's own kernels, and a line in
`PEERS`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from adjoint.bench import fla_w_u
from adjoint.bench.contenders import FORWARD, Builder, Contender, NotInstalled, Task, as_tuple, through_autograd
from adjoint.bench.gated_delta_peers import fla_step, transformers_rule
from adjoint.bench.norm_peers import fla_gated_rms_norm, fla_l2_norm, liger_rms_norm, quack_rms_norm


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


def _delta_rule(function: Callable[..., Any]) -> Builder:
    """A peer's `chunk_gated_delta_rule`, both directions through its own autograd function."""

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any, cu_seqlens: Any) -> Tensor:
        outputs: tuple[Tensor, ...] = function(
            q, k, v, g, beta, initial_state=state, output_final_state=False, cu_seqlens=cu_seqlens
        )
        return outputs[0]

    return lambda task: through_autograd(rule, task)


def _fla_gated_delta_rule(task: Task) -> Contender:
    os.environ["FLA_FLASH_QLA"] = "0"  # or, with FlashQLA installed, it would run that one's kernels
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise NotInstalled("pip install flash-linear-attention") from error
    return _delta_rule(chunk_gated_delta_rule)(task)


def _flash_qla_gated_delta_rule(task: Task) -> Contender:
    try:
        from flash_qla import chunk_gated_delta_rule
    except ImportError as error:
        raise NotInstalled("pip install flash-qla") from error
    return _delta_rule(chunk_gated_delta_rule)(task)


PEERS = {
    "liger_swiglu": Peer("Liger", "liger-kernel", _liger_swiglu),
    "liger_rms_norm": Peer("Liger", "liger-kernel", liger_rms_norm),
    "quack_rms_norm": Peer("QuACK", "quack-kernels", quack_rms_norm),
    "fla_gated_rms_norm": Peer("FLA", "fla-core", fla_gated_rms_norm),
    "fla_l2_norm": Peer("FLA", "fla-core", fla_l2_norm),
    "fla_gated_delta_rule": Peer("FLA", "fla-core", _fla_gated_delta_rule),
    "flash_qla_gated_delta_rule": Peer("FlashQLA", "flash-qla", _flash_qla_gated_delta_rule),
    "fla_gated_delta_step": Peer("FLA", "fla-core", fla_step),
    "transformers_gated_delta_rule": Peer("transformers", "transformers", transformers_rule),
    "fla_recompute_w_u": Peer("FLA", "fla-core", fla_w_u.recompute_w_u),
}
