"""`adjoint.nn.Embedding` under FSDP2 (`fully_shard`): two processes on the CPU against one.

Parameters and upstream gradients are small integers. In float64 every sum, and the mean over two ranks,
is then exact in any order, so the bound is 0: sharded and whole results are equal. In bfloat16 each
rank's gradient is one rounding of an exact sum, and the mean of two runs in float32, exactly: the
result is equal to that of the same module in one process, and within half a unit in the last place of
each rank's part of the exact one.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint.nn
from tests import forks

RANKS, ROWS, COLUMNS, TOKENS = 2, 7, 4, 96
LEARNING_RATE = 0.5
BFLOAT16_HALF_ULP = 2.0**-8  # of a number's magnitude, at most

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without torch.distributed, or without gloo",
)


class Model(nn.Module):
    """A table whose rows two ranks cannot share evenly, and a projection."""

    def __init__(self, dtype: torch.dtype, table: type[nn.Embedding] = adjoint.nn.Embedding) -> None:
        super().__init__()
        self.table = table(ROWS, COLUMNS, padding_idx=2, dtype=dtype)
        self.project = nn.Linear(COLUMNS, 3, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        return self.project(self.table(ids))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """The ids of a rank, half of them one token, and the upstream gradient.

    Row 6 is used on rank 1 alone, row 5 never.
    """
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.randint(0, 5, (2, TOKENS // 2), generator=generator)
    ids[0] = 3
    ids[1, 0] = 6 * rank
    return ids, torch.randint(0, 9, (2, TOKENS // 2, 3), generator=generator)


def step(model: nn.Module, ids: Tensor, upstream: Tensor) -> None:
    """One forward and backward."""
    out = model(ids)
    out.backward(upstream.to(out.dtype))


def rank_main(rank: int, folder: str) -> None:
    """What each process does: every setting, two steps of SGD. Rank 0 saves what is gathered."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    minute = timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=minute)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "resharded": (torch.float64, {"reshard_after_forward": True}),
        "kept": (torch.float64, {"reshard_after_forward": False}),
        "mixed": (torch.float32, {"mp_policy": mixed}),
    }
    gathered = {}
    for name, (dtype, options) in settings.items():
        model = Model(dtype)
        for part in (model.table, model.project, model):
            fully_shard(part, mesh=mesh, **options)
        looked_up: list[Tensor] = []
        model.table.register_forward_hook(lambda _m, _i, out, found=looked_up: found.append(out.detach().clone()))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        gradients, rows_here = [], model.table.weight.to_local().shape[0]
        for number in range(2):
            optimizer.zero_grad()
            step(model, *batch(rank, number))
            gradients.append(model.table.weight.grad.full_tensor())
            optimizer.step()
        gathered[name] = {
            "rows": rows_here,
            "looked_up": looked_up,
            "gradients": gradients,
            "table": model.table.weight.full_tensor().detach(),
        }
    if rank == 0:
        torch.save(gathered, Path(folder) / "gathered.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    code = "import os, sys; from tests.nn.test_fsdp import rank_main; rank_main(int(os.environ['RANK']), sys.argv[1])"
    done = forks.python("-c", code, str(folder), ranks=RANKS)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "gathered.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize("setting", ["resharded", "kept"])
@pytest.mark.parametrize("table", [adjoint.nn.Embedding, nn.Embedding])
def test_sharded_is_whole(gathered: dict[str, Any], setting: str, table: type[nn.Embedding]) -> None:
    found = gathered[setting]
    assert found["rows"] == 4  # of 7: the other rank has 3
    model = Model(torch.float64, table)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for number in range(2):
        optimizer.zero_grad()
        for rank in range(RANKS):
            ids, upstream = batch(rank, number)
            step(model, ids, upstream / RANKS)  # FSDP takes the mean over ranks
        expected = model.table.weight.grad
        assert isinstance(expected, Tensor) and expected.count_nonzero() > 0
        assert torch.equal(found["gradients"][number], expected)
        assert not expected[2].any() and not expected[5].any()
        optimizer.step()
    assert torch.equal(found["table"], model.table.weight)


def test_mixed_precision(gathered: dict[str, Any]) -> None:
    """Parameters go to bfloat16 for the computation, gradients come back to float32 for the reduction."""
    found = gathered["mixed"]
    parts, exact = [], []
    for rank in range(RANKS):
        for parts_of, dtype in ((parts, torch.bfloat16), (exact, torch.float64)):
            model = Model(dtype)
            ids, upstream = batch(rank, 0)
            step(model, ids, upstream)
            assert model.table.weight.grad is not None
            parts_of.append(model.table.weight.grad.to(torch.promote_types(dtype, torch.float32)))
            if rank == 0 and dtype == torch.bfloat16:
                assert found["looked_up"][0].dtype == torch.bfloat16
                assert torch.equal(found["looked_up"][0], model.table(ids))
    reduced = found["gradients"][0]
    assert reduced.dtype == found["table"].dtype == torch.float32
    assert torch.equal(reduced, (parts[0] + parts[1]) / RANKS)
    error = (reduced - (exact[0] + exact[1]) / RANKS).abs()
    assert error.any()  # sums that bfloat16 does not hold
    assert (error <= BFLOAT16_HALF_ULP * (exact[0].abs() + exact[1].abs()) / RANKS).all()
    assert all(gradient.isfinite().all() for gradient in found["gradients"]) and found["table"].isfinite().all()
