"""`recompute_w_u` beyond the shared checks: what is rounded, and what is not."""

import pytest
import torch

import adjoint
from adjoint.ops.gated_delta.values import solved
from tests.ops.gated_delta.sequences import CPU


def one_chunk(T: torch.Tensor, value: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    size = T.shape[-1]
    k, v = torch.ones(1, size, 1, 1, dtype=dtype), torch.full((1, size, 1, 1), value, dtype=dtype)
    ones, zeros = torch.ones(1, size, 1), torch.zeros(1, size, 1)
    return adjoint.gated_delta.recompute_w_u(k, v, ones, zeros, T.view(1, size, 1, size))[1].flatten()


def test_T_is_not_rounded_where_it_is_given_wide() -> None:
    """1 + 2⁻¹² − 1 is 2⁻¹² with T in float32, and 0 with T in bfloat16."""
    T = torch.tensor([[1.0, 0.0], [-1.0 - 2**-12, 1.0]])
    assert one_chunk(T)[1] == -(2**-12)
    assert one_chunk(T.bfloat16())[1] == 0


def test_operands_are_rounded_before_the_products() -> None:
    """β·v is rounded to bfloat16: 1/3 times 3 is what bfloat16 makes of it, before a sum in float32."""
    k = v = torch.full((1, 2, 1, 1), 3.0, dtype=torch.bfloat16)
    beta, G = torch.full((1, 2, 1), 1 / 3), torch.log(torch.tensor(0.3)).expand(1, 2, 1)
    T = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 2, 1, 2)
    w, u = adjoint.gated_delta.recompute_w_u(k, v, beta, G, T)
    rounded = (torch.tensor(3.0) * (1 / 3) * torch.tensor(0.3)).bfloat16().float()
    assert torch.equal(w.flatten().float(), torch.stack((rounded, (2 * rounded).bfloat16().float())))
    assert u.flatten().tolist() == [1.0, 2.0]


def test_the_plan_follows_T() -> None:
    k, v, beta, G, T, _ = solved((1, 20, 1, 2, 8, 4), 16)(torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    plan = adjoint.plan(adjoint.gated_delta.recompute_w_u, k, v, beta, G, T)
    assert plan.name == plan.adjoint.name == f"{plan.backend}.solved_T"
    narrow = adjoint.plan(adjoint.gated_delta.recompute_w_u, k, v, beta, G, T.bfloat16())
    assert narrow.name == narrow.adjoint.name == f"{plan.backend}.narrow_T"
    assert narrow.sku != plan.sku
    with pytest.raises(adjoint.Unsupported, match="16 bits"):
        adjoint.gated_delta.recompute_w_u(k, v, beta, G, T, preference=adjoint.Preference(plan="eager.narrow_T"))
