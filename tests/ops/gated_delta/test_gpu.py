"""What only a GPU can show of the gated delta rule: errors and bits of every plan it has there, also of those in Gluon,
which has no interpreter; repeats under load, graphs of a training step, compiled graphs, sizes past 2^16 and 2^31.

Each test runs with every plan of kernels that the device accepts. Few shapes, because each compiles its kernels:
K = V = 128 with 16 value heads, and with 4, of which sequences of more than 1024 tokens are split.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import leaves, widened
from adjoint.core import kernels
from adjoint.core.plan import Plan
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.rule import guarantee, plans

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16
MANY, FEW, ODD, EIGHT = (8, 16), (2, 4), (1, 3), (2, 8)
"""Key heads and value heads: scanned from end to end, split over the card, not in pairs, and as many as are split."""

SMALLER: dict[str, Any] = {"sizes": (64, 128), "dtype": torch.float16}

PORTABLE = "triton.chunked"
NAMES = tuple(dict.fromkeys(c.name for c in (*plans.RULE, *plans.RULE_BACKWARD) if c.backend == "triton"))
"""Every plan that has kernels, of either direction."""

OUTPUTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")

every_plan = pytest.mark.parametrize("name", NAMES)
both_scans = pytest.mark.parametrize("heads", (MANY, FEW), ids=("many heads", "few heads"))


class Example(NamedTuple):
    """Inputs of a call: the op's tensors, and the gradients of its outputs and final states."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    cu_seqlens: Tensor | None
    do: Tensor
    dfinal: Tensor

    @property
    def tokens(self) -> tuple[Tensor, ...]:
        return self[:5]

    def of(self, begin: int, end: int, number: int, row: int = 0) -> "Example":
        """One sequence alone: tokens of a row, and the states of its number."""
        tokens = [x[row : row + 1, begin:end] for x in self.tokens]
        states = slice(number, number + 1)
        return Example(*tokens, self.state[states], None, self.do[row : row + 1, begin:end], self.dfinal[states])


def drawn(
    device: torch.device,
    time: int,
    heads: tuple[int, int] = MANY,
    *,
    sizes: tuple[int, int] = (128, 128),
    dtype: torch.dtype = BFLOAT16,
    rows: int = 1,
    bounds: tuple[int, ...] | None = None,
    decay: float = 0.25,
    near: bool = False,
    seed: int = 0,
) -> Example:
    """Directions as keys and queries, decays and strengths as a layer has them; `near` makes keys nearly equal."""
    generator = torch.Generator(device).manual_seed(seed)
    (key_heads, value_heads), (K, V) = heads, sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    keys = F.normalize(normal(rows, time, key_heads, K), dim=-1)
    if near:
        keys = F.normalize(F.normalize(normal(rows, 1, key_heads, K), dim=-1) + 0.05 * keys, dim=-1)
    number = rows if bounds is None else len(bounds) - 1
    return Example(
        F.normalize(normal(rows, time, key_heads, K), dim=-1).to(dtype),
        keys.to(dtype),
        normal(rows, time, value_heads, V).to(dtype),
        F.logsigmoid(normal(rows, time, value_heads)) * decay,
        normal(rows, time, value_heads).sigmoid(),
        normal(number, value_heads, K, V),
        None if bounds is None else torch.tensor(bounds, device=device),
        normal(rows, time, value_heads, V).to(dtype),
        normal(number, value_heads, K, V),
    )


def preference_for(name: str) -> Preference:
    """A plan by name in the directions that have it, and the portable one in the other."""
    return Preference(plan=name if name == PORTABLE else f"{name}+{PORTABLE}")


def plan_of(name: str, example: Example) -> Plan:
    """The plan, or a skipped test where the device or the shape has none."""
    try:
        return adjoint.plan(
            adjoint.gated_delta_rule,
            *example.tokens,
            initial_state=example.state,
            cu_seqlens=example.cu_seqlens,
            output_final_state=True,
            preference=preference_for(name),
        )
    except adjoint.Unsupported as refusal:
        pytest.skip(str(refusal))


def forward(preference: Preference, example: Example) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        o, final = adjoint.gated_delta_rule(
            *example.tokens,
            initial_state=example.state,
            cu_seqlens=example.cu_seqlens,
            output_final_state=True,
            preference=preference,
        )
    assert final is not None
    return o, final


def results(preference: Preference, example: Example) -> tuple[Tensor, ...]:
    """Outputs, final states, and all gradients."""
    inputs = leaves((*example.tokens, example.state))
    o, final = adjoint.gated_delta_rule(
        *inputs[:5],
        initial_state=inputs[5],
        cu_seqlens=example.cu_seqlens,
        output_final_state=True,
        preference=preference,
    )
    assert final is not None
    gradients = torch.autograd.grad((o, final), inputs, (example.do, example.dfinal))
    return o.detach(), final.detach(), *gradients


def exact_results(example: Example) -> tuple[Tensor, ...]:
    """In float64, by the chunked form in plain PyTorch, which other tests hold to the recurrence."""
    return results(Preference(plan="eager.chunked"), Example(*widened(example)))


def inside(plan: Plan, answers: dict[str, Tensor], exact: dict[str, Tensor], example: Example | None = None) -> None:
    """Every result is finite, within what is recorded and, with its inputs, within what its plan promises for them.
    What float32 has no normal number for may be 0."""
    assert plan.adjoint is not None
    stated = plan.guarantee | plan.adjoint.guarantee
    smallest = torch.finfo(torch.float32).smallest_normal
    *inputs, do, dfinal = (None,) * 9 if example is None else widened(example)
    for name, got in answers.items():
        assert bool(torch.isfinite(got).all()), name
        got, expected = (torch.where(x.abs() < smallest, 0.0, x) for x in (got, exact[name]))
        measured = stated[name].recorded.measure(got, expected)
        assert measured.holds, (name, str(measured))
        if example is not None:
            upstream = (do, dfinal) if name in GRADIENTS else ()
            measured = stated[name].error.measure(got, expected, *upstream, *inputs)
            assert measured.holds, (name, str(measured))


def named(answers: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip((*OUTPUTS, *GRADIENTS), answers, strict=True))


def of_sequence(answers: tuple[Tensor, ...], number: int, begin: int, end: int) -> tuple[Tensor, ...]:
    """What belongs to one of the packed sequences."""
    states = ("final_state", "dinitial_state")
    return tuple(x[number : number + 1] if key in states else x[:, begin:end] for key, x in named(answers).items())


def same(answers: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, answers, expected))


def warm(name: str, heads: str, smaller: str) -> None:
    """Compiles what the tests of a plan and of a number of heads launch, into Triton's cache."""
    device = torch.device("cuda", 0)
    options = SMALLER if smaller else {}
    for bounds in (None, (0, 3, 70)):
        example = drawn(device, 70, {"many": MANY, "few": FEW, "odd": ODD}[heads], bounds=bounds, **options)
        results(preference_for(name), example)


@pytest.fixture(autouse=True, scope="module")
def compiled_concurrently() -> None:
    """One process for each plan and number of heads: compiling is most of the time here, and none of what is tested."""
    if not torch.cuda.is_available() or (os.cpu_count() or 1) < 8:
        return
    code = "import sys; from tests.ops.gated_delta.test_gpu import warm; warm(*sys.argv[1:])"
    combinations = [(name, heads, "") for name in NAMES for heads in ("many", "few", "odd")]
    combinations += [(name, "few", "smaller") for name in NAMES]
    root = Path(__file__).parents[3]
    run = [sys.executable, "-c", code]
    processes = [subprocess.Popen([*run, *what], cwd=root, stderr=subprocess.DEVNULL) for what in combinations]
    for process in processes:
        process.wait()  # a plan that is refused, or fails, is the tests' affair


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    adjoint.check()
    torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ errors


def _without_decay(example: Example) -> Example:
    return example._replace(g=torch.zeros_like(example.g), beta=1 - 0.01 * example.beta)


def _orthogonal(example: Example) -> Example:
    _, time, _, size = example.k.shape
    axes = torch.eye(size, dtype=example.k.dtype, device=example.k.device)[
        torch.arange(time, device=example.k.device) % size
    ]
    return example._replace(k=axes[None, :, None].expand_as(example.k), beta=torch.ones_like(example.beta))


def _reset(*tokens: int) -> Callable[[Example], Example]:
    """−inf as the log decay of some tokens; of the last head alone one more."""

    def change(example: Example) -> Example:
        g = example.g.clone()
        g[:, list(tokens)] = -torch.inf
        g[:, tokens[0] + 1, -1] = -torch.inf
        return example._replace(g=g)

    return change


DOMAINS: dict[str, tuple[dict[str, Any], Callable[[Example], Example]]] = {
    "random": ({"time": 700}, lambda example: example),
    "random, split": ({"time": 2200, "heads": FEW, "decay": 0.05}, lambda example: example),
    "nearly equal keys": ({"time": 1024, "near": True, "decay": 1.0}, lambda example: example),
    "nearly equal keys, slow decay": ({"time": 1024, "near": True, "decay": 1 / 16}, lambda example: example),
    "no decay, full strength": ({"time": 300}, _without_decay),
    "decay that leaves nothing": ({"time": 300, "decay": 5000.0}, lambda example: example),
    "orthogonal keys, full strength": ({"time": 300}, _orthogonal),
    "one token": ({"time": 1}, lambda example: example),
    "a chunk and a token": ({"time": CHUNK + 1}, lambda example: example),
    "packed": ({"time": 700, "bounds": (0, 0, 1, 65, 193, 700, 700)}, lambda example: example),
    "smaller keys, float16": ({"time": 300, "heads": FEW, **SMALLER}, lambda example: example),
    "resets": ({"time": 700}, _reset(0, 63, 64, 100, 101, 640, 699)),
    "resets of most of a chunk": ({"time": 300, "heads": FEW, **SMALLER}, _reset(*range(64, 112))),
    "resets, split": ({"time": 2200, "heads": FEW, "decay": 0.05}, _reset(700, 1023, 1024, 2047, 2199)),
    "resets, packed": ({"time": 700, "bounds": (0, 0, 1, 65, 193, 700, 700)}, _reset(0, 1, 64, 65, 150, 192, 300)),
    "every token reset": ({"time": 130}, _reset(*range(129))),
    "three heads of a key": ({"time": 130, "heads": ODD}, lambda example: example),
}


@every_plan
@pytest.mark.parametrize("domain", DOMAINS)
def test_errors_are_within_what_is_stated(device: torch.device, name: str, domain: str) -> None:
    options, change = DOMAINS[domain]
    example = change(drawn(device, **options))
    plan = plan_of(name, example)
    inside(plan, named(results(preference_for(name), example)), named(exact_results(example)), example)


@every_plan
def test_wide_values(device: torch.device, name: str) -> None:
    """The forward alone, which takes more sizes of V than the backward does."""
    example = drawn(device, 300, FEW, sizes=(64, 192), dtype=torch.float16)
    exact = forward(Preference(plan="eager.chunked"), Example(*widened(example)))
    try:
        answers = forward(Preference(plan=name), example)
    except adjoint.Unsupported as refusal:
        pytest.skip(str(refusal))
    for got, expected in zip(answers, exact, strict=True):
        assert float((got.double() - expected).norm()) <= guarantee.CEILINGS[torch.float16] * float(expected.norm())


@every_plan
def test_residuals_of_a_rounding(device: torch.device, name: str) -> None:
    """Values that the state has already, but for their rounding: dβ is a sum of products with v − Sᵀk, which is then
    smaller than the errors of its terms. Its error is measured against those terms."""
    example = drawn(device, 300)
    remembered = torch.einsum("bthk,bhkv->bthv", example.k.float().repeat_interleave(2, 2), example.state)
    example = example._replace(v=remembered.to(BFLOAT16), g=torch.zeros_like(example.g))
    plan = plan_of(name, example)
    answers, exact = named(results(preference_for(name), example)), named(exact_results(example))
    terms = (example.v.double() * exact["dv"] / example.beta.double()[..., None]).abs().sum(-1)
    error = (answers.pop("dbeta").double() - exact["dbeta"]).norm()
    inside(plan, answers, exact, example)
    assert float(error) <= plan.adjoint.guarantee["dbeta"].recorded.ceiling * float(terms.norm())  # type: ignore[union-attr]


@every_plan
def test_a_million_tokens(device: torch.device, name: str) -> None:
    """One sequence. A decay of about 0.98 a token leaves nothing of a state, or of its gradient, in 65536 tokens: so
    float64 has the last outputs from those alone, and the first gradients likewise."""
    time, some, enough = 2**20, 4096, 2**16
    example = drawn(device, time, FEW, decay=0.02)
    plan = plan_of(name, example)
    answers = named(results(preference_for(name), example))
    last = named(exact_results(example.of(time - enough, time, 0)))
    first = named(exact_results(example.of(0, enough, 0)))
    early = {key: answers[key][:, :some] for key in GRADIENTS[:-1]} | {"dinitial_state": answers["dinitial_state"]}
    inside(plan, early, {key: x[:, :some] if key in GRADIENTS[:-1] else x for key, x in first.items()})
    late = {"o": answers["o"][:, -some:], "final_state": answers["final_state"]}
    inside(plan, late, {"o": last["o"][:, -some:], "final_state": last["final_state"]})


# -------------------------------------------------------------------------------------------------- bits


@every_plan
@both_scans
def test_packed_sequences_are_separate_ones(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    bounds = (0, 0, 1, 66, 1200, 3400)
    example = drawn(device, bounds[-1], heads, bounds=bounds)
    plan_of(name, example)
    batch = results(preference_for(name), example)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        alone = results(preference_for(name), example.of(begin, end, number))
        assert same(alone, of_sequence(batch, number, begin, end)), (begin, end)


@every_plan
@pytest.mark.parametrize("heads", (FEW, EIGHT), ids=("4 heads", "8 heads"))
def test_gradients_pass_through_segments(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """Weak tokens that hardly decay, so that most of a state, and of its gradient, passes through thousands of them:
    within what is stated, and each sequence as if alone, those that are split and those that are not."""
    bounds = (0, 700, 700, 17800, 21896, 30088, 30189)
    example = drawn(device, bounds[-1], heads, bounds=bounds, decay=2e-5)
    example = example._replace(beta=example.beta * 0.01)
    plan = plan_of(name, example)
    answers, exact = results(preference_for(name), example), named(exact_results(example))
    passed = exact["dinitial_state"][2].norm() / example.dfinal[2].norm()
    assert passed > 0.1, "the gradient of the longest initial state has much of the final state's"
    inside(plan, named(answers), exact, example)
    assert torch.equal(named(answers)["dinitial_state"][1], example.dfinal[1])
    for number, (begin, end) in enumerate(pairwise(bounds)):
        alone = results(preference_for(name), example.of(begin, end, number))
        assert same(alone, of_sequence(answers, number, begin, end)), (begin, end)


@every_plan
@both_scans
def test_a_row_of_a_batch_is_the_row_alone(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    example = drawn(device, 1500, heads, rows=3)
    plan_of(name, example)
    batch = results(preference_for(name), example)
    for row in (0, 2):
        alone = results(preference_for(name), example.of(0, 1500, row, row))
        assert same(alone, tuple(x[row : row + 1] for x in batch)), row


@every_plan
@both_scans
def test_prefixes_and_causality(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """The output of a prefix is the prefix of the output, and nothing that comes later changes it."""
    example = drawn(device, 3000, heads)
    plan_of(name, example)
    o, _ = forward(preference_for(name), example)
    for cut in (1, 64, 1000, 1025, 2048, 2500):
        short, _ = forward(preference_for(name), example.of(0, cut, 0))
        assert torch.equal(short, o[:, :cut]), cut
    for cut in (63, 1024, 1777, 2999):
        changed = example._replace(**{key: x.clone() for key, x in zip(Example._fields, example.tokens, strict=False)})
        for x in changed.tokens:
            x[:, cut:] *= 0.5
        again, _ = forward(preference_for(name), changed)
        assert torch.equal(again[:, :cut], o[:, :cut]) and not torch.equal(again[:, cut:], o[:, cut:]), cut


@every_plan
@both_scans
def test_resets_change_no_bit_before_them_and_have_no_gradient(
    device: torch.device, name: str, heads: tuple[int, int]
) -> None:
    """Nor do very low gates, whose results are those of −inf."""
    example = drawn(device, 1500, heads)
    plan_of(name, example)
    before = named(results(preference_for(name), example))
    resets = [100, 101, 1100]
    after = []
    for value in (-torch.inf, -1e30, torch.finfo(torch.float32).min, -104.5):
        g = example.g.clone()
        g[:, resets] = value
        after.append(results(preference_for(name), example._replace(g=g)))
        assert same(after[-1], after[0]), value
    answers = named(after[0])
    assert torch.equal(answers["o"][:, :100], before["o"][:, :100]) and not answers["dg"][:, resets].any()


@every_plan
@both_scans
def test_nan_stays_within_its_chunk_and_after(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """Chunks before it, other sequences, and their gradients keep every bit; a query reaches its own output alone."""
    bounds, token, begin, end = (0, 200, 1500, 1700), 1300, 200 + 17 * CHUNK, 1500
    example = drawn(device, 1700, heads, bounds=bounds)
    plan_of(name, example)
    right = results(preference_for(name), example)
    for names in (("k", "v", "g", "beta"), ("q",)):
        changes = {key: x.clone() for key, x in zip(Example._fields, example.tokens, strict=False) if key in names}
        for x in changes.values():
            x[:, token] = torch.nan
        got = results(preference_for(name), example._replace(**changes))
        elsewhere = torch.ones(1700, dtype=torch.bool, device=device)
        elsewhere[slice(token, token + 1) if names == ("q",) else slice(begin, end)] = False
        assert got[0][:, token].isnan().all() and torch.equal(got[0][:, elsewhere], right[0][:, elsewhere])
        for number in (0, 2):
            whose = number, bounds[number], bounds[number + 1]
            assert same(of_sequence(got, *whose), of_sequence(right, *whose)), (names, number)


@every_plan
def test_a_prefill_in_checking_mode_is_recorded_in_a_graph(device: torch.device, name: str) -> None:
    """NaN in g, a beta above 1 and long keys are reported by each replay, and change nothing otherwise."""
    example = drawn(device, 300, MANY)
    plan_of(name, example)
    expected = forward(preference_for(name), example)
    with adjoint.checked():
        forward(preference_for(name), example)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = forward(preference_for(name), example)
    graph.replay()
    adjoint.check()
    assert same(recorded, expected)
    places = (("g", torch.nan, "got NaN at position 323 "), ("beta", 1.25, "from 0 to 1.* position 323 "))
    for key, value, words in (*places, ("k", 1.0, "the state grow at position ")):
        tensor = getattr(example, key)
        before = tensor.clone()
        if key == "k":
            tensor[:, 20] = value  # 128 of them
        else:
            tensor[0, 20, 3] = value
        graph.replay()
        with pytest.raises(adjoint.ArgumentError, match=words):
            adjoint.check()
        tensor.copy_(before)


@every_plan
@both_scans
def test_a_prefill_cut_in_two(device: torch.device, name: str, heads: tuple[int, int]) -> None:
    """After whole chunks it keeps its bits, where it is not one that is split. Any other cut gives what is within the
    ceiling of the exact result as the whole is, so the two are within twice of it."""
    time = 2500
    example = drawn(device, time, heads)
    plan = plan_of(name, example)
    whole = forward(preference_for(name), example)
    for cut in (CHUNK, 3 * CHUNK, SEGMENT, 2 * SEGMENT, 1, 777, 1025):
        first, between = forward(preference_for(name), example.of(0, cut, 0))
        second, last = forward(preference_for(name), example.of(cut, time, 0)._replace(state=between))
        parts = torch.cat((first, second), 1), last
        if heads == MANY and cut % CHUNK == 0:
            assert same(parts, whole), cut
        for key, got, expected in zip(OUTPUTS, parts, whole, strict=True):
            measured = plan.guarantee[key].recorded.measure(got, expected.double())
            assert measured.value <= 2 * measured.limit, (key, cut, str(measured))
    short = forward(preference_for(name), example.of(0, SEGMENT, 0))
    first, between = forward(preference_for(name), example.of(0, 5 * CHUNK, 0))
    second, last = forward(preference_for(name), example.of(5 * CHUNK, SEGMENT, 0)._replace(state=between))
    assert same((torch.cat((first, second), 1), last), short), "a sequence of one segment is never split"


@every_plan
@both_scans
def test_bits_repeat_while_another_stream_loads_the_gpu(
    device: torch.device, name: str, heads: tuple[int, int]
) -> None:
    example = drawn(device, 2048 if heads == MANY else 3000, heads)
    plan_of(name, example)
    first = results(preference_for(name), example)
    load, side = torch.randn(4096, 4096, dtype=BFLOAT16, device=device), torch.cuda.Stream(device)
    for repeat in range(100):
        with torch.cuda.stream(side):
            torch.mm(load, load)
        assert same(results(preference_for(name), example), first), repeat


# ------------------------------------------------------------------------------------------------ graphs


@every_plan
@both_scans
@pytest.mark.parametrize("packed", (False, True), ids=("a batch", "packed"))
def test_a_training_step_is_recorded_in_a_graph(
    device: torch.device, name: str, heads: tuple[int, int], packed: bool
) -> None:
    """Forward and backward through autograd, without a wait; replayed with other values and other bounds."""
    time = 3000
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
    for bounds in ((0, 1), (0, 64, 65, 65, 500), (0, 2100), (0, 3, 17000), (0, 1, 2, 3, 4, 1500), tuple(range(301))):
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


# ---------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", (torch.float32, BFLOAT16), ids=str)
def test_a_step_in_place_and_paged(device: torch.device, kind: torch.dtype) -> None:
    """The pool's other states stay as they are, a row is as if alone, and in place is as out of place."""
    rows, time, heads = 37, 3, (16, 32)
    example = drawn(device, time, heads, rows=rows)
    pool = torch.randn(64, 32, 128, 128, device=device).to(kind)
    indices = torch.randperm(64, device=device)[:rows]
    indices[5] = -1
    o, states = adjoint.gated_delta_step(*example.tokens, pool, state_indices=indices)
    updated = pool.clone()
    again, returned = adjoint.gated_delta_step(*example.tokens, updated, state_indices=indices, in_place=True)
    assert returned is updated and torch.equal(again, o) and not o[5].any()
    chosen = indices >= 0
    assert torch.equal(updated[indices[chosen]], states[chosen])
    others = torch.ones(64, dtype=torch.bool, device=device)
    others[indices[chosen]] = False
    assert torch.equal(updated[others], pool[others])
    row = 11
    token = tuple(x[row : row + 1] for x in example.tokens)
    alone, state = adjoint.gated_delta_step(*token, pool[indices[row]][None])
    assert torch.equal(alone[0], o[row]) and torch.equal(state[0], states[row])
    wide = example._replace(state=pool[indices.clamp_min(0)].float())
    exact = forward(Preference(plan="eager.chunked"), Example(*widened(wide)))
    stated = adjoint.plan(adjoint.gated_delta_step, *example.tokens, pool, state_indices=indices).guarantee
    for key, got, expected in zip(("o", "new_state"), (o, states), exact, strict=True):
        assert stated[key].error.measure(got[chosen], expected[chosen]).holds, key


def test_4096_decoded_tokens_follow_a_prefill(device: torch.device) -> None:
    """Within the ceiling of the prefill, whose state they begin with, and that of one step, every 64 tokens."""
    prefill, decoded = 1024, 4096
    example = drawn(device, prefill + decoded, decay=1 / 64)._replace(state=torch.zeros(1, 16, 128, 128, device=device))
    exact, _ = forward(Preference(plan="eager.chunked"), Example(*widened(example)))
    _, pool = forward(Preference(), example.of(0, prefill, 0))
    steps = []
    for t in range(prefill, prefill + decoded):
        token = (x[:, t : t + 1] for x in example.tokens)
        steps.append(adjoint.gated_delta_step(*token, pool, in_place=True)[0])
    rule = adjoint.plan(adjoint.gated_delta_rule, *example.tokens).guarantee["o"].recorded
    step = adjoint.plan(adjoint.gated_delta_step, *(x[:, :1] for x in example.tokens), pool).guarantee["o"].error
    limit = rule.ceiling + step.ceiling  # type: ignore[union-attr]
    got, expected = torch.cat(steps, 1).double(), exact[:, prefill:]
    for begin in range(0, decoded, 64):
        part = slice(begin, begin + 64)
        assert float((got[:, part] - expected[:, part]).norm()) <= limit * float(expected[:, part].norm()), begin
