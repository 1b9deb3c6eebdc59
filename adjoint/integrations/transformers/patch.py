"""`patch`: our operations in one model of transformers, module by module, and `unpatch`, which takes them out again."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from adjoint.core.arguments import require_flag
from adjoint.core.errors import ArgumentError
from adjoint.integrations.transformers import forwards
from adjoint.integrations.transformers.families import FAMILIES, class_of
from adjoint.integrations.transformers.instance import Undo, is_replaced, set_forward
from adjoint.integrations.transformers.loss import training_loss, why_not_fused
from adjoint.integrations.transformers.moe import register_experts, router_forward, why_not_experts
from adjoint.integrations.transformers.positions import with_bounds
from adjoint.integrations.transformers.versions import require

OLDEST, NEWEST = (5, 17), (5, 22)
"""The versions whose forwards ours are written after, and are tested on."""

_STATE = "_adjoint_patch"
"""The attribute of a module that was replaced which says how to undo it: whatever holds the module can be unpatched."""


@dataclass(frozen=True)
class Replacement:
    """A class of modules: how many of the model's run our operations, by name, and why others do not."""

    module: str
    count: int
    operations: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `patch` did, a line for each class of modules; `print` shows a table."""

    replacements: tuple[Replacement, ...]

    def __str__(self) -> str:
        rows = [("module", "count", "now runs", "why not")]
        rows += [(r.module, str(r.count), r.operations or "as before", r.reason) for r in self.replacements]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)


def patch(model: nn.Module, *, loss: bool = False, verbose: bool = True) -> Report:
    """Lets a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model of transformers 5.17 to 5.22 run our operations.

    Norms, convolutions, the gated delta rule, rotary positions, gates, feed-forward layers, experts, routers and the
    embedding are replaced, on this model alone; its attention stays the one it is configured with, except for packed
    sequences. These come as `cu_seq_lens_q`, as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives them,
    or as `position_ids` that begin again at 0, and never see each other.

    Args:
        model: a model of transformers, or one that holds it, such as a PEFT model; training, generation, checkpointing
            and adapters work as before.
        loss: whether the model, in training and with labels, returns the loss of `adjoint.linear_cross_entropy` and
            no logits, which are then never held at once. Not for a trainer that reads logits in training, as TRL's
            `SFTTrainer` does for its metrics.
        verbose: whether the report is printed.

    Raises:
        ArgumentError: the model has no module of a family it knows, or is patched already; loss or verbose is no bool.
        Unsupported: this transformers is older or newer than those it is tested on.
    """
    require(OLDEST, NEWEST)
    require_flag("patch", "loss", loss)
    require_flag("patch", "verbose", verbose)
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"patch: model must be a model of transformers, got {type(model).__name__}")
    if any(_STATE in vars(module) for module in model.modules()):
        raise ArgumentError(f"patch: this {type(model).__name__} is patched already; unpatch it first")
    modules = [module for module in model.modules() if class_of(module)]
    if not modules:
        raise ArgumentError(
            f"patch: {type(model).__name__} has no module of the families it knows: {', '.join(FAMILIES)}"
        )
    rows: dict[tuple[str, str, str], int] = {}
    for module in modules:
        undo: Undo = []
        operations, reason = _replace(module, undo, loss)
        if undo:
            setattr(module, _STATE, undo)
        if operations or reason:
            key = (type(module).__name__, "" if reason else operations, reason)
            rows[key] = rows.get(key, 0) + 1
    report = Report(tuple(Replacement(name, count, done, reason) for (name, done, reason), count in rows.items()))
    if verbose:
        print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Puts back what `patch` replaced, in this model or in what holds it or is left of it: a PEFT model, or its base.

    Raises:
        ArgumentError: nothing in the model is patched.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"unpatch: model must be a model of transformers, got {type(model).__name__}")
    patched = [module for module in model.modules() if _STATE in vars(module)]
    if not patched:
        raise ArgumentError(f"unpatch: this {type(model).__name__} is not patched")
    for module in patched:
        for function, *arguments in reversed(vars(module).pop(_STATE)):
            function(*arguments)


_FORWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "RMSNorm": (forwards.normalize, "rms_norm"),
    "RMSNormGated": (forwards.normalize_gated, "gated_rms_norm"),
    "GatedDeltaNet": (forwards.mix_by_delta_rule, "causal_conv1d, gate, gated_delta_rule"),
    "Attention": (forwards.attend, "rotary, sigmoid_gate"),
    "MLP": (forwards.feed_forward, "swiglu"),
    "TopKRouter": (router_forward, "moe.route"),
    "ForCausalLM": (training_loss, "linear_cross_entropy"),
    "ForConditionalGeneration": (training_loss, "linear_cross_entropy"),
}
"""By the name of a class without its family: the forward that takes its place, and the operations in it."""


def _replace(module: Any, undo: Undo, loss: bool) -> tuple[str, str]:
    """Replaces what a module does; its operations, and why it was left alone. Both empty: there is nothing to do."""
    kind = cast(type, class_of(module))
    name = next(kind.__name__.removeprefix(family) for family in FAMILIES if kind.__name__.startswith(family))
    if name == "Experts":
        return _replace_experts(module, undo)
    if name in ("Model", "TextModel") and isinstance(getattr(module, "embed_tokens", None), nn.Module):
        _watch_positions(module, undo)
        return _replace_embedding(module.embed_tokens)
    whole = name.removeprefix("Text").startswith("For")
    if loss and whole and name not in _FORWARDS:
        return "linear_cross_entropy", "loss=True is for causal models, and this has another loss"
    if name not in _FORWARDS or (whole and not loss):
        return "", ""
    forward, operations = _FORWARDS[name]
    if reason := _why_not(module, name):
        return operations, reason
    set_forward(module, forward, undo)
    return operations, ""


def _why_not(module: Any, name: str) -> str:
    """Why a module cannot run our operations; empty where it can."""
    if is_replaced(module):
        return "its forward is replaced already"
    if type(module).forward is not getattr(class_of(module), "forward", None):
        return f"its class is made from {class_of(module).__name__}, with a forward of its own"
    activation = getattr(module, "act_fn", getattr(module, "activation", "silu"))
    if not (activation in ("silu", "swish") or isinstance(activation, nn.SiLU) or _is_silu(activation)):
        return f"has the activation {activation}, not SiLU"
    if name == "GatedDeltaNet" and max(module.head_k_dim, module.head_v_dim) > 256:
        return "has heads of more than 256 columns"
    if _FORWARDS[name][0] is training_loss:
        return why_not_fused(module)
    return ""


def _is_silu(activation: object) -> bool:
    return type(activation).__name__ == "SiLUActivation"


def _replace_embedding(module: Any) -> tuple[str, str]:
    """The embedding says itself how to undo it, as PEFT trains a copy of it."""
    if type(module) is not nn.Embedding:
        return "embedding", "its embedding is of another class"
    if is_replaced(module):
        return "embedding", "its embedding's forward is replaced already"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return "embedding", "its embedding has max_norm, scale_grad_by_freq or sparse"
    undo: Undo = []
    set_forward(module, forwards.embed, undo)
    setattr(module, _STATE, undo)
    return "embedding", ""


def _replace_experts(module: Any, undo: Undo) -> tuple[str, str]:
    """Through transformers' registry: experts ask their configuration which implementation runs, here one of their own.

    The configuration of the model may be that of other models, too.
    """
    if reason := why_not_experts(module):
        return "moe.experts", reason
    register_experts()
    before = module.config
    module.config = copy(before)
    module.config._experts_implementation = "adjoint"
    undo.append((setattr, module, "config", before))
    return "moe.experts", ""


def _watch_positions(module: nn.Module, undo: Undo) -> None:
    """Packed sequences that position_ids alone tell get their bounds, for the layers that are given no positions."""
    handle = module.register_forward_pre_hook(with_bounds, with_kwargs=True)
    undo.append((_forget_hook, module, handle.id))


def _forget_hook(module: nn.Module, number: int) -> None:
    module._forward_pre_hooks.pop(number, None)
    module._forward_pre_hooks_with_kwargs.pop(number, None)
