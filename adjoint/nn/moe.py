"""`SparseMoE`: a router, its experts and an optional shared expert, as Qwen3-Next and Qwen3.5-MoE have them."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.arguments import require_integer, require_size
from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.nn.mlp import DenseMLP
from adjoint.nn.tokens import require_tokens
from adjoint.ops import moe
from adjoint.ops.moe.route import SCORES


class Routing(NamedTuple):
    """The routing of a layer's tokens: the router's logits, and the weights and indices of each token's experts."""

    logits: Float[Tensor, "*tokens experts"]
    weights: Float[Tensor, "*tokens k"]
    indices: Int[Tensor, "*tokens k"]


class SparseMoE(nn.Module):
    """y[t] = Σ over the experts e of token t of weight[t, e] · expert_e(x[t]) + σ(w·x[t]) · shared(x[t])

    with expert(x) = down · swiglu(gate · x, up · x). Routing is `adjoint.moe.route`, and the experts are
    `adjoint.moe.experts`. The layer has a shared expert, with its gate, if `shared_expert_size` is set.

    The state dict has the names and shapes of Hugging Face's `Qwen3NextSparseMoeBlock` and
    `Qwen3_5MoeSparseMoeBlock`, so each loads the state dict of the other:

        gate.weight               [experts, hidden]
        experts.gate_up_proj      [experts, 2·expert size, hidden], gates first
        experts.down_proj         [experts, hidden, expert size]
        shared_expert.gate_proj.weight, .up_proj.weight, .down_proj.weight
        shared_expert_gate.weight [1, hidden]

    The gate may be replaced by the router of such a block. Then the layer takes only the logits of the router, which
    transformers records for its auxiliary loss (`adjoint.integrations.transformers`).

    Checkpoints with separate matrices for each expert (`experts.7.gate_proj.weight`) go through `fuse_experts` first.

    Args:
        hidden_size: the number of columns of a token.
        expert_size: the number of columns of gate and up in an expert.
        num_experts: the number of experts.
        experts_per_token: the number of experts to which a token goes.
        shared_expert_size: the number of columns of gate and up in the shared expert; None for no shared expert.
        renormalize: whether a token's weights add up to 1 (`norm_topk_prob` in a configuration; always in Qwen3.5-MoE).
        score: "softmax" or "sigmoid", as for `adjoint.moe.route`.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: a size is not positive, or there are fewer experts than `experts_per_token`.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        shared_expert_size: int | None = None,
        renormalize: bool = True,
        score: Literal["softmax", "sigmoid"] = "softmax",
        preference: Preference | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = require_size("SparseMoE", "hidden_size", hidden_size)
        expert_size = require_size("SparseMoE", "expert_size", expert_size)
        num_experts = require_size("SparseMoE", "num_experts", num_experts)
        experts_per_token = require_integer("SparseMoE", "experts_per_token", experts_per_token)
        if not 1 <= experts_per_token <= num_experts:
            raise ArgumentError(
                f"SparseMoE: experts_per_token must be from 1 to num_experts, {num_experts}, got {experts_per_token}"
            )
        if score not in SCORES:
            raise ArgumentError(f"SparseMoE: score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
        self.hidden_size, self.num_experts, self.experts_per_token = hidden_size, num_experts, experts_per_token
        self.renormalize, self.score, self.preference = renormalize, score, preference
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, **factory)
        self.experts = _Experts(num_experts, hidden_size, expert_size, factory)
        self.shared_expert: DenseMLP | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_expert_size is not None:
            shared_expert_size = require_size("SparseMoE", "shared_expert_size", shared_expert_size)
            self.shared_expert = DenseMLP(hidden_size, shared_expert_size, **factory)
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **factory)

    @overload
    def forward(self, x: Tensor, return_routing: Literal[False] = False) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, return_routing: Literal[True]) -> "tuple[Tensor, Routing]": ...

    def forward(
        self, x: Float[Tensor, "*tokens hidden"], return_routing: bool = False
    ) -> "Float[Tensor, '*tokens hidden'] | tuple[Float[Tensor, '*tokens hidden'], Routing]":
        """The outputs of the layer; on request also the routing of its tokens, for auxiliary losses and statistics."""
        self._check(x)
        logits = self.gate(x)
        if isinstance(logits, tuple):  # a router of transformers: its logits, weights and indices
            logits = logits[0].view(*x.shape[:-1], self.num_experts)
        y, routing = self._mix(x, logits)
        return (y, routing) if return_routing else y

    def mix(
        self, x: Float[Tensor, "*tokens hidden"], logits: Float[Tensor, "*tokens experts"]
    ) -> Float[Tensor, "*tokens hidden"]:
        """The outputs of the layer for logits that the caller has: `gate(x)`, which a loss may need too."""
        self._check(x)
        if not isinstance(logits, Tensor) or logits.shape != (*x.shape[:-1], self.num_experts):
            expected = (*x.shape[:-1], self.num_experts)
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ArgumentError(f"SparseMoE: logits must be a tensor of shape {expected}, got {got}")
        return self._mix(x, logits)[0]

    def _check(self, x: Tensor) -> None:
        require_tokens("SparseMoE", x, self.hidden_size, self.gate.weight)

    def _mix(self, x: Tensor, logits: Tensor) -> "tuple[Tensor, Routing]":
        tokens = x.reshape(-1, self.hidden_size)
        weights, indices = moe.route(
            logits.reshape(tokens.shape[0], self.num_experts),
            self.experts_per_token,
            score=self.score,
            renormalize=self.renormalize,
            preference=self.preference,
        )
        y = self.experts(tokens, indices, weights, preference=self.preference)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        slots = (*x.shape[:-1], self.experts_per_token)
        return y.view(x.shape), Routing(logits, weights.view(slots), indices.view(slots))

    def extra_repr(self) -> str:
        options = [f"num_experts={self.num_experts}", f"experts_per_token={self.experts_per_token}"]
        options += [f"renormalize={self.renormalize}"] * (not self.renormalize)
        options += [f"score={self.score!r}"] * (self.score != "softmax")
        options += [f"preference={self.preference!r}"] * (self.preference is not None)
        return ", ".join(options)


class _Experts(nn.Module):
    """The experts, with their matrices stacked. The layer calls this module, as transformers does, so that hooks on it
    run and adapters of its parameters work."""

    def __init__(self, num_experts: int, hidden_size: int, expert_size: int, factory: dict[str, Any]) -> None:
        super().__init__()
        up, down = (num_experts, 2 * expert_size, hidden_size), (num_experts, hidden_size, expert_size)
        self.gate_up_proj = nn.Parameter(torch.empty(up, **factory))
        self.down_proj = nn.Parameter(torch.empty(down, **factory))
        for matrices in (self.gate_up_proj, self.down_proj):  # initialised as nn.Linear does
            nn.init.uniform_(matrices, -(matrices.shape[-1] ** -0.5), matrices.shape[-1] ** -0.5)

    def forward(
        self, x: Tensor, indices: Tensor, weights: Tensor, *, preference: Preference | None = None
    ) -> Float[Tensor, "tokens hidden"]:
        return moe.experts(x, self.gate_up_proj, self.down_proj, indices, weights, preference=preference)

    def extra_repr(self) -> str:
        experts, hidden, size = self.down_proj.shape
        return f"{experts} of {hidden} → {size} → {hidden}"


_ONE_EXPERT = re.compile(r"(?P<prefix>(?:.*\.)?experts\.)(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")


def fuse_experts(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the separate matrices of experts in a state dict; stacked ones stay as they are.

    `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, … become `experts.gate_up_proj`, and
    `experts.0.down_proj.weight`, … become `experts.down_proj`. Names may have any prefix, so the state dict may be that
    of a layer or of a whole model.

    Raises:
        ArgumentError: an expert is missing, or lacks one of its three matrices.

    >>> import torch
    >>> state = {f"mlp.experts.{e}.{m}_proj.weight": torch.zeros(2, 2) for e in (0, 1) for m in ("gate", "up", "down")}
    >>> {name: tuple(tensor.shape) for name, tensor in fuse_experts(state).items()}
    {'mlp.experts.gate_up_proj': (2, 4, 2), 'mlp.experts.down_proj': (2, 2, 2)}
    """
    by_prefix: dict[str, dict[int, dict[str, Tensor]]] = {}
    fused = {}
    for name, tensor in state_dict.items():
        if match := _ONE_EXPERT.fullmatch(name):
            experts = by_prefix.setdefault(match["prefix"], {})
            experts.setdefault(int(match["expert"]), {})[match["matrix"]] = tensor
        else:
            fused[name] = tensor
    for prefix, experts in by_prefix.items():
        for expert in range(max(experts) + 1):
            missing = [matrix for matrix in ("gate", "up", "down") if matrix not in experts.get(expert, {})]
            if missing:
                raise ArgumentError(
                    f"fuse_experts: state_dict has experts up to {prefix}{max(experts)}, but no "
                    f"{prefix}{expert}.{missing[0]}_proj.weight; give all experts of a layer at once"
                )
        ordered = [experts[expert] for expert in range(len(experts))]
        fused[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in ordered])
        fused[f"{prefix}down_proj"] = torch.stack([one["down"] for one in ordered])
    return fused
