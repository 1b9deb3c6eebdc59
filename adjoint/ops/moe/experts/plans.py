"""Which kernels serve which expert layer, and what they guarantee."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import register_fault
from adjoint.core.guarantee import Derived, Empirical, Guarantee
from adjoint.core.launch import Execute, Setup, imported
from adjoint.core.plan import Candidate, Compute, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.experts import eager, grouped_mm
from adjoint.ops.moe.experts.bounds import Bounds, in_words
from adjoint.ops.moe.experts.eager import PER_EXPERT, Products
from adjoint.ops.moe.layout import MAX_ENTRIES, MAX_EXPERTS, REPORTED, Layout
from adjoint.ops.moe.layout.eager import write as write_layout

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

INDEX_OUT_OF_RANGE = register_fault(
    "moe.experts: indices must be at least 0 and less than the number of experts, "
    "got {value} at position {position} (token·k + slot)"
)

DEPTH = {torch.float64: 16, torch.float32: 32, torch.bfloat16: 64, torch.float16: 64}
"""The number of terms of a sum that one step of a product adds."""

HIDDEN_COLUMNS = {torch.float64: 32, torch.float32: 64, torch.bfloat16: 128, torch.float16: 128}
"""The number of columns of h·dh of which one program writes the sum, for the gradient of a routing weight."""

EDGE = {torch.float64: 32, torch.float32: 64}
"""The rows, and the columns, of a tile for the types without matrix instructions. The order of their sums within a row
follows the layout of a tile, so they have the same tile under every schedule."""

NEED_X, NEED_GATE_UP, NEED_DOWN, NEED_WEIGHTS = 1, 2, 4, 8
"""The bits of the gradients in the mask of a backward."""

MAX_WIDTH = 2**15
"""The largest D or 2·I, because offsets inside one expert's weights have 32 bits."""


def refuse(problem: Problem) -> str:
    """Why the kernels cannot serve a problem."""
    tokens, hidden, experts, inner, slots = problem.sizes
    if tokens * slots > MAX_ENTRIES:
        return f"numbers up to {MAX_ENTRIES} rows, these are {tokens * slots}"
    if experts > MAX_EXPERTS:
        return f"groups by up to {MAX_EXPERTS} experts, these are {experts}"
    if max(hidden, 2 * inner) > MAX_WIDTH:
        return f"rows have up to {MAX_WIDTH} columns, these have {max(hidden, 2 * inner)}"
    return ""


HOPPER_MULTIPLE = 64
"""D and I must be multiples of this for the kernels for Hopper: it is the number of terms in one of their stages."""

HOPPER_LEAST_HIDDEN = 128
"""The least D for the kernels for Hopper. Triton 3.6 does not compile the product of gradients by token for 64
columns, which are half a tile."""


def _refuse_hopper(problem: Problem) -> str:
    """Why the kernels for Hopper cannot serve a problem."""
    _, hidden, _, inner, _ = problem.sizes
    if problem.dtypes[0] not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit types, this layer is {short(problem.dtypes[0])}"
    if hidden % HOPPER_MULTIPLE or inner % HOPPER_MULTIPLE:
        return f"D and I must be multiples of {HOPPER_MULTIPLE} for its kernels, they are {hidden} and {inner}"
    if hidden < HOPPER_LEAST_HIDDEN:
        return f"D must be at least {HOPPER_LEAST_HIDDEN} for its kernels, it is {hidden}"
    return refuse(problem)


# ------------------------------------------------------------------------------------------- guarantee

CEILINGS = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""Recorded ceilings of every output on the cases. The largest measured errors are 4e-16, 6e-7, 4.0e-3 and 4.9e-4."""

_CASES = {
    torch.float64: "normal inputs, D up to 528, I up to 136",
    torch.float32: "normal inputs, D up to 528, I up to 136",
    torch.bfloat16: "normal inputs, D up to 2048, I up to 768, up to 512 experts, uniform and skewed routing",
    torch.float16: "normal inputs, D up to 2048, I up to 768",
}

_BY_SLOT = "a product's terms in the order of its columns; then slots in their order"
_BY_TOKEN = "an expert's rows in the order of their tokens"
_PROMISES = {
    "y": ("token", 4, False, _BY_SLOT),
    "dx": ("token", 4, True, _BY_SLOT),
    "dgate_up": ("expert", 3, True, _BY_TOKEN),
    "ddown": ("expert", 3, False, _BY_TOKEN),
    "dweights": ("token", 2, True, "columns in fixed blocks, blocks in their order"),
}
"""For each output: its item, its roundings to the storage type, whether it depends on dh, and the order of its sums.

The roundings of the forward are g and u, h, each row's result, and the sum of slots. Those of the backward are g and u,
dgu or w·h, each row's result, and the sum of slots."""


_DOMAIN = "finite inputs; where a number on the way may overflow, the bound of what it reaches is infinite"
_BY_THREADS = "; equal bits for equal numbers of threads"


def guarantee(
    problem: Problem, ours: bool, repeats_on_cpu: bool = False, rounds_dh: bool = False
) -> dict[str, Guarantee]:
    """The promises of each output: for our kernels, or for the matrix products of a library, which may round dh.

    On the CPU torch's product of two matrices gives equal bits for equal calls, if the number of threads is the same.
    It promises nothing about a row's bits beside other rows, because the shape of a product may decide its kernel.
    """
    element, is_forward = problem.dtypes[0], problem.op == "moe_experts"
    repeats = repeats_on_cpu and problem.device.type == "cpu"
    bounds, words = Bounds(element, problem.dtypes[-1], rounds_dh), f"{in_words(element, rounds_dh)}: docs/experts.md"
    return {
        name: Guarantee(
            repeatable=ours or repeats,
            batch_invariant=item if ours else "",
            device_invariant=False,
            accumulator=short(wide_dtype(element)),
            roundings=roundings + (rounds_dh and has_dh),
            error=Derived(words, bounds.y if is_forward else partial(bounds.gradient, name)),
            recorded=Empirical(CEILINGS[element], _CASES[element]),
            domain=_DOMAIN + (f"; {order}" if ours else _BY_THREADS * repeats),
            special_values="as the products and sums give them, in the tokens and experts they reach; "
            f"silu(+∞) = +∞, silu(−∞) {'= −0' if ours else 'is NaN'}",
            out_of_range=f"an index out of range adds nothing and has no gradient, and is {REPORTED}",
        )
        for name, (item, roundings, has_dh, order) in _PROMISES.items()
        if is_forward == (name == "y")
    }


# ------------------------------------------------------------------------------------------ candidates


def _write_layout(down: Tensor, indices: Tensor, outputs: tuple[Tensor, ...]) -> Layout:
    """Writes the layout of a forward in PyTorch."""
    layout = Layout(*outputs[2:])
    write_layout(indices, down.shape[0], layout, INDEX_OUT_OF_RANGE)
    return layout


def _forward(products: Products) -> Compute:
    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
        x, gate_up, down, indices, weights, keep = arguments
        layout = _write_layout(down, indices, outputs)
        with torch.autocast(x.device.type, enabled=False):  # the op has cast its inputs already, and its sums are wider
            layer = x, gate_up, down, weights
            eager.forward(layer, layout, outputs[0], outputs[1] if keep else None, products)

    return run


def _backward(products: Products) -> Compute:
    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
        with torch.autocast(arguments[0].device.type, enabled=False):
            eager.backward(arguments[:6], Layout(*arguments[6:9]), outputs, products)

    return run


def _set_up(setup: Setup, folder: str) -> Execute:
    """A plan on the kernels of a folder.

    If there are no rows, no experts or no columns, nothing is multiplied and outputs are zero.
    """
    is_forward, (option,) = setup.problem.op == "moe_experts", setup.problem.options
    if 0 not in setup.problem.sizes and (is_forward or option):
        return imported(f"adjoint.ops.moe.experts.{folder}.layer:{'forward' if is_forward else 'backward'}")(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        if is_forward:
            _write_layout(arguments[2], arguments[3], outputs)
        for output in outputs[:2] if is_forward else outputs:
            output.zero_()

    return execute


def _candidates(kernel: str, in_torch: Callable[[Products], Compute]) -> tuple[Candidate, ...]:
    return (
        Candidate(
            name="gluon.grouped",
            backend="triton",
            kernel=kernel,
            revision=1,
            refuse=_refuse_hopper,
            guarantee=lambda problem: guarantee(problem, ours=True),
            setup=partial(_set_up, folder="hopper"),
            targets=("sm_90",),
            schedules=_SCHEDULES,
            entry=lambda problem: "hopper",
        ),
        Candidate(
            name="triton.grouped",
            backend="triton",
            kernel=kernel,
            revision=1,
            refuse=refuse,
            guarantee=lambda problem: guarantee(problem, ours=True),
            setup=partial(_set_up, folder="triton"),
            schedules=_SCHEDULES,
        ),
        in_pytorch(
            "eager.grouped",
            lambda problem: guarantee(problem, ours=False, repeats_on_cpu=True),
            allocating_outputs(in_torch(PER_EXPERT), many_calls=True),
            revision=2,
        ),
        # It comes after the candidate that serves everything, so only a preference that names it gets it.
        replace(
            in_pytorch(
                "eager.grouped_mm",
                lambda problem: guarantee(problem, ours=False, rounds_dh=True),
                allocating_outputs(in_torch(grouped_mm.GROUPED_MM), many_calls=True),
                revision=2,
            ),
            refuse=grouped_mm.refuse,
        ),
    )


EXPERTS = _candidates("moe_experts", _forward)
EXPERTS_BACKWARD = _candidates("moe_experts_backward", _backward)
