"""Calls that mutants of the router's kernels and of its losses are tried on.

Kernels and the eager path differ in their last bits, so what is compared is what is stated: experts exactly, and
weights, losses and gradients against their bounds. Every tensor lies at the edge of memory that nobody may touch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.ops.moe.losses import reference as losses_reference
from tests.mutants.calls.edges import at_the_edge
from tests.ops.moe.routing import HALF, SINGLE, adversarial, wrongs

MODULES = (
    "adjoint.ops.moe.kernels",
    "adjoint.ops.moe.route.triton.selection",
    "adjoint.ops.moe.route.triton.forward",
    "adjoint.ops.moe.route.triton.backward",
    "adjoint.ops.moe.losses.kernels",
)
"""The modules with kernels; each imports from those before it."""

Noticed = Callable[[bool], bool]
"""`noticed(front)`: whether a call shows the mutant, with tensors at the front edge or at the back one."""


def _route(experts: int, k: int, dtype: torch.dtype = HALF, lay: str = "", **options: Any) -> Noticed:
    def noticed(front: bool) -> bool:
        logits = at_the_edge(adversarial(experts, dtype), front)
        if lay == "two axes":
            logits = torch.stack((logits[:5], logits[5:10]))[:, 1:4]
        elif lay == "one lane":  # the best experts are all in the list of one lane
            logits = at_the_edge(logits + 40 * (torch.arange(experts) % 32 == 3).to(dtype), front)
        elif lay == "far":  # from each other and from 0, on either side of it
            logits = at_the_edge(logits[10:] * 300 + torch.tensor([[-3e4], [0.0], [3e4]]), front)
        elif lay == "transposed":
            logits = at_the_edge(logits.T, front).T
        bias = options.get("bias")
        changed = {"bias": at_the_edge(bias, front)} if bias is not None else {}
        return bool(wrongs(logits, k, "triton", **options | changed))

    return noticed


def _loss(
    experts: int, k: int, tokens: int, dtype: torch.dtype, masked: bool, split: bool = False, scale: int = 2
) -> Noticed:
    def noticed(front: bool) -> bool:
        generator = torch.Generator().manual_seed(tokens)
        logits = (scale * torch.randn(tokens, experts, generator=generator)).to(dtype)
        indices = torch.randint(experts, (tokens, k), generator=generator)
        mask = torch.rand(tokens, generator=generator) < 0.6 if masked else None
        if mask is not None:
            logits[~mask] = float("nan")
            mask = at_the_edge(mask, front)
        logits, indices = at_the_edge(logits, front), at_the_edge(indices, front)
        if split:
            half = tokens // 2
            logits = torch.stack((logits, logits))[:, :half]
            indices = torch.stack((indices, indices))[:, :half].contiguous()
            mask = None if mask is None else torch.stack((mask, mask))[:, :half].contiguous()
        balance = (adjoint.moe.load_balancing_loss, losses_reference.load_balancing_loss, logits, indices, mask)
        return _is_wrong(*balance) or _is_wrong(adjoint.moe.z_loss, losses_reference.z_loss, logits, mask)

    return noticed


def _is_wrong(function: Any, reference: Any, logits: Tensor, *rest: Any) -> bool:
    preference = Preference(backend="triton")
    x = logits.detach().requires_grad_()
    loss = function(x, *rest, preference=preference)
    upstream = torch.tensor(1.5)
    (gradient,) = torch.autograd.grad(loss, x, upstream)
    wide = logits.detach().double()
    backward = getattr(losses_reference, f"{reference.__name__}_backward")
    plan = adjoint.plan(function, logits, *rest, preference=preference)
    assert plan.adjoint is not None
    errors = (
        plan.guarantee["loss"].error.measure(loss.detach(), reference(wide, *rest), wide, *rest),
        plan.adjoint.guarantee["dlogits"].error.measure(
            gradient, backward(upstream.double(), wide, *rest), upstream.double(), wide, *rest
        ),
    )
    return not all(error.holds for error in errors)


def _without_experts(front: bool) -> bool:
    """A token whose logits are all −∞ has a logsumexp of −∞."""
    logits = at_the_edge(torch.full((1, 12), float("-inf")), front)
    return float(adjoint.moe.z_loss(logits, preference=Preference(backend="triton"))) != float("inf")


def _reports(position: int, value: int) -> Noticed:
    """An index that is no expert is reported, where it is."""

    def noticed(front: bool) -> bool:
        indices = torch.arange(40).remainder(12)
        indices[position] = value
        logits = torch.zeros(20, 12)
        messages = []
        for backend in ("eager", "triton"):
            try:
                adjoint.moe.load_balancing_loss(logits, indices.view(20, 2), preference=Preference(backend=backend))
                messages.append("")
            except adjoint.ArgumentError as error:
                messages.append(str(error))
        return messages[0] != messages[1]

    return noticed


def routes() -> Iterator[Noticed]:
    """Likely deaths first."""
    bias = 0.3 * torch.randn(40, generator=torch.Generator().manual_seed(5))
    yield _route(40, 6)
    yield _route(40, 6, SINGLE, renormalize=False)
    yield _route(40, 6, SINGLE, score="sigmoid", bias=bias)
    yield _route(40, 6, HALF, score="sigmoid", renormalize=False, num_groups=4, groups_kept=2)
    yield _route(40, 6, SINGLE, bias=bias, renormalize=False, num_groups=5, groups_kept=2)
    yield _route(70, 40, torch.float16)
    yield _route(300, 6, HALF, "one lane")
    yield _route(40, 6, HALF, "two axes", renormalize=False)
    yield _route(40, 6, HALF, "two axes")
    yield _route(40, 6, HALF, "two axes", num_groups=4, groups_kept=3)
    yield _route(96, 40, SINGLE)
    yield _route(40, 6, SINGLE, "transposed", bias=bias)
    yield _route(8, 8, torch.float16, score="sigmoid", renormalize=False)
    yield _route(40, 6, HALF, num_groups=40, groups_kept=9)
    yield _route(300, 20, HALF)
    yield _route(40, 6, SINGLE, "far", score="sigmoid", bias=bias)
    yield _route(40, 6, SINGLE, "far", bias=bias)
    yield _route(40, 6, HALF, num_groups=20, groups_kept=7)
    yield _route(40, 6, SINGLE, bias=0.1 * bias, num_groups=5, groups_kept=2)
    yield _route(1000, 20, HALF, "one lane")  # whose list is as long as lists are


def losses() -> Iterator[Noticed]:
    yield _loss(12, 2, 35, SINGLE, True)
    yield _loss(40, 3, 20, HALF, False, scale=60)
    yield _without_experts
    yield _reports(0, 12)
    yield _reports(39, -1)
    yield _reports(13, 2**32 + 1)
    yield _loss(40, 3, 24, SINGLE, True, split=True)
    yield _loss(3, 2, 1100, SINGLE, False)
    yield _loss(130, 1, 3, SINGLE, False)


def dependents(module: str) -> tuple[str, ...]:
    """The modules that must be loaded again where a module was exchanged: they have its functions."""
    return MODULES[MODULES.index(module) + 1 :]


def noticed(module: str) -> bool:
    """Whether any call shows what was done to a module."""
    calls = [*routes()] if ".losses." not in module else []
    if ".route." not in module:
        calls += losses()
    return any(call(number % 2 == 1) for number, call in enumerate(calls))
