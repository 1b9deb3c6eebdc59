"""Calls of the activations that must raise, and what their errors must say."""

import torch
from torch import Tensor

import adjoint
from adjoint.core.cases import BadCall
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.swiglu import swiglu


def _pair(device: torch.device, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _run_second_derivative(device: torch.device) -> None:
    x = _pair(device).requires_grad_()
    (dx,) = torch.autograd.grad(silu(x).sum(), x, create_graph=True)
    dx.sum().backward()


def _run_second_backward(device: torch.device) -> None:
    gate, up = (_pair(device).requires_grad_() for _ in range(2))
    y = swiglu(gate * 1, up * 1, reuse_inputs=True).sum()
    y.backward(retain_graph=True)
    y.backward()


def _plan_for_float32(device: torch.device) -> adjoint.Plan:
    return adjoint.plan(swiglu, _pair(device), _pair(device))


BAD_CALLS = (
    BadCall(
        "shapes differ",
        lambda d: swiglu(_pair(d), _pair(d, (4, 5))),
        ArgumentError,
        ("swiglu", "up", "(4, 6)", "(4, 5)"),
    ),
    BadCall("integer gate", lambda d: swiglu(_pair(d).long(), _pair(d).long()), ArgumentError, ("gate", "int64")),
    BadCall("integer x", lambda d: silu(_pair(d).int()), ArgumentError, ("silu", "x", "int32")),
    BadCall("boolean x", lambda d: silu(_pair(d).bool()), ArgumentError, ("silu", "x", "bool")),
    BadCall("complex x", lambda d: silu(_pair(d).to(torch.complex64)), ArgumentError, ("silu", "x", "complex64")),
    BadCall("sparse x", lambda d: silu(_pair(d).to_sparse()), ArgumentError, ("silu", "x", "dense", "sparse")),
    BadCall(
        "a preference of another type",
        lambda d: silu(_pair(d), preference="eager"),  # type: ignore[arg-type]
        ArgumentError,
        ("preference=", "adjoint.Preference", "str"),
    ),
    BadCall(
        "out= over an input",
        lambda d: (lambda x: adjoint.plan(silu, x[:-1]).run(x[:-1], out=x[1:]))(_pair(d, (9,))),
        ArgumentError,
        ("out=", "shares memory", "x"),
    ),
    BadCall(
        "a forward-mode gradient",
        lambda d: torch.func.jvp(silu, (_pair(d),), (_pair(d),)),
        Unsupported,
        ("silu", "torch.func"),
    ),
    BadCall("not a tensor", lambda d: silu([1.0]), ArgumentError, ("silu", "x", "list")),  # type: ignore[arg-type]
    BadCall(
        "dtypes differ",
        lambda d: swiglu(_pair(d), _pair(d).half()),
        ArgumentError,
        ("up", "float32", "float16"),
    ),
    BadCall("devices differ", lambda d: swiglu(_pair(d), _pair(torch.device("meta"))), ArgumentError, ("up", "meta")),
    BadCall("odd packed width", lambda d: swiglu(_pair(d, (4, 5))), ArgumentError, ("packed", "even", "5")),
    BadCall("packed without axes", lambda d: swiglu(_pair(d, ())), ArgumentError, ("packed", "no axes")),
    BadCall(
        "unknown order",
        lambda d: swiglu(_pair(d), order="gateup"),  # type: ignore[arg-type]
        ArgumentError,
        ("order", "gate_up", "interleaved", "gateup"),
    ),
    BadCall(
        "order with two tensors",
        lambda d: swiglu(_pair(d), _pair(d), order="gate_up"),
        ArgumentError,
        ("order", "up is given"),
    ),
    BadCall(
        "a preference nothing satisfies",
        lambda d: silu(_pair(d), preference=adjoint.Preference(device_invariant=True)),
        Unsupported,
        ("triton.rows", "triton.strided", "eager", "device_invariant"),
    ),
    BadCall(
        "an unknown backend", lambda d: adjoint.Preference(backend="cuda"), ArgumentError, ("backend", "triton", "cuda")
    ),
    BadCall(
        "an unknown plan",
        lambda d: silu(_pair(d), preference=adjoint.Preference(plan="fastest")),
        Unsupported,
        ("fastest", "eager"),
    ),
    BadCall(
        "another problem than the plan's",
        lambda d: _plan_for_float32(d).run(_pair(d).half(), _pair(d).half()),
        Unsupported,
        ("not made for", "float16", "float32"),
    ),
    BadCall("too few tensors", lambda d: _plan_for_float32(d).run(_pair(d)), ArgumentError, ("2 tensors", "gate, up")),
    BadCall(
        "out= of the wrong shape",
        lambda d: _plan_for_float32(d).run(_pair(d), _pair(d), out=_pair(d, (4, 7))),
        ArgumentError,
        ("out=", "(4, 6)", "(4, 7)"),
    ),
    BadCall(
        "out= of the wrong dtype",
        lambda d: _plan_for_float32(d).run(_pair(d), _pair(d), out=_pair(d).double()),
        ArgumentError,
        ("out=", "float32", "float64"),
    ),
    BadCall("create_graph=True", _run_second_derivative, Unsupported, ("silu", "second derivative", "create_graph")),
    BadCall("a second backward over reused memory", _run_second_backward, Unsupported, ("swiglu", "reuse_inputs")),
    BadCall(
        "reuse of overlapping memory",
        lambda d: swiglu(_pair(d, (4, 1)).requires_grad_().expand(4, 6), _pair(d).requires_grad_(), reuse_inputs=True),
        ArgumentError,
        ("reuse_inputs", "gate", "overlap"),
    ),
    BadCall(
        "reuse of one tensor twice",
        lambda d: (lambda x: swiglu(x, x, reuse_inputs=True))(_pair(d).requires_grad_() * 1),
        ArgumentError,
        ("reuse_inputs", "gate and up", "overlap"),
    ),
)
