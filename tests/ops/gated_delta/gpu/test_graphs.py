"""The gated delta rule in CUDA graphs and compiled graphs, and at sizes past 2^16 and 2^31."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.inputs import leaves
from adjoint.core import kernels
from tests.ops.gated_delta.gpu.examples import (
    BFLOAT16,
    FEW,
    Example,
    both_scans,
    drawn,
    every_plan,
    of_sequence,
    plan_of,
    preference_for,
    results,
    same,
)

pytestmark = pytest.mark.gpu


@every_plan
@both_scans
@pytest.mark.parametrize("packed", (False, True), ids=("a batch", "packed"))
def test_a_training_step_is_recorded_in_a_graph(
    device: torch.device, name: str, heads: tuple[int, int], packed: bool
) -> None:
    """Forward and backward through autograd, without a wait; replayed with other values and other bounds. One sequence
    of many heads is scanned in stretches, on two streams."""
    time = 4200
    example = drawn(device, time, heads, bounds=(0, 100, 1500, time) if packed else None)
    plan_of(name, example)
    preference = preference_for(name)
    inputs = leaves((*example.tokens, example.state))

    def step() -> tuple[Tensor, ...]:
        o, final = adjoint.gated_delta_rule(
            *inputs[:5],
            initial_state=inputs[5],
            cu_seqlens=example.cu_seqlens,
            output_final_state=True,
            preference=preference,
        )
        assert final is not None
        return o, final, *torch.autograd.grad((o, final), inputs, (example.do, example.dfinal))

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # what is recorded must have run once
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in (1, 2):
        other = drawn(device, time, heads, bounds=(0, 64 * seed, 64 * seed, time) if packed else None, seed=seed)
        for x, y in zip((*inputs, example.cu_seqlens, example.do, example.dfinal), other, strict=True):
            if x is not None:
                x.detach().copy_(y)
        graph.replay()
        assert same(tuple(x.detach() for x in recorded), results(preference, other)), seed
    example.g[0, 7, 1] = 0.5
    inputs[3].detach().copy_(example.g)
    graph.replay()
    with pytest.raises(adjoint.ArgumentError, match="must be at most 0"):
        adjoint.check()


@every_plan
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_compiled_whole(device: torch.device, name: str, dynamic: bool) -> None:
    """`torch.compile(fullgraph=True)` of forward and backward, packed, for two lengths: the bits of eager mode."""
    preference = preference_for(name)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: adjoint.gated_delta_rule(
            *x[:5], initial_state=x[5], cu_seqlens=x[6], output_final_state=True, preference=preference
        ),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for time in (700, 1500):
        example = drawn(device, time, bounds=(0, 100, 100, time))
        plan_of(name, example)
        inputs = leaves((*example.tokens, example.state))
        outputs = compiled(*inputs, example.cu_seqlens)
        gradients = torch.autograd.grad(outputs, inputs, (example.do, example.dfinal))
        assert same((*(x.detach() for x in outputs), *gradients), results(preference, example)), time
    torch._dynamo.reset()


@every_plan
@both_scans
def test_no_length_compiles_anything_new(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    first = drawn(device, 130, heads, bounds=(0, 30, 130))
    plan_of(name, first)
    results(preference_for(name), first)
    before = kernels.compilations()
    several = (
        (0, 1),
        (0, 64, 65, 65, 500),
        (0, 2100),
        (0, 5000),
        (0, 3, 17000),
        (0, 1, 2, 3, 4, 1500),
        tuple(range(301)),
    )
    for bounds in several:
        results(preference_for(name), drawn(device, bounds[-1], heads, bounds=bounds))
    assert kernels.compilations() == before


# ------------------------------------------------------------------------------------------------- sizes


def _room(device: torch.device, gigabytes: int) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB")


@every_plan
def test_more_than_65535_sequences(device: torch.device, name: str) -> None:
    """So many that their states are more than 2^31 numbers, of 0, 1 and 2 tokens: each as if alone."""
    _room(device, 115)
    number = 2**16 + 100
    lengths = torch.arange(number, device=device) % 3
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    time = int(bounds[-1])
    small = drawn(device, time, FEW)
    state = torch.empty(number, 4, 128, 128, device=device).normal_()
    assert state.numel() > 2**31
    example = small._replace(state=state, cu_seqlens=bounds, dfinal=state)
    plan_of(name, example)
    answers = results(preference_for(name), example)
    for sequence in (1, 2, 3, 65534, 65535, 65536, number - 2, number - 1):
        begin, end = bounds[sequence : sequence + 2].tolist()
        alone = results(preference_for(name), example.of(begin, end, sequence))
        assert same(alone, of_sequence(answers, sequence, begin, end)), sequence


@every_plan
def test_tokens_past_two_to_the_31_numbers(device: torch.device, name: str) -> None:
    _room(device, 110)
    length, number = 4096, 256
    time = length * number + 70
    bounds = (*range(0, length * number + 1, length), time)
    example = drawn(device, 70)  # small: the large ones are drawn in their own dtype
    heads = example.v.shape[2]

    def normal(*shape: int) -> Tensor:
        return torch.empty(1, time, *shape, dtype=BFLOAT16, device=device).normal_()

    example = Example(
        normal(8, 128).mul_(0.07),
        normal(8, 128).mul_(0.07),
        normal(heads, 128),
        -torch.rand(1, time, heads, device=device),
        torch.rand(1, time, heads, device=device),
        torch.randn(number + 1, heads, 128, 128, device=device),
        torch.tensor(bounds, device=device),
        normal(heads, 128),
        torch.randn(number + 1, heads, 128, 128, device=device),
    )
    assert example.v.numel() > 2**31
    plan_of(name, example)
    answers = results(preference_for(name), example)
    for sequence in (0, number - 1, number):
        begin, end = bounds[sequence : sequence + 2]
        alone = results(preference_for(name), example.of(begin, end, sequence))
        assert same(alone, of_sequence(answers, sequence, begin, end)), sequence
