"""Calls of the step and the stages that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError
from adjoint.ops.gated_delta.stages.w_u import recompute_w_u
from adjoint.ops.gated_delta.step import gated_delta_step

META = torch.device("meta")
BATCH, TIME, KEY_HEADS, HEADS, K, V = 1, 6, 1, 2, 4, 3


def _inputs(device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "k": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "v": torch.zeros(BATCH, TIME, HEADS, V, device=device),
        "g": torch.zeros(BATCH, TIME, HEADS, device=device),
        "beta": torch.zeros(BATCH, TIME, HEADS, device=device),
    }


def _bounds(*values: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, device=device)


def _state(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


# ------------------------------------------------------------------------------------------------ steps


def _step(**options: Any) -> Callable[[torch.device], Any]:
    """A step with other arguments; those that are functions are called with the device."""

    def call(device: torch.device) -> None:
        given = {name: x[:, :2] for name, x in _inputs(device).items()}
        given["state"] = torch.zeros(BATCH, HEADS, K, V, device=device)
        found = {name: value(device) if callable(value) else value for name, value in options.items()}
        gated_delta_step(**(given | found))
        adjoint.check()

    return call


def _tokens(count: int) -> dict[str, Callable[[torch.device], Tensor]]:
    """So many tokens of every input."""

    def of(name: str) -> Callable[[torch.device], Tensor]:
        return lambda device: _inputs(device)[name][:, :1].repeat_interleave(count, 1)

    return {name: of(name) for name in _inputs(META)}


STEPS = (
    BadCall("no token", _step(**_tokens(0)), ArgumentError, ("gated_delta_step", "1 to 16", "got 0")),
    BadCall("too many tokens", _step(**_tokens(17)), ArgumentError, ("1 to 16", "got 17", "gated_delta_rule")),
    BadCall("a state with three axes", _step(state=_state(HEADS, K, V)), ArgumentError, ("state", "axes", "(2, 4, 3)")),
    BadCall(
        "a state of another head size",
        _step(state=_state(BATCH, HEADS, K, 5)),
        ArgumentError,
        ("state", "(1, 2, 4, 3)", "(1, 2, 4, 5)"),
    ),
    BadCall(
        "a state in float16",
        _step(state=_state(BATCH, HEADS, K, V, dtype=torch.float16)),
        ArgumentError,
        ("state", "float32 or bfloat16", "float16"),
    ),
    BadCall(
        "a state elsewhere", _step(state=lambda d: _state(BATCH, HEADS, K, V)(META)), ArgumentError, ("state", "meta")
    ),
    BadCall(
        "a pool without indices",
        _step(state=_state(5, HEADS, K, V)),
        ArgumentError,
        ("state", "(1, 2, 4, 3)", "(5, 2, 4, 3)"),
    ),
    BadCall(
        "more indices than rows", _step(state_indices=_bounds(0, 0)), ArgumentError, ("state_indices", "(1,)", "(2,)")
    ),
    BadCall(
        "float indices",
        _step(state_indices=lambda d: torch.zeros(1, device=d)),
        ArgumentError,
        ("state_indices", "float32"),
    ),
    BadCall(
        "an index past the pool",
        _step(state_indices=_bounds(1)),
        ArgumentError,
        ("state_indices", "got 1 at position 0"),
    ),
    BadCall(
        "an index below −1", _step(state_indices=_bounds(-2)), ArgumentError, ("state_indices", "got -2 at position 0")
    ),
    BadCall(
        "a positive g in a step",
        _step(g=lambda d: torch.full((BATCH, 2, HEADS), 0.5, device=d)),
        ArgumentError,
        ("g", "at most 0", "position 0 "),
    ),
    BadCall(
        "a gradient of an in-place step",
        _step(state=lambda d: torch.zeros(BATCH, HEADS, K, V, device=d).requires_grad_(), in_place=True),
        ArgumentError,
        ("in_place", "gradient", "no_grad"),
    ),
)

# ----------------------------------------------------------------------------------------------- stages


def _w_u(**options: Any) -> Callable[[torch.device], Any]:
    def call(device: torch.device) -> None:
        given = _inputs(device)
        given["G"] = given.pop("g")
        given["T"] = torch.zeros(BATCH, TIME, HEADS, 4, device=device)
        del given["q"]
        found = {name: value(device) if callable(value) else value for name, value in options.items()}
        recompute_w_u(**(given | found))
        adjoint.check()

    return call


STAGES = (
    BadCall("T of another time", _w_u(T=_state(1, 5, HEADS, 4)), ArgumentError, ("recompute_w_u", "T", "(1, 6, 2, 4)")),
    BadCall("a chunk of 48", _w_u(T=_state(1, TIME, HEADS, 48)), ArgumentError, ("chunk", "power of two", "64", "48")),
    BadCall("a chunk of 128", _w_u(T=_state(1, TIME, HEADS, 128)), ArgumentError, ("chunk", "64", "128", "fit")),
    BadCall(
        "T in another 16 bits",
        _w_u(T=_state(1, TIME, HEADS, 4, dtype=torch.float16)),
        ArgumentError,
        ("T", "float32", "float16"),
    ),
    BadCall("G of another dtype", _w_u(G=_state(1, TIME, HEADS, dtype=torch.float64)), ArgumentError, ("G", "float64")),
    BadCall("beta elsewhere", _w_u(beta=lambda d: _state(1, TIME, HEADS)(META)), ArgumentError, ("beta", "meta")),
    BadCall(
        "heads of v that do not divide", _w_u(k=_state(1, TIME, 3, K)), ArgumentError, ("2 heads of v", "3 heads of k")
    ),
    BadCall("K past the cap in a stage", _w_u(k=_state(1, TIME, 1, 300)), ArgumentError, ("K", "300", "256")),
    BadCall(
        "bounds of a stage that descend",
        _w_u(cu_seqlens=_bounds(0, 4, 2, 6)),
        ArgumentError,
        ("cu_seqlens", "got 2 at position 2 "),
    ),
)

BAD_CALLS = (*STEPS, *STAGES)
