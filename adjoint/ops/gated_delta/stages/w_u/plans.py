"""Which code serves `recompute_w_u`: kernels before plain PyTorch, for all types but float64."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.kernels import NVIDIA
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import Compute, eager_candidate
from adjoint.ops.gated_delta.stages.w_u import eager, guarantee
from adjoint.ops.gated_delta.stages.w_u.guarantee import parts_of

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_STRIDE = 2**24
"""The largest stride of tokens, in elements, that kernels can read."""

MAX_TOKENS = 2**31 - 2**16
"""The most tokens, and bounds of sequences, that the kernels' integers can count."""


def is_readable(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor in place: rows of adjacent elements, close enough to each other for the 32 bits
    of an offset within a chunk."""
    near = tensor.stride(1) <= MAX_STRIDE or tensor.shape[1] == 1
    return tensor.numel() == 0 or (near and (tensor.shape[3] == 1 or tensor.stride(3) == 1))


def _refuse_T(problem: Problem, narrow: bool) -> str:
    """Why a plan cannot serve the dtype of T. One plan is for T as it is solved, and one for T in the 16 bits of k,
    because they read different numbers."""
    element, T = problem.dtypes
    if narrow == (wide_dtype(element) != T):
        return ""
    return "reads T in the 16 bits of k" if narrow else "reads T in the type it is solved in"


def _refuse(problem: Problem, narrow: bool) -> str:
    if problem.dtypes[0] == torch.float64:
        return "computes in float32; float64 is eager alone"
    if reason := _refuse_T(problem, narrow):
        return reason
    _, _, chunk, batch, time, _, heads, bounds = problem.sizes
    programs = (batch * time // chunk + batch + bounds + 2) * max(1, heads)
    return f"numbers up to {MAX_TOKENS} chunks of heads, these are {programs}" if programs > MAX_TOKENS else ""


_PRODUCTS = ("16_bit", "tf32", "two_parts")
"""The modes of a product with T, as `parts_of` numbers them. Each has its own schedule."""


def _on_kernels(kernel: str, direction: str, narrow: bool) -> Candidate:
    return Candidate(
        name="triton.narrow_T" if narrow else "triton.solved_T",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=lambda problem: _refuse(problem, narrow),
        guarantee=guarantee.on_kernels,
        setup=imported(f"adjoint.ops.gated_delta.stages.w_u.kernels:{direction}"),
        targets=NVIDIA,
        schedules=_SCHEDULES,
        entry=lambda problem: f"{kernel}_{_PRODUCTS[parts_of(*problem.dtypes)]}",
    )


def _in_pytorch(compute: Compute, narrow: bool) -> Candidate:
    candidate = eager_candidate(
        "eager.narrow_T" if narrow else "eager.solved_T",
        guarantee.in_pytorch,
        compute,
        lambda problem: {"chunk": problem.sizes[2], "T": short(problem.dtypes[1])},
        waits=lambda problem: problem.sizes[-1] > 0,  # with cu_seqlens, the number of chunks depends on values
    )
    return replace(candidate, refuse=lambda problem: _refuse_T(problem, narrow))


_EITHER = (False, True)

RECOMPUTE_W_U = (
    *(_on_kernels("gated_delta_w_u", "forward", narrow) for narrow in _EITHER),
    *(_in_pytorch(eager.forward, narrow) for narrow in _EITHER),
)
RECOMPUTE_W_U_BACKWARD = (
    *(_on_kernels("gated_delta_w_u_backward", "backward", narrow) for narrow in _EITHER),
    *(_in_pytorch(eager.backward, narrow) for narrow in _EITHER),
)
