"""Calls of the router and its losses that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.moe.losses import load_balancing_loss, z_loss
from adjoint.ops.moe.route import route

TOKENS, EXPERTS = 4, 12
META = torch.device("meta")


def _logits(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (TOKENS, EXPERTS), device=device)


def _route(device: torch.device, k: Any = 2, **options: Any) -> Any:
    return route(_logits(device), k, **options)


def _bias(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (EXPERTS,), device=device)


def _indices(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (TOKENS, 2), dtype=torch.int64, device=device)


def _mask(device: torch.device, *shape: int) -> Tensor:
    return torch.ones(shape or (TOKENS,), dtype=torch.bool, device=device)


def _balance(device: torch.device, **changes: Any) -> Any:
    given = {"logits": _logits(device), "indices": _indices(device), "mask": None} | changes
    return load_balancing_loss(**given)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """Choices of 40 tokens, all right but one."""

    def call(device: torch.device) -> None:
        indices = torch.arange(80, device=device).remainder(EXPERTS).to(dtype)
        indices[position] = value
        load_balancing_loss(_logits(device, 40, EXPERTS), indices.view(40, 2))
        adjoint.check()

    return call


def _second_derivative(function: Callable[[Tensor], Tensor], device: torch.device) -> None:
    logits = _logits(device).requires_grad_()
    (gradient,) = torch.autograd.grad(function(logits).sum(), logits, create_graph=True)
    gradient.sum().backward()


def _forward_mode(device: torch.device) -> None:
    with forward_ad.dual_level():
        route(forward_ad.make_dual(_logits(device), _logits(device)), 2)


def _into(device: torch.device, **changes: Tensor) -> None:
    """The router's plan with `out=`."""
    logits = _logits(device)
    out = {"weights": torch.empty(TOKENS, 2, device=device), "indices": _indices(device)} | changes
    adjoint.plan(route, logits, 2).run(logits, None, out=tuple(out.values()))


ROUTES = (
    BadCall("integer logits", lambda d: route(_logits(d).long(), 2), ArgumentError, ("route: logits", "int64")),
    BadCall("boolean logits", lambda d: route(_logits(d).bool(), 2), ArgumentError, ("route: logits", "bool")),
    BadCall(
        "logits in float64", lambda d: route(_logits(d).double(), 2), ArgumentError, ("logits", "float64", ".float()")
    ),
    BadCall("logits that are a list", lambda d: route([0.0], 1), ArgumentError, ("logits", "tensor", "list")),  # type: ignore[arg-type]
    BadCall("sparse logits", lambda d: route(_logits(d).to_sparse(), 2), ArgumentError, ("logits", "dense")),
    BadCall("logits without axes", lambda d: route(_logits(d)[0, 0], 1), ArgumentError, ("logits", "axis of experts")),
    BadCall("no experts", lambda d: route(_logits(d, 3, 0), 1), ArgumentError, ("1 to 1024 experts", "(3, 0)")),
    BadCall("too many experts", lambda d: route(_logits(d, 2, 1025), 1), ArgumentError, ("1024", "(2, 1025)")),
    BadCall("k = 0", lambda d: _route(d, 0), ArgumentError, ("route: k", "from 1 to 12", "got 0")),
    BadCall("a negative k", lambda d: _route(d, -1), ArgumentError, ("route: k", "got -1")),
    BadCall("k past the experts", lambda d: _route(d, 13), ArgumentError, ("route: k", "got 13 for 12 experts")),
    BadCall("k past 64", lambda d: route(_logits(d, 2, 100), 65), ArgumentError, ("route: k", "64", "got 65")),
    BadCall("k that is a float", lambda d: _route(d, 2.0), ArgumentError, ("route: k", "integer", "2.0")),
    BadCall("k that is a boolean", lambda d: _route(d, True), ArgumentError, ("route: k", "integer", "True")),
    BadCall(
        "an unknown score",
        lambda d: _route(d, score="relu"),
        ArgumentError,
        ("score", "'softmax', 'sigmoid'", "'relu'"),
    ),
    BadCall("groups that do not divide", lambda d: _route(d, num_groups=5), ArgumentError, ("num_groups", "12", "5")),
    BadCall("no groups", lambda d: _route(d, num_groups=0), ArgumentError, ("num_groups", "got 0")),
    BadCall("no group kept", lambda d: _route(d, num_groups=4, groups_kept=0), ArgumentError, ("groups_kept", "got 0")),
    BadCall(
        "more groups kept than there are",
        lambda d: _route(d, num_groups=4, groups_kept=5),
        ArgumentError,
        ("groups_kept", "from 1 to num_groups, 4", "got 5"),
    ),
    BadCall(
        "groups that hold too few",
        lambda d: _route(d, 4, num_groups=4, groups_kept=1),
        ArgumentError,
        ("1 of 4 groups of 3 experts", "fewer than k = 4"),
    ),
    BadCall(
        "renormalize that is a number",
        lambda d: _route(d, renormalize=1),
        ArgumentError,
        ("renormalize", "True or False"),
    ),
    BadCall("a bias too long", lambda d: _route(d, bias=_bias(d, 13)), ArgumentError, ("bias", "12 experts", "(13,)")),
    BadCall("a bias for each token", lambda d: _route(d, bias=_logits(d)), ArgumentError, ("bias", "(4, 12)")),
    BadCall(
        "a bias of another dtype",
        lambda d: _route(d, bias=_bias(d).bfloat16()),
        ArgumentError,
        ("bias", "float32", "bfloat16"),
    ),
    BadCall("an integer bias", lambda d: _route(d, bias=_bias(d).long()), ArgumentError, ("bias", "int64")),
    BadCall("a bias elsewhere", lambda d: _route(d, bias=_bias(META)), ArgumentError, ("bias", "logits", "meta")),
    BadCall(
        "a second derivative",
        lambda d: _second_derivative(lambda x: route(x, 2)[0], d),
        Unsupported,
        ("route", "second derivatives"),
    ),
    BadCall("forward-mode gradients", _forward_mode, Unsupported, ("route", "forward-mode")),
    BadCall(
        "out= of another dtype",
        lambda d: _into(d, indices=_indices(d).int()),
        ArgumentError,
        ("route", "indices", "int64", "int32"),
    ),
    BadCall(
        "out= of another shape",
        lambda d: _into(d, weights=torch.empty(TOKENS, 3, device=d)),
        ArgumentError,
        ("weights", "(4, 2)", "(4, 3)"),
    ),
)

LOSSES = (
    BadCall(
        "indices for other tokens",
        lambda d: _balance(d, indices=_indices(d, 3, 2)),
        ArgumentError,
        ("indices", "(3, 2)"),
    ),
    BadCall(
        "indices without a slot", lambda d: _balance(d, indices=_indices(d, TOKENS)), ArgumentError, ("indices", "(4,)")
    ),
    BadCall(
        "more choices than experts",
        lambda d: _balance(d, indices=_indices(d, TOKENS, 13)),
        ArgumentError,
        ("indices", "from 1 to 12", "got 13"),
    ),
    BadCall("float indices", lambda d: _balance(d, indices=_logits(d)), ArgumentError, ("indices", "int64", "float32")),
    BadCall("indices elsewhere", lambda d: _balance(d, indices=_indices(META)), ArgumentError, ("indices", "meta")),
    BadCall(
        "integer logits, for the loss",
        lambda d: _balance(d, logits=_logits(d).int()),
        ArgumentError,
        ("load_balancing_loss: logits", "int32"),
    ),
    BadCall(
        "a mask of integers", lambda d: z_loss(_logits(d), _mask(d).long()), ArgumentError, ("mask", "bool", "int64")
    ),
    BadCall(
        "a mask too long", lambda d: z_loss(_logits(d), _mask(d, 5)), ArgumentError, ("z_loss: mask", "(4,)", "(5,)")
    ),
    BadCall("a mask elsewhere", lambda d: _balance(d, mask=_mask(META)), ArgumentError, ("mask", "logits", "meta")),
    BadCall("a mask that is a list", lambda d: z_loss(_logits(d), [True]), ArgumentError, ("mask", "list")),  # type: ignore[arg-type]
    BadCall("integer logits, for z", lambda d: z_loss(_logits(d).long()), ArgumentError, ("z_loss: logits", "int64")),
    BadCall("the first index too large", _with_index(0, EXPERTS), ArgumentError, ("indices[0]", "is 12", "no expert")),
    BadCall("a negative index", _with_index(33, -1), ArgumentError, ("indices[33]", "is -1")),
    BadCall("the last index too large", _with_index(79, 99, torch.int32), ArgumentError, ("indices[79]", "is 99")),
    BadCall(
        "an index that is an expert modulo 2^32",
        _with_index(40, 2**32 + 2),
        ArgumentError,
        ("indices[40]", "4294967298"),
    ),
    BadCall(
        "a second derivative of the loss",
        lambda d: _second_derivative(lambda x: load_balancing_loss(x, _indices(d)), d),
        Unsupported,
        ("load_balancing_loss", "second derivatives"),
    ),
    BadCall(
        "a second derivative of z",
        lambda d: _second_derivative(z_loss, d),
        Unsupported,
        ("z_loss", "second derivatives"),
    ),
)

BAD_CALLS = (*ROUTES, *LOSSES)
