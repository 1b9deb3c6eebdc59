"""What comes before the rule: its gates from a layer's projections, and q and k of length one.

    g = −e^{A_log}·softplus(a + dt_bias),   β = σ(b)                       gate
    y = x / sqrt(Σx² + 1e-6), along the last axis                          normalize

Adjoints, with t = a + dt_bias and r = 1/sqrt(Σx² + 1e-6):

    da = −dg·e^{A_log}·σ(t),   db = dβ·β·(1 − β),   dA_log = Σ dg·g,   ddt_bias = Σ da
    dx = r·(dy − y·(y·dy))

In plain PyTorch computed in float64 and rounded once, the sums over all tokens too; by kernels in float32. Under
autocast nothing is cast.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.plan import publish
from adjoint.core.preference import Preference
from adjoint.ops.gated_delta import arguments as metadata
from adjoint.ops.gated_delta.arguments import EPSILON, state_dtype
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD
from adjoint.ops.gated_delta.stages import gate_plans, promised
from adjoint.ops.gated_delta.stages.stage import Definition, Stage

_FINITE = "every finite input whose results are finite"

# ------------------------------------------------------------------------------------------------- gate


def _check_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: None) -> None:
    require_floating("gate", "a", a)
    require_like("gate", "b", b, "a", a)
    if a.dim() == 0:
        raise ArgumentError("gate: a must have at least one axis, the value heads, got shape ()")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_floating("gate", name, value)
        metadata.require_shape("gate", name, value, (a.shape[-1],), "one for each head, the last axis of a")
        metadata.require_device("gate", name, value, "a", a)


def _softplus(t: Tensor) -> Tensor:
    """log(1 + e^t), for every t."""
    return t.abs().neg_().exp_().log1p_().add_(t.clamp_min(0))


def _gate_forward(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: None, outputs: tuple[Tensor, ...]
) -> None:
    g, beta = outputs
    g.copy_(_softplus(a.double() + dt_bias.double()).mul_(A_log.double().exp().neg_()))
    beta.copy_(b.double().sigmoid())


def _gate_backward(
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dg: Tensor | None,
    dbeta: Tensor | None,
    cu_seqlens: None,
) -> tuple[Tensor, ...]:
    heads = a.shape[-1]
    t, rate = a.double() + dt_bias.double(), A_log.double().exp()
    upstream = torch.zeros_like(t) if dg is None else dg.double()
    of_beta = torch.zeros_like(t) if dbeta is None else dbeta.double()
    da = upstream * t.sigmoid() * -rate
    through = upstream * _softplus(t) * -rate
    beta = b.double().sigmoid()
    db = of_beta * beta * b.double().neg().sigmoid()
    return da, db, through.reshape(-1, heads).sum(0), da.reshape(-1, heads).sum(0)


_gate = Stage(
    Definition(
        name="gate",
        inputs=("a", "b", "A_log", "dt_bias"),
        outputs=("g", "beta"),
        options="",
        check=_check_gate,
        allocate=lambda a, b, A_log, dt_bias, cu_seqlens: (
            a.new_empty(a.shape, dtype=state_dtype(a.dtype)),
            a.new_empty(a.shape, dtype=state_dtype(a.dtype)),
        ),
        forward=_gate_forward,
        backward=_gate_backward,
        promises=promised(FORWARD, torch.float64, _FINITE, g="wide", beta="wide"),
        adjoint_promises=promised(BACKWARD, torch.float64, _FINITE, da=0, db=1, dA_log=2, ddt_bias=3),
        kernels=gate_plans.GATE,
        adjoint_kernels=gate_plans.GATE_BACKWARD,
        describe=lambda a, b, A_log, dt_bias, cu_seqlens: gate_plans.describe(a=a, b=b),
        adjoint_describe=lambda a, b, A_log, dt_bias, dg, dbeta, cu_seqlens: gate_plans.describe(
            a=a, b=b, dg=dg, dbeta=dbeta
        ),
    )
)


def gate(
    a: Float[Tensor, "*shape value_heads"],
    b: Float[Tensor, "*shape value_heads"],
    A_log: Float[Tensor, " value_heads"],
    dt_bias: Float[Tensor, " value_heads"],
    *,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "*shape value_heads"], Float[Tensor, "*shape value_heads"]]:
    """g = −e^{A_log}·softplus(a + dt_bias) and β = σ(b), in float32 (float64 for float64).

    Args:
        a, b: a layer's projections, of one shape and dtype.
        A_log, dt_bias: parameters of each head, of any floating dtype.

    >>> import torch
    >>> g, beta = gate(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(2), torch.zeros(2))
    >>> g, beta
    (tensor([[-0.6931, -0.6931]]), tensor([[0.5000, 0.5000]]))
    """
    return _gate(a, b, A_log, dt_bias, None, preference=preference)  # type: ignore[no-any-return]


publish(gate, lambda a, b, A_log, dt_bias: _gate.bind(a, b, A_log, dt_bias, None))

# -------------------------------------------------------------------------------------------- normalize


def _check_normalize(x: Tensor, cu_seqlens: None) -> None:
    require_floating("normalize", "x", x)
    if x.dim() == 0:
        raise ArgumentError("normalize: x must have at least one axis, got shape ()")


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    scale = x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    return x * scale, scale


def _normalize_forward(x: Tensor, cu_seqlens: None, outputs: tuple[Tensor, ...]) -> None:
    outputs[0].copy_(_scaled(x)[0])


def _normalize_backward(x: Tensor, dy: Tensor, cu_seqlens: None) -> tuple[Tensor, ...]:
    y, scale = _scaled(x)
    upstream = dy.double()
    return ((upstream - y * (y * upstream).sum(-1, keepdim=True)) * scale,)


_normalize = Stage(
    Definition(
        name="normalize",
        inputs=("x",),
        outputs=("y",),
        options="",
        check=_check_normalize,
        allocate=lambda x, cu_seqlens: (x.new_empty(x.shape),),
        forward=_normalize_forward,
        backward=_normalize_backward,
        promises=promised(FORWARD, torch.float64, _FINITE, y=0),
        adjoint_promises=promised(BACKWARD, torch.float64, _FINITE, dx=0),
        kernels=gate_plans.NORMALIZE,
        adjoint_kernels=gate_plans.NORMALIZE_BACKWARD,
        describe=lambda x, cu_seqlens: gate_plans.describe(x=x),
        adjoint_describe=lambda x, dy, cu_seqlens: gate_plans.describe(x=x, dy=dy),
    )
)


def normalize(x: Float[Tensor, "*shape size"], *, preference: Preference | None = None) -> Float[Tensor, "*shape size"]:
    """x / sqrt(Σx² + 1e-6) along the last axis, in the dtype of x: what `normalize_qk` does, rounded.

    >>> import torch
    >>> normalize(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return _normalize(x, None, preference=preference)  # type: ignore[no-any-return]


publish(normalize, lambda x: _normalize.bind(x, None))
