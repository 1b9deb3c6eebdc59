"""Our expert layer and router as transformers' own interfaces take them."""

from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.integrations.transformers.versions import require
from adjoint.ops import moe

OLDEST = (5, 8)

ROUTERS = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter")
"""Router classes that take the k largest of a softmax over all experts and divide them by their sum, always or on
request."""


def register_experts(name: str = "adjoint") -> None:
    """Registers `adjoint.moe.experts` under a name as one of transformers' implementations of experts, for all models.

    A model whose experts are of another kind, with biases or another activation for example, raises in its forward.
    Expert parallelism is not supported: it marks the experts of other ranks by an index out of range, which is
    an error here.

    Raises:
        Unsupported: this transformers is too old.
    """
    require(OLDEST)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module of transformers: tokens [T, D], their experts and weights [T, k].

    Raises:
        Unsupported: the experts have biases, another activation, or another layout in memory.
    """
    if reason := why_not_experts(module):
        raise Unsupported(f"experts_forward: {type(module).__name__} {reason}; choose another experts_implementation")
    gate_up, down = module.gate_up_proj, module.down_proj
    return moe.experts(hidden_states, gate_up, down, top_k_index, top_k_weights)  # type: ignore[arg-type]


def exchange_routers(model: nn.Module) -> int:
    """Lets every router of a model choose experts and their weights by `adjoint.moe.route`; returns their number.

    The router's logits keep their bits, and its results keep their types. Routers stay modules of their class, with
    their hooks. `del router.forward` restores a router.

    Raises:
        ArgumentError: the model has no router that routes in this way.
        Unsupported: this transformers is too old.
    """
    require(OLDEST)
    routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    if not routers:
        raise ArgumentError(f"exchange_routers: model has no router of a class it knows: {', '.join(ROUTERS)}")
    for router in routers:
        router.forward = MethodType(router_forward, router)
    return len(routers)


def router_forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The logits [T, E], and the weights, in the logits' dtype, and indices of the chosen experts, both [T, k]."""
    logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    weights, indices = moe.route(logits, router.top_k, renormalize=getattr(router, "norm_topk_prob", True))
    return logits, weights.to(logits.dtype), indices


def why_not_experts(module: Any) -> str:
    """Why an experts module is not the layer that `adjoint.moe.experts` computes; empty when it is."""
    if not getattr(module, "has_gate", True):
        return "has no gate"
    if getattr(module, "has_bias", False):
        return "has biases"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "keeps its matrices transposed, or gate and up interleaved"
    if not isinstance(module.act_fn, nn.SiLU) and type(module.act_fn).__name__ != "SiLUActivation":
        return f"has the activation {type(module.act_fn).__name__}, not SiLU"
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__module__ != "transformers.integrations.moe":
        return "has a gate of its own"
    return ""
