"""Every module is exported once, with a dynamic batch and length, and serves others with the bits of the module."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export
from torch.utils._pytree import tree_leaves

from adjoint import nn
from adjoint.core.kernels import interpreting

HIDDEN, ROWS = 16, 10

pytestmark = pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")


def _values(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, HIDDEN, generator=torch.Generator().manual_seed(batch + length))


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(ROWS, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def _heads(batch: int, length: int) -> Tensor:
    return _values(batch, length).view(batch, length, 2, HIDDEN // 2)


def _angles(batch: int, length: int) -> Tensor:
    return torch.rand(batch, length, 2, generator=torch.Generator().manual_seed(batch + length))


MODULES = {
    "SiLU": (nn.SiLU, (_values,)),
    "SwiGLU": (nn.SwiGLU, (_values, _values)),
    "SigmoidGate": (nn.SigmoidGate, (_values, _values)),
    "Rotary": (lambda: nn.Rotary(HIDDEN // 2), (_heads, _heads)),
    "LinearCrossEntropy": (lambda: nn.LinearCrossEntropy(HIDDEN, ROWS), (_values, _ids)),
    "RMSNorm": (lambda: nn.RMSNorm(HIDDEN), (_values,)),
    "GatedRMSNorm": (lambda: nn.GatedRMSNorm(HIDDEN), (_values, _values)),
    "CausalConv1d": (lambda: nn.CausalConv1d(HIDDEN, 4, bias=True), (_values,)),
    "Embedding": (lambda: nn.Embedding(ROWS, HIDDEN, padding_idx=3), (_ids,)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(ROWS, HIDDEN), (_ids,)),
    "GatedDeltaNet": (lambda: nn.GatedDeltaNet(HIDDEN, 1, 2, 8, 8), (_values,)),
    "GatedDeltaNet, interleaved": (lambda: nn.GatedDeltaNet(HIDDEN, 2, 4, 8, 8, projections="interleaved"), (_values,)),
    "GatedAttention": (lambda: nn.GatedAttention(HIDDEN, 4, 2, 8), (_values, _angles, _angles)),
    "DenseMLP": (lambda: nn.DenseMLP(HIDDEN, 24), (_values,)),
    "SparseMoE": (lambda: nn.SparseMoE(HIDDEN, 12, 6, 3, shared_expert_size=20), (_values,)),
    "SparseMoE, sigmoid": (lambda: nn.SparseMoE(HIDDEN, 12, 6, 3, score="sigmoid", renormalize=False), (_values,)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_exported_with_a_dynamic_length(name: str, strict: bool) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make()
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=1, max=4096)}
    program = export(module, tuple(x(3, 7) for x in inputs), dynamic_shapes=(sizes,) * len(inputs), strict=strict)
    for batch, length in ((3, 7), (1, 1), (2, 100), (64, 1)):
        arguments = [x(batch, length) for x in inputs]
        exported, own = program.module()(*arguments), module(*arguments)
        assert all(map(torch.equal, tree_leaves(exported), tree_leaves(own))), (batch, length)


def test_every_module_is_among_them() -> None:
    modules = {name for name in nn.__all__ if isinstance(getattr(nn, name), type)}
    assert modules == {name.partition(",")[0] for name in MODULES}
