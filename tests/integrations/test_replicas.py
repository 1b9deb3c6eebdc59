"""`nn.DataParallel` copies a model for each GPU: a replica of a patched model runs with its own parameters."""

# ruff: noqa: F811  (fixtures are imported, and arguments have their names)

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint.integrations.transformers import patch, unpatch
from tests.integrations.test_patch import _version, families, ids, their_model  # noqa: F401


def replica(model: nn.Module) -> Any:
    """What `torch.nn.parallel.replicate` makes of a model for one GPU, on a CPU: parameters are copies."""
    modules = list(model.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}  # type: ignore[no-untyped-call]
    for module in modules:
        for key, child in module._modules.items():
            replicas[module]._modules[key] = None if child is None else replicas[child]
        for key, parameter in module._parameters.items():
            if parameter is None:
                replicas[module]._parameters[key] = None
            else:
                setattr(replicas[module], key, parameter.detach().clone())
        for key, buffer in module._buffers.items():
            replicas[module]._buffers[key] = None if buffer is None else buffer.clone()
    return replicas[model]


@families
@pytest.mark.parametrize("loss", (False, True))
def test_a_replica_has_its_own_parameters(name: str, loss: bool, ids: Tensor) -> None:
    model = their_model(name).train()
    model.config.output_router_logits = False
    patch(model, loss=loss, verbose=False)
    expected = model(input_ids=ids, labels=ids, use_cache=False)
    mine, other = replica(model), copy.deepcopy(model)
    of_mine = replica(mine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for each in (mine, of_mine, replica(other)):
        output = each(input_ids=ids, labels=ids, use_cache=False)
        assert torch.equal(output.loss, expected.loss) and (output.logits is None) == loss
    unpatch(model)
    assert not any("_replicate_for_data_parallel" in vars(module) for module in model.modules())
