"""Our operations inside the models of transformers: Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

    from adjoint.integrations.transformers import patch, unpatch

    patch(model)            # prints what was replaced, what not, and why
    unpatch(model)

`patch` reaches the modules of one model; others in the process are untouched. Blocks, parameters and state dicts stay
those of the model, and so does what transformers records: with `output_router_logits=True` the logits of every layer,
and the auxiliary loss that it computes from them.

Experts and routers can be exchanged alone, in other mixture models of transformers 5.8 and newer too:

    from adjoint.integrations.transformers import exchange_routers, register_experts

    register_experts()                              # once
    model.set_experts_implementation("adjoint")     # or from_pretrained(..., experts_implementation="adjoint")
    exchange_routers(model)                         # their softmax and top-k for `adjoint.moe.route`

The other way, `adjoint.nn.SparseMoE` in the place of a block, keeps them too where the block's router stays its gate:

    block = adjoint.nn.SparseMoE(hidden_size, expert_size, num_experts, experts_per_token, ...)
    block.load_state_dict(layer.mlp.state_dict())
    block.gate, layer.mlp = layer.mlp.gate, block
"""

from adjoint.integrations.transformers.moe import exchange_routers, experts_forward, register_experts
from adjoint.integrations.transformers.patch import Replacement, Report, patch, unpatch

__all__ = [
    "Replacement",
    "Report",
    "exchange_routers",
    "experts_forward",
    "patch",
    "register_experts",
    "unpatch",
]
