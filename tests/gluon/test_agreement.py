"""The model and the GPU agree: on the same problems, both are within what the plan for Hopper promises and records, and
their results are no further from each other than is recorded of their errors. Bits may differ: the model adds the terms
of a product in another order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.inputs import each
from adjoint.core import kernels
from adjoint.core.preference import Preference, resolve
from tests.gluon import hopper
from tests.gluon.examples import EXAMPLES, Example

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels.interpreting(), reason="the kernels run on the GPU here"),
]


def in_the_model(name: str, file: Path) -> dict[str, Tensor]:
    """The results of an example in the model, which another process runs."""
    command = [sys.executable, "-m", "tests.gluon.save_results", name, str(file)]
    surroundings = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=surroundings, cwd=Path(__file__).parents[2])
    results: dict[str, Tensor] = torch.load(file)
    return results


def on_the_gpu(example: Example, device: torch.device) -> dict[str, Tensor]:
    """The results of an example from the plan for Hopper, on the CPU."""
    there = Example(each(lambda x: x.to(device), example.inputs), example.normalize, example.final)
    call, plan = there.call, resolve(Preference(plan=hopper.candidate_of(there.call.operator).name))
    outputs = directions.forward(call, plan).run()
    upstream = tuple(None if x is None else x.to(device) for x in example.upstream())
    slopes = directions.backward(call, upstream, outputs, plan).run()  # type: ignore[arg-type]
    return {name: result.cpu() for name, result in hopper.named(call, outputs, slopes).items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_model_agrees_with_the_gpu(name: str, device: torch.device, tmp_path: Path) -> None:
    if kernels.architecture(device) != hopper.TARGET:
        pytest.skip(f"the kernels are for {hopper.TARGET}")
    example = EXAMPLES[name]()
    modelled, measured = in_the_model(name, tmp_path / "results.pt"), on_the_gpu(example, device)
    assert modelled.keys() == measured.keys()
    for where, results in (("model", modelled), ("GPU", measured)):
        for output, statement, error in hopper.errors(example, results):
            assert error.holds, (where, output, statement, error)
    stated = hopper.promises(example)
    for output, result in measured.items():
        recorded = stated[output].recorded
        assert recorded is not None
        apart = recorded.measure(result, modelled[output].double())
        print(f"{name}: {output} {apart.value:.2e} of {apart.limit:.2e} apart")
        assert apart.holds, (output, apart)
