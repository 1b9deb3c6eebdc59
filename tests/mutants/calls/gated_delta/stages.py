"""Calls that mutants of the stage kernels of the gated delta rule are tried on.

Kernels and the eager path differ in their last bits, so results are held to their stated bounds, in float32 where these
are narrow; sums of the gates also to their order. Every tensor lies at the edge of memory that nobody may touch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Preference
from adjoint.contract import directions
from adjoint.contract.inputs import widened
from adjoint.core.plan import bind
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.gate.cases import GATE, gates
from adjoint.ops.gated_delta.stages.w_u.cases import SUBJECTS as W_U
from adjoint.ops.gated_delta.values import solved
from tests.mutants.calls.edges import at_the_edge, differs_alone
from tests.mutants.calls.gated_delta.rule import WRONG_BOUNDS

CPU, TRITON, EAGER = torch.device("cpu"), Preference(backend="triton").text, Preference(backend="eager").text
Noticed = Callable[[bool], bool]
"""`noticed(front)`: whether a call shows the mutant, with tensors at the front edge or at the back one."""


def _is_wrong(
    function: Any,
    exact: Any,
    exact_backward: Any,
    given: tuple[Any, ...],
    named: dict[str, Any],
    front: bool,
    **schedule: int,
) -> bool:
    """Whether anything is outside its bound, both directions; outputs and gradients are new memory each time."""
    call = bind(function, *given, **named)
    forward = directions.forward(call, TRITON)
    if schedule:
        forward = directions.Bound(forward.plan.with_schedule(**schedule), forward.arguments)
    outputs = forward.run()
    generator = torch.Generator().manual_seed(1)
    upstream = tuple(at_the_edge(torch.randn(x.shape, generator=generator).to(x.dtype), front) for x in outputs)
    backward = directions.backward(call, upstream, outputs, TRITON)
    gradients = backward.run()
    inputs = widened((*given, *named.values()))
    wide = widened(upstream)
    truth = exact(*inputs), exact_backward(*wide, *inputs)
    pairs = [
        (forward.plan.guarantee[name], got, right, inputs)
        for name, got, right in zip(call.operator.outputs, outputs, truth[0], strict=True)
    ]
    adjoint_outputs = backward.plan.operator.outputs
    pairs += [
        (backward.plan.guarantee[name], got, right, (*wide, *inputs))
        for name, got, right in zip(adjoint_outputs, gradients, truth[1], strict=True)
    ]
    if any(not stated.error.measure(got, right, *with_).holds for stated, got, right, with_ in pairs):
        return True
    return differs_alone(backward, gradients)


def _w_u(
    shape: tuple[int, int, int, int, int, int],
    chunk: int,
    dtype: torch.dtype = torch.float32,
    narrow: bool = False,
    cu_seqlens: tuple[int, ...] | None = None,
    lay: str = "",
    **schedule: int,
) -> Noticed:
    def noticed(front: bool) -> bool:
        *given, bounds = solved(shape, chunk, cu_seqlens, narrow)(dtype, CPU, torch.Generator().manual_seed(0))
        given = [at_the_edge(x, front) for x in given]
        if lay == "heads apart":
            given = [at_the_edge(torch.stack((x, x), 2), front)[:, :, 1] for x in given]
        elif lay == "elements apart":
            given = [at_the_edge(torch.stack((x, x), -1), front)[..., 1] for x in given]
        bounds = None if bounds is None else at_the_edge(bounds, front)
        subject = W_U[0]
        named = {"cu_seqlens": bounds}
        return _is_wrong(
            subject.function, subject.reference, subject.reference_backward, tuple(given), named, front, **schedule
        )

    return noticed


def _out_of_order(front: bool) -> bool:
    """Bounds that are wrong are reported, the first of them; a backward takes what lies within, as the eager one does,
    which says in float64 what is exact."""
    *given, _ = solved((1, 25, 1, 2, 3, 2), 4)(torch.float32, CPU, torch.Generator().manual_seed(0))
    for bounds, place in WRONG_BOUNDS:
        wrong = at_the_edge(torch.tensor(bounds), front)
        try:
            adjoint.gated_delta.recompute_w_u(*given, cu_seqlens=wrong, preference=Preference(backend="triton"))
        except ArgumentError as error:
            if f"got {bounds[place]} at position {place} " not in str(error):
                return True
        else:
            return True
        upstream = tuple(torch.ones_like(given[1][..., :1]).expand(*given[1].shape[:3], size) for size in (3, 2))
        ours, exact = (
            directions.backward(
                bind(adjoint.gated_delta.recompute_w_u, *inputs, cu_seqlens=wrong), slopes, slopes, text
            )
            for inputs, slopes, text in ((given, upstream, TRITON), (widened(given), widened(upstream), EAGER))
        )
        inputs = (*widened(upstream), *widened(given), wrong)
        results = zip(ours.plan.operator.outputs, ours.run(), exact.run(), strict=True)
        if any(not ours.plan.guarantee[name].error.measure(got, right, *inputs).holds for name, got, right in results):
            return True
    return False


def _gate(shape: tuple[int, ...], dtype: torch.dtype, lay: str = "") -> Noticed:
    def noticed(front: bool) -> bool:
        a, b, A_log, dt_bias = gates(shape)(dtype, CPU, torch.Generator().manual_seed(0))
        b.view(-1)[:2] = torch.tensor([100.0, -100.0])  # whose exponentials are infinite
        a, b, A_log, dt_bias = (at_the_edge(x, front) for x in (a, b, A_log, dt_bias))
        if lay == "two axes":
            both = at_the_edge(torch.stack((a, b), -2), front)
            a, b = both[..., 0, :], both[..., 1, :]
        elif lay == "rows left out":
            a, b = (at_the_edge(torch.cat((x, x[:, :1]), 1), front)[:, : shape[1]] for x in (a, b))
        subject = GATE
        if _is_wrong(
            subject.function, subject.reference, subject.reference_backward, (a, b, A_log, dt_bias), {}, front
        ):
            return True
        if dtype != torch.float32:
            return False
        leaf, bias = a.detach().requires_grad_(), dt_bias.detach().requires_grad_()
        g, _ = adjoint.gated_delta.gate(leaf, b, A_log, bias, preference=Preference(backend="triton"))
        da, ddt_bias = torch.autograd.grad(g, (leaf, bias), torch.ones_like(g))
        return not torch.equal(ddt_bias, _by_halves(da.reshape(-1, shape[-1])))

    return noticed


def _reset_and_unused(front: bool) -> bool:
    """Whether a gate of −inf whose gradient is 0 gives anything but zeros, with the signs of a product with 0."""
    a = at_the_edge(torch.tensor([[torch.inf, 1.0], [0.5, 2.0]]), front).requires_grad_()
    A_log, dt_bias = torch.tensor([0.5, 100.0]).requires_grad_(), torch.zeros(2).requires_grad_()
    g, _ = adjoint.gated_delta.gate(a, torch.zeros(2, 2), A_log, dt_bias, preference=Preference(backend="triton"))
    dg = torch.tensor([[0.0, -0.0], [2.0, 0.0]])
    da, dA_log, ddt_bias = torch.autograd.grad(g, (a, A_log, dt_bias), dg)
    zeros = da.flatten()[[0, 1, 3]]
    if zeros.any() or zeros.signbit().tolist() != [True, False, True] or dA_log[1] != 0 or ddt_bias[1] != 0:
        return True
    return bool((dA_log[0] - 2 * g[1, 0]).abs() > 1e-6) or bool(ddt_bias[0] != da[1, 0])


def _softplus_near_zero(front: bool) -> bool:
    """Whether log(1 + e^t) is wrong by a tenth of its last bit on average, where its series has most to add: the bound
    leaves room for exponentials, and so for more than its last terms."""
    t, nothing = torch.linspace(-0.05, 0.05, 4096).view(64, 64), torch.zeros(64)
    g, _ = adjoint.gated_delta.gate(t, t, nothing, nothing, preference=Preference(backend="triton"))
    return bool((g.double() + torch.nn.functional.softplus(t.double())).mean().abs() > 0.1 * 2**-24)


def _by_halves(terms: Tensor, run: int = 64) -> Tensor:
    while True:
        padded = torch.nn.functional.pad(terms, (0, 0, 0, -len(terms) % run)).unflatten(0, (-1, run))
        while padded.shape[1] > 1:
            padded = padded[:, : padded.shape[1] // 2] + padded[:, padded.shape[1] // 2 :]
        terms = padded[:, 0]
        if len(terms) == 1:
            return terms[0]


def _calls(module: str) -> Iterator[Noticed]:
    """Likely deaths first."""
    half, single = torch.bfloat16, torch.float32
    if ".w_u." in module:
        yield _w_u((2, 21, 2, 4, 40, 35), 16)
        yield _w_u((1, 40, 1, 2, 9, 7), 16, cu_seqlens=(0, 0, 1, 18, 40, 40))
        yield _w_u((1, 9, 1, 2, 3, 2), 4, half, lay="heads apart")
        yield _w_u((2, 9, 1, 2, 3, 17), 4, half, True, unaligned_columns=16)
        yield _w_u((1, 9, 1, 2, 20, 3), 4, half, False, unaligned_columns=16)
        yield _w_u((1, 9, 1, 2, 3, 2), 4, lay="elements apart")
        yield _w_u((1, 16, 1, 2, 48, 48), 16, half, True, columns=32)  # aligned: all that is read comes first
        yield _w_u((1, 9, 1, 2, 33, 3), 4)
        yield _w_u((1, 9, 1, 2, 32, 3), 4)
        yield _out_of_order
    else:
        yield _gate((2, 35, 3), single)
        yield _gate((2, 3, 4), half, "two axes")
        yield _gate((3, 4, 2), single, "rows left out")
        yield _reset_and_unused
        yield _softplus_near_zero
        yield _gate((2, 130), single)


def noticed(module: str) -> bool:
    """Whether any call shows a mutant; bounds of sequences are put in order four at a time, not a thousand."""
    lookup = Schedules.lookup

    def small(self: Schedules, kernel: str, device: torch.device | None = None) -> dict[str, int]:
        schedule = lookup(self, kernel, device)
        return schedule | ({"bounds_block": 4} if "bounds_block" in schedule else {})

    Schedules.lookup = small  # type: ignore[method-assign]
    return any(call(front) for call in _calls(module) for front in (False, True))


def warm() -> None:
    """What is done once is done."""
    reference.normalized(torch.ones(1, 1))
    next(_calls("adjoint.ops.gated_delta.stages.gate.kernels"))(False)
