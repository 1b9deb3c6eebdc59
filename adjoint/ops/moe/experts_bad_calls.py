"""Calls of the expert layer that must raise, and what their errors must say."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import adjoint
from adjoint.contract.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.moe.experts import experts

TOKENS, COLUMNS, EXPERTS, INNER, SLOTS = 5, 6, 4, 3, 2
META = torch.device("meta")


def _inputs(device: torch.device) -> dict[str, Any]:
    return {
        "x": torch.ones(TOKENS, COLUMNS, device=device),
        "gate_up": torch.ones(EXPERTS, 2 * INNER, COLUMNS, device=device),
        "down": torch.ones(EXPERTS, COLUMNS, INNER, device=device),
        "indices": torch.zeros(TOKENS, SLOTS, dtype=torch.int64, device=device),
        "weights": torch.ones(TOKENS, SLOTS, device=device),
    }


def _changed(
    preference: Any = None, **changes: Callable[[Tensor], Any]
) -> Callable[[torch.device], Tensor]:  # fmt: skip
    """A layer that would be right, but for what is changed."""

    def call(device: torch.device) -> Tensor:
        inputs = _inputs(device)
        for name, change in changes.items():
            inputs[name] = change(inputs[name])
        return experts(**inputs, preference=preference)

    return call


def _shaped(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.new_ones(shape)


def _with_index(token: int, slot: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        inputs = _inputs(device)
        inputs["indices"] = inputs["indices"].to(dtype)
        inputs["indices"][token, slot] = value
        experts(**inputs)
        adjoint.check()

    return call


def _second_derivative(device: torch.device) -> None:
    inputs = _inputs(device)
    x = inputs["x"].requires_grad_()
    (dx,) = torch.autograd.grad(experts(**inputs).sum(), x, create_graph=True)
    dx.sum().backward()


def _forward_mode(device: torch.device) -> None:
    inputs = _inputs(device)
    with forward_ad.dual_level():
        inputs["x"] = forward_ad.make_dual(inputs["x"], inputs["x"])
        experts(**inputs)


def _other_gradient(device: torch.device) -> None:
    inputs = _inputs(device)
    plan = adjoint.plan(experts, *inputs.values())
    _, *saved = plan.run(*inputs.values())
    assert plan.adjoint is not None
    layer = (inputs["x"], inputs["gate_up"], inputs["down"], inputs["weights"])
    plan.adjoint.run(torch.ones(TOKENS, COLUMNS + 1, device=device), *layer, *saved)


BAD_CALLS = (
    BadCall("x with three axes", _changed(x=_shaped(5, 1, 6)), ArgumentError, ("moe.experts", "x", "(5, 1, 6)")),
    BadCall("integer x", _changed(x=Tensor.long), ArgumentError, ("moe.experts: x", "int64")),
    BadCall("x that is a list", _changed(x=lambda t: [1.0]), ArgumentError, ("x", "tensor", "list")),
    BadCall(
        "gate_up of an odd number of rows",
        _changed(gate_up=_shaped(EXPERTS, 5, COLUMNS)),
        ArgumentError,
        ("gate_up", "2·I", "(4, 5, 6)"),
    ),
    BadCall(
        "gate_up of other columns",
        _changed(gate_up=_shaped(EXPERTS, 6, 7)),
        ArgumentError,
        ("gate_up", "6 columns", "(4, 6, 7)"),
    ),
    BadCall("gate_up of one expert alone", _changed(gate_up=_shaped(6, 6)), ArgumentError, ("gate_up", "(6, 6)")),
    BadCall("gate_up in another type", _changed(gate_up=Tensor.half), ArgumentError, ("gate_up", "float32", "float16")),
    BadCall("down in another type", _changed(down=Tensor.double), ArgumentError, ("down", "float32", "float64")),
    BadCall("down of other experts", _changed(down=_shaped(5, 6, 3)), ArgumentError, ("down", "gate_up, 4", "got 5")),
    BadCall("down of another I", _changed(down=_shaped(4, 6, 4)), ArgumentError, ("down", "(4, 6, 3)", "(4, 6, 4)")),
    BadCall("down transposed", _changed(down=_shaped(4, 3, 6)), ArgumentError, ("down", "(4, 6, 3)", "(4, 3, 6)")),
    BadCall("down elsewhere", _changed(down=lambda t: t.to(META)), ArgumentError, ("down", "device of x", "meta")),
    BadCall("float indices", _changed(indices=Tensor.float), ArgumentError, ("indices", "int64", "float32")),
    BadCall("narrow indices", _changed(indices=Tensor.short), ArgumentError, ("indices", "int16", ".long()")),
    BadCall("indices with one axis", _changed(indices=_shaped(5)), ArgumentError, ("indices", "[tokens, k]", "(5,)")),
    BadCall("indices of other tokens", _changed(indices=_shaped(4, 2)), ArgumentError, ("indices", "(5, 6)", "(4, 2)")),
    BadCall(
        "no slots",
        _changed(indices=lambda t: t[:, :0], weights=lambda t: t[:, :0]),
        ArgumentError,
        ("indices", "k ≥ 1", "(5, 0)"),
    ),
    BadCall("indices elsewhere", _changed(indices=lambda t: t.to(META)), ArgumentError, ("indices", "x", "meta")),
    BadCall("weights of other slots", _changed(weights=_shaped(5, 3)), ArgumentError, ("weights", "(5, 2)", "(5, 3)")),
    BadCall("weights of other tokens", _changed(weights=_shaped(4, 2)), ArgumentError, ("weights", "[5, k]", "(4, 2)")),
    BadCall("integer weights", _changed(weights=Tensor.long), ArgumentError, ("weights", "int64")),
    BadCall(
        "weights elsewhere", _changed(weights=lambda t: t.to(META)), ArgumentError, ("weights", "device of x", "meta")
    ),
    BadCall(
        "an index too large", _with_index(3, 1, 4), ArgumentError, ("moe.experts: indices", "got 4 at position 7 ")
    ),
    BadCall("a negative index", _with_index(0, 0, -1, torch.int32), ArgumentError, ("got -1 at position 0 ",)),
    BadCall(
        "an index that is an expert modulo 2^32",
        _with_index(4, 1, 2**32 + 1),
        ArgumentError,
        ("got 4294967297 at position 9 ",),
    ),
    BadCall("a second derivative", _second_derivative, Unsupported, ("moe.experts", "create_graph")),
    BadCall("forward mode", _forward_mode, Unsupported, ("experts", "reverse mode")),
    BadCall("a gradient of another shape", _other_gradient, ArgumentError, ("dy", "(5, 6)", "(5, 7)")),
    BadCall("a preference of another type", _changed("eager"), ArgumentError, ("preference=", "str")),
    BadCall(
        "no workspace allowed",
        _changed(adjoint.Preference(max_workspace_bytes=0)),
        Unsupported,
        ("experts", "triton", "eager", "the preference allows 0"),
    ),
)
