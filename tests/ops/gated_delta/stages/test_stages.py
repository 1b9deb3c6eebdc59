"""The stages, one after the other, are the rule; what each refuses and keeps."""

import pytest
import torch

import adjoint
from adjoint import gated_delta
from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta.rule.eager import inverse
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
