"""`HybridLM` under FSDP2, two processes on the CPU: gradients and tokens of one process, and what cannot be saved."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.models import pack
from tests.models.small import CONFIGS, EXACT_GRADIENTS, distance, sequences, small_model

RANKS = 2

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch was built without torch.distributed, or without gloo",
)


def loss_of(model: Any, rank: int) -> Tensor:
    """Of other packed sequences on each rank, as many labels on both."""
    ids, cu_seqlens = pack(sequences((9, 4, 7) if rank == 0 else (5, 12, 3)))
    return model(ids, cu_seqlens=cu_seqlens, labels=ids).loss  # type: ignore[no-any-return]


def rank_main(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    minute = timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=minute)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    gathered: dict[str, Any] = {}
    for name in CONFIGS:
        model = small_model(name, torch.float64)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss_of(model, rank).backward()
        gradients = {key: p.grad.full_tensor() for key, p in model.named_parameters()}  # type: ignore[union-attr]
        tokens = model.eval().generate([[1, 2, 3], [7]], 4)
        with pytest.raises(adjoint.ArgumentError) as refusal:
            model.save_pretrained(Path(folder) / name)
        gathered[name] = {"gradients": gradients, "tokens": tokens, "refusal": str(refusal.value)}
    if rank == 0:
        torch.save(gathered, Path(folder) / "gathered.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.spawn(rank_main, args=(str(folder),), nprocs=RANKS)
    return torch.load(folder / "gathered.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sharded_model_is_the_whole_one(gathered: dict[str, dict[str, Any]], name: str) -> None:
    model = small_model(name, torch.float64)
    for rank in range(RANKS):
        (loss_of(model, rank) / RANKS).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert distance(gathered[name]["gradients"][key], parameter.grad) <= EXACT_GRADIENTS, key
    assert gathered[name]["tokens"] == model.eval().generate([[1, 2, 3], [7]], 4)
    assert "is sharded over processes; gather all of them with full_tensor()" in gathered[name]["refusal"]
