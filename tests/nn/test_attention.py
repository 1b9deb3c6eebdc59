"""Which attention computes a batch of rows, and, on a GPU, that it does, beside float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import adjoint
from adjoint.nn.attention import causal_attention, prefers_cudnn
from tests.models.small import distance

HOPPER: dict[str, Any] = {"deterministic": False, "capability": (9, 0), "cudnn": 91900}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_heads_of_256_on_hopper_prefer_cudnn(dtype: torch.dtype) -> None:
    assert prefers_cudnn(dtype, 256, **HOPPER)
    assert prefers_cudnn(dtype, 256, **HOPPER | {"cudnn": 91501})


@pytest.mark.parametrize(
    "dtype, size, changes",
    (
        (torch.bfloat16, 256, {"deterministic": True}),
        (torch.bfloat16, 256, {"capability": (8, 0)}),
        (torch.bfloat16, 256, {"capability": (10, 0)}),
        (torch.bfloat16, 256, {"cudnn": 91500}),
        (torch.bfloat16, 256, {"cudnn": 0}),
        (torch.float32, 256, {}),
        (torch.float64, 256, {}),
        (torch.bfloat16, 192, {}),
        (torch.bfloat16, 128, {}),
    ),
    ids=str,
)
def test_torch_chooses_for_all_others(dtype: torch.dtype, size: int, changes: dict[str, Any]) -> None:
    assert not prefers_cudnn(dtype, size, **HOPPER | changes)


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention with all scores, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


# ------------------------------------------------------------------------------------------------------ GPU

AS_FAR_AS_FLASH = 1.5
"""How many times as far from float64 as flash attention's cuDNN's results may be, as docs/models.md states."""

SHAPES = (
    (4, 512, 8, 2, 256), (1, 2048, 16, 2, 256), (8, 130, 4, 4, 256), (64, 2, 8, 2, 256), (8, 77, 16, 4, 256),
    (2, 300, 10, 2, 128), (2, 300, 12, 3, 64), (2, 200, 4, 2, 192), (4, 65, 4, 1, 32),
)  # fmt: skip
"""Rows, tokens, heads of queries and of keys, and columns of a head; many rows where they are short."""


def problem(batch: int, time: int, heads: int, key_value_heads: int, size: int) -> list[Tensor]:
    """Queries, keys, values and the output's gradient."""
    torch.manual_seed(0)
    shapes = [(batch, time, count, size) for count in (heads, key_value_heads, key_value_heads, heads)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def results(attend: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output and gradients."""
    q, k, v, upstream = (x.detach().clone().requires_grad_() for x in inputs)
    y = attend(q, k, v)
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), upstream)]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@contextmanager
def deterministic_mode() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses products
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_about_as_near_to_float64_as_flash(shape: tuple[int, ...]) -> None:
    inputs = problem(*shape)
    exact = results(exact_attention, *(x.double() for x in inputs))
    ours, others = results(causal_attention, *inputs), results(flash, *inputs)
    for name, mine, other, right in zip(("y", "dq", "dk", "dv"), ours, others, exact, strict=True):
        assert distance(mine, right) <= AS_FAR_AS_FLASH * distance(other, right), name


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_deterministic_mode_has_the_bits_of_flash(shape: tuple[int, ...]) -> None:
    inputs = problem(*shape)
    with deterministic_mode():
        ours, others = results(causal_attention, *inputs), results(flash, *inputs)
    for name, mine, other in zip(("y", "dq", "dk", "dv"), ours, others, strict=True):
        assert torch.equal(mine, other), name


def kernels(call: Callable[[], object]) -> str:
    """The names of the kernels that a call runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return " ".join(event.key for event in record.key_averages())


@pytest.mark.gpu
def test_what_prefers_cudnn_runs_it_and_nothing_of_torch_changes() -> None:
    cudnn = torch.backends.cudnn.version() or 0
    facts: dict[str, Any] = {"capability": torch.cuda.get_device_capability(), "cudnn": cudnn}
    if not prefers_cudnn(torch.bfloat16, 256, deterministic=False, **facts):
        pytest.skip(f"not on {facts}")
    inputs = problem(2, 256, 8, 2, 256)
    before = torch._C._get_sdp_priority_order()
    names = kernels(lambda: results(causal_attention, *inputs))
    assert "cudnn" in names and "pytorch_flash" not in names
    assert torch._C._get_sdp_priority_order() == before
    for mode in (sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]), deterministic_mode()):
        with mode:
            names = kernels(lambda: results(causal_attention, *inputs))
        assert "pytorch_flash" in names and "cudnn" not in names


@pytest.mark.gpu
def test_a_layer_in_deterministic_mode_repeats_its_bits() -> None:
    torch.manual_seed(0)
    layer = adjoint.nn.GatedAttention(256, 8, 2, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 1024, 256, device="cuda", dtype=torch.bfloat16)
    angles = torch.arange(1024, device="cuda")[:, None] * torch.rand(32, device="cuda")
    runs = []
    with deterministic_mode():
        for _ in range(3):
            y = layer(x, angles.cos(), angles.sin())
            runs.append([y, *torch.autograd.grad(y, [*layer.parameters()], y.detach())])
    for other in runs[1:]:
        assert all(torch.equal(mine, right) for mine, right in zip(other, runs[0], strict=True))


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        (torch.tensor([0, 3]), r"must begin with 0, never descend, and end with the number of tokens, 5, got \[0, 3\]"),
        (torch.tensor([0, 7]), r"got \[0, 7\]"),
        (torch.tensor([0, 4, 3, 5]), "never descend"),
        (torch.arange(12) * 2, r"got \[0, 2, 4, 6, …, 20, 22\]"),
        (torch.tensor([0.0, 5.0]), "cu_seqlens must be int32 or int64"),
        ([0, 5], "cu_seqlens must be a tensor, got list"),
    ],
)
def test_bounds_that_are_none_are_named(bounds: Any, words: str) -> None:
    layer, angles = adjoint.nn.GatedAttention(8, 2, 1, 4), torch.zeros(5, 1)
    with pytest.raises(adjoint.ArgumentError, match=f"GatedAttention: .*{words}"):
        layer(torch.zeros(1, 5, 8), angles, angles, cu_seqlens=bounds)
