"""`GatedDeltaNet`, `GatedAttention` and `DenseMLP` beside the oracle: all dtypes, packed, from a cache, bad calls."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.nn.attention import causal_attention
from adjoint.nn.cache import Places
from tests.models import oracle
from tests.models.small import ANOTHER_WAY, distance
from tests.stated import stated

HIDDEN = 24
CONFIG = SimpleNamespace(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=50.0,
    partial_rotary_factor=0.5,
)
SEEDS = range(4)

MARGIN = 1.5
"""How much of the error that plain torch has in 16 bits, against float64, ours may have."""


def angles(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = 8
    steps = positions.float()[..., None] * (1.0 / (50.0 ** (torch.arange(0, size, 2).float() / size)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return steps.cos().to(wide), steps.sin().to(wide)


def delta_net(dtype: torch.dtype, **options: Any) -> nn.Module:
    layer = adjoint.nn.GatedDeltaNet(HIDDEN, 2, 6, 8, 12, **options)
    with torch.no_grad():
        layer.A_log.uniform_(-4, 0)
    return layer.to(dtype)


def apply_attention(layer: Any, x: Tensor) -> Tensor:
    return layer(x, *angles(torch.arange(x.shape[1]), x.dtype))  # type: ignore[no-any-return]


Layer = tuple[Callable[[torch.dtype], nn.Module], Callable[[Any, Tensor], Tensor], Callable[..., Tensor]]
LAYERS: dict[str, Layer] = {
    "GatedDeltaNet": (delta_net, lambda layer, x: layer(x), lambda x, w: oracle.gated_delta_net(x, w, CONFIG)),
    "interleaved": (
        lambda dtype: delta_net(dtype, projections="interleaved"),
        lambda layer, x: layer(x),
        lambda x, w: oracle.gated_delta_net(x, w, CONFIG),
    ),
    "width 2": (
        lambda dtype: delta_net(dtype, conv_width=2),
        lambda layer, x: layer(x),
        lambda x, w: oracle.gated_delta_net(x, w, CONFIG),
    ),
    "GatedAttention": (
        lambda dtype: adjoint.nn.GatedAttention(HIDDEN, 6, 2, 16).to(dtype),
        apply_attention,
        lambda x, w: oracle.attention(x, w, CONFIG),
    ),
    "biases": (
        lambda dtype: adjoint.nn.GatedAttention(HIDDEN, 6, 2, 16, bias=True).to(dtype),
        apply_attention,
        lambda x, w: oracle.attention(x, w, CONFIG),
    ),
    "DenseMLP": (
        lambda dtype: adjoint.nn.DenseMLP(HIDDEN, 36).to(dtype),
        lambda layer, x: layer(x),
        lambda x, w: oracle.mlp(x, w),
    ),
}
layers = pytest.mark.parametrize("name", LAYERS)


def results(name: str, seed: int, dtype: torch.dtype, of_oracle: torch.dtype | None = None) -> dict[str, Tensor]:
    """The output and all gradients of a layer in a dtype, or what the oracle makes of the same numbers in another."""
    make, apply, reference = LAYERS[name]
    torch.manual_seed(seed)
    layer = make(dtype)
    x, upstream = (torch.randn(1, 14, HIDDEN).to(dtype) for _ in range(2))
    weights = {key: p.detach() for key, p in layer.named_parameters()}
    if of_oracle is None:
        x.requires_grad_()
        y = apply(layer, x)
        leaves = dict(layer.named_parameters())
    else:
        x, upstream = x.to(of_oracle, copy=True).requires_grad_(), upstream.to(of_oracle)
        leaves = {key: w.to(of_oracle, copy=True).requires_grad_() for key, w in weights.items()}  # type: ignore[misc]
        y = reference(x[0], leaves)[None]
    (y * upstream).sum().backward()
    gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
    assert gradients.keys() == weights.keys() and x.grad is not None
    return {"y": y.detach(), "x": x.grad, **gradients}


@layers
@pytest.mark.parametrize(("dtype", "bound"), ((torch.float64, 1e-12), (torch.float32, 2e-5)), ids=str)
def test_outputs_and_gradients(name: str, dtype: torch.dtype, bound: float) -> None:
    for seed in SEEDS:
        exact = results(name, seed, dtype, torch.float64)
        for key, result in results(name, seed, dtype).items():
            assert distance(result, exact[key]) <= bound, (key, seed)


@layers
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_16_bits_are_as_near_to_float64_as_plain_torch(name: str, dtype: torch.dtype) -> None:
    """Over some draws, and beside plain torch in bfloat16, scaled to the dtype's last digit: its norms underflow."""
    ours: dict[str, list[float]] = {}
    plain: dict[str, list[float]] = {}
    for seed in SEEDS:
        exact, rounded = (results(name, seed, torch.bfloat16, kind) for kind in (torch.float64, torch.bfloat16))
        for key, result in rounded.items():
            plain.setdefault(key, []).append(distance(result, exact[key]))
        exact = results(name, seed, dtype, torch.float64)
        for key, result in results(name, seed, dtype).items():
            assert result.dtype == dtype
            ours.setdefault(key, []).append(distance(result, exact[key]))
    scale = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    for key, distances in ours.items():
        assert math.hypot(*distances) <= MARGIN * scale * math.hypot(*plain[key]), key


@pytest.mark.parametrize("lengths", ((5, 1, 0, 70, 14), (90,), (0, 3, 0)), ids=str)
@pytest.mark.parametrize("name", ("GatedDeltaNet", "GatedAttention"))
def test_packed_equals_separate(name: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer: Any = LAYERS[name][0](torch.float64)
    parts = [torch.randn(1, length, HIDDEN, dtype=torch.float64, requires_grad=True) for length in lengths]
    upstream = torch.randn(1, sum(lengths), HIDDEN, dtype=torch.float64)
    separate = torch.cat([LAYERS[name][1](layer, part) for part in parts if part.shape[1]], 1)
    expected = torch.autograd.grad(separate, [*layer.parameters(), *parts], upstream, allow_unused=True)
    x = torch.cat(parts, 1)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    if name == "GatedAttention":
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed = layer(x, *angles(positions, torch.float64), cu_seqlens=cu_seqlens)
    else:
        packed = layer(x, cu_seqlens=cu_seqlens)
    gradients = torch.autograd.grad(packed, [*layer.parameters(), *parts], upstream)
    assert distance(packed, separate) <= stated("models", "| a layer's packed outputs, float64 |")
    for gradient, right in zip(gradients, expected, strict=True):
        assert gradient.numel() == 0 or distance(gradient, right) <= ANOTHER_WAY


def test_attention_keeps_no_matrix_of_scores() -> None:
    """Neither in a row nor in packed ones: 4096² scores of 6 heads would be 400 MB and more."""
    q, k = torch.randn(1, 4096, 6, 16, requires_grad=True), torch.randn(1, 4096, 2, 16, requires_grad=True)
    for cu_seqlens in (None, torch.tensor([0, 4096])):
        sizes: list[int] = []

        def note(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            causal_attention(q, k, k, cu_seqlens).sum().backward()
        assert sizes and max(sizes) <= q.numel()


@pytest.mark.parametrize("pieces", ((9, 1, 1, 3), (20, 40, 1), (1,) * 8), ids=str)
@pytest.mark.parametrize("name", ("GatedDeltaNet", "GatedAttention"))
def test_a_cache_goes_on(name: str, pieces: tuple[int, ...]) -> None:
    """Two rows of three slots, in pieces through steps, chunks and single tokens: what all tokens at once give."""
    torch.manual_seed(0)
    layer: Any = LAYERS[name][0](torch.float64)
    x = torch.randn(2, sum(pieces), HIDDEN, dtype=torch.float64)
    slots = torch.tensor([2, 0])
    with torch.no_grad():
        expected, cache, parts, past = LAYERS[name][1](layer, x), layer.new_cache(3), [], 0
        for count in pieces:
            piece = x[:, past : past + count]
            if name == "GatedAttention":
                positions = torch.arange(past, past + count).expand(2, count)
                places = Places(slots[:, None].expand(2, count), positions, (past,) * 2, (count,) * 2, slots)
                options: dict[str, Any] = {"cache": cache, "places": places}
                parts.append(layer(piece, *angles(positions, x.dtype), **options))
            else:
                parts.append(layer(piece, cache=cache, slots=slots))
            past += count
    assert distance(torch.cat(parts, 1), expected) <= ANOTHER_WAY


TINY: dict[str, Callable[[], Any]] = {
    "GatedDeltaNet": lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4),
    "GatedAttention": lambda: adjoint.nn.GatedAttention(8, 2, 1, 4),
    "DenseMLP": lambda: adjoint.nn.DenseMLP(8, 6),
    "SparseMoE": lambda: adjoint.nn.SparseMoE(8, 6, 4, 2),
}
WRONG_TOKENS: dict[str, tuple[Any, str]] = {
    "columns": (torch.zeros(1, 3, 7), r"x must have 8 columns, the hidden size, got shape \(1, 3, 7\)"),
    "dtype": (
        torch.zeros(1, 3, 8, dtype=torch.float64),
        "x must have the dtype of the layer's parameters, float32, got",
    ),
    "whole numbers": (torch.zeros(1, 3, 8, dtype=torch.int64), "x must be one of float64"),
    "no tensor": ([[0.0] * 8], "x must be a tensor, got list"),
}


@pytest.mark.parametrize("layer", TINY)
@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_tokens_that_a_layer_does_not_take_are_named(case: str, layer: str) -> None:
    (x, words), tables = WRONG_TOKENS[case], [torch.ones(3, 2)] * 2 if layer == "GatedAttention" else []
    with pytest.raises(adjoint.ArgumentError, match=f"^{layer}: {words}"):
        TINY[layer]()(x, *tables)


@pytest.mark.parametrize("layer", ("GatedDeltaNet", "GatedAttention", "DenseMLP"))
def test_a_projection_of_another_class_may_convert_its_inputs(layer: str) -> None:
    class Converting(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    module = TINY[layer]().double()
    for child in module.modules():
        if type(child) is torch.nn.Linear:
            child.__class__ = Converting
            child.float()
    x = torch.ones(1, 3, 8, dtype=torch.float64)
    tables = [torch.ones(3, 2, dtype=torch.float64)] * 2 if layer == "GatedAttention" else []
    assert module(x, *tables).shape == x.shape


@pytest.mark.parametrize("name", ("GatedDeltaNet", "GatedAttention"))
def test_packed_tokens_on_meta_have_shapes(name: str) -> None:
    x, tables = (
        torch.zeros(1, 5, 8, device="meta"),
        [torch.ones(5, 2, device="meta")] * (2 * (name == "GatedAttention")),
    )
    bounds = torch.tensor([0, 2, 5], device="meta")
    assert TINY[name]().to("meta")(x, *tables, cu_seqlens=bounds).shape == x.shape


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "axes": (
        lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4)(torch.zeros(3, 8)),
        r"GatedDeltaNet: x must have the axes \[batch, time, hidden\], got shape \(3, 8\)",
    ),
    "another layer's cache": (
        lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4)(
            torch.zeros(1, 1, 8), cache=adjoint.nn.GatedAttention(8, 2, 1, 4).new_cache(1)
        ),
        "GatedDeltaNet: cache must be of its new_cache, got KeyValueCache",
    ),
    "another attention's cache": (
        lambda: adjoint.nn.GatedAttention(8, 2, 1, 4)(
            torch.zeros(1, 1, 8),
            torch.ones(1, 2),
            torch.zeros(1, 2),
            cache=adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4).new_cache(1),
        ),
        "GatedAttention: cache must be of its new_cache, got RecurrentCache",
    ),
    "fewer than no sequences": (lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4).new_cache(-1), "at least 0, got -1"),
    "text of sequences": (lambda: adjoint.nn.GatedAttention(8, 2, 1, 4).new_cache("x"), "must be an integer, got 'x'"),
    "groups": (lambda: adjoint.nn.GatedDeltaNet(8, 3, 4, 4, 4), "multiple of num_key_heads"),
    "size": (lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 300, 4), "key_head_dim must be from 1 to 256, got 300"),
    "width": (lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4, conv_width=9), "conv_width must be from 1 to 8"),
    "projections": (lambda: adjoint.nn.GatedDeltaNet(8, 1, 2, 4, 4, projections="fused"), "projections must be"),  # type: ignore[arg-type]
    "heads": (lambda: adjoint.nn.GatedAttention(8, 3, 2, 4), "multiple of num_key_value_heads"),
    "no head": (lambda: adjoint.nn.GatedAttention(8, 0, 2, 4), "num_heads must be at least 1"),
    "mlp": (lambda: adjoint.nn.DenseMLP(8, 0), "intermediate_size must be at least 1"),
    "places": (
        lambda: adjoint.nn.GatedAttention(8, 2, 1, 4)(
            torch.zeros(1, 1, 8),
            torch.ones(1, 2),
            torch.zeros(1, 2),
            cache=adjoint.nn.GatedAttention(8, 2, 1, 4).new_cache(1),
        ),
        "needs places",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    call, words = BAD[case]
    with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match=words):
        call()


def test_a_cache_is_refused_alike_for_few_tokens_and_many() -> None:
    """Under a gradient, and with slots that are none of its rows."""
    layer = adjoint.nn.GatedDeltaNet(16, num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    for time in (5, 50):
        with pytest.raises(adjoint.ArgumentError):
            layer(torch.randn(1, time, 16), cache=layer.new_cache(1)).sum().backward()
        with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match=r"slots|state_indices"):
            layer(torch.randn(1, time, 16), cache=layer.new_cache(2), slots=torch.tensor([2]))
    with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match="slots"):
        layer(torch.randn(1, 50, 16), cache=layer.new_cache(2), slots=torch.tensor([-1]))
