"""The forward that `patch(model, loss=True)` gives to a model with a last matrix: in training, a loss and no logits."""

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from adjoint.integrations.transformers.families import class_of
from adjoint.integrations.transformers.instance import is_replaced, loaded
from adjoint.integrations.transformers.positions import by_name, takes, with_bounds
from adjoint.models.packing import next_labels
from adjoint.nn.plain import has_hooks
from adjoint.ops.loss import linear_cross_entropy


def why_not_fused(self: Any) -> str:
    """Why a model's loss needs logits; empty where it is transformers' own, of a last matrix that need not be called.

    Hooks of accelerate, which move and load weights, are no reason.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = self.lm_head
    if self.loss_function is not ForCausalLMLoss:
        return "its loss_function is another"
    if type(head) is not nn.Linear:
        return f"its lm_head is of the class {type(head).__module__}.{type(head).__name__}, and has to be called"
    if has_hooks(head) or is_replaced(head):
        return "its lm_head has hooks or a forward of its own, and has to be called"
    return ""


def training_loss(self: Any, *arguments: Any, **kwargs: Any) -> Any:
    """The forward of a causal model that, in training, gives the loss and no logits: they are never held at once."""
    kwargs = by_name(self, arguments, kwargs) if arguments else kwargs
    labels = kwargs.pop("labels", None)
    keep = kwargs.get("logits_to_keep")  # how many, or which
    if (
        not self.training
        or labels is None
        or isinstance(keep, Tensor)
        or bool(keep)
        or kwargs.get("return_dict") is False
        or kwargs.get("ignore_index", -100) != -100
        or why_not_fused(self)
    ):
        return type(self).forward(self, labels=labels, **kwargs)
    for name in ("return_dict", "logits_to_keep", "ignore_index"):
        kwargs.pop(name, None)
    shifted, count = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
    sizes = self if hasattr(self, "router_aux_loss_coef") else self.config.get_text_config()
    sparse = hasattr(sizes, "router_aux_loss_coef")
    if sparse and kwargs.get("output_router_logits") is None and takes(self, "output_router_logits"):
        kwargs["output_router_logits"] = self.config.get_text_config().output_router_logits
    told = with_bounds(self.model, (), kwargs)[1]  # no sequence's last token has a label in the next
    pictures = class_of(self).__name__.endswith("ForConditionalGeneration")  # whose tower knows bounds of its own
    outputs = self.model(**(kwargs if pictures else told))
    targets = next_labels(cast(Tensor, labels), told.get("cu_seq_lens_q")) if shifted is None else shifted
    loss = _loss(self.lm_head, outputs.last_hidden_state, targets, count)
    results = {name: getattr(outputs, name) for name in ("past_key_values", "hidden_states", "attentions")}
    modeling: Any = sys.modules[class_of(self).__module__]
    kind = modeling.MoeCausalLMOutputWithPast if sparse and not pictures else modeling.CausalLMOutputWithPast
    if pictures:
        kind = getattr(modeling, class_of(self).__name__.replace("ForConditionalGeneration", "CausalLMOutputWithPast"))
        results["rope_deltas"] = outputs.rope_deltas
    if sparse:
        results |= {"aux_loss": None, "router_logits": outputs.router_logits}
        if kwargs.get("output_router_logits"):
            balance = modeling.load_balancing_loss_func(
                outputs.router_logits, sizes.num_experts, sizes.num_experts_per_tok, kwargs.get("attention_mask")
            )
            loss = loss + sizes.router_aux_loss_coef * balance.to(loss.device)
            results["aux_loss"] = balance
    return kind(loss=loss, **results)


def _loss(head: nn.Linear, hidden: Tensor, targets: Tensor, count: Any) -> Tensor:
    """The sum of what counts over its number; over that of a larger batch where the caller knows it."""
    with loaded(head):
        weight = head.weight
        if torch.is_autocast_enabled(weight.device.type) and weight.dtype.itemsize == 2:
            # A sum of both 16-bit types is float32, and autocast rounds it before a product.
            hidden = hidden.to(weight.dtype)
        hidden, targets = hidden.to(weight.device), targets.to(weight.device)
        if count is None:
            return linear_cross_entropy(hidden, weight, targets, bias=head.bias)
        loss = linear_cross_entropy(hidden, weight, targets, bias=head.bias, reduction="sum")
        return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
