"""Every promise holds where numbers have no digits left, and where sums pass the largest: named inputs of many ops.

Where a bound is infinite, an example shows that it is not NaN, which no result meets.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adjoint.core.errors import Unsupported
from adjoint.core.plan import plan
from adjoint.core.preference import Preference
from adjoint.ops.loss.cross_entropy import cross_entropy
from adjoint.verify.listing.jobs import subjects
from adjoint.verify.run import differentiate, measure

Example = tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]
"""Inputs, and gradients of the outputs."""

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SUBNORMAL = {F32: 2.0**-145, BF16: 2.0**-131, F64: 2.0**-1070}


def one_of(shape: tuple[int, ...], dtype: torch.dtype, first: float, others: float) -> Tensor:
    """Numbers of two sizes: that of the first of each line, and that of the others, which grow a little."""
    x = torch.linspace(1, 1.5, shape[-1], dtype=torch.float64).mul(others).expand(shape).clone()
    x[..., 0] = first
    return x.to(dtype)


def rows(dtype: torch.dtype, *factors: float, shape: tuple[int, ...] = (3, 32)) -> tuple[Tensor, ...]:
    """x, whose rows begin with a subnormal number, and for every factor a tensor of about that, which is 0 there."""
    return one_of(shape, dtype, SUBNORMAL[dtype], 1.0), *(one_of(shape, dtype, 0.0, factor) for factor in factors)


def subnormal_x(name: str, dtype: torch.dtype) -> Example:
    """dx at a subnormal x with no gradient of its own: the product of what x lost with what all others add up to."""
    large = 2.0**300 if dtype == F64 else 2.0**40
    x, dy = rows(dtype, large, shape=(1, 3, 32) if name == "normalize" else (3, 32))
    weight, gate = (torch.ones(32, dtype=dtype),), (torch.full_like(x, 2.0),)
    more = {"rms_norm": weight, "gated_rms_norm": gate + weight}.get(name, ())
    return (x, *more), (dy,)


def subnormal_rows(name: str, dtype: torch.dtype) -> Example:
    """dweight of rows of which all but one number have lost digits, and whose gradients are large."""
    x = one_of((3, 32), dtype, 1.0, SUBNORMAL[dtype])
    weight, gate = (torch.ones(32, dtype=dtype),), (torch.full_like(x, 2.0),)
    return (x, *(gate if name == "gated_rms_norm" else ()), *weight), (torch.full_like(x, 2.0**60),)


def subnormal_sum(name: str, dtype: torch.dtype) -> Example:
    """Results of bfloat16 that are subnormal in float32, too, through which float64 goes."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    return (x, torch.linspace(1, 2, 1024) * 2.0**-128), (torch.ones_like(x),)


def subnormal_slope(name: str, dtype: torch.dtype) -> Example:
    """A slope and a gradient whose product is subnormal, and a rate that it is multiplied by."""
    a, ones = torch.full((1, 2, 4), -59.0, dtype=dtype), torch.ones(1, 2, 4, dtype=dtype)
    return (a, ones, torch.full((4,), 400.0, dtype=dtype), torch.zeros(4, dtype=dtype)), (ones * 1e-296, ones)


def rows_outside(name: str, dtype: torch.dtype) -> Example:
    """Rows whose squares or sums have no place in the arithmetic, beside one that has: nothing is promised of them."""
    most = torch.finfo(dtype).max
    x = torch.linspace(1, 2, 24, dtype=torch.float64).view(1, 3, 8)
    large = (most / 4, most / 4) if name == "causal_conv1d" else (most / 4, most**0.5 * 2)
    x = (x * torch.tensor([1.0, *large], dtype=torch.float64)[:, None]).to(dtype)
    weight, ones = torch.ones(8, dtype=dtype), torch.ones_like(x)
    more = {
        "rms_norm": (weight,), "rms_norm[residual]": (weight, x), "gated_rms_norm": (ones, weight),
        "causal_conv1d": (torch.tensor([0.0, 0.0, -6.0, 6.0], dtype=dtype).expand(8, 4), weight, None, None),
    }.get(name, ())  # fmt: skip
    return (x, *more), (ones,) * (1 + (name == "rms_norm[residual]"))


def rates_outside(name: str, dtype: torch.dtype) -> Example:
    """A rate e^{A_log} that float32 has no place for, and a gate of which its product with it would be 0."""
    a, ones = torch.full((1, 2, 4), -1000.0, dtype=dtype), torch.ones(1, 2, 4, dtype=dtype)
    rates = torch.tensor([1.0, 1.0, 100.0, 1.0], dtype=dtype)
    return (a, ones, rates, torch.zeros(4, dtype=dtype)), (ones.to(F64 if dtype == F64 else F32),) * 2


NORMS = ("rms_norm", "gated_rms_norm", "l2_norm", "normalize")


def subnormal_share(name: str, dtype: torch.dtype) -> Example:
    """Probabilities of 2⁻¹⁴⁰, and a large gradient of the loss."""
    logits = torch.zeros(4, 8, dtype=dtype)
    logits[:, 0] = 97.0
    indices = (torch.zeros(4, 2, dtype=torch.long),) if name == "moe.load_balancing_loss" else ()
    return (logits, *indices, None), (torch.tensor(2.0**110, dtype=dtype),)


def large_logits(name: str, dtype: torch.dtype) -> Example:
    """A logsumexp whose square has no place in float32."""
    return (torch.linspace(-1, 1, 12).view(2, 6).to(dtype) * 2.0**70, torch.tensor([1, 2])), (torch.tensor(1.0),)


def capped_logits(name: str, dtype: torch.dtype) -> Example:
    """Logits of which some are off by more than a softcap is."""
    hidden, weight = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-2, 1, 20).view(5, 4)
    weight[0] *= 2.0**38
    return (hidden.to(dtype), weight.to(dtype), torch.tensor([1, 3, 0]), None), (torch.tensor(1.0),)


def large_gradient(name: str, dtype: torch.dtype) -> Example:
    """A gradient of the loss whose double has no place."""
    return (torch.linspace(-3, 2, 64, dtype=dtype)[None], torch.tensor([1])), (torch.tensor(9e307, dtype=F64),)


def logits_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """A logit whose terms have no sum in the type of the sums, though it is itself a number."""
    large = torch.finfo(dtype).max * 0.9
    hidden, weight = torch.tensor([[1.0, 1.0, -1.0], [0.5, 0.0, 0.0]]), torch.ones(4, 3)
    weight[0] = large
    return (hidden.to(dtype), weight.to(dtype), torch.tensor([1, 3]), None), (torch.tensor(1.0),)


def subnormal_weights(name: str, dtype: torch.dtype) -> Example:
    """Gradients that are subnormal for a loss whose gradient is 1, and a large one."""
    hidden, weight = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(-2, 1, 20).view(5, 4)
    weight, labels = weight * SUBNORMAL[dtype], torch.tensor([1, 3, 0])
    return (hidden.to(dtype), weight.to(dtype), labels, None), (torch.tensor(2.0**64),)


def subnormal_state(name: str, dtype: torch.dtype) -> Example:
    """A state without digits, and a gradient of the state after the token that is large: dg is their product."""
    k = torch.full((1, 1, 1, 4), 0.5, dtype=dtype)
    v, g = torch.zeros(1, 1, 1, 3, dtype=dtype), torch.full((1, 1, 1), -0.3)
    state, large = torch.full((1, 1, 4, 3), 3 * 2.0**-149), torch.full((1, 1, 4, 3), 2.0**60)
    return (k, k, v, g, torch.full_like(g, 0.4), state, None), (torch.zeros_like(v), large)


def tiny_keys(name: str, dtype: torch.dtype) -> Example:
    """Keys of float64 whose squares are 0, and gradients of states by which products with them are numbers again."""
    k = torch.linspace(1, 2, 20, dtype=dtype).view(1, 5, 1, 4) * 1e-180
    v, gate, state = torch.ones(1, 5, 1, 2, dtype=dtype), torch.full((1, 5, 1), -0.3, dtype=dtype), torch.eye(4)[:, :2]
    state, large = state.to(dtype)[None, None] / 3, torch.full((1, 1, 4, 2), 1e140, dtype=dtype)
    if name == "carry":
        return (k, k, v, gate.cumsum(1), state, None), (v * 0, state.new_zeros(2, 1, 4, 2), large)
    return (k, k, v, gate, -gate, state, None), (v, large)


def tiny_states(name: str, dtype: torch.dtype) -> Example:
    """States and values of float64 whose squares are 0, and large gradients of states."""
    inputs, upstream = tiny_keys(name, dtype)
    k, places = inputs[0], (2, 4) if name == "carry" else (2, 5)
    assert k is not None
    keys = k / 4e-180
    scaled = [x * 1e-180 if place in places and x is not None else x for place, x in enumerate(inputs)]
    return (keys, keys, *scaled[2:]), upstream


def subnormal_keys(name: str, dtype: torch.dtype) -> Example:
    """Keys whose product with a decay is subnormal, and a large gradient of the final state: du is their product."""
    k, w = torch.full((1, 5, 1, 4), 3 * 2.0**-149, dtype=dtype), torch.full((1, 5, 1, 4), 0.5, dtype=dtype)
    u, G = torch.ones(1, 5, 1, 3, dtype=dtype), torch.linspace(-0.1, -3, 5).view(1, 5, 1)
    state = torch.ones(1, 1, 4, 3)
    return (k, w, u, G, state, None), (torch.zeros_like(u), torch.zeros(2, 1, 4, 3), 2.0**60 * state)


def subnormal_inverse(name: str, dtype: torch.dtype) -> Example:
    """An inverse whose product with a gradient is subnormal, and large values that multiply it: dbeta."""
    k, v = torch.ones(1, 5, 1, 4, dtype=dtype), torch.full((1, 5, 1, 3), 2.0**40, dtype=dtype)
    beta, T = torch.full((1, 5, 1), 0.7), torch.full((1, 5, 1, 16), 3 * 2.0**-149)
    return (k, v, beta, -beta, T, None), (torch.full_like(k, 0.3), torch.full_like(v, 0.3))


def tokens(dtype: torch.dtype, query: float, key: float, strength: float) -> Example:
    """Three tokens whose outputs have a large gradient."""
    k, v = torch.full((1, 3, 1, 2), key, dtype=dtype), torch.ones(1, 3, 1, 3, dtype=dtype)
    q, beta, g = torch.full_like(k, query), torch.full((1, 3, 1), strength), torch.full((1, 3, 1), -0.5)
    state = torch.ones(1, 1, 2, 3)
    return (q, k, v, g, beta, state, None), (torch.full_like(v, 2.0**32), torch.zeros_like(state))


def products_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """Numbers whose products have no place in the type of sums, before decays make them small again."""
    large = 2.0**600 if dtype == F64 else 2.0**70
    q = torch.full((1, 5, 1, 4), large, dtype=dtype)
    k, v = torch.full_like(q, 0.25), torch.full((1, 5, 1, 3), large, dtype=dtype)
    wide = F64 if dtype == F64 else F32
    g, state = torch.full((1, 5, 1), -60.0, dtype=wide), torch.full((1, 1, 4, 3), large, dtype=wide)
    beta, G = g / -120, g.cumsum(1)
    T = torch.eye(16, dtype=wide)[:5].view(1, 5, 1, 16) * 2.0**-40
    return {
        "carry": lambda: ((k, k, v, G, state, None), (v, state.new_zeros(2, 1, 4, 3), state)),
        "output": lambda: ((q, k, v, state.expand(2, 1, 4, 3), G, None), (v,)),
        "recompute_w_u": lambda: ((k, v, beta * 2.0**-40, G, T, None), (q, v)),
    }.get(name, lambda: ((q, k, v, g, beta, state, None), (v, state)))()


def zero_strengths(name: str, dtype: torch.dtype) -> Example:
    """Tokens that write nothing, and whose queries make a large gradient of the state."""
    return tokens(dtype, 2.0**21, 0.5, 0.0)


def subnormal_decayed_keys(name: str, dtype: torch.dtype) -> Example:
    """Keys that are subnormal, and lose digits as they decay."""
    return tokens(dtype, 1.0, 511 * 2.0**-149, 0.6)


def subnormal_scores(name: str, dtype: torch.dtype) -> Example:
    """Keys and a state whose products with queries lose digits, and large values and gradients of outputs: dg."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 9, 1, size, generator=draw) for size in (5, 5, 1, 1))
    g, state = torch.full((1, 9, 1), -0.02), torch.full((1, 1, 5, 1), 7e-44)
    inputs = q * 1e-3, k * 7e-43, v * 1e5, g, torch.full_like(g, 0.5), state, None
    return inputs, (do * 1e6, torch.full_like(state, 3e-7))


def sums_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """Terms of which some add up to more than the largest number, and all of them to less."""
    large = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64).mul(0.9 * torch.finfo(dtype).max).to(dtype)
    column, zeros = large[:, None], torch.zeros(3, dtype=torch.long)
    layout = torch.arange(3).int()[None], torch.tensor([0, 3]).int()
    return {
        "embedding": lambda: ((zeros, torch.ones(4, 1, dtype=dtype)), (column,)),
        "embedding_bag[mean]": lambda: ((zeros.new_tensor([[0, 1, 2]]), column, None, None), (column[:1] / 4,)),
        "take_along_axis": lambda: ((torch.ones(1, 4, dtype=dtype), zeros[None]), (large[None],)),
        "moe.dispatch": lambda: ((torch.ones(1, 1, dtype=dtype), zeros.new_tensor([[0, 1, 2]])), (column,)),
        "moe.combine": lambda: ((column, torch.ones(1, 3), *layout), (torch.ones(1, 1, dtype=dtype),)),
        "cross_entropy": lambda: ((column * zeros.new_tensor([0, 1]), zeros), (torch.tensor(1.0),)),
    }[name]()


def hidden_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """g and u whose product has no place in the type of the layer, in the first of two tokens, and a small down."""
    x = torch.tensor([[1.0, 1.0], [2.0**-8, 0.0]], dtype=dtype)
    gate_up = torch.full((1, 4, 2), 2.0 ** math.ceil(math.log2(torch.finfo(dtype).max) / 2), dtype=dtype)
    indices, weights = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=dtype if dtype == F64 else F32)
    return (x, gate_up, torch.full((1, 2, 2), 2.0**-12, dtype=dtype), indices, weights), (x,)


def pairs_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """Pairs whose products with cos and sin have no place, and whose sums do."""
    q = torch.full((1, 2, 1, 8), 0.9 * torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    table = torch.full((2, 3), 1.25, dtype=F64 if dtype == F64 else F32)
    return (q, q, table, table), (q, q)


def slopes_that_overflow(name: str, dtype: torch.dtype) -> Example:
    """Gradients whose products with a slope above 1 have no place, and those with up do."""
    gate = torch.full((2, 5), 2.4, dtype=dtype)
    dy = torch.full((2, 5), 0.95 * torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    return (gate, torch.full_like(gate, 0.5)), (dy,)


SUMS = ("embedding", "embedding_bag[mean]", "take_along_axis", "moe.dispatch", "moe.combine", "cross_entropy")

WIDE = (F32, BF16, F64)

DELTA = ("gated_delta_rule", "gated_delta_step", "carry", "output", "recompute_w_u")

EXAMPLES: list[tuple[Callable[[str, torch.dtype], Example], str, torch.dtype]] = [
    *((subnormal_x, name, kind) for name in NORMS for kind in (F32, F64)),
    *((subnormal_rows, name, kind) for name in NORMS[:2] for kind in (F32, F64)),
    *((rows_outside, name, kind) for name in (*NORMS, "rms_norm[residual]", "causal_conv1d") for kind in WIDE),
    *((rows_outside, "rms_norm[residual]", F16), (rates_outside, "gate", BF16)),
    (subnormal_sum, "rms_norm", BF16),
    (subnormal_slope, "gate", F64),
    *((subnormal_share, name, F32) for name in ("moe.load_balancing_loss", "moe.z_loss")),
    *((large_logits, "cross_entropy", kind) for kind in (F32, BF16)),
    (large_gradient, "cross_entropy", F64),
    *((make, "linear_cross_entropy", F32) for make in (logits_that_overflow, subnormal_weights)),
    (subnormal_state, "gated_delta_step", F32),
    (subnormal_keys, "carry", F32),
    *((tiny_states, name, F64) for name in ("gated_delta_step", "carry")),
    (tiny_keys, "carry", F64),
    (subnormal_inverse, "recompute_w_u", F32),
    *((products_that_overflow, name, kind) for name in DELTA for kind in (F32, BF16, F64)),
    *((make, "gated_delta_rule", F32) for make in (zero_strengths, subnormal_decayed_keys, subnormal_scores)),
    (capped_logits, "linear_cross_entropy[sum, smoothing, z_loss, softcap]", F32),
    *((hidden_that_overflow, "moe.experts", kind) for kind in (F32, BF16, F16)),
    *((pairs_that_overflow, "rotary", kind) for kind in WIDE),
    *((slopes_that_overflow, "swiglu", kind) for kind in (*WIDE, F16)),
    *((sums_that_overflow, name, kind) for name in SUMS for kind in (F32, BF16)),
]

WITHOUT_KERNELS = {
    *((name, F64) for name in ("normalize", "gate", "cross_entropy")),
    *((name, dtype) for name in ("carry", "output") for dtype in (F32, BF16, F64)),
    *((name, F64) for name in ("gated_delta_rule", "recompute_w_u")),
}
"""Examples of a stage, or of a type, that only plain PyTorch serves."""


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize(("make", "name", "dtype"), EXAMPLES)
def test_promises_hold_where_digits_are_lost(
    make: Callable[[str, torch.dtype], Example], name: str, dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    (subject,) = (x for x in subjects() if x.name == name)
    inputs, upstream = (tuple(x if x is None else x.to(device) for x in part) for part in make(name, dtype))
    if backend == "triton" and (name, dtype) in WITHOUT_KERNELS:
        with pytest.raises(Unsupported):
            differentiate(subject, inputs, upstream, Preference(backend=backend))
        return
    found = measure(differentiate(subject, inputs, upstream, Preference(backend=backend)))
    assert all(error.holds for error in found.values()), {name: str(error) for name, error in found.items()}


@pytest.mark.parametrize(("dtype", "size"), [(F32, 1e25), (F64, 1e160)])
def test_a_loss_is_a_number_where_the_square_of_logits_has_no_place(dtype: torch.dtype, size: float) -> None:
    logits = torch.tensor([[1.0, 0.5], [0.25, 1.0]], dtype=dtype) * size
    labels, z_loss = torch.tensor([0, 1]), 1.0 / size
    loss = cross_entropy(logits, labels, z_loss=z_loss)
    promise = plan(cross_entropy, logits, labels, z_loss=z_loss).guarantee["loss"]
    exact = torch.tensor(size, dtype=F64)  # z_loss·L², where L is the label's logit
    assert promise.error.measure(loss, exact, logits.double(), labels).holds and loss.isfinite()
