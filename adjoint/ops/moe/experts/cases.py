"""What the expert layer is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Subject, Workload
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.experts import experts, reference

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
    """Normal inputs, weight matrices that keep their size, distinct random experts; `unused` is nobody's."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def values(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return drawn.to(dtype).to(device)

        scores = torch.rand(tokens, number, generator=generator)
        scores[:, 0] *= 2  # the first expert is busier than the others
        if unused >= 0:
            scores[:, unused] = -1
        indices = scores.topk(slots, dim=1).indices if tokens else torch.zeros(0, slots, dtype=torch.int64)
        return lay(
            values(tokens, columns),
            values(number, 2 * inner, columns, scale=columns**-0.5),
            values(number, columns, inner, scale=inner**-0.5),
            indices.to(kind).to(device),
            values(tokens, slots),
        )

    return make


def _strided(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    """Every input transposed in memory, or with other elements between its own."""
    return (
        x.T.contiguous().T,
        gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((down, down), -1)[..., 0],
        indices.T.contiguous().T,
        torch.cat((weights, weights), 1)[:, : weights.shape[1]],
    )


_CASES = (
    Case("few tokens", _layer(4, 3, 2, 2, 2)),
    Case(
        "odd sizes, strided, an expert without tokens", _layer(21, 75, 4, 133, 3, torch.int32, unused=2, lay=_strided)
    ),
    Case("no tokens", _layer(0, 3, 2, 2, 2)),
    Case("two chunks of columns", _layer(300, 528, 32, 136, 4, unused=7), heavy=True),
)


def _with_other_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """The tokens of one expert alone, the last token alone, and all of them in the other order.

    A token's results keep their bits everywhere; an expert's gradients where its tokens are the same, in order.
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
    forward: Callable[..., Inputs] = lambda *inputs: inputs,
    backward: Callable[..., Inputs] = lambda *inputs: inputs,
    spoil: Callable[[Tensor, Inputs, list[Tensor]], Any] = lambda dy, inputs, gradients: None,
) -> Callable[[tuple[Tensor, ...], Inputs], Answers]:
    """The reference on inputs that were changed, or with gradients that were."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        dtypes = [t.dtype for t in inputs if t.is_floating_point()]
        wide = tuple(t.double() if t.is_floating_point() else t for t in inputs)
        dy = upstream[0].double()
        y = reference.experts(*forward(*wide))
        gradients = list(reference.experts_backward(dy, *backward(*wide)))
        spoil(dy, wide, gradients)
        return (y.to(upstream[0].dtype),), tuple(g.to(d) for g, d in zip(gradients, dtypes, strict=True))

    return answer


def _exchanged(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    inner = down.shape[2]
    return x, torch.cat((gate_up[:, inner:], gate_up[:, :inner]), 1), down, indices, weights


def _next_expert(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    return x, gate_up, down, (indices + 1) % down.shape[0], weights


def _unweighted(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Inputs:
    return x, gate_up, down, indices, torch.ones_like(weights)


def _last_token_dropped(dy: Tensor, inputs: Inputs, gradients: list[Tensor]) -> None:
    """Weight gradients over all tokens but the last of the batch."""
    x, gate_up, down, indices, weights = inputs
    gradients[1:3] = reference.experts_backward(dy[:-1], x[:-1], gate_up, down, indices[:-1], weights[:-1])[1:3]


def _added_narrowly(dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ, every sum rounded to a dtype."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=dtype, device=left.device)
    for column in range(left.shape[1]):
        total = (total.double() + left[:, column, None] * right[None, :, column]).to(dtype)
    return total.double()


def _narrow_sums(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    """Products whose sums run in a type too narrow for them."""
    x, gate_up, down, indices, weights = (t.double() if t.is_floating_point() else t for t in inputs)
    narrow = torch.float32 if inputs[0].dtype == torch.float64 else torch.bfloat16
    y, inner = torch.zeros_like(x), down.shape[2]
    for e in range(down.shape[0]):
        t, j = (indices == e).nonzero(as_tuple=True)
        both = _added_narrowly(narrow, x[t], gate_up[e])
        h = F.silu(both[:, :inner]) * both[:, inner:]
        y.index_add_(0, t, weights[t, j][:, None] * _added_narrowly(narrow, h, down[e]))
    gradients = reference.experts_backward(upstream[0].double(), x, gate_up, down, indices, weights)
    return (y.to(inputs[0].dtype),), tuple(g.to(inputs[0].dtype) for g in gradients)


def _zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return (torch.zeros_like(upstream[0]),), tuple(torch.zeros_like(t) for t in inputs if t.is_floating_point())


_MISTAKES = {
    "zero output": _zeros,
    "gate and up exchanged": _mistake(_exchanged, _exchanged),
    "the next expert": _mistake(_next_expert, _next_expert),
    "routing weights ignored": _mistake(_unweighted),
    "gradients without the routing weight": _mistake(backward=_unweighted),
    "a token missing from the weights' gradients": _mistake(spoil=_last_token_dropped),
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
)

SUBJECTS = (EXPERTS,)

# ------------------------------------------------------------------------------------------ bad calls

_TOKENS, _COLUMNS, _EXPERTS, _INNER, _SLOTS = 5, 6, 4, 3, 2


def _inputs(device: torch.device) -> dict[str, Any]:
    return {
        "x": torch.ones(_TOKENS, _COLUMNS, device=device),
        "gate_up": torch.ones(_EXPERTS, 2 * _INNER, _COLUMNS, device=device),
        "down": torch.ones(_EXPERTS, _COLUMNS, _INNER, device=device),
        "indices": torch.zeros(_TOKENS, _SLOTS, dtype=torch.int64, device=device),
        "weights": torch.ones(_TOKENS, _SLOTS, device=device),
    }


def _changed(preference: Any = None, **changes: Callable[[Tensor], Any]) -> Callable[[torch.device], Tensor]:
    """A layer that would be right, but for what is changed."""

    def call(device: torch.device) -> Tensor:
        inputs = _inputs(device)
        for name, change in changes.items():
            inputs[name] = change(inputs[name])
        return experts(**inputs, preference=preference)

    return call


def _shaped(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.new_ones(shape)


def _with_index(token: int, slot: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    def call(device: torch.device) -> None:
        inputs = _inputs(device)
        inputs["indices"] = inputs["indices"].to(dtype)
        inputs["indices"][token, slot] = value
        experts(**inputs)
        adjoint.check()

    return call


def _other_gradient(device: torch.device) -> None:
    inputs = _inputs(device)
    plan = adjoint.plan(experts, *inputs.values())
    _, *saved = plan.run(*inputs.values())
    assert plan.adjoint is not None
    layer = (inputs["x"], inputs["gate_up"], inputs["down"], inputs["weights"])
    plan.adjoint.run(torch.ones(_TOKENS, _COLUMNS + 1, device=device), *layer, *saved)


BAD_CALLS = (
    BadCall("x with three axes", _changed(x=_shaped(5, 1, 6)), "moe.experts", "x", "(5, 1, 6)"),
    BadCall(
        "gate_up of an odd number of rows",
        _changed(gate_up=_shaped(_EXPERTS, 5, _COLUMNS)),
        "gate_up",
        "2·I",
        "(4, 5, 6)",
    ),
    BadCall("gate_up of other columns", _changed(gate_up=_shaped(_EXPERTS, 6, 7)), "gate_up", "6 columns", "(4, 6, 7)"),
    BadCall("gate_up of one expert alone", _changed(gate_up=_shaped(6, 6)), "gate_up", "(6, 6)"),
    BadCall("gate_up in another type", _changed(gate_up=Tensor.half), "gate_up", "float32", "float16"),
    BadCall("down in another type", _changed(down=Tensor.double), "down", "float32", "float64"),
    BadCall("down of other experts", _changed(down=_shaped(5, 6, 3)), "down", "gate_up, 4", "got 5"),
    BadCall("down of another I", _changed(down=_shaped(4, 6, 4)), "down", "(4, 6, 3)", "(4, 6, 4)"),
    BadCall("down transposed", _changed(down=_shaped(4, 3, 6)), "down", "(4, 6, 3)", "(4, 3, 6)"),
    BadCall("narrow indices", _changed(indices=Tensor.short), "indices", "int16", ".long()"),
    BadCall("indices with one axis", _changed(indices=_shaped(5)), "indices", "[tokens, k]", "(5,)"),
    BadCall("indices of other tokens", _changed(indices=_shaped(4, 2)), "indices", "(5, 6)", "(4, 2)"),
    BadCall("no slots", _changed(indices=lambda t: t[:, :0], weights=lambda t: t[:, :0]), "indices", "k ≥ 1", "(5, 0)"),
    BadCall("weights of other slots", _changed(weights=_shaped(5, 3)), "weights", "(5, 2)", "(5, 3)"),
    BadCall("weights of other tokens", _changed(weights=_shaped(4, 2)), "weights", "[5, k]", "(4, 2)"),
    BadCall("an index too large", _with_index(3, 1, 4), "moe.experts: indices", "got 4 at position 7 "),
    BadCall("a negative index", _with_index(0, 0, -1, torch.int32), "got -1 at position 0 "),
    BadCall("an index that is an expert modulo 2^32", _with_index(4, 1, 2**32 + 1), "got 4294967297 at position 9 "),
    BadCall("a gradient of another shape", _other_gradient, "dy", "(5, 6)", "(5, 7)"),
    BadCall("a preference of another type", _changed("eager"), "preference=", "str"),
    BadCall(
        "no workspace allowed",
        _changed(adjoint.Preference(max_workspace_bytes=0)),
        "experts",
        "triton",
        "eager",
        "the preference allows 0",
        error=Unsupported,
    ),
)

# ------------------------------------------------------------------------------------------ workloads


def _routed(tokens: int, columns: int, number: int, inner: int, slots: int, skewed: bool) -> Make:
    """A layer on a device, routed uniformly, or with experts chosen as often as 1 / rank."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        on_device = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

        def values(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=on_device).mul_(scale)

        times = torch.rand(tokens, number, device=device, generator=on_device).log_().neg_()
        if skewed:
            times *= 1 + torch.randperm(number, device=device, generator=on_device)
        shares = torch.rand(tokens, slots, device=device, generator=on_device)
        return (
            values(tokens, columns),
            values(number, 2 * inner, columns, scale=columns**-0.5),
            values(number, columns, inner, scale=inner**-0.5),
            times.topk(slots, dim=1, largest=False).indices,
            (shares / shares.sum(1, keepdim=True)).to(dtype),
        )

    return make


def composed(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """torch's grouped product with a gather before and a scatter after it."""
    order = indices.reshape(-1).sort(stable=True)
    token = order.indices // indices.shape[1]
    experts_of = torch.arange(1, down.shape[0] + 1, device=x.device)
    ends = torch.searchsorted(order.values, experts_of).to(torch.int32)
    g, u = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    rows = torch._grouped_mm(F.silu(g) * u, down.transpose(1, 2), offs=ends)
    rows = rows * weights.reshape(-1)[order.indices].to(rows.dtype)[:, None]
    return torch.zeros_like(x).index_add_(0, token, rows)


def _grouped_reference(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> tuple[Tensor]:
    """The definition, expert by expert: the layer of a workload has too many rows to take one by one."""
    y, inner = torch.zeros_like(x), down.shape[2]
    for e in range(down.shape[0]):
        t, j = (indices == e).nonzero(as_tuple=True)
        both = x[t] @ gate_up[e].T
        h = F.silu(both[:, :inner]) * both[:, inner:]
        y.index_add_(0, t, weights[t, j][:, None] * (h @ down[e].T))
    return (y,)


TIMED = Subject(
    name="moe.experts",
    function=experts,
    inputs=EXPERTS.inputs,
    reference=_grouped_reference,
    reference_backward=reference.experts_backward,
    cases=(),
    batched=EXPERTS.batched,
)


def _workloads() -> Iterable[Workload]:
    for tokens, columns, number, inner, slots in ((16384, 2048, 512, 512, 10), (16384, 2048, 128, 768, 8)):
        for skewed in (False, True):
            routing = "skewed" if skewed else "uniform"
            matrices, lines = 3 * number * inner * columns * 2, tokens * columns * 2
            yield Workload(
                f"moe.experts {tokens}×{columns}, {number} of {inner}, k = {slots}, {routing}",
                TIMED,
                _routed(tokens, columns, number, inner, slots, skewed),
                matrices + 2 * lines,
                2 * matrices + 3 * lines,
                composed,
                compile=False,
                devices=("cuda",),
                directions=("forward", "forward + backward"),
                operations=6 * tokens * slots * columns * inner,
            )


WORKLOADS = tuple(_workloads())

# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """A layer of every dtype."""
    for dtype in EXPERTS.dtypes:
        shapes = {"x": (64, 2048), "gate_up": (512, 1536, 2048), "down": (512, 2048, 768), "weights": (64, 8)}
        tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        yield bind(experts, indices=torch.empty(64, 8, dtype=torch.int64, device="meta"), **tensors)
