"""Calls of the norms whose bits are recorded before kernels are broken: a mutant that computes the same keeps them."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core.kernels import interpreting
from adjoint.core.launch import Setup
from adjoint.core.layout import Rows
from adjoint.core.op.operator import forget
from adjoint.core.problem import Problem
from adjoint.ops.norm import plans
from adjoint.verify.checks.bits import same_bits
from tests.mutants.calls import edges

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Layout = Callable[[Tensor], Tensor]
TRITON = Preference(backend="triton")


def shrink() -> None:
    """Few blocks and short runs, so that few rows fill several."""
    plans.most_blocks = lambda size: 5  # type: ignore[assignment]
    plans.RUN_LEVELS = 1
    kernels = import_module("adjoint.ops.norm.kernels")
    vars(kernels).update(most_blocks=plans.most_blocks, RUN_LEVELS=plans.RUN_LEVELS)
    forget()


def _normal(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64).to(dtype)


def _edge(tensor: Tensor) -> Tensor:
    return edges.LAYOUTS[""](tensor)


def _apart(tensor: Tensor) -> Tensor:
    """Rows with others' columns between them."""
    return _edge(torch.cat((tensor, tensor + 1), -1))[..., : tensor.shape[-1]]


def _runs(tensor: Tensor) -> Tensor:
    """[3, n, columns], rows of the first axis further apart than those of the second."""
    return _edge(torch.cat((tensor, tensor + 1), 1))[:, : tensor.shape[1]]


def _gradients(outputs: Tensor | tuple[Tensor, ...], inputs: list[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [layout(_normal(7 + i, *o.shape, dtype=o.dtype)) for i, o in enumerate(outputs)]
    return (*(o.detach() for o in outputs), *torch.autograd.grad(outputs, inputs, upstream))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _rms(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = _edge, residual: bool = False,
    weight_dtype: torch.dtype | None = None, eps: float = 0.5, offset: float = 0.25,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = _leaf(layout(_normal(0, *shape, dtype=dtype)))
    weight = _leaf(_edge(_normal(1, shape[-1], dtype=weight_dtype or dtype)))
    keywords = {"residual": _leaf(layout(_normal(2, *shape, dtype=dtype)))} if residual else {}
    outputs = adjoint.rms_norm(x, weight, eps=eps, offset=offset, preference=TRITON, **keywords)
    return _gradients(outputs, [x, weight, *keywords.values()], layout)


def _gated(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = _edge, rounds: bool = False, scale: float = 3.0
) -> tuple[Tensor, ...]:
    gate = _normal(3, *shape, dtype=dtype) * scale
    gate.view(-1)[:6] = torch.tensor([torch.inf, -torch.inf, 200, -200, 87, -87.0], dtype=dtype)
    x, gate = _leaf(layout(_normal(0, *shape, dtype=dtype))), _leaf(layout(gate))
    weight = _leaf(_edge(_normal(1, shape[-1], dtype=dtype)))
    y = adjoint.gated_rms_norm(x, gate, weight, round_before_gate=rounds, eps=0.5, preference=TRITON)
    return _gradients(y, [x, gate, weight], layout)


def _l2(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout = _edge) -> tuple[Tensor, ...]:
    x = _leaf(layout(_normal(0, *shape, dtype=dtype)))
    return _gradients(adjoint.l2_norm(x, eps=0.5, preference=TRITON), [x], layout)


def _read_twice(shape: tuple[int, ...], gated: bool) -> tuple[Tensor, ...]:
    """The backward whose tiles are read a second time."""
    x, gate, dy = (_edge(_normal(i, *shape, dtype=BFLOAT16)) for i in range(3))
    weight = _edge(_normal(3, shape[-1], dtype=BFLOAT16))
    if gated:
        plan = adjoint.plan(adjoint.gated_rms_norm, x, gate, weight, eps=0.5, preference=TRITON).adjoint
    else:
        plan = adjoint.plan(adjoint.rms_norm, x, weight, eps=0.5, preference=TRITON).adjoint
    assert plan is not None
    tensors = (dy, x, weight, gate) if gated else (dy, x, weight)
    return plan.with_schedule(readings=2).run(*tensors)  # type: ignore[return-value]


def _saved() -> tuple[Tensor, ...]:
    """The l2 norm as another op binds it: rows further apart, and 1 / sqrt(Σx² + ε) of each."""
    kernels = import_module("adjoint.ops.norm.l2_norm.kernels")
    x, y, reciprocals = _edge(_normal(0, 7, 40, dtype=FLOAT32)), _edge(torch.zeros(7, 48)), _edge(torch.zeros(7))
    setup = Setup(Problem("l2_norm", x.device, (FLOAT32,)), {})
    kernels.bind_l2(setup, FLOAT32, 40, "contiguous", tile=4, num_warps=4, y_step=48, save=True)(
        Rows(x), y, 7, 0.5, reciprocals
    )
    return y, reciprocals


def calls(module: str) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
    """Those of the kernels of a module; of what they share, some of both."""
    if "l2_norm" not in module:
        yield partial(_rms, (37, 24), BFLOAT16, weight_dtype=FLOAT32)
        yield partial(_gated, (37, 24), BFLOAT16, rounds=True)
        yield partial(_rms, (3, 1000), FLOAT16, residual=True)
        yield partial(_rms, (3, 6, 64), FLOAT32, _runs, residual=True)
        yield partial(_gated, (3, 6, 32), FLOAT16, _runs)
        yield partial(_gated, (5, 12), FLOAT32, _apart, scale=30.0)
        yield partial(_gated, (5, 9), FLOAT64)
        yield partial(_rms, (150, 16), FLOAT32, _apart)
        yield partial(_rms, (3, 130), FLOAT32, eps=0.0)
        yield partial(_rms, (2, 8192), BFLOAT16)
        yield partial(_read_twice, (5, 256), True)
        yield partial(_read_twice, (3, 1024), False)
    if module != "adjoint.ops.norm.kernels":
        yield partial(_l2, (37, 24), BFLOAT16)
        yield partial(_l2, (3, 6, 64), FLOAT32, _runs)
        yield partial(_l2, (5, 100), FLOAT16, _apart)
        yield partial(_l2, (2, 2000), FLOAT32)
        yield partial(_l2, (3, 5), FLOAT64)
        yield _saved  # at the front edge, then at the other
        yield _saved


_recorded: dict[str, list[tuple[Tensor, ...]]] = {}


def record(modules: tuple[str, ...]) -> None:
    """Keeps the bits of the kernels as they are."""
    if interpreting() and not _recorded:
        shrunk = vars(plans), vars(import_module("adjoint.ops.norm.kernels"))
        kept = [dict(names) for names in shrunk]
        shrink()
        _recorded.update({module: [call() for call in calls(module)] for module in modules})
        for names, before in zip(shrunk, kept, strict=True):  # other tests of this process have them as they were
            names.update(before)
        forget()


def noticed(module: str) -> bool:
    """Whether any call has other bits than before, at either edge of memory."""
    for number, (call, expected) in enumerate(zip(calls(module), _recorded[module], strict=True)):
        edges.surround(number)
        found = call()
        if not all(map(same_bits, found, expected)):
            return True
    return False
