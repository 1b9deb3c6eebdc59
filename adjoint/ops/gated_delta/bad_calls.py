"""Calls of the gated delta rule that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.gated_delta.rule import gated_delta_rule
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


def _with(**changes: Callable[[Tensor], Any]) -> Callable[[torch.device], Any]:
    """The rule on inputs of which some are changed."""

    def call(device: torch.device) -> None:
        given = _inputs(device)
        gated_delta_rule(**(given | {name: change(given[name]) for name, change in changes.items()}))
        adjoint.check()

    return call


def _and(**options: Any) -> Callable[[torch.device], Any]:
    """The rule with further arguments; those that are functions are called with the device."""

    def call(device: torch.device) -> None:
        found = {name: value(device) if callable(value) else value for name, value in options.items()}
        gated_delta_rule(**_inputs(device), **found)
        adjoint.check()

    return call


def _bounds(*values: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, device=device)


def _state(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _positive_gate(device: torch.device) -> None:
    given = _inputs(device)
    given["g"][0, 3, 1] = 0.25
    gated_delta_rule(**given)
    adjoint.check()


def _second_derivative(device: torch.device) -> None:
    given = _inputs(device)
    v = given["v"].requires_grad_()
    (dv,) = torch.autograd.grad(gated_delta_rule(**given)[0].sum(), v, create_graph=True)
    dv.sum().backward()


def _adjoint_with(device: torch.device, need: int, saved: Tensor) -> Any:
    given = _inputs(device)
    return torch.ops.adjoint.gated_delta_rule_backward(
        *given.values(), given["v"], None, None, None, saved, 1.0, False, need, ""
    )


_HEADS = _with(q=lambda x: x.expand(BATCH, TIME, 3, K), k=lambda x: x.expand(BATCH, TIME, 3, K))

RULE = (
    BadCall("q that is a list", _with(q=lambda x: x.tolist()), ArgumentError, ("gated_delta_rule", "q", "list")),
    BadCall("q with three axes", _with(q=lambda x: x[0]), ArgumentError, ("q", "batch, time", "(6, 1, 4)")),
    BadCall("integer q", _with(q=lambda x: x.long()), ArgumentError, ("q", "int64")),
    BadCall("k of another shape", _with(k=lambda x: x[:, :5]), ArgumentError, ("k", "(1, 6, 1, 4)", "(1, 5, 1, 4)")),
    BadCall("k of another dtype", _with(k=lambda x: x.half()), ArgumentError, ("k", "float32", "float16")),
    BadCall("v of another dtype", _with(v=lambda x: x.bfloat16()), ArgumentError, ("v", "float32", "bfloat16")),
    BadCall("v of another time", _with(v=lambda x: x[:, :5]), ArgumentError, ("v", "(1, 6)", "(1, 5, 2, 3)")),
    BadCall("v elsewhere", _with(v=lambda x: x.to(META)), ArgumentError, ("v", "device", "meta")),
    BadCall("g elsewhere", _with(g=lambda x: x.to(META)), ArgumentError, ("g", "device", "meta")),
    BadCall("g of another shape", _with(g=lambda x: x[..., :1]), ArgumentError, ("g", "(1, 6, 2)", "(1, 6, 1)")),
    BadCall("g of another dtype", _with(g=lambda x: x.double()), ArgumentError, ("g", "float32", "float64")),
    BadCall("beta of another dtype", _with(beta=lambda x: x.half()), ArgumentError, ("beta", "float32", "float16")),
    BadCall("beta with the values' axes", _with(beta=lambda x: x[..., None]), ArgumentError, ("beta", "(1, 6, 2, 1)")),
    BadCall("heads that do not divide", _HEADS, ArgumentError, ("2 heads of v", "3 heads of q and k", "multiple")),
    BadCall(
        "K past the cap",
        _with(q=lambda x: x.new_zeros(1, 6, 1, 257), k=lambda x: x.new_zeros(1, 6, 1, 257)),
        ArgumentError,
        ("K", "257", "256", "because"),
    ),
    BadCall(
        "V past the cap", _with(v=lambda x: x.new_zeros(1, 6, 2, 300)), ArgumentError, ("V", "300", "256", "because")
    ),
    BadCall("a positive g", _positive_gate, ArgumentError, ("g", "at most 0", "position 7 ")),
    BadCall(
        "states of the wrong shape",
        _and(initial_state=_state(2, HEADS, K, V)),
        ArgumentError,
        ("initial_state", "(1, 2, 4, 3)", "(2, 2, 4, 3)"),
    ),
    BadCall(
        "states with K and V exchanged",
        _and(initial_state=_state(1, HEADS, V, K)),
        ArgumentError,
        ("initial_state", "(1, 2, 4, 3)", "(1, 2, 3, 4)"),
    ),
    BadCall(
        "states of the wrong dtype",
        _and(initial_state=_state(1, HEADS, K, V, dtype=torch.bfloat16)),
        ArgumentError,
        ("initial_state", "float32", "bfloat16"),
    ),
    BadCall(
        "states elsewhere",
        _and(initial_state=lambda d: torch.zeros(1, HEADS, K, V, device=META)),
        ArgumentError,
        ("initial_state", "device", "meta"),
    ),
    BadCall(
        "a state per row where sequences are packed",
        _and(initial_state=_state(1, HEADS, K, V), cu_seqlens=_bounds(0, 2, 6)),
        ArgumentError,
        ("initial_state", "(2, 2, 4, 3)", "(1, 2, 4, 3)"),
    ),
    BadCall(
        "bounds that descend",
        _and(cu_seqlens=_bounds(0, 4, 3, 6)),
        ArgumentError,
        ("cu_seqlens", "got 3 at position 2 "),
    ),
    BadCall(
        "bounds that begin past 0",
        _and(cu_seqlens=_bounds(1, 6)),
        ArgumentError,
        ("cu_seqlens", "got 1 at position 0 "),
    ),
    BadCall(
        "bounds that end early",
        _and(cu_seqlens=_bounds(0, 5)),
        ArgumentError,
        ("cu_seqlens", "end with", "got 5 at position 1 "),
    ),
    BadCall(
        "bounds past the end", _and(cu_seqlens=_bounds(0, 7)), ArgumentError, ("cu_seqlens", "got 7 at position 1 ")
    ),
    BadCall(
        "a negative bound", _and(cu_seqlens=_bounds(0, -1, 6)), ArgumentError, ("cu_seqlens", "got -1 at position 1 ")
    ),
    BadCall(
        "no bounds",
        _and(cu_seqlens=lambda d: torch.zeros(0, dtype=torch.int64, device=d)),
        ArgumentError,
        ("cu_seqlens", "(0,)"),
    ),
    BadCall(
        "bounds with two axes",
        _and(cu_seqlens=lambda d: _bounds(0, 6)(d)[None]),
        ArgumentError,
        ("cu_seqlens", "(1, 2)"),
    ),
    BadCall(
        "float bounds", _and(cu_seqlens=lambda d: _bounds(0, 6)(d).float()), ArgumentError, ("cu_seqlens", "float32")
    ),
    BadCall("bounds elsewhere", _and(cu_seqlens=lambda d: _bounds(0, 6)(META)), ArgumentError, ("cu_seqlens", "meta")),
    BadCall(
        "bounds and two rows",
        lambda d: gated_delta_rule(*(torch.cat((x, x)) for x in _inputs(d).values()), cu_seqlens=_bounds(0, 6)(d)),
        ArgumentError,
        ("cu_seqlens", "batch", "2"),
    ),
    BadCall("a scale that is no number", _and(scale="auto"), ArgumentError, ("scale", "'auto'")),
    BadCall("a preference of another type", _and(preference="eager"), ArgumentError, ("preference=", "str")),
    BadCall(
        "batch invariance, which nobody promises",
        _and(preference=adjoint.Preference(backend="eager", batch_invariant=True)),
        Unsupported,
        ("gated_delta_rule", "o is not batch_invariant"),
    ),
    BadCall("create_graph=True", _second_derivative, Unsupported, ("gated_delta_rule", "second derivative")),
    BadCall(
        "a gradient of a state that is not given, to the operator",
        lambda d: _adjoint_with(d, 63, torch.zeros(0, HEADS, K, V, device=d)),
        ArgumentError,
        ("need", "initial_state"),
    ),
    BadCall(
        "saved states of the wrong shape, to the operator",
        lambda d: _adjoint_with(d, 31, torch.zeros(2, HEADS, K, V, device=d)),
        ArgumentError,
        ("saved", "(0, 2, 4, 3)", "(2, 2, 4, 3)"),
    ),
    BadCall(
        "vmap",
        lambda d: torch.func.vmap(lambda v: gated_delta_rule(**(_inputs(d) | {"v": v}))[0])(
            torch.zeros(2, 1, 6, 2, 3, device=d)
        ),
        Unsupported,
        ("gated_delta_rule", "vmap"),
    ),
)


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

BAD_CALLS = (*RULE, *STEPS, *STAGES)
