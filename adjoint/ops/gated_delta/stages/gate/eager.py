"""`gate` in plain PyTorch, in float64."""

import torch
from torch import Tensor


def _softplus(t: Tensor) -> Tensor:
    """log(1 + e^t), for every t."""
    return t.abs().neg_().exp_().log1p_().add_(t.clamp_min(0))


def forward(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, outputs: tuple[Tensor, ...]) -> None:
    g, beta = outputs
    g.copy_(_softplus(a.double() + dt_bias).mul_(A_log.double().exp().neg_()))
    beta.copy_(b.double().sigmoid())


def backward(
    dg: Tensor | None, dbeta: Tensor | None, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, ...]:
    heads = a.shape[-1]
    t, fall = a.double() + dt_bias, A_log.double().exp().neg_()
    upstream = torch.zeros_like(t) if dg is None else dg.double()
    is_zero, none = upstream == 0, upstream.neg()

    def through(slope: Tensor) -> Tensor:
        """−dg·e^{A_log}·slope, and 0 where dg is 0: a g of −inf, which resets the state, has infinite factors."""
        return torch.where(is_zero, none, slope.mul_(upstream).mul_(fall))

    da, of_rate = through(t.sigmoid()), through(_softplus(t))
    x = b.double()
    db = torch.zeros_like(t) if dbeta is None else x.sigmoid().mul_(dbeta).mul_(x.neg().sigmoid_())
    return da, db, of_rate.reshape(-1, heads).sum(0), da.reshape(-1, heads).sum(0)
