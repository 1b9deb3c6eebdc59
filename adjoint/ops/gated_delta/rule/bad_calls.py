"""Calls of the gated delta rule that must raise, beside those that every op refuses, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import Unsupported
from adjoint.ops.gated_delta.rule import gated_delta_rule

BATCH, TIME, KEY_HEADS, HEADS, K, V = 1, 6, 1, 2, 4, 3


def _inputs(device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "k": torch.zeros(BATCH, TIME, KEY_HEADS, K, device=device),
        "v": torch.zeros(BATCH, TIME, HEADS, V, device=device),
        "g": torch.zeros(BATCH, TIME, HEADS, device=device),
        "beta": torch.zeros(BATCH, TIME, HEADS, device=device),
    }


def _with_changed(**changes: Callable[[Tensor], Any]) -> Callable[[torch.device], Any]:
    """The rule on inputs of which some are changed."""

    def call(device: torch.device) -> None:
        inputs = _inputs(device)
        gated_delta_rule(**(inputs | {name: change(inputs[name]) for name, change in changes.items()}))
        adjoint.check()

    return call


def _with_options(**options: Any) -> Callable[[torch.device], Any]:
    """The rule with further arguments; those that are functions are called with the device."""

    def call(device: torch.device) -> None:
        values = {name: value(device) if callable(value) else value for name, value in options.items()}
        gated_delta_rule(**_inputs(device), **values)
        adjoint.check()

    return call


def _bounds(*values: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.tensor(values, device=device)


def _state(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def _positive_gate(device: torch.device) -> None:
    inputs = _inputs(device)
    inputs["g"][0, 3, 1] = 0.25
    gated_delta_rule(**inputs)
    adjoint.check()


def _adjoint_with(device: torch.device, need: int, saved: Tensor) -> Any:
    inputs = _inputs(device)
    return torch.ops.adjoint.gated_delta_rule_backward(
        inputs["v"], None, *inputs.values(), None, None, saved, 1.0, False, need, ""
    )


_HEADS = _with_changed(q=lambda x: x.expand(BATCH, TIME, 3, K), k=lambda x: x.expand(BATCH, TIME, 3, K))

BAD_CALLS = (
    BadCall("q with three axes", _with_changed(q=lambda x: x[0]), "q", "batch, time", "(6, 1, 4)"),
    BadCall("k of another shape", _with_changed(k=lambda x: x[:, :5]), "k", "(1, 6, 1, 4)", "(1, 5, 1, 4)"),
    BadCall("k of another dtype", _with_changed(k=lambda x: x.half()), "k", "float32", "float16"),
    BadCall("v of another dtype", _with_changed(v=lambda x: x.bfloat16()), "v", "float32", "bfloat16"),
    BadCall("v of another time", _with_changed(v=lambda x: x[:, :5]), "v", "(1, 6)", "(1, 5, 2, 3)"),
    BadCall("g of another shape", _with_changed(g=lambda x: x[..., :1]), "g", "(1, 6, 2)", "(1, 6, 1)"),
    BadCall("g of another dtype", _with_changed(g=lambda x: x.double()), "g", "float32", "float64"),
    BadCall("beta of another dtype", _with_changed(beta=lambda x: x.half()), "beta", "float32", "float16"),
    BadCall("beta with the values' axes", _with_changed(beta=lambda x: x[..., None]), "beta", "(1, 6, 2, 1)"),
    BadCall("heads that do not divide", _HEADS, "2 heads of v", "3 heads of q and k", "multiple"),
    BadCall(
        "K past the cap",
        _with_changed(q=lambda x: x.new_zeros(1, 6, 1, 257), k=lambda x: x.new_zeros(1, 6, 1, 257)),
        "K",
        "257",
        "256",
        "because",
    ),
    BadCall("V past the cap", _with_changed(v=lambda x: x.new_zeros(1, 6, 2, 300)), "V", "300", "256", "because"),
    BadCall("a positive g", _positive_gate, "g", "at most 0", "position 7 "),
    BadCall(
        "states of the wrong shape",
        _with_options(initial_state=_state(2, HEADS, K, V)),
        "initial_state",
        "(1, 2, 4, 3)",
        "(2, 2, 4, 3)",
    ),
    BadCall(
        "states with K and V exchanged",
        _with_options(initial_state=_state(1, HEADS, V, K)),
        "initial_state",
        "(1, 2, 4, 3)",
        "(1, 2, 3, 4)",
    ),
    BadCall(
        "states of the wrong dtype",
        _with_options(initial_state=_state(1, HEADS, K, V, dtype=torch.bfloat16)),
        "initial_state",
        "float32",
        "bfloat16",
    ),
    BadCall(
        "a state per row where sequences are packed",
        _with_options(initial_state=_state(1, HEADS, K, V), cu_seqlens=_bounds(0, 2, 6)),
        "initial_state",
        "(2, 2, 4, 3)",
        "(1, 2, 4, 3)",
    ),
    BadCall("bounds that descend", _with_options(cu_seqlens=_bounds(0, 4, 3, 6)), "cu_seqlens", "got 3 at position 2 "),
    BadCall("bounds that begin past 0", _with_options(cu_seqlens=_bounds(1, 6)), "cu_seqlens", "got 1 at position 0 "),
    BadCall(
        "bounds that end early",
        _with_options(cu_seqlens=_bounds(0, 5)),
        "cu_seqlens",
        "end with",
        "got 5 at position 1 ",
    ),
    BadCall("bounds past the end", _with_options(cu_seqlens=_bounds(0, 7)), "cu_seqlens", "got 7 at position 1 "),
    BadCall("a negative bound", _with_options(cu_seqlens=_bounds(0, -1, 6)), "cu_seqlens", "got -1 at position 1 "),
    BadCall(
        "no bounds",
        _with_options(cu_seqlens=lambda d: torch.zeros(0, dtype=torch.int64, device=d)),
        "cu_seqlens",
        "(0,)",
    ),
    BadCall("bounds with two axes", _with_options(cu_seqlens=lambda d: _bounds(0, 6)(d)[None]), "cu_seqlens", "(1, 2)"),
    BadCall("float bounds", _with_options(cu_seqlens=lambda d: _bounds(0, 6)(d).float()), "cu_seqlens", "float32"),
    BadCall(
        "bounds elsewhere",
        _with_options(cu_seqlens=lambda d: _bounds(0, 6)(torch.device("meta"))),
        "cu_seqlens",
        "meta",
    ),
    BadCall(
        "bounds and two rows",
        lambda d: gated_delta_rule(*(torch.cat((x, x)) for x in _inputs(d).values()), cu_seqlens=_bounds(0, 6)(d)),
        "cu_seqlens",
        "batch",
        "2",
    ),
    BadCall("a scale that is no number", _with_options(scale="auto"), "scale", "'auto'"),
    BadCall("a preference of another type", _with_options(preference="eager"), "preference=", "str"),
    BadCall(
        "batch invariance, which nobody promises",
        _with_options(preference=adjoint.Preference(backend="eager", batch_invariant=True)),
        "gated_delta_rule",
        "o is not batch_invariant",
        error=Unsupported,
    ),
    BadCall(
        "a gradient of a state that is not given, to the operator",
        lambda d: _adjoint_with(d, 63, torch.zeros(0, HEADS, K, V, device=d)),
        "need",
        "initial_state",
    ),
    BadCall(
        "saved states of the wrong shape, to the operator",
        lambda d: _adjoint_with(d, 31, torch.zeros(2, HEADS, K, V, device=d)),
        "saved",
        "(0, 2, 4, 3)",
        "(2, 2, 4, 3)",
    ),
)
