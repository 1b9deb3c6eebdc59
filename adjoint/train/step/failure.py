"""The error for a loss or gradient that is not finite, which names its step, layer and batch."""

from pathlib import Path

import torch
from torch import Tensor, nn

from adjoint.models import safetensors
from adjoint.train.step.objective import Objective
from adjoint.train.step.optimizer import local_part
from adjoint.train.step.ranks import Ranks
from adjoint.train.step.weights import Weights
from adjoint.train.stops import NotFinite
from adjoint.train.text.stream import Batch


def explain(
    folder: Path, step: int, what: str, objective: Objective, weights: Weights, batches: list[Batch], ranks: Ranks
) -> NotFinite:
    """Saves the batch of a step, if there is room, and returns the error for the step. All ranks call this together."""
    layer = _first_layer(objective, batches) or _layer_of_gradient(weights)
    layers = [name for name in ranks.gather(layer) if name]
    path = folder / f"not-finite-step-{step}{f'-rank-{ranks.rank}' if ranks.mesh is not None else ''}.safetensors"
    tensors: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        for name in ("tokens", "labels", "cu_seqlens"):
            if (tensor := getattr(batch, name)) is not None:
                tensors[f"{number}.{name}"] = tensor.cpu()
    try:
        safetensors.write(path, tensors)
        saved = f"is in {path}"
    except OSError as error:
        saved = f"could not be saved in {path}: {error.strerror or error}"
    rows = [row for batch in batches for row in batch.rows]
    return NotFinite(
        f"train: step {step}: the {what} is not finite, first in {layers[0] if layers else 'their sum'}; "
        f"the weights were not changed, and the batch, rows {', '.join(map(str, rows[:8]))} of the data, {saved}"
    )


def _first_layer(objective: Objective, batches: list[Batch]) -> str:
    """The first module whose output is not finite in a forward of the same batches; empty if all are finite."""
    seen: list[str] = []

    def watch(name: str) -> object:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if not seen and not _is_finite(output):
                seen.append(name)

        return hook

    modules = [(name, module) for name, module in objective.model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in modules]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            for batch in batches:
                sums = objective(batch)
                if not seen and not _is_finite(sums.nats):
                    seen.append("lm_head")
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else ""


def _is_finite(output: object) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(output.isfinite().all())
    return all(_is_finite(part) for part in output) if isinstance(output, tuple | list) else True


def _layer_of_gradient(weights: Weights) -> str:
    """The weight nearest to the loss whose gradient is not finite. From there it spread to the weights before it."""
    for name, gradient in reversed(weights.gradients().items()):
        if not _is_finite(local_part(gradient)):
            return f"the gradient of {name}"
    return ""
