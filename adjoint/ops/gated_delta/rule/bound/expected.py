"""The error that is to be expected of a forward that rounds to 16 bits: a model of its roundings, and no bound.

Each is taken as independent, of mean 0 and variance 0.1803·u²·x² (for numbers of evenly distributed logarithms), and
carried as the covariance E[E Eᵀ] of the state's error. That of T is not random: it is known from k, β and g, repeats
where keys do, and is carried as a mean.
"""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.rule.bound.arithmetic import Arithmetic
from adjoint.ops.gated_delta.rule.bound.chunk import times
from adjoint.ops.gated_delta.rule.bound.forward import Lanes

VARIANCE = 0.1803
"""The variance of a rounding error divided by u."""


def expected_errors(a: Arithmetic, scale: float, lanes: Lanes, S: Tensor, out: float) -> tuple[list[Tensor], Tensor]:
    """The root mean square of the norm of every token's output error, [lanes, 64] for each chunk, and of the final
    state's error.

    Args:
        out: the unit roundoff of the outputs.
    """
    assert a.storage is not None
    covariance, mean, outputs = S.new_zeros(*S.shape[:-1], S.shape[-2]), torch.zeros_like(S), []
    for at in range(lanes.chunks):
        c, v = lanes.chunk(a, scale, at), lanes.v[at]
        r = c.beta.unsqueeze(-1) * v - c.old @ S
        new = c.T @ r
        o = c.far @ S + c.P @ new
        shift = (c.T0.to(a.storage).double() - c.T0) @ r
        of_S, of_r, of_new, of_o = (VARIANCE * x.square().sum(-1) for x in (S, r, new, o))
        squares = ((c.z @ covariance) * c.z).sum(-1) + a.u**2 * times(c.z.square(), of_S)
        squares = squares + a.u**2 * times((c.P @ c.T0).square(), of_r)
        squares = squares + (a.new_value**2 + a.score**2) * times(c.P.square(), of_new) + out**2 * of_o
        outputs.append((squares + (c.z @ mean + c.P @ shift).square().sum(-1)).sqrt())
        columns = torch.cat([c.kt @ c.w, c.kt @ c.T0, c.kt], -1)
        covariance = c.M @ covariance @ c.M.mT
        covariance = covariance + (columns * (a.u**2 * torch.cat([of_S, of_r, of_new], -1)).unsqueeze(-2)) @ columns.mT
        mean, S = c.M @ mean + c.kt @ shift, c.over[:, None, None] * S + c.kt @ new
    traces = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return outputs, (traces + mean.square().sum((-1, -2))).sqrt()
