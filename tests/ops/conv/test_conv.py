"""The convolution against formulations that share no code with it, the order of its sums, and what is its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.ops.conv import plans
from tests.promises import broken

BACKENDS = ["eager", pytest.param("triton", marks=pytest.mark.kernels)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
TRITON = Preference(backend="triton")


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype)


def leaves(device: torch.device, *tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.to(device).requires_grad_() for t in tensors]


def conv(*arguments: Any, backend: str = "triton", **keywords: Any) -> Any:
    return adjoint.causal_conv1d(*arguments, **keywords, preference=Preference(backend=backend))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("split", [None, (2, 4)])
def test_autograd_sees_no_output_that_nobody_asks_for(asked: bool, split: tuple[int, ...] | None) -> None:
    x, weight = leaves(torch.device("cpu"), normal(1, 5, 6), normal(6, 4, seed=1))
    results = adjoint.causal_conv1d(x, weight, split=split, output_final_state=asked)
    y = results[0] if isinstance(results, tuple) else results
    assert len(y.grad_fn._input_metadata) == (1 if split is None else len(split)) + asked
    (gradient,) = torch.autograd.grad(y.sum(), weight)  # the other outputs have no upstream gradient
    assert bool(gradient.isfinite().all())


# ------------------------------------------------------------------------------ a second formulation


def torch_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None) -> Tensor:
    """torch's own convolution of all channels, of the state and the tokens side by side."""
    tokens = torch.cat((state, x.transpose(1, 2)), -1)
    z = F.conv1d(tokens, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    return F.silu(z) if activation else z


@every_backend
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", range(1, 9))
def test_torch_and_its_autograd_agree(width: int, activation: str | None, backend: str, device: torch.device) -> None:
    shapes = ((2, 21, 9), (9, width), (9,), (2, 9, width - 1))
    inputs = leaves(device, *(normal(*shape, seed=n) for n, shape in enumerate(shapes)))
    x, weight, bias, state = inputs
    options = {"activation": activation, "initial_state": state, "output_final_state": True}
    y, final = conv(x, weight, bias, **options, backend=backend)
    expected = torch_conv(x, weight, bias, state, activation)
    tail = torch.cat((state, x.transpose(1, 2)), -1)[..., 21:]
    dy, dfinal = normal(2, 21, 9, seed=7).to(device), normal(2, 9, width - 1, seed=8).to(device)
    ours = torch.autograd.grad((y, final), inputs, (dy, dfinal))
    theirs = torch.autograd.grad((expected, tail), inputs, (dy, dfinal))
    assert torch.equal(final, tail)
    assert not broken_conv((x, weight, bias), (y, *ours), (expected, *theirs), (dy, dfinal), backend, **options)


def broken_conv(
    inputs: tuple[Tensor, ...], results: Any, exact: Any, upstream: tuple[Tensor, ...], backend: str, **options: Any
) -> dict[str, str]:
    """What is not where the plan promises it: y, dx, dweight, dbias and dinitial_state, those that there are."""
    names = ["y", "dx", "dweight", "dbias", "dinitial_state"]
    if len(inputs) == 2:
        inputs = (*inputs, None)  # type: ignore[assignment]
        names.remove("dbias")
    assert [one.shape for one in results] == [one.shape for one in exact]
    pairs = {name: pair for name, *pair in zip(names, results, exact, strict=False)}
    by_name = ("initial_state", "cu_seqlens")
    chosen = Preference(backend=backend)
    return broken(adjoint.causal_conv1d, inputs, pairs, upstream, chosen, by_name, **options)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------- the order of sums


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a·b + c as the interpreter computes it, in two operations, or a GPU in one."""
    if a.device.type == "cpu":
        return a * b + c
    return (a.double() * b.double() + c.double()).float()  # float64 holds the product of two float32 exactly


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [40, 5000])
def test_bits_are_those_of_the_stated_order(tokens: int, device: torch.device) -> None:
    """Without an activation, in float32, one operation after the other."""
    shapes = ((1, tokens, 5), (5, 3), (5,), (1, tokens, 5))
    x, weight, bias, dy = (normal(*shape, seed=n).float().to(device) for n, shape in enumerate(shapes))
    inputs = leaves(device, x, weight, bias)
    y = conv(*inputs, activation=None)
    dx, dweight, dbias = torch.autograd.grad(y, inputs, dy)
    rows, slopes = F.pad(x[0], (0, 0, 2, 0)), F.pad(dy[0], (0, 0, 0, 2))
    z, total = bias.expand(tokens, 5), torch.zeros(tokens, 5, device=device)
    for tap in range(3):
        z = fused(weight[:, tap].expand(tokens, 5), rows[tap : tap + tokens], z)
        total = fused(weight[:, 2 - tap].expand(tokens, 5), slopes[tap : tap + tokens], total)
    assert torch.equal(y[0], z) and torch.equal(dx[0], total)
    stretch = plans.stretch_of(tokens)
    shares = []
    for begin in range(0, tokens, stretch):
        sums = [torch.zeros(5, device=device) for _ in range(4)]
        for token in range(begin, min(begin + stretch, tokens)):
            for tap in range(3):
                sums[tap] = fused(dy[0, token], rows[token + tap], sums[tap])
            sums[3] = sums[3] + dy[0, token]
        shares.append(torch.stack(sums))
    expected = torch.zeros(4, 5, device=device)
    for begin in range(0, len(shares), 2**plans.RUN_LEVELS):
        run = torch.stack(shares[begin : begin + 2**plans.RUN_LEVELS])
        run = F.pad(run, (0, 0, 0, 0, 0, 2**plans.RUN_LEVELS - len(run)))
        while len(run) > 1:
            first, second = run.chunk(2)
            run = first + second
        expected = expected + run[0]
    assert torch.equal(dweight.T, expected[:3]) and torch.equal(dbias, expected[3])


def test_stretches_follow_from_the_number_of_tokens() -> None:
    assert [plans.stretch_of(n) for n in (0, 1, 4096, 4097, 32768, 10**6)] == [32, 32, 32, 64, 256, 1024]


# ------------------------------------------------------------------------------------- bits and batches


def run_packed(
    device: torch.device, lengths: list[int], width: int = 4, dtype: torch.dtype = torch.float32, channels: int = 24
) -> tuple[list[Any], Tensor, list[Tensor]]:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)
    count, tokens = len(lengths), sum(lengths)
    shapes = ((1, tokens, channels), (channels, width), (channels,), (count, channels, width - 1))
    inputs = leaves(device, *(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)))
    upstream = [
        normal(1, tokens, channels, dtype=dtype, seed=8).to(device),
        normal(count, channels, width - 1, dtype=dtype, seed=9).to(device),
    ]
    return inputs, bounds, upstream


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_bits_it_has_alone(dtype: torch.dtype, device: torch.device) -> None:
    """Packed with others, or alone: outputs, states, and the gradients that belong to it."""
    lengths = [0, 1, 2, 3, 17, 0, 40, 1]
    (x, weight, bias, state), bounds, (dy, dfinal) = run_packed(device, lengths, dtype=dtype)
    options = {"initial_state": state, "output_final_state": True}
    y, final = conv(x, weight, bias, cu_seqlens=bounds, **options)
    dx, dstate = torch.autograd.grad((y, final), (x, state), (dy, dfinal))
    for number, length in enumerate(lengths):
        part = slice(int(bounds[number]), int(bounds[number + 1]))
        own, before = leaves(device, x.detach()[:, part], state.detach()[number : number + 1])
        alone, after = conv(own, weight, bias, initial_state=before, output_final_state=True)
        gradients = torch.autograd.grad((alone, after), (own, before), (dy[:, part], dfinal[number : number + 1]))
        assert torch.equal(alone, y[:, part]) and torch.equal(after, final[number : number + 1]), length
        assert torch.equal(gradients[0], dx[:, part]) and torch.equal(gradients[1], dstate[number : number + 1]), length


@pytest.mark.kernels
def test_packed_rows_are_the_rows_of_a_batch(device: torch.device) -> None:
    """All gradients too: the number of tokens fixes the order of dweight, not how they are cut."""
    (x, weight, bias, state), bounds, (dy, dfinal) = run_packed(device, [13] * 5)
    inputs = (x, weight, bias, state)
    packed = conv(x, weight, bias, initial_state=state, output_final_state=True, cu_seqlens=bounds)
    gradients = torch.autograd.grad(packed, inputs, (dy, dfinal))
    rows, dy_rows = leaves(device, x.detach().view(5, 13, -1))[0], dy.view(5, 13, -1)
    y, final = conv(rows, weight, bias, initial_state=state, output_final_state=True)
    theirs = torch.autograd.grad((y, final), (rows, weight, bias, state), (dy_rows, dfinal))
    assert torch.equal(packed[0].view_as(y), y) and torch.equal(packed[1], final)
    for got, right in zip(gradients, theirs, strict=True):
        assert torch.equal(got.view_as(right), right)


@pytest.mark.kernels
def test_a_prefix_has_the_bits_of_the_whole(device: torch.device) -> None:
    x, weight = normal(1, 70, 20).float().to(device), normal(20, 4, seed=1).float().to(device)
    whole = conv(x, weight)
    for length in (1, 2, 3, 4, 16, 33, 69):
        assert torch.equal(conv(x[:, :length], weight), whole[:, :length]), length


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_prefill_and_steps_have_the_bits_of_the_whole(
    dtype: torch.dtype, activation: str | None, device: torch.device
) -> None:
    """In every dtype: a state is a copy of tokens, so nothing is rounded on the way."""
    x, weight, bias = (
        normal(*shape, dtype=dtype, seed=n).to(device) for n, shape in enumerate(((2, 24, 20), (20, 4), (20,)))
    )
    whole, last = conv(x, weight, bias, activation=activation, output_final_state=True)
    y, state = conv(x[:, :13], weight, bias, activation=activation, output_final_state=True)
    parts = [y]
    for begin, end in ((13, 14), (14, 15), (15, 20), (20, 24)):
        arguments = (x[:, begin:end], state, weight, bias)
        y, state = adjoint.causal_conv1d_step(*arguments, activation=activation, preference=TRITON)
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(state, last)


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["slice", "transposed", "transposed, not aligned"])
def test_how_x_lies_changes_no_bit(layout: str, device: torch.device) -> None:
    time = 35 if "not" in layout else 48
    x, weight, dy = normal(2, time, 32).float(), normal(32, 4, seed=1).float().to(device), normal(2, time, 32, seed=2)
    x, dy = x.to(device), dy.float().to(device)
    laid = torch.cat((x, x, x), -1)[..., 32:64] if layout == "slice" else x.mT.contiguous().mT
    assert not laid.is_contiguous()
    results = []
    for own in (x, laid):
        inputs = [own.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = conv(*inputs)
        plan = adjoint.plan(adjoint.causal_conv1d, *inputs, preference=TRITON)
        assert "copied" not in plan.problem.layout and plan.workspace_bytes == 0
        results.append((y, *torch.autograd.grad(y, inputs, dy)))
    assert all(map(torch.equal, *results))


# ------------------------------------------------------------------------------------------ special values


@every_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_special_value_stays_within_its_window(value: float, backend: str, device: torch.device) -> None:
    """It reaches W tokens of its own channel and sequence, and nothing else, in either direction."""
    x, weight = normal(1, 40, 6).float(), normal(6, 4, seed=1).float().to(device)
    bounds = torch.tensor([0, 22, 40], device=device)
    spoiled = x.clone()
    spoiled[0, 20, 2] = value
    clean, y = (conv(t.to(device), weight, cu_seqlens=bounds, backend=backend) for t in (x, spoiled))
    reached = torch.zeros(1, 40, 6, dtype=torch.bool, device=device)
    reached[0, 20:22, 2] = True
    assert torch.equal(y[~reached], clean[~reached])
    assert (y[reached] != clean[reached]).all()  # of an infinity, silu may make −0
    inputs = leaves(device, x)
    dy = torch.zeros(1, 40, 6, device=device)
    dy[0, 23, 2] = value
    (dx,) = torch.autograd.grad(conv(*inputs, weight, cu_seqlens=bounds, backend=backend), inputs, dy)
    touched = torch.zeros(1, 40, 6, dtype=torch.bool, device=device)
    touched[0, 22:24, 2] = True
    assert (dx[~touched] == 0).all() and not torch.isfinite(dx[touched]).any()


@every_backend
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_special_value_reaches_gradients_of_tokens_nearby(
    value: float, activation: str | None, backend: str, device: torch.device
) -> None:
    """Of x, with SiLU alone: it reaches dx of W − 1 tokens on either side, as does one of a state before a sequence."""
    shapes = ((2, 12, 3), (3, 4), (3,), (2, 3, 3))
    x, weight, bias, state = (normal(*shape, seed=n).float() for n, shape in enumerate(shapes))
    dy = normal(2, 12, 3, seed=9).float().to(device)

    def reached(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        inputs = leaves(device, x, weight, bias, state)
        y = conv(*inputs[:3], initial_state=inputs[3], activation=activation, backend=backend)
        return tuple(~torch.isfinite(t.cpu()) for t in torch.autograd.grad(y, inputs, dy))

    spoiled = x.clone()
    spoiled[0, 6, 1] = value
    of_x, of_slopes, channel = torch.zeros_like(x).bool(), activation is not None, torch.arange(3) == 1
    of_x[0, 3:10, 1] = True
    dx, dweight, dbias, dstate = reached(spoiled, state)
    assert not (dx & ~of_x).any() and (of_slopes or not dx.any()) and not dstate.any()
    if value == value or not of_slopes:  # the slope of −∞ may be −0
        assert not dbias.any() or torch.equal(dbias, channel & of_slopes)
    else:
        assert torch.equal(dx, of_x) and torch.equal(dbias, channel)
    assert torch.equal(dweight, channel[:, None].expand(3, 4))
    late = state.clone()
    late[1, 1, 2] = value  # the token before the first
    dx, dweight, dbias, dstate = reached(x, late)
    near = torch.zeros_like(x).bool()
    near[1, :3, 1] = True
    assert not (dx & ~near).any() and not dstate[0].any() and not dstate[:, ~channel].any()
    assert dweight[1, :3].all() and not dweight[~channel].any()


@every_backend
def test_infinities_have_silu_s_limits(backend: str, device: torch.device) -> None:
    x = torch.tensor([float("-inf"), float("inf"), float("nan")], device=device).view(1, 3, 1)
    y = conv(x, torch.ones(1, 1, device=device), backend=backend).flatten()
    assert torch.equal(y[:2], torch.tensor([-0.0, float("inf")], device=device)) and y[0].signbit() and y[2].isnan()


@every_backend
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_special_value_stays_within_its_row(value: float, backend: str, device: torch.device) -> None:
    """Of a step: it reaches its own channel of its own row, from its token on, and the gradients of that channel."""
    shapes = ((3, 5, 6), (3, 6, 2), (6, 3))
    x, state, weight = (normal(*shape, seed=n).float() for n, shape in enumerate(shapes))
    spoiled = x.clone()
    spoiled[1, 2, 4] = value

    def run(tokens: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        inputs = leaves(device, tokens, state.clone())
        outputs = adjoint.causal_conv1d_step(*inputs, weight.to(device), preference=Preference(backend=backend))
        return (*outputs, *torch.autograd.grad(outputs[0], inputs, dy.to(device)))

    dy = torch.ones(3, 5, 6)
    (clean, _, *_), (y, last, dx, dstate) = run(x, dy), run(spoiled, dy)
    reached = torch.zeros(3, 5, 6, dtype=torch.bool)
    reached[1, 2:, 4] = True
    assert torch.equal(y.cpu()[~reached], clean.cpu()[~reached]) and (y.cpu()[reached] != clean.cpu()[reached]).all()
    assert torch.equal(last.cpu(), spoiled[:, 3:].mT) or value != value
    elsewhere = torch.ones(3, 5, 6, dtype=torch.bool)
    elsewhere[1, :, 4] = False
    assert torch.isfinite(dx.cpu()[elsewhere]).all() and torch.isfinite(dstate.cpu()[[0, 2]]).all()
    dy[1, 3, 4] = value
    _, _, dx, dstate = run(x, dy)
    touched = torch.zeros(3, 5, 6, dtype=torch.bool)
    touched[1, 1:4, 4] = True
    assert torch.equal(~torch.isfinite(dx.cpu()), touched) and torch.isfinite(dstate).all()


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_states_are_copies_of_tokens(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Bits of the tokens, on every device: the zero below zero and an infinity included."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x, state, weight = normal(2, 5, 3, dtype=dtype), normal(2, 3, 3, dtype=dtype, seed=1), normal(3, 4, seed=2)
    x[0, 3, 0], x[1, 4, 2], state[1, 1, 2] = -0.0, torch.inf, -0.0
    x, state, weight = (t.to(device) for t in (x, state, weight.to(dtype)))
    _, final = conv(x, weight, initial_state=state, output_final_state=True, backend=backend)
    _, new = adjoint.causal_conv1d_step(x[:, :2], state, weight, preference=Preference(backend=backend))
    assert torch.equal(final.view(bits), x[:, 2:].mT.contiguous().view(bits))
    assert torch.equal(new.view(bits), torch.cat((state[..., 2:], x[:, :2].mT), -1).view(bits))


# ------------------------------------------------------------------------------------- many sequences, parts


@every_backend
def test_tens_of_thousands_of_sequences(backend: str, device: torch.device) -> None:
    """Most of them of no token, one or two; each has the states and outputs that a window over it has."""
    count = 20_000 if backend == "eager" or device.type == "cuda" else 700
    lengths = torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(0))
    bounds = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    tokens = int(bounds[-1])
    x, weight, state = normal(1, tokens, 2), normal(2, 3, seed=1), normal(count, 2, 2, seed=2)
    inputs = leaves(device, x, weight, state)
    arguments = {"initial_state": inputs[2], "output_final_state": True, "cu_seqlens": bounds.to(device)}
    y, final = conv(inputs[0], inputs[1], activation=None, **arguments, backend=backend)
    rows = torch.zeros(count, 4, 2, dtype=torch.float64)  # the state, and up to two tokens
    rows[:, :2] = state.mT
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    place = torch.arange(tokens) - bounds[:-1][owner]
    rows[owner, 2 + place] = x[0]
    expected = sum(weight[:, tap] * rows[owner, place + tap] for tap in range(3))
    columns = torch.stack([rows[torch.arange(count), lengths + column] for column in range(2)], -1)
    assert torch.equal(final.cpu(), columns)
    upstream = torch.ones_like(y), torch.zeros_like(final)
    dx, dweight, dstate = torch.autograd.grad((y, final), inputs, upstream)
    slopes = torch.zeros_like(rows)
    for tap in range(3):
        slopes.index_put_((owner, place + tap), weight[:, tap].expand(tokens, 2), accumulate=True)
    of_weight = torch.stack([rows[owner, place + tap].sum(0) for tap in range(3)], -1)
    exact = [t.to(device) for t in (expected[None], slopes[owner, 2 + place][None], of_weight, slopes[:, :2].mT)]
    results = (y, dx, dweight, dstate)
    assert not broken_conv(tuple(inputs[:2]), results, exact, upstream, backend, activation=None, **arguments)


@every_backend
@pytest.mark.parametrize("split", [(8,), (3, 5), (0, 8), (8, 0), (2, 0, 6), (1, 2, 3, 2)])
def test_parts_are_tensors_of_their_own(split: tuple[int, ...], backend: str, device: torch.device) -> None:
    inputs = leaves(device, normal(2, 11, 8).float(), normal(8, 4, seed=1).float())
    parts = conv(*inputs, split=split, backend=backend)
    whole = conv(*inputs, backend=backend)
    assert isinstance(parts, tuple) and [p.shape[2] for p in parts] == list(split)
    assert all(part.is_contiguous() for part in parts) and len({p.untyped_storage()._cdata for p in parts}) == len(
        parts
    )
    for part, expected in zip(parts, whole.split(split, -1), strict=True):
        assert torch.equal(part, expected)
    dy = normal(2, 11, 8, seed=2).float().to(device)
    used = [(part, d) for part, d in zip(parts, dy.split(split, -1), strict=True) if part.numel()]
    found = torch.autograd.grad([part for part, _ in used], inputs, [d for _, d in used])
    theirs = torch.autograd.grad(whole, inputs, dy)
    if backend == "triton":
        assert all(map(torch.equal, found, theirs))
    else:
        x, weight = (one.detach().double().requires_grad_() for one in inputs)
        y = torch_conv(x, weight, None, x.new_zeros(2, 8, 3), "silu")
        exact = dict(zip(("dx", "dweight"), torch.autograd.grad(y, (x, weight), dy.double()), strict=True))
        pairs = {name: (one, exact[name]) for name, one in zip(exact, found, strict=True)}
        assert not broken(adjoint.causal_conv1d, tuple(inputs), pairs, (dy,), Preference(backend=backend))


@every_backend
def test_a_part_that_nobody_uses_has_no_gradient(backend: str, device: torch.device) -> None:
    x, weight = leaves(device, normal(1, 9, 8), normal(8, 3, seed=1))
    parts = conv(x, weight, split=(3, 5), backend=backend)
    dx, dweight = torch.autograd.grad(parts[1].sum(), (x, weight))
    whole = conv(x, weight, backend=backend)
    upstream = torch.zeros_like(whole)
    upstream[..., 3:] = 1
    expected = torch.autograd.grad(torch_conv(x, weight, None, x.new_zeros(1, 8, 2), "silu"), (x, weight), upstream)
    assert (dx[..., :3] == 0).all() and (dweight[:3] == 0).all()
    pairs = {"dx": (dx, expected[0]), "dweight": (dweight, expected[1])}
    assert not broken(adjoint.causal_conv1d, (x, weight), pairs, (upstream,), Preference(backend=backend))


@every_backend
def test_final_states_alone_have_gradients(backend: str, device: torch.device) -> None:
    """y is not used: the states' gradient goes to the last tokens, past a sequence's first to its initial state."""
    x, weight, state = leaves(device, normal(1, 7, 2), normal(2, 4, seed=1), normal(3, 2, 3, seed=2))
    bounds = torch.tensor([0, 0, 2, 7], device=device)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": bounds}
    _, final = conv(x, weight, **options, backend=backend)
    dfinal = normal(3, 2, 3, seed=3).to(device)
    dx, dstate = torch.autograd.grad(final, (x, state), dfinal)
    expected = torch.zeros(1, 7, 2, dtype=torch.float64, device=device)
    expected[0, :2] = dfinal[1, :, 1:].T
    expected[0, 4:] = dfinal[2].T
    before = torch.zeros(3, 2, 3, dtype=torch.float64, device=device)
    before[0] = dfinal[0]
    before[1, :, 2] = dfinal[1, :, 0]
    assert torch.equal(dx, expected) and torch.equal(dstate, before)


@every_backend
def test_packed_sequences_without_channels_have_states_without_elements(backend: str, device: torch.device) -> None:
    x, weight, state = leaves(device, normal(1, 7, 0), normal(0, 4, seed=1), normal(3, 0, 3, seed=2))
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": torch.tensor([0, 0, 2, 7]).to(device)}
    y, final = conv(x, weight, **options, backend=backend)
    gradients = torch.autograd.grad((y, final), (x, weight, state), (y.detach(), final.detach()))
    assert [x.shape for x in (y, final, *gradients)] == [(1, 7, 0), (3, 0, 3), (1, 7, 0), (0, 4), (3, 0, 3)]


# ------------------------------------------------------------------------------------------------- steps


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_is_the_step_out_of_place(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    x, weight, pool = (
        normal(*shape, dtype=dtype, seed=n).to(device) for n, shape in enumerate(((3, 2, 20), (20, 4), (6, 20, 3)))
    )
    indices = torch.tensor([4, -1, 1], device=device)
    preference = Preference(backend=backend)
    y, rows = adjoint.causal_conv1d_step(x, pool, weight, state_indices=indices, preference=preference)
    own = pool.clone()
    y_too, same = adjoint.causal_conv1d_step(
        x, own, weight, state_indices=indices, in_place=True, preference=preference
    )
    assert same is own and torch.equal(y, y_too)
    assert (y[1] == 0).all() and (rows[1] == 0).all()
    expected = pool.clone()
    expected[4], expected[1] = rows[0], rows[2]
    assert torch.equal(own, expected)
    options = {"state_indices": indices, "in_place": True, "preference": preference}
    promises = adjoint.plan(adjoint.causal_conv1d_step, x, own, weight, **options).guarantee
    assert set(promises) == {"y", "state"} and promises["state"].error.is_zero


@every_backend
def test_two_rows_of_one_state_in_place_are_an_error_when_checking(backend: str, device: torch.device) -> None:
    x, weight, pool = torch.zeros(2, 1, 3, device=device), torch.zeros(3, 2, device=device), torch.zeros(4, 3, 1)
    indices = torch.tensor([2, 2], device=device)
    with pytest.raises(adjoint.ArgumentError, match=r"must not repeat.*got 2 again at position 1"), adjoint.checked():
        adjoint.causal_conv1d_step(
            x, pool.to(device), weight, state_indices=indices, in_place=True, preference=Preference(backend=backend)
        )


@pytest.mark.kernels
def test_rows_of_a_step_keep_their_bits_in_another_batch(device: torch.device) -> None:
    """dweight does not, so the shared check of batch invariance leaves the backward out."""

    def run(rows: slice) -> tuple[Tensor, ...]:
        x, pool = leaves(device, normal(5, 3, 20).float()[rows], normal(7, 20, 3, seed=1).float())
        weight = normal(20, 4, seed=2).float().to(device)
        indices = torch.tensor([6, 0, -1, 3, 1], device=device)[rows]
        outputs = adjoint.causal_conv1d_step(x, pool, weight, state_indices=indices, preference=TRITON)
        upstream = (normal(5, 3, 20, seed=3).float()[rows], normal(5, 20, 3, seed=4).float()[rows])
        dx, dpool = torch.autograd.grad(outputs, (x, pool), [u.to(device) for u in upstream])
        return (*outputs, dx, dpool[indices[indices >= 0]])

    for rows in (slice(3, 5), slice(0, 1), slice(1, 4)):
        live = torch.tensor([True, True, False, True, True])
        whole, alone = run(slice(None)), run(rows)
        kept = live[: rows.start].sum(), live[: rows.stop].sum()
        expected = (*(t[rows] for t in whole[:3]), whole[3][int(kept[0]) : int(kept[1])])
        assert all(map(torch.equal, alone, expected)), rows


# ------------------------------------------------------------------------------------------------- errors


@every_backend
@pytest.mark.parametrize("wrong", [(0, 9), (0, 4, 2, 5), (0, -3, 5), (1, 5), (0,), (0, 5, 5, 4)])
def test_wrong_bounds_are_reported_and_harmless(wrong: tuple[int, ...], backend: str, device: torch.device) -> None:
    x, weight = torch.ones(1, 5, 3, device=device), torch.ones(3, 4, device=device)
    with pytest.raises(adjoint.ArgumentError, match="causal_conv1d: cu_seqlens must begin with 0"):
        conv(x, weight, cu_seqlens=torch.tensor(wrong, device=device), output_final_state=True, backend=backend)
        adjoint.check()


@every_backend
@pytest.mark.parametrize("wrong", [4, -2])
def test_an_index_out_of_range_is_reported_and_skips_its_row(wrong: int, backend: str, device: torch.device) -> None:
    """At once on the CPU; on a GPU the row gives zeros, and so do its gradients, until `check` raises."""
    x, weight, pool = leaves(device, normal(3, 2, 5), normal(5, 3, seed=1), normal(4, 5, 2, seed=2))
    said = rf"state_indices must be at least 0.*got {wrong} at position 1"

    def run(index: int) -> list[Tensor]:
        chosen = torch.tensor([3, index, 0], device=device)
        preference = Preference(backend=backend)
        outputs = adjoint.causal_conv1d_step(x, pool, weight, state_indices=chosen, preference=preference)
        return [*outputs, *torch.autograd.grad(outputs, (x, weight, pool), [torch.ones_like(o) for o in outputs])]

    expected = run(-1)
    with pytest.raises(adjoint.ArgumentError, match=said):
        results = run(wrong)
        assert all(map(torch.equal, results, expected))
        adjoint.check()


def test_more_tokens_than_kernels_count_are_refused_by_them() -> None:
    x = torch.empty(1, 2**30, 1, device="meta", dtype=torch.float16)
    plan = adjoint.plan(adjoint.causal_conv1d, x, x.new_empty(1, 4), device="cpu")
    assert plan.name == "eager"
    assert any("numbers up to" in reason for _, reason in plan.others)


def test_a_width_is_checked_before_anything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise AssertionError("something ran")

    monkeypatch.setattr(adjoint.core.op.operator.Operator, "launch", fail)
    for width in (0, 9):
        with pytest.raises(adjoint.ArgumentError, match=f"1 to 8, got {width}"):
            adjoint.causal_conv1d(torch.zeros(1, 2, 3), torch.zeros(3, width))
