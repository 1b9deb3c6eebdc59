"""Workloads that take no time, their rows, and rows that nobody measured."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from adjoint.bench.measurement import run
from adjoint.cli import app
from adjoint.contract.cases import Workload
from adjoint.ops.activation.swiglu import cases
from adjoint.ops.moe.route import cases as routes

CPU = torch.device("cpu")


def small(**changes: Any) -> Workload:
    """A workload of the real family, small enough for a test."""
    workload = next(w for w in cases.WORKLOADS if w.subject.name == "swiglu")
    make = lambda dtype, device, generator: tuple(  # noqa: E731
        torch.randn(12, 32, generator=generator).to(dtype) for _ in workload.subject.inputs
    )
    made = replace(workload, name="swiglu 12×32", make=make, forward_bytes=3 * 768, backward_bytes=5 * 768, peers=())
    return replace(made, **changes)


def rows_of(workload: Workload, **options: Any) -> dict[tuple[str, str], run.Row]:
    on_a_cpu, quickly = replace(workload, devices=("cpu",)), {"compile": False, "rounds": 1}
    rows = run.measure("activation", on_a_cpu, CPU, **(quickly | options))  # type: ignore[arg-type]
    return {(row.contender, row.direction): row for row in rows}


def workload_of(module: Any, text: str) -> Workload:
    """The first workload of a family that has this text in its name."""
    return next(workload for workload in module.WORKLOADS if text in workload.name)


def row(contender: str, microseconds: float | None, ratio: float | None = None, **changes: Any) -> run.Row:
    made = run.Row("activation", "swiglu 8×8", "forward", contender, run.OK, 10**6, microseconds, ratio, 1.7e-3)
    return replace(made, **changes)


def result_of(*rows: run.Row) -> run.Result:
    return run.Result(torch.device("cuda"), 4000.0, rows)


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--no-compile", *options])


INACCURATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "three percent off": lambda gate, up: F.silu(gate) * up * 1.03,
    "last row missing": lambda gate, up: torch.cat([(F.silu(gate) * up)[:-1], up[-1:] * 0]),
}
"""Baselines that are wrong, and not so wrong that they have no time."""


def routing(**changes: Any) -> Workload:
    """Few distinct logits, so that equal ones are everywhere."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> tuple[Tensor]:
        return (torch.randn(64, 128, generator=generator).mul(2).round().to(dtype),)

    return replace(workload_of(routes, "128 experts"), make=make, peers=(), **changes)


def higher_first(logits: Tensor) -> Tensor:
    """Of equal logits the higher index first: the other way around than ours."""
    order = logits.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return logits.shape[-1] - 1 - order
