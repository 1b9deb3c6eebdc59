"""Peers of the norms, each both directions through its own autograd function."""

from torch import Tensor

from adjoint.bench.contenders import Contender, NotInstalled, Task, through_autograd

EPS = 1e-6


def liger_rms_norm(task: Task) -> Contender:
    """In the mode that computes in float32, without overwriting dy."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        raise NotInstalled("pip install liger-kernel") from error

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False)  # type: ignore[no-any-return]

    return through_autograd(norm, task)


def quack_rms_norm(task: Task) -> Contender:
    try:
        from quack.rmsnorm import rmsnorm  # type: ignore[import-not-found]
    except ImportError as error:
        raise NotInstalled("pip install quack-kernels") from error

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rmsnorm(x, weight, eps=EPS)  # type: ignore[no-any-return]

    return through_autograd(norm, task)


def fla_gated_rms_norm(task: Task) -> Contender:
    try:
        from fla.modules.fused_norm_gate import rms_norm_gated
    except ImportError as error:
        raise NotInstalled("pip install flash-linear-attention") from error

    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_gated(x, gate, weight, None, "swish", eps=EPS)  # type: ignore[no-any-return]

    return through_autograd(norm, task)


def fla_l2_norm(task: Task) -> Contender:
    try:
        from fla.modules.l2norm import l2norm
    except ImportError as error:
        raise NotInstalled("pip install flash-linear-attention") from error
    return through_autograd(lambda x: l2norm(x, EPS), task)
