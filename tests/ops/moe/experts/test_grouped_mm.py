"""The expert layer on torch's grouped product: right, chosen by name alone, and deaf to what that leaves unwritten."""

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.ops.moe.experts import eager, grouped_mm, plans, reference
from adjoint.ops.moe.layout import allocate as allocate_layout
from adjoint.ops.moe.layout.eager import write as write_layout

NAMED = Preference(plan="eager.grouped_mm")
BFLOAT16 = torch.bfloat16


def _layer(device: torch.device, tokens: int = 13, columns: int = 24) -> list[Tensor]:
    """x, gate_up, down, indices and weights of four experts with I = 16; expert 2 is nobody's."""
    generator = torch.Generator().manual_seed(5)

    def values(*shape: int) -> Tensor:
        scale = max(1, shape[-1]) ** -0.5 if len(shape) == 3 else 1.0
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(BFLOAT16).to(device)

    indices = torch.tensor([0, 1, 3])[torch.randint(3, (tokens, 2), generator=generator)]
    matrices = values(4, 32, columns), values(4, columns, 16)
    return [values(tokens, columns), *matrices, indices.to(device), values(tokens, 2)]


def _upstream(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(6)).to(x.dtype).to(x.device)


def _run(inputs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    y = moe.experts(*leaves, preference=NAMED)
    return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.is_floating_point()], _upstream(y))


def _assert_right(got: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = reference.experts(*wide), *reference.experts_backward(_upstream(inputs[0]).double(), *wide)
    for value, truth in zip(got, exact, strict=True):
        assert (value.double() - truth).norm() <= plans.CEILINGS[BFLOAT16] * truth.norm()


def _with_garbage(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever torch's product leaves unwritten, or might, is NaN. Returns how many rows or matrices a call spoils."""
    product: Any = grouped_mm._grouped_mm
    spoilt: list[int] = []

    def spoiling(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left, right, offs=offs)
        unwritten = torch.arange(len(out), device=out.device) >= offs[-1]
        if out.dim() == 3:
            unwritten = offs.diff(prepend=offs.new_zeros(1)) == 0
        out[unwritten] = float("nan")
        spoilt.append(int(unwritten.sum()))
        return out

    monkeypatch.setattr(grouped_mm, "_grouped_mm", spoiling)
    return spoilt


def test_values(device: torch.device) -> None:
    inputs = _layer(device)
    got = _run(inputs)
    _assert_right(got, inputs)
    assert not got[2][2].any() and not got[3][2].any()  # nobody's expert


def test_any_strides_and_addresses(device: torch.device) -> None:
    x, gate_up, down, indices, weights = _layer(device)
    moved = torch.empty(down.numel() + 1, dtype=BFLOAT16, device=device)[1:].view(down.shape).copy_(down)
    inputs = [x.T.contiguous().T, torch.stack((gate_up, gate_up), -1)[..., 0], moved, indices.T.contiguous().T, weights]
    for got, expected in zip(_run(inputs), _run([x, gate_up, down, indices, weights]), strict=True):
        assert torch.equal(got, expected)


def test_unwritten_rows_reach_nobody(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries whose expert is out of range have rows that nobody writes; so may an expert without rows."""
    spoilt = _with_garbage(monkeypatch)
    x, gate_up, down, indices, weights = _layer(device)
    indices[2, 1], indices[5, 0] = -1, 4
    layout = allocate_layout(indices, 4)
    write_layout(indices, 4, layout, None)
    layer, y, gu = (x, gate_up, down, weights), torch.empty_like(x), x.new_empty(26, 32)
    eager.forward(layer, layout, y, gu, grouped_mm.GROUPED_MM)
    gradients = tuple(map(torch.empty_like, layer))
    eager.backward((_upstream(x), *layer, gu), layout, gradients, grouped_mm.GROUPED_MM)
    assert len(spoilt) == 6 and all(spoilt)
    _assert_right((y, *gradients), [x, gate_up, down, indices, weights])
    assert gradients[3][2, 1] == gradients[3][5, 0] == 0
    assert torch.equal(gu[24:], torch.zeros_like(gu[24:]))  # what is saved is written whole


@pytest.mark.parametrize(("tokens", "columns"), [(0, 24), (3, 0)])
def test_nothing_to_multiply(tokens: int, columns: int, device: torch.device) -> None:
    inputs = _layer(device, tokens, columns)
    for got, like in zip(_run(inputs), [inputs[0], *(t for t in inputs if t.is_floating_point())], strict=True):
        assert torch.equal(got, torch.zeros_like(like))


def test_only_its_name_chooses_it(device: torch.device) -> None:
    inputs = _layer(device)
    for preference in (None, Preference(backend="eager"), Preference(batch_invariant=False)):
        plan = adjoint.plan(moe.experts, *inputs, preference=preference)
        assert plan.adjoint is not None and "grouped_mm" not in plan.name + plan.adjoint.name
    plan = adjoint.plan(moe.experts, *inputs, preference=NAMED)
    assert plan.adjoint is not None and plan.name == plan.adjoint.name == "eager.grouped_mm"
    for promise in (*plan.guarantee.values(), *plan.adjoint.guarantee.values()):
        assert not (promise.batch_invariant or promise.repeatable or promise.device_invariant)


def _narrowed(tensor: Tensor) -> Tensor:
    """With 20 columns of x instead of 24, wherever they are."""
    for axis, size in enumerate(tensor.shape):
        if size == 24:
            return tensor.narrow(axis, 0, 20)
    return tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [(Tensor.float, "takes bfloat16, this layer is float32"), (_narrowed, "multiples of 8 .* they are 20 and 16")],
)
def test_what_it_refuses(change: Any, words: str, device: torch.device) -> None:
    inputs = [change(t) if t.is_floating_point() else t for t in _layer(device)]
    with pytest.raises(adjoint.Unsupported, match=words):
        moe.experts(*inputs, preference=NAMED)
