"""The layers the gated delta rule is timed on, and how their results are checked."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import Inputs, Make, Workload
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.packing import CHUNK, saved_states
from adjoint.ops.gated_delta.rule import eager
from adjoint.ops.gated_delta.rule.cases import RULE

ROWS = (
    (32768, 16, 32, 1, 1),
    (32768, 16, 32, 4, 1),
    (8192, 16, 32, 1, 1),
    (32768, 2, 8, 1, 1),
    (32768, 16, 32, 1, 256),
)
"""Tokens, key heads, value heads, sequences they are packed from, and what log σ(x) is divided by for the decay.

Our times do not depend on the decay. Those of a peer do that leaves out what has decayed away: log σ(x) itself halves a
state at every token, more than most heads of a layer do.
"""

K = V = 128


def _layer(tokens: int, key_heads: int, heads: int, sequences: int, slower: int) -> Make:
    """Directions as keys and queries, decays and strengths as a layer has them, sequences of one length."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, tokens, *shape, device=device, generator=own)

        bounds = None
        if sequences > 1:
            bounds = torch.arange(0, tokens + 1, tokens // sequences, device=device)
        return (
            F.normalize(normal(key_heads, K), dim=-1).to(dtype),
            F.normalize(normal(key_heads, K), dim=-1).to(dtype),
            normal(heads, V).to(dtype),
            F.logsigmoid(normal(heads)) / slower,
            normal(heads).sigmoid(),
            None,
            bounds,
        )

    return make


def _by_chunks(*inputs: Any) -> tuple[Tensor]:
    """The chunked form in float64, which other tests hold to the recurrence: that would take minutes here."""
    out = torch.empty_like(inputs[2])
    eager.forward(*(*inputs, K**-0.5, False, out, None, None))
    return (out,)


def _gradients(do: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    tokens, rest, v = inputs[:5], inputs[5:], inputs[2]
    saved = v.new_zeros(saved_states(v.shape[1]), v.shape[2], K, V)
    options = (K**-0.5, False)
    eager.forward(*(*inputs, *options, torch.empty_like(v), None, saved))
    slopes = tuple(map(torch.empty_like, tokens))
    eager.backward(*(*tokens, do, None, *rest, saved, *options, NEED_STATE - 1, (*slopes, v.new_empty(0))))
    return slopes


TIMED = replace(
    RULE,
    keywords={},
    reference=_by_chunks,
    reference_backward=_gradients,
    cases=(),
    mistakes={},
    pieces=lambda arguments, outputs: [(arguments, outputs)],
)


def _workloads() -> Iterator[Workload]:
    for tokens, key_heads, heads, sequences, slower in ROWS:
        keys, values, gates = tokens * key_heads * K * 2, tokens * heads * V * 2, tokens * heads * 4
        products = CHUNK * (2 * K + 2 * V) + 3 * K * V  # k kᵀ, q kᵀ; T r, P v'; k S, q S, kᵀ v'
        packed = f", {sequences} sequences" if sequences > 1 else ""
        slow = ", slow decay" if slower > 1 else ""
        yield Workload(
            f"gated_delta_rule {tokens} tokens, {key_heads} and {heads} heads{packed}{slow}",
            TIMED,
            _layer(tokens, key_heads, heads, sequences, slower),
            2 * keys + 2 * values + 2 * gates,
            4 * keys + 3 * values + 4 * gates,
            None,
            peers=("fla_gated_delta_rule", "flash_qla_gated_delta_rule"),
            compile=False,
            devices=("cuda",),
            operations=2 * tokens * heads * products,
            kept=True,
            recorded=True,
        )


WORKLOADS = tuple(_workloads())
