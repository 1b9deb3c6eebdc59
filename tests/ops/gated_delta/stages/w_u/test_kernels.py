"""The kernels of `recompute_w_u` beyond the shared checks: bounds, edges, what is not read."""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core.errors import status_word
from adjoint.core.launch import Setup
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.values import solved
from tests.ops.gated_delta.sequences import CPU

pytestmark = pytest.mark.kernels

TRITON = Preference(backend="triton")


def chunks(shape: tuple[int, int, int, int, int, int], chunk: int, device: torch.device) -> list[Tensor]:
    inputs = solved(shape, chunk)(torch.float32, CPU, torch.Generator().manual_seed(0))
    return [x.to(device) for x in inputs[:5]]


@pytest.mark.parametrize("bounds", [(0, 0, 3, 3, 40), (0, 50, 20, 45), (-3, 7, 7, 40), (2, 9), (0,), (41, 40)])
def test_bounds_are_put_in_order(device: torch.device, bounds: tuple[int, ...]) -> None:
    """As the path in plain PyTorch puts them, with the tokens before the first and after the last beside them."""
    from adjoint.ops.gated_delta.stages.w_u.kernels import gated_delta_bounds

    time = 40
    wrong = torch.tensor(bounds, device=device, dtype=torch.int32)
    out = torch.full((len(bounds) + 2,), -7, device=device, dtype=torch.int64)
    setup = Setup(Problem("recompute_w_u", device, (torch.float32,), "", (), ()), {})
    launch = setup.kernel(gated_delta_bounds, index=torch.int32, REPORT=False, BLOCK=1024, num_warps=8).launch
    word = status_word(device)
    launch((1,), cu_seqlens=wrong, bounds=out, status_word=word, fault=0, count=len(bounds), time=time, stride=1)
    starts, lengths = packing.bounds(1, time, wrong, raises=False)
    ends = wrong.cpu().long().clamp(0, time).cummax(0).values
    assert out.tolist() == [0, *ends.tolist(), time]
    assert out[1:-2].tolist() == starts.tolist() and out[1:-1].diff().tolist() == lengths.tolist()


def test_what_stands_past_the_end_is_not_used(device: torch.device) -> None:
    """Columns of T for tokens that are not there: NaN in them reaches nothing."""
    k, v, beta, G, T = chunks((1, 5, 1, 2, 3, 2), 4, device)
    spoiled = T.clone()
    spoiled[:, 4:, :, 1:] = torch.nan
    results = []
    for matrix in (T, spoiled):
        leaves = [x.clone().requires_grad_() for x in (k, v, beta, G, matrix)]
        w, u = adjoint.gated_delta.recompute_w_u(*leaves, preference=TRITON)
        results.append((w, u, *torch.autograd.grad((w, u), leaves, (torch.ones_like(w), torch.ones_like(u)))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not results[1][-1][:, 4:, :, 1:].any()


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_counts_as_one_without_a_gradient(device: torch.device, used: int) -> None:
    leaves = [x.requires_grad_() for x in chunks((1, 6, 1, 2, 3, 2), 4, device)]
    out = adjoint.gated_delta.recompute_w_u(*leaves, preference=TRITON)
    upstream = [torch.ones_like(x) if place == used else torch.zeros_like(x) for place, x in enumerate(out)]
    both = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    alone = torch.autograd.grad(out[used], leaves, upstream[used])
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
    assert both[used].any() and not both[1 - used].any()
