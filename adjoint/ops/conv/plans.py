"""Which kernel serves which convolution, and what it guarantees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, EvaluatedOnce, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short
from adjoint.core.schedules import Schedules
from adjoint.ops.conv import eager
from adjoint.ops.conv.arguments import MAX_PARTS
from adjoint.ops.conv.bounds import Bounds, Inputs, words
from adjoint.ops.conv.reference import Gradients
from adjoint.ops.conv.shape import STEP as STEP_OP
from adjoint.ops.conv.shape import Shape, part_names

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_TOKENS = 2**30 - 2**12
"""Tokens that the kernels' integers count."""

MOST_STRETCHES, SHORTEST_STRETCH, LONGEST_STRETCH = 128, 32, 1024
"""Into how many stretches tokens are cut for dweight, as long as these are neither too short nor too long."""

RUN_LEVELS = 7
"""Stretches whose shares are added by halves: 128."""


def stretch_of(tokens: int) -> int:
    """The tokens of a stretch, whose share of dweight one program adds up: a power of two."""
    stretch = 1 << max(0, -(-tokens // MOST_STRETCHES) - 1).bit_length()
    return max(SHORTEST_STRETCH, min(LONGEST_STRETCH, stretch))


def chain_of(tokens: int) -> int:
    """The longest chain of additions that a term of dweight goes through."""
    stretches = -(-tokens // stretch_of(tokens))
    return stretch_of(tokens) + RUN_LEVELS + -(-stretches >> RUN_LEVELS)


DOMAIN = (
    "inputs whose products, and sums of their magnitudes, stay below 2^126 (float64: 2^1022), else the bound of what "
    "they reach is infinite"
)
ORDER = "; its order is fixed by the number of tokens: other tokens in the batch change its bits"
SPECIAL_VALUES = (
    "a NaN or an infinity at a token reaches the outputs of that token and of the W − 1 after it, in its own channel "
    "and its own sequence; silu(−∞) = −0 and silu(+∞) = +∞"
)
SPECIAL_GRADIENTS = (
    "a NaN or an infinity of a token, of a state or of a gradient reaches dx and the states' gradients of tokens up to "
    "W − 1 away, in its own channel and its own sequence, and dweight and dbias of its channel"
)
OUT_OF_ORDER = (
    "cu_seqlens out of order are reported: at once on the CPU, by adjoint.check() on a GPU, where results are then "
    "unspecified, and nothing outside of the tensors is touched"
)
OUT_OF_RANGE = (
    "state_indices out of range are reported: at once on the CPU, by adjoint.check() on a GPU, where the row is skipped"
)
COPIED = Derived("0: bytes are copied", lambda *inputs: torch.zeros((), dtype=torch.float64, device="cpu"))

GRADIENTS = {"dx": "x", "dweight": "weight", "dbias": "bias", "dinitial_state": "state", "dstate": "state"}


class Convolution:
    """An operator's two directions: how many parts y has, and whether it is a step.

    Attributes:
        outputs: names of what the forward gives.
    """

    def __init__(self, part_count: int = 1, is_step: bool = False) -> None:
        self.part_count, self.is_step = part_count, is_step
        self.item = "row" if is_step else "sequence"
        self.outputs = (*part_names(part_count, "y"), "new_state" if is_step else "final_state")

    def _read(self, tensors: tuple[Any, ...]) -> Inputs:
        """The arguments of a reference. A step's are x, the pool, weight, bias and indices."""
        if not self.is_step:
            return Inputs(*tensors)
        x, pool, weight, bias, indices = tensors
        if indices is not None:
            live = (indices >= 0)[:, None, None]
            x = x * live
            pool = pool[indices.clamp_min(0).long()] * live if len(pool) else x.new_zeros(len(x), *pool.shape[1:])
        return Inputs(x, weight, bias, pool, None)

    def _bounds(self, problem: Problem, on_kernels: bool) -> tuple[Shape, Bounds]:
        shape = Shape.of(problem)
        chain = chain_of(shape.tokens) if on_kernels else shape.tokens
        return shape, Bounds(shape.element, shape.weight, shape.bias, shape.computed, shape.is_silu, max(1, chain))

    def _guarantee(self, arithmetic: torch.dtype, on_kernels: bool, error: Derived, **more: Any) -> Guarantee:
        always: dict[str, Any] = {
            "repeatable": True, "batch_invariant": self.item if on_kernels else "", "device_invariant": False,
            "accumulator": short(arithmetic), "roundings": 1, "error": error, "domain": DOMAIN,
            "special_values": SPECIAL_VALUES, "out_of_range": OUT_OF_RANGE if self.is_step else OUT_OF_ORDER,
        }  # fmt: skip
        return Guarantee(**always | more)

    def forward_guarantee(self, problem: Problem, on_kernels: bool) -> dict[str, Guarantee]:
        """y, whose bits a prefix fixes, and states, which are copies of tokens."""
        shape, bounds = self._bounds(problem, on_kernels)
        begins = shape.begins

        def part(number: int) -> Callable[..., Tensor]:
            return lambda *tensors: bounds.y(self._read(tensors))[..., begins[number] : begins[number + 1]]

        promises = {
            name: self._guarantee(
                bounds.arithmetic, on_kernels, Derived(words("y", bounds.arithmetic), part(number)),
                prefix_invariant=on_kernels,
            )
            for number, name in enumerate(self.outputs[:-1])
        }  # fmt: skip
        promises[self.outputs[-1]] = self._guarantee(
            bounds.arithmetic, True, COPIED, device_invariant=True, accumulator="none", roundings=0,
            domain="every input", special_values="copied",
        )  # fmt: skip
        return promises

    def backward_guarantee(self, problem: Problem, on_kernels: bool) -> dict[str, Guarantee]:
        """dx and the states' gradients belong to a sequence; dweight and dbias are sums over all."""
        shape, bounds = self._bounds(problem, on_kernels)
        has_final = shape.has_final_gradient
        count = self.part_count + has_final

        def evaluate(*tensors: Any) -> Gradients:
            upstream, of = tensors[:count], self._read(tensors[count:])
            dy, dfinal = torch.cat(upstream[: self.part_count], -1), upstream[-1] if has_final else None
            if not self.is_step or tensors[-1] is None:
                return bounds.gradients(of, dy, dfinal)
            return self._pooled(bounds, of, dy, dfinal, tensors[count + 1], tensors[-1])

        together = EvaluatedOnce(evaluate)

        def error(name: str) -> Derived:
            return Derived(
                words(name, bounds.arithmetic), lambda *tensors: getattr(together(*tensors), GRADIENTS[name])
            )

        def promise(name: str) -> Guarantee:
            is_sum = name in ("dweight", "dbias")
            return self._guarantee(
                bounds.arithmetic, on_kernels and not is_sum, error(name),
                domain=DOMAIN + (ORDER if on_kernels and is_sum else ""), special_values=SPECIAL_GRADIENTS,
            )  # fmt: skip

        state = "dstate" if self.is_step else "dinitial_state"
        return {name: promise(name) for name in ("dx", "dweight", "dbias", state)}

    @staticmethod
    def _pooled(
        bounds: Bounds, of: Inputs, dy: Tensor, dfinal: Tensor | None, pool: Tensor, indices: Tensor
    ) -> Gradients:
        """The bounds of a step whose states are picked from a pool: rows that share a state add up."""
        live = (indices >= 0)[:, None, None]
        rows = bounds.gradients(of, dy * live, None if dfinal is None else dfinal * live)
        # The sum of rows is rounded once more for each of them, and once at the end.
        if not len(pool):
            return rows._replace(state=torch.zeros_like(pool))
        total = torch.zeros_like(pool).index_add_(0, indices.clamp_min(0).long(), rows.state * live)
        return rows._replace(state=2 * total + (len(indices) + 2) * bounds.u * total + bounds.tiny)


def _refuse(problem: Problem) -> str:
    tokens = problem.sizes[0] * problem.sizes[1]
    return f"numbers up to {MAX_TOKENS} tokens, these are {tokens}" if tokens > MAX_TOKENS else ""


def _candidates(
    kernel: str, setup: str, promises: Callable[[Problem, bool], dict[str, Guarantee]], compute: Callable[..., None]
) -> tuple[Candidate, Candidate]:
    """The candidates of an operator, best first."""

    def entry(problem: Problem) -> str:
        """How x lies, its dtype and the width decide what registers have room for."""
        if kernel == "conv_step":
            return kernel
        kind = {2: "16 bits", 4: "float32", 8: "float64"}[problem.dtypes[0].itemsize]
        if problem.layout.startswith("time"):
            kind = "time adjacent"
        if problem.op.startswith(STEP_OP):
            kind = "step"
        return f"{kernel} {kind}{', wide' if problem.sizes[3] > 4 else ''}"

    on_kernels = Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=_refuse,
        guarantee=lambda problem: promises(problem, True),
        setup=imported(f"adjoint.ops.conv.triton.{setup}"),
        schedules=_SCHEDULES,
        entry=entry,
    )
    run = allocating_outputs(
        lambda plan, arguments, outputs, _: compute(plan.problem, arguments, outputs), many_calls=True
    )
    return on_kernels, in_pytorch("eager", lambda problem: promises(problem, False), run, waits=_waits, revision=2)


def _waits(problem: Problem) -> bool:
    """In plain PyTorch, bounds are read on the host, and how many rows a step writes to the pool is data."""
    shape = Shape.of(problem)
    return shape.is_packed or (shape.is_indexed and problem.op.endswith("in_place"))


def _forward(convolution: Convolution) -> tuple[Candidate, Candidate]:
    return _candidates("conv_forward", "forward:forward", convolution.forward_guarantee, eager.forward)


def _backward(convolution: Convolution) -> tuple[Candidate, Candidate]:
    compute = eager.step_backward if convolution.is_step else eager.backward
    return _candidates("conv_backward", "backward:backward", convolution.backward_guarantee, compute)


_CONVOLUTIONS = {count: Convolution(count) for count in range(1, MAX_PARTS + 1)}
_STEP = Convolution(is_step=True)


def _in_place_guarantee(problem: Problem, on_kernels: bool) -> dict[str, Guarantee]:
    """What a step promises that overwrites its states: y, and the states that it writes."""
    stated = _STEP.forward_guarantee(problem, on_kernels)
    return {"y": stated["y"], "state": stated["new_state"]}


CONV = {count: _forward(convolution) for count, convolution in _CONVOLUTIONS.items()}
CONV_BACKWARD = {count: _backward(convolution) for count, convolution in _CONVOLUTIONS.items()}
STEP = _candidates("conv_step", "step:step", _STEP.forward_guarantee, eager.step)
STEP_IN_PLACE = _candidates("conv_step", "step:step", _in_place_guarantee, eager.step)
STEP_BACKWARD = _backward(_STEP)
