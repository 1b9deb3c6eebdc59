"""`recompute_w_u` of flash-linear-attention."""

import math

from torch import Tensor

from adjoint.bench.contenders import Contender, NotInstalled, Task


def recompute_w_u(task: Task) -> Contender:
    """Its forward kernel alone. Its running sums of g are logarithms to base 2, made before the clock starts."""
    try:
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
    except ImportError as error:
        raise NotInstalled("pip install flash-linear-attention") from error

    k, v, beta, G, T, _ = task.inputs
    exponents = G * (1 / math.log(2))

    def forward() -> tuple[Tensor, ...]:
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=T, g=exponents)
        return w, u

    return Contender(forward)
