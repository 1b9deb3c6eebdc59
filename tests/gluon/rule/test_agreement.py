"""The model and the GPU agree: on the same problems, both are within what the plan for Hopper promises and records, and
their results are no further from each other than is recorded of their errors. Bits may differ: the model adds the terms
of a product in another order."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.inputs import each
from adjoint.core import kernels
from adjoint.core.preference import Preference, resolve
from tests.gluon import hopper
from tests.gluon.rule.examples import EXAMPLES, Example

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels.interpreting(), reason="the kernels run on the GPU here"),
]


class _Modelled:
    """The results of examples in the model: a process each, all of which run beside each other and beside the GPU."""

    def __init__(self, folder: Path) -> None:
        surroundings = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._files = {name: folder / f"{number}.pt" for number, name in enumerate(EXAMPLES)}
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, "-m", "tests.gluon.rule.save_results", name, str(file)],
                env=surroundings,
                cwd=Path(__file__).parents[3],
            )
            for name, file in self._files.items()
        }

    def results(self, name: str) -> dict[str, Tensor]:
        assert self._processes[name].wait() == 0, f"the model did not run {name!r}"
        results: dict[str, Tensor] = torch.load(self._files[name])
        return results

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def modelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Modelled]:
    started = _Modelled(tmp_path_factory.mktemp("modelled"))
    yield started
    started.end()


def on_the_gpu(example: Example, device: torch.device) -> dict[str, Tensor]:
    """The results of an example from the plan for Hopper, on the CPU."""
    there = Example(each(lambda x: x.to(device), example.inputs), example.normalize, example.final)
    call, plan = there.call, resolve(Preference(plan=hopper.candidate_of(there.call.operator).name))
    outputs = directions.forward(call, plan).run()
    upstream = tuple(None if x is None else x.to(device) for x in example.upstream())
    slopes = directions.backward(call, upstream, outputs, plan).run()  # type: ignore[arg-type]
    return {name: result.cpu() for name, result in hopper.named(call, outputs, slopes).items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_model_agrees_with_the_gpu(name: str, device: torch.device, modelled: _Modelled) -> None:
    if kernels.architecture(device) != hopper.TARGET:
        pytest.skip(f"the kernels are for {hopper.TARGET}")
    example = EXAMPLES[name]()
    measured, expected = on_the_gpu(example, device), modelled.results(name)
    assert expected.keys() == measured.keys()
    for where, results in (("model", expected), ("GPU", measured)):
        for output, statement, error in hopper.errors(example, results):
            assert error.holds, (where, output, statement, error)
    stated = hopper.promises(example)
    for output, result in measured.items():
        recorded = stated[output].recorded
        assert recorded is not None
        apart = recorded.measure(result, expected[output].double())
        print(f"{name}: {output} {apart.value:.2e} of {apart.limit:.2e} apart")
        assert apart.holds, (output, apart)
