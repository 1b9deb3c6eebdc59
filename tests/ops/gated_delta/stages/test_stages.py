"""The stages, one after the other, are the rule; what each refuses and keeps."""

import pytest
import torch

import adjoint
from adjoint import gated_delta
from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta.rule.eager import inverse
from adjoint.ops.gated_delta.stages.rows import U
from tests.ops.gated_delta.sequences import BACKWARD_64, FORWARD_64, by_recurrence, drawn, gradients_of, relative
from tests.promises import broken


@pytest.mark.parametrize("chunk", (1, 16, 64))
@pytest.mark.parametrize("cu_seqlens", (None, (0, 0, 1, 18, 70, 70)), ids=("rows", "packed"))
def test_the_stages_are_the_rule(chunk: int, cu_seqlens: tuple[int, ...] | None) -> None:
    inputs = leaves(drawn((1 if cu_seqlens else 2, 70, 1, 2, 4, 3), cu_seqlens=cu_seqlens))
    q, k, v, g, beta, state, bounds = inputs
    G = gated_delta.cumulative_decay(g, chunk, cu_seqlens=bounds)
    T = gated_delta.solve(gated_delta.gram(k, beta, G, chunk=chunk, cu_seqlens=bounds), cu_seqlens=bounds)
    w, u = gated_delta.recompute_w_u(k, v, beta, G, T, cu_seqlens=bounds)
    values, states, final = gated_delta.carry(k, w, u, G, state, chunk=chunk, cu_seqlens=bounds)
    o = gated_delta.output(q, k, values, states, G, chunk=chunk, cu_seqlens=bounds)
    exact, slopes = by_recurrence(inputs)
    for got, expected in zip((o, final, *gradients_of((o, final), inputs)), (*exact, *slopes), strict=True):
        assert relative(got, expected) < BACKWARD_64


@pytest.mark.parametrize("cu_seqlens", (None, (0, 0, 1, 18, 70, 70)), ids=("rows", "packed"))
@pytest.mark.parametrize("value", (-torch.inf, -3e38))
def test_the_stages_reset_the_state_as_the_rule_does(value: float, cu_seqlens: tuple[int, ...] | None) -> None:
    """−inf in g gives a finite G, and what crosses it is 0: the recurrence, in outputs and in gradients."""
    inputs = drawn((1, 70, 1, 2, 4, 3), cu_seqlens=cu_seqlens)
    resets = [0, 15, 16, 17, 40, 41, 69]
    inputs[3][:, resets] = value
    inputs = leaves(inputs)
    q, k, v, g, beta, state, bounds = inputs
    G = gated_delta.cumulative_decay(g, 16, cu_seqlens=bounds)
    assert G.isfinite().all()
    T = gated_delta.solve(gated_delta.gram(k, beta, G, chunk=16, cu_seqlens=bounds), cu_seqlens=bounds)
    w, u = gated_delta.recompute_w_u(k, v, beta, G, T, cu_seqlens=bounds)
    values, states, final = gated_delta.carry(k, w, u, G, state, chunk=16, cu_seqlens=bounds)
    o = gated_delta.output(q, k, values, states, G, chunk=16, cu_seqlens=bounds)
    exact, slopes = by_recurrence(inputs)
    gradients = gradients_of((o, final), inputs)
    # G, one number, is rounded: after resets of 746 each, differences of it are off by its last digit.
    limit = BACKWARD_64 + torch.finfo(torch.float64).eps * float(G.detach().abs().max())
    for got, expected in zip((o, final, *gradients), (*exact, *slopes), strict=True):
        assert got.isfinite().all() and (relative(got, expected) <= limit or not expected.any())
    assert not gradients[3][:, resets].any()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_running_sums_of_very_low_gates(dtype: torch.dtype) -> None:
    least = -746.0 if dtype == torch.float64 else -104.0
    g = torch.tensor([-1.0, -torch.inf, -0.5, torch.finfo(dtype).min, 2 * least, least, torch.nan, -1.0], dtype=dtype)
    g = g.view(1, 8, 1).requires_grad_()
    G = gated_delta.cumulative_decay(g, 8)
    sums = torch.tensor([-1, least - 1, least - 1.5, 2 * least - 1.5, 3 * least - 1.5, 4 * least - 1.5]).to(G)
    assert torch.equal(G.flatten()[:6], sums) and G.flatten()[6:].isnan().all()
    (dg,) = torch.autograd.grad(G, g, torch.ones_like(G))
    assert dg.flatten().tolist() == [8, 0, 6, 0, 0, 3, 2, 1]


@pytest.mark.parametrize("backend", ("eager", pytest.param("triton", marks=pytest.mark.kernels)))
def test_a_gate_that_resets_the_state_has_finite_gradients(device: torch.device, backend: str) -> None:
    """g = −inf, from an infinite a or a rate past float32, has dg = 0 in the rule; what is used has its own."""
    preference = adjoint.Preference(backend=backend)
    a = torch.tensor([[torch.inf, 1.0], [0.5, 2.0], [torch.inf, -1.0]], device=device).requires_grad_()
    A_log = torch.tensor([0.5, 100.0], device=device).requires_grad_()
    dt_bias, b = torch.tensor([0.1, 0.2], device=device).requires_grad_(), torch.zeros(3, 2, device=device)
    g, _ = gated_delta.gate(a, b, A_log, dt_bias, preference=preference)
    assert torch.equal(g.isinf(), torch.tensor([[True, True], [False, True], [True, True]], device=device))
    dg = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]], device=device)
    da, dA_log, ddt_bias = torch.autograd.grad(g, (a, A_log, dt_bias), dg)
    slope = -2 * A_log[0].double().exp() * (a[1, 0].double() + dt_bias[0].double()).sigmoid()
    limit = U * (3 * 0.5 + 4 * 0.6 + 40)  # what kernels promise of both; plain PyTorch promises more
    assert relative(da[1, 0].cpu(), slope.cpu()) < limit and not da[[0, 2]].any() and not da[:, 1].any()
    assert relative(dA_log[0].cpu(), 2 * g[1, 0].double().cpu()) < 2 * limit and dA_log[1] == 0
    assert ddt_bias[0] == da[1, 0] and ddt_bias[1] == 0


def test_the_gates_feed_the_rule() -> None:
    q, k, v, a, b, state, _ = leaves(drawn((1, 9, 1, 2, 4, 3)))
    A_log, dt_bias = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    g, beta = gated_delta.gate(a, b, A_log, dt_bias)
    assert (g < 0).all() and (beta > 0).all() and (beta < 1).all()
    o, _ = adjoint.gated_delta_rule(gated_delta.normalize(q), gated_delta.normalize(k), v, g, beta, initial_state=state)
    fused, _ = adjoint.gated_delta_rule(q, k, v, g, beta, initial_state=state, normalize_qk=True)
    assert relative(o, fused) < FORWARD_64
    o.sum().backward()
    assert A_log.grad.abs().sum() > 0 and dt_bias.grad.abs().sum() > 0


def test_a_gate_far_out_is_finite_and_right() -> None:
    a = torch.tensor([[-1000.0, -50.0, 0.0, 50.0, 1000.0]])
    inputs = (a, a, torch.zeros(5), torch.zeros(5))
    g, beta = gated_delta.gate(*inputs)
    assert g[0, 0] == 0 and g[0, 4] == -1000 and g[0, 3] == -50
    exact = -torch.logaddexp(a.double(), torch.zeros(()).double()), a.double().sigmoid()
    assert not broken(gated_delta.gate, inputs, {"g": (g, exact[0]), "beta": (beta, exact[1])})


def test_solve_reads_what_stands_below_the_diagonal() -> None:
    lower = _matrices(1, 16)
    above = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).triu()
    A, same = ((x[:, :, None]) for x in (lower + above, lower))
    T = gated_delta.solve(A)
    assert torch.equal(T, gated_delta.solve(same))
    exact = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + lower)[:, :, None]
    assert not broken(gated_delta.solve, (A,), {"T": (T, exact)})


def _matrices(number: int, size: int) -> torch.Tensor:
    """A of unit keys and strengths below 1, as `gram` gives it without decay."""
    generator = torch.Generator().manual_seed(size)
    keys = torch.nn.functional.normalize(torch.randn(number, size, 8, generator=generator, dtype=torch.float64), dim=-1)
    return (torch.rand(number, size, 1, generator=generator, dtype=torch.float64) * (keys @ keys.mT)).tril(-1)


def test_inverse_of_every_size() -> None:
    for size in (1, 2, 8, 16, 32, 64):
        A = _matrices(3, size)
        assert relative(inverse(A), torch.linalg.inv(torch.eye(size, dtype=torch.float64) + A)) < FORWARD_64


BAD = {
    "a chunk that is no power of two": (
        lambda: gated_delta.cumulative_decay(torch.zeros(1, 4, 1), 48),
        "cumulative_decay: the chunk.*power of two up to 64, got 48",
    ),
    "gates in 16 bits": (
        lambda: gated_delta.gram(
            torch.zeros(1, 4, 1, 2, dtype=torch.bfloat16),
            torch.zeros(1, 4, 1, dtype=torch.bfloat16),
            torch.zeros(1, 4, 1),
        ),
        "gram: beta must be float32, got bfloat16",
    ),
    "a matrix in 16 bits": (
        lambda: gated_delta.solve(torch.zeros(1, 4, 1, 4).half()),
        "solve: A must be float32 or float64",
    ),
    "states for another number of chunks": (
        lambda: gated_delta.output(
            *(torch.zeros(1, 4, 1, 2),) * 3, torch.zeros(7, 1, 2, 2), torch.zeros(1, 4, 1), chunk=4
        ),
        r"output: states must have shape \(2, 1, 2, 2\).*got \(7, 1, 2, 2\)",
    ),
    "values of another time": (
        lambda: gated_delta.output(
            *(torch.zeros(1, 4, 1, 2),) * 2, torch.zeros(1, 3, 1, 2), torch.zeros(2, 1, 2, 2), torch.zeros(1, 4, 1)
        ),
        r"output: values must begin with the batch and time of q, \(1, 4\), got shape \(1, 3, 1, 2\)",
    ),
    "a decay of other heads": (
        lambda: gated_delta.output(
            *(torch.zeros(1, 4, 1, 2),) * 3, torch.zeros(2, 1, 2, 2), torch.zeros(1, 4, 2), chunk=4
        ),
        r"output: G must have shape \(1, 4, 1\).*got \(1, 4, 2\)",
    ),
    "a state elsewhere": (
        lambda: gated_delta.carry(
            *(torch.zeros(1, 4, 1, 2),) * 3, torch.zeros(1, 4, 1), torch.zeros(1, 1, 2, 2, device="meta")
        ),
        "carry: state must be on the device of k, cpu, got meta",
    ),
    "bounds beside two rows": (
        lambda: gated_delta.cumulative_decay(torch.zeros(2, 4, 1), cu_seqlens=torch.tensor((0, 4))),
        "cumulative_decay: cu_seqlens.* so the batch of g must be 1, got 2",
    ),
    "w of the wrong heads": (
        lambda: gated_delta.carry(
            torch.zeros(1, 4, 1, 2),
            torch.zeros(1, 4, 1, 2),
            torch.zeros(1, 4, 2, 3),
            torch.zeros(1, 4, 2),
            torch.zeros(1, 2, 2, 3),
        ),
        r"carry: w must have shape \(1, 4, 2, 2\)",
    ),
    "parameters of other heads": (
        lambda: gated_delta.gate(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3), torch.zeros(2)),
        r"gate: A_log must have shape \(2,\).*got \(3,\)",
    ),
    "b of another shape": (
        lambda: gated_delta.gate(torch.zeros(3, 2), torch.zeros(2, 2), torch.zeros(2), torch.zeros(2)),
        "gate: b must have the shape of a",
    ),
    "a number": (lambda: gated_delta.normalize(torch.zeros(())), "normalize: x must have at least one axis"),
    "bounds out of order": (
        lambda: gated_delta.solve(torch.zeros(1, 4, 1, 4), cu_seqlens=torch.tensor((0, 5))),
        "cu_seqlens.*got 5 at position 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    call, words = BAD[name]
    with pytest.raises(adjoint.ArgumentError, match=words):
        call()


def test_an_upstream_gradient_of_another_shape_is_refused() -> None:
    A = torch.zeros(1, 4, 1, 4)
    with pytest.raises(adjoint.ArgumentError, match="solve: dT"):
        torch.ops.adjoint.solve_backward(torch.zeros(1, 4, 1, 2), A, None, "")
