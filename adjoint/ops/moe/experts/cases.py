"""What the expert layer is tested, verified and timed on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.contract.mistakes import answers, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.experts import experts, reference
from adjoint.ops.moe.values import changing, laid_across, of_device, shaped, values, with_index

Lay = Callable[..., Inputs]


def _layer(
    tokens: int,
    columns: int,
    number: int,
    inner: int,
    slots: int,
    kind: torch.dtype = torch.int64,
    unused: int = -1,
    lay: Lay = lambda *inputs: inputs,
) -> Make:
    """Normal inputs, weight matrices that keep the size of values, and distinct random experts. No token goes to the
    expert `unused`."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        draw = partial(values, generator, dtype, device)
        scores = torch.rand(tokens, number, generator=generator)
        scores[:, 0] *= 2  # the first expert is busier than the others
        if unused >= 0:
            scores[:, unused] = -1
        indices = scores.topk(slots, dim=1).indices if tokens else torch.zeros(0, slots, dtype=torch.int64)
        return lay(
            draw(tokens, columns),
            draw(number, 2 * inner, columns, scale=columns**-0.5),
            draw(number, columns, inner, scale=inner**-0.5),
            indices.to(kind).to(device),
            draw(tokens, slots),
        )

    return make


def _strided(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    """Every input transposed in memory, or with other elements between its elements."""
    return (
        laid_across(x, 1, 0),
        laid_across(gate_up, 0, 2, 1),
        torch.stack((down, down), -1)[..., 0],
        laid_across(indices, 1, 0),
        torch.cat((weights, weights), 1)[:, : weights.shape[1]],
    )


_CASES = (
    Case("few tokens", _layer(4, 3, 2, 2, 2)),
    Case(
        "odd sizes, strided, an expert without tokens", _layer(21, 75, 4, 133, 3, torch.int32, unused=2, lay=_strided)
    ),
    Case("columns in eights", _layer(13, 24, 4, 16, 2, unused=2)),
    Case("no tokens", _layer(0, 3, 2, 2, 2)),
    Case("two chunks of columns", _layer(300, 528, 32, 136, 4, unused=7), heavy=True),
    Case("columns in 64s", _layer(300, 576, 5, 192, 3, unused=2), heavy=True),
)


def _with_other_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The tokens of one expert alone, the last token alone, and all tokens in reversed order.

    A token's results keep their bits in all of these. An expert's gradients keep them where its tokens are the same, in
    the same order.
    """
    x, gate_up, down, indices, weights = inputs
    if len(x) == 0:
        return
    expert = int(indices[0, 0])

    def batch(name: str, tokens: Tensor, same: list[int]) -> Rebatch:
        def pairs(whole: Answers, alone: Answers) -> Iterator[tuple[Tensor, Tensor]]:
            for all_of_them, some in zip(whole[0], alone[0], strict=True):
                yield all_of_them[tokens], some
            for all_of_them, some in zip(whole[1], alone[1], strict=True):
                if all_of_them.dim() == 3:
                    yield all_of_them[same], some[same]
                else:
                    yield all_of_them[tokens], some

        return Rebatch(
            name, (x[tokens], gate_up, down, indices[tokens], weights[tokens]), (upstream[0][tokens],), pairs
        )

    yield batch(f"the tokens of expert {expert}", (indices == expert).any(1).nonzero()[:, 0], [expert])
    yield batch("the last token", torch.tensor([len(x) - 1], device=x.device), [])
    yield batch("the other order", torch.arange(len(x) - 1, -1, -1, device=x.device), [])


# ------------------------------------------------------------------------------------------- mistakes


def _mistake(
    forward: Callable[..., Inputs] = lambda *inputs: inputs, backward: Callable[..., Inputs] = lambda *inputs: inputs
) -> Callable[..., Answers]:
    """The reference on changed inputs."""
    return answers(
        lambda *inputs: reference.experts(*forward(*inputs)),
        lambda dy, *inputs: reference.experts_backward(dy, *backward(*inputs)),
    )


def _exchanged(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    return x, gate_up.roll(down.shape[2], 1), down, indices, weights


def _next_expert(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    return x, gate_up, down, (indices + 1) % down.shape[0], weights


def _unweighted(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    return x, gate_up, down, indices, torch.ones_like(weights)


def _last_token_dropped(dy: Tensor, *layer: Tensor) -> tuple[Tensor, ...]:
    """Weight gradients over all tokens of the batch but the last one."""
    x, gate_up, down, indices, weights = layer
    dx, _, _, dweights = reference.experts_backward(dy, *layer)
    few = reference.experts_backward(dy[:-1], x[:-1], gate_up, down, indices[:-1], weights[:-1])
    return dx, *few[1:3], dweights


def _by_expert(product: Callable[[Tensor, Tensor], Tensor], *layer: Tensor) -> Tensor:
    """The layer, expert by expert, where `product` computes left · rightᵀ."""
    x, gate_up, down, indices, weights = layer
    y, inner = torch.zeros_like(x), down.shape[2]
    for e in range(down.shape[0]):
        t, j = (indices == e).nonzero(as_tuple=True)
        both = product(x[t], gate_up[e])
        h = F.silu(both[:, :inner]) * both[:, inner:]
        y.index_add_(0, t, weights[t, j][:, None] * product(h, down[e]))
    return y


def _narrow_sums(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    """Products in which every sum is rounded to a type that is too narrow."""
    narrow = torch.float32 if inputs[0].dtype == torch.float64 else torch.bfloat16

    def product(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[0], right.shape[0], dtype=narrow, device=left.device)
        for column in range(left.shape[1]):
            total = (total.double() + left[:, column, None] * right[None, :, column]).to(narrow)
        return total.double()

    return answers(partial(_by_expert, product), reference.experts_backward)(upstream, inputs)


_MISTAKES = {
    "zero output": zeros,
    "gate and up exchanged": _mistake(_exchanged, _exchanged),
    "the next expert": _mistake(_next_expert, _next_expert),
    "routing weights ignored": _mistake(_unweighted),
    "gradients without the routing weight": _mistake(backward=_unweighted),
    "a token missing from the weights' gradients": answers(reference.experts, _last_token_dropped),
    "sums in a narrow type": _narrow_sums,
}

EXPERTS = Subject(
    name="moe.experts",
    function=experts,
    inputs=("x", "gate_up", "down", "indices", "weights"),
    reference=lambda *inputs: (reference.experts(*inputs),),
    reference_backward=reference.experts_backward,
    cases=_CASES,
    mistakes=_MISTAKES,
    batched=("x", "indices", "weights"),
    rebatched=_with_other_tokens,
    autocast=("x", "gate_up", "down"),
    plans=("eager.grouped_mm", "triton.grouped"),
)

SUBJECTS = (EXPERTS,)

# ------------------------------------------------------------------------------------------ bad calls


def _inputs(device: torch.device) -> dict[str, Any]:
    """5 tokens of 6 columns, two slots, and 4 experts with I = 3."""
    shapes = {"x": (5, 6), "gate_up": (4, 6, 6), "down": (4, 6, 3), "indices": (5, 2), "weights": (5, 2)}
    inputs = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    return inputs | {"indices": torch.zeros(5, 2, dtype=torch.int64, device=device)}


_changed = changing(experts, _inputs)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    return _changed(indices=with_index(5, 4, position, value, dtype))


def _other_gradient(device: torch.device) -> None:
    inputs = _inputs(device)
    plan = adjoint.plan(experts, *inputs.values())
    _, *saved = plan.run(*inputs.values())
    assert plan.adjoint is not None
    del inputs["indices"]
    plan.adjoint.run(torch.ones(5, 7, device=device), *inputs.values(), *saved)


BAD_CALLS = (
    BadCall("x with three axes", _changed(x=shaped(5, 1, 6)), "x must have two axes", "(5, 1, 6)", "flatten"),
    BadCall("gate_up of an odd number of rows", _changed(gate_up=shaped(4, 5, 6)), "gate_up", "2·I", "(4, 5, 6)"),
    BadCall("gate_up of other columns", _changed(gate_up=shaped(4, 6, 7)), "gate_up", "6 columns", "(4, 6, 7)"),
    BadCall("gate_up of one expert alone", _changed(gate_up=shaped(6, 6)), "gate_up", "(6, 6)"),
    BadCall("gate_up in another type", _changed(gate_up=Tensor.half), "gate_up", "float32", "float16"),
    BadCall("down in another type", _changed(down=Tensor.double), "down", "float32", "float64"),
    BadCall("down of other experts", _changed(down=shaped(5, 6, 3)), "down", "gate_up, 4", "got 5"),
    BadCall("down of another I", _changed(down=shaped(4, 6, 4)), "down", "(4, 6, 3)", "(4, 6, 4)"),
    BadCall("down transposed", _changed(down=shaped(4, 3, 6)), "down", "(4, 6, 3)", "(4, 3, 6)"),
    BadCall("narrow indices", _changed(indices=Tensor.short), "indices", "int16", ".long()"),
    BadCall("indices with one axis", _changed(indices=shaped(5)), "indices", "[tokens, k]", "(5,)"),
    BadCall("indices of other tokens", _changed(indices=shaped(4, 2)), "indices", "(5, 6)", "(4, 2)"),
    BadCall("no slots", _changed(indices=shaped(5, 0), weights=shaped(5, 0)), "indices", "k ≥ 1", "(5, 0)"),
    BadCall("weights of other slots", _changed(weights=shaped(5, 3)), "weights", "(5, 2)", "(5, 3)"),
    BadCall("weights of other tokens", _changed(weights=shaped(4, 2)), "weights", "[5, k]", "(4, 2)"),
    BadCall("an index too large", _with_index(7, 4), "moe.experts: indices", "got 4 at position 7 "),
    BadCall("a negative index", _with_index(0, -1, torch.int32), "got -1 at position 0 "),
    BadCall("an index that is an expert modulo 2^32", _with_index(9, 2**32 + 1), "got 4294967297 at position 9 "),
    BadCall("a gradient of another shape", _other_gradient, "dy", "(5, 6)", "(5, 7)"),
    BadCall("a preference of another type", _changed(preference="eager"), "preference=", "str"),
    BadCall("no workspace allowed", _changed(preference=adjoint.Preference(max_workspace_bytes=0)), "experts", "triton",
            "eager", "the preference allows 0", error=Unsupported),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ workloads


def _routed(tokens: int, columns: int, number: int, inner: int, slots: int, skewed: bool) -> Make:
    """A layer on a device. Its routing is uniform, or the frequency of an expert is proportional to 1 / rank."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        on_device = of_device(device, generator)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=on_device).mul_(scale)

        times = torch.rand(tokens, number, device=device, generator=on_device).log_().neg_()
        if skewed:
            times *= 1 + torch.randperm(number, device=device, generator=on_device)
        shares = torch.rand(tokens, slots, device=device, generator=on_device)
        return (
            draw(tokens, columns),
            draw(number, 2 * inner, columns, scale=columns**-0.5),
            draw(number, columns, inner, scale=inner**-0.5),
            times.topk(slots, dim=1, largest=False).indices,
            (shares / shares.sum(1, keepdim=True)).to(dtype),
        )

    return make


def composed(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Torch's grouped product, with a gather before it and a scatter after it."""
    order = indices.reshape(-1).sort(stable=True)
    token = order.indices // indices.shape[1]
    experts_of = torch.arange(1, down.shape[0] + 1, device=x.device)
    ends = torch.searchsorted(order.values, experts_of).to(torch.int32)
    g, u = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    rows = torch._grouped_mm(F.silu(g) * u, down.transpose(1, 2), offs=ends)
    rows = rows * weights.reshape(-1)[order.indices].to(rows.dtype)[:, None]
    return torch.zeros_like(x).index_add_(0, token, rows)


TIMED = replace(
    EXPERTS,
    reference=lambda *inputs: (_by_expert(lambda left, right: left @ right.T, *inputs),),
    cases=(),
    mistakes={},
    rebatched=None,
)
"""A subject for layers that have too many rows to compute them one by one."""


def _workload(tokens: int, columns: int, number: int, inner: int, slots: int, skewed: bool) -> Workload:
    matrices, lines = 3 * number * inner * columns * 2, tokens * columns * 2
    routing = "skewed" if skewed else "uniform"
    return Workload(
        f"moe.experts {tokens}×{columns}, {number} of {inner}, k = {slots}, {routing}",
        TIMED,
        _routed(tokens, columns, number, inner, slots, skewed),
        matrices + 2 * lines,
        2 * matrices + 3 * lines,
        composed,
        peers=("quack_experts",),
        devices=("cuda",),
        directions=("forward", "forward + backward"),
        operations=6 * tokens * slots * columns * inner,
    )


_LAYERS = (
    (16384, 2048, 512, 512, 10, False),
    (16384, 2048, 512, 512, 10, True),
    (16384, 2048, 128, 768, 8, False),
    (16384, 2048, 128, 768, 8, True),
    (8192, 2880, 32, 2880, 4, False),
    (4096, 4096, 64, 1536, 6, False),
    (256, 2048, 512, 512, 10, False),
)
"""The layers that are timed: tokens, D, experts, I, slots, and whether few experts have most of the tokens."""

WORKLOADS = tuple(_workload(*layer) for layer in _LAYERS)

# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls of a layer in every dtype."""
    for dtype in EXPERTS.dtypes:
        shapes = {"x": (64, 2048), "gate_up": (512, 1536, 2048), "down": (512, 2048, 768), "weights": (64, 8)}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        yield bind(experts, indices=torch.empty(64, 8, dtype=torch.int64, device="meta"), **tensors)
