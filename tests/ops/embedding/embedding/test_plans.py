"""The plans of the lookup's gradient, and their memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import ArgumentError, Plan, Preference, Unsupported
from adjoint.verify.checks.bits import same_bits
from tests.ops.embedding.embedding.lookups import (
    COLUMNS,
    ROWS,
    every_backend,
    expected_rows,
    make_ids,
    make_weight,
    normal,
)

FORMS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "dense": lambda weight: {},
    "into": lambda weight: {"accumulate_into": torch.zeros_like(weight)},
    "sparse": lambda weight: {"sparse": True},
}


def _plan(form: str, device: torch.device, backend: str, **preference: Any) -> Plan:
    weight = make_weight(device).detach()
    narrowed = Preference(backend=backend, **preference)
    ids = make_ids(9, device=device)
    return adjoint.plan(adjoint.embedding, ids, weight, preference=narrowed, **FORMS[form](weight))


def _backward(form: str, device: torch.device, backend: str, **preference: Any) -> Plan:
    plan = _plan(form, device, backend, **preference).adjoint
    assert plan is not None
    return plan


@every_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["tiles", "sequential"])
def test_plans_by_name(order: str, form: str, backend: str, device: torch.device) -> None:
    plan = _plan(form, device, backend, plan=f"{backend}.gather+{backend}.{order}")
    assert (plan.name, plan.adjoint.name) == (f"{backend}.gather", f"{backend}.{order}")  # type: ignore[union-attr]
    backward = plan.adjoint
    assert backward is not None
    assert str(backward.sku).startswith(f"embedding_backward{'' if form == 'dense' else '_' + form}/{backend}/")
    assert str(backward.sku).endswith("tile=32" if order == "tiles" else "tile=none")
    promise = backward.guarantee["dweight"]
    assert promise.flags == "repeatable, batch_invariant(row), device_invariant"
    assert promise.accumulator == "float32" and promise.roundings == 1
    assert ("tiles of 32" in promise.domain) == (order == "tiles")
    assert plan.guarantee["out"].roundings == 0


@every_backend
def test_the_tiles_come_first(backend: str, device: torch.device) -> None:
    assert _backward("dense", device, backend).name == f"{backend}.tiles"
    named = f"{backend}.sequential"
    with pytest.raises(Unsupported, match=rf"(?s)embedding: no plan .* asks for the plan {named}"):
        _plan("dense", device, backend, plan=named)  # no forward plan has the name


def test_no_workspace_allowed_lists_every_candidate(device: torch.device) -> None:
    weight, ids = make_weight(device), make_ids(4, device=device)
    with pytest.raises(Unsupported) as caught:
        adjoint.embedding(ids, weight, preference=Preference(max_workspace_bytes=0)).sum().backward()
    message = str(caught.value)
    candidates = ("gather",) if "embedding: no plan" in message else ("tiles", "sequential")
    for name in (f"{backend}.{kind}" for backend in ("triton", "eager") for kind in candidates):
        assert f"  {name}: " in message
    assert "the preference allows 0 bytes" in message


def test_eager_plans_take_no_workspace(device: torch.device) -> None:
    plan = _backward("dense", device, "eager")
    assert plan.workspace_bytes is None
    with pytest.raises(ArgumentError, match=r"eager\.tiles takes no workspace="):
        plan.run(
            normal(9, COLUMNS, device=device), make_ids(9, device=device), workspace=torch.empty(99, device=device)
        )


def _guarded(size: int, shift: int, device: torch.device) -> tuple[Tensor, Callable[[], bool]]:
    """Poisoned memory of a size that begins at any address, and whether what lies around it is untouched."""
    memory = torch.full((size + 1024,), 0xAB, dtype=torch.uint8, device=device)
    begin = 512 + shift - memory.data_ptr() % 256
    around = torch.cat((memory[:begin], memory[begin + size :])).clone()
    return memory[begin : begin + size], lambda: torch.equal(
        torch.cat((memory[:begin], memory[begin + size :])), around
    )


@pytest.mark.kernels
@pytest.mark.parametrize("shift", [0, 1, 255])
@pytest.mark.parametrize("form", FORMS)
def test_the_stated_workspace_is_enough_wherever_it_begins(form: str, shift: int, device: torch.device) -> None:
    """Poisoned: nothing is read before it is written. Guarded: nothing is written beside it."""
    plan = _backward(form, device, "triton")
    assert plan.workspace_bytes
    dout, ids = normal(9, COLUMNS, device=device), make_ids(9, device=device)
    workspace, intact = _guarded(plan.workspace_bytes, shift, device)
    buffer = torch.zeros(ROWS, COLUMNS, device=device)
    if form == "dense":
        out = torch.full((ROWS, COLUMNS), float("nan"), device=device)
        assert plan.run(dout, ids, out=out, workspace=workspace) is out
        buffer = out
    elif form == "into":
        assert plan.run(dout, ids, buffer, workspace=workspace) == ()
    else:
        rows, values = plan.run(dout, ids, workspace=workspace)
        buffer[rows] = values
    assert same_bits(buffer, expected_rows(dout, ids))
    assert intact()
    with pytest.raises(ArgumentError, match=rf"too small: {plan.workspace_bytes} bytes are needed"):
        plan.run(dout, ids, *([buffer] * (form == "into")), workspace=workspace[:-1])


@pytest.mark.kernels
def test_the_copies_a_layout_takes_are_in_the_workspace(device: torch.device) -> None:
    """Ids that are not contiguous, and a gradient that no kernel reads as it lies."""
    weight = make_weight(device).detach()
    ids = make_ids(4, 3, 2, device=device).permute(2, 0, 1)
    dout = normal(3, 4, 2, COLUMNS, device=device, seed=2).permute(2, 1, 0, 3)
    plan = adjoint.plan(adjoint.embedding, ids, weight)
    workspace, intact = _guarded(plan.workspace_bytes or 0, 3, device)
    assert len(workspace) >= ids.numel() * 8
    assert same_bits(plan.run(ids, weight, workspace=workspace), weight[ids])  # type: ignore[arg-type]
    assert intact()
    operator = torch.ops.adjoint.embedding_backward
    expected = operator(dout.contiguous(), ids.contiguous(), ROWS, -1, "")
    assert same_bits(operator(dout, ids, ROWS, -1, ""), expected)
    assert same_bits(expected, expected_rows(dout, ids))


@pytest.mark.kernels
def test_another_number_of_tokens_is_another_plan(device: torch.device) -> None:
    """A plan's workspace has the size of its problem."""
    plan = _backward("dense", device, "triton")
    with pytest.raises(Unsupported, match=r"not made for .* \(8, 11, 6\), the plan was made for \(9, 11, 6\)"):
        plan.run(normal(8, COLUMNS, device=device), make_ids(8, device=device))
