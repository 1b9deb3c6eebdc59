"""What the cases, mistakes and bad calls of both losses are made of."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, Inputs, Rebatch, Subject
from adjoint.contract.inputs import is_differentiable
from adjoint.contract.mistakes import answers, narrow_arithmetic, zeros

IGNORED = -100

MODES: dict[str, dict[str, Any]] = {
    "": {},
    "[sum, smoothing, z_loss, softcap]": {
        "reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "ignore_index": 2,
    },
    "[none, shift, log-probabilities]": {"reduction": "none", "shift": True, "return_log_probabilities": True},
}  # fmt: skip
"""Options that are tested together, by the text behind the op's name."""


def labels_of(
    generator: torch.Generator, tokens: tuple[int, ...], classes: int, device: torch.device,
    dtype: torch.dtype = torch.int64, ignored: float = 0.3,
) -> Tensor:  # fmt: skip
    """Random classes, and tokens that do not count; the first one counts."""
    labels = torch.randint(classes, tokens, generator=generator)
    skipped = torch.rand(tokens, generator=generator) < ignored
    if labels.numel() and ignored < 1:
        skipped.view(-1)[0] = False
    return torch.where(skipped, IGNORED, labels).to(dtype).to(device)


def in_mode(make: Callable[..., Inputs], place: int, keywords: Mapping[str, Any]) -> Callable[..., Inputs]:
    """Inputs whose labels, at `place`, mark tokens that do not count by the mode's `ignore_index`."""

    def made(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        inputs = list(make(dtype, device, generator))
        labels, ignored = inputs[place], keywords.get("ignore_index", IGNORED)
        inputs[place] = (
            torch.where(labels == IGNORED, ignored, labels).to(labels.dtype) if ignored != IGNORED else labels
        )
        return tuple(inputs)

    return made


def upstream_count(keywords: Mapping[str, Any]) -> int:
    return 1 + bool(keywords.get("return_log_probabilities"))


def with_upstream(backward: Callable[..., Any], keywords: Mapping[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A reference's backward, which takes the upstream gradients as one tuple, as subjects call it."""
    number = upstream_count(keywords)

    def call(*tensors: Any) -> tuple[Tensor, ...]:
        found = backward(tensors[:number], *tensors[number:], **keywords)
        return found if isinstance(found, tuple) else (found,)

    return call


def mistakes(
    forward: Callable[..., Any], backward: Callable[..., Any], keywords: Mapping[str, Any]
) -> dict[str, Callable[..., Answers]]:
    """Wrong answers: options that are left out, exchanged or applied to only one direction."""

    def with_options(of_loss: Mapping[str, Any], of_gradient: Mapping[str, Any]) -> Callable[..., Answers]:
        def first(*inputs: Any) -> tuple[Tensor, ...]:
            return forward(*inputs, **{**keywords, **of_loss})  # type: ignore[no-any-return]

        return answers(first, with_upstream(backward, {**keywords, **of_gradient}))

    wrong: dict[str, Callable[..., Answers]] = {"zero output": zeros}
    changes: dict[str, dict[str, Any]] = {"tokens that do not count, counted": {"ignore_index": -7}}
    if keywords.get("reduction", "mean") == "mean":
        changes["a sum instead of a mean"] = {"reduction": "sum"}
    for option in ("label_smoothing", "z_loss", "softcap"):
        if keywords.get(option):
            changes[f"{option} left out"] = {option: 0.0}
            changes[f"twice the {option}"] = {option: 2 * keywords[option]}
    if keywords.get("shift"):
        changes["labels not shifted"] = {"shift": False}
    for name, change in changes.items():
        if "ignore_index" in change:
            continue
        wrong[name] = with_options(change, change)
        wrong[f"{name}, in the gradient alone"] = with_options({}, change)
    narrow = narrow_arithmetic(lambda *x: forward(*x, **keywords), with_upstream(backward, keywords))
    return {**wrong, "narrow arithmetic": narrow}


def resized(
    batched: tuple[bool, ...], keywords: Mapping[str, Any]
) -> Callable[[Inputs, tuple[Tensor, ...], int], tuple[Inputs, tuple[Tensor, ...]]]:
    """Other numbers of tokens; an upstream gradient of one number stays."""

    def resize(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
        per_token = tuple(x for x in upstream if x.dim())
        changed, gradients = batching.resized(inputs, per_token, size, 0, batched)
        return changed, (*(x for x in upstream if not x.dim()), *gradients)

    return resize


def rebatched(batched: tuple[bool, ...]) -> Callable[[Inputs, tuple[Tensor, ...]], Iterator[Rebatch]]:
    """The first items alone, the last one alone, and the last half. Results with a number for each token keep their
    bits."""

    def rebatch(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
        size = inputs[0].shape[0] if inputs[0].dim() > 1 else 0
        compared = [has for x, has in zip(inputs, batched, strict=True) if is_differentiable(x)]
        for begin, length in ((0, 1), (size - 1, 1), (size // 2, size - size // 2)) if size else ():

            def part(tensor: Tensor, begin: int = begin, length: int = length) -> Tensor:
                return tensor.narrow(0, begin, length) if tensor.dim() else tensor

            def pairs(
                whole: Answers, alone: Answers, part: Callable[[Tensor], Tensor] = part
            ) -> Iterable[tuple[Tensor, Tensor]]:
                for one, among_all in zip(alone[0], whole[0], strict=True):
                    if one.dim():
                        yield one, part(among_all)
                for one, among_all, has_items in zip(alone[1], whole[1], compared, strict=False):
                    if has_items:
                        yield one, part(among_all)

            changed = tuple(part(x) if has and x is not None else x for x, has in zip(inputs, batched, strict=True))
            yield Rebatch(f"items {begin}+{length}", changed, tuple(map(part, upstream)), pairs)

    return rebatch


def with_label(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[Tensor], Tensor]:
    """Labels all of which are right but one."""

    def change(labels: Tensor) -> Tensor:
        wrong = labels.to(dtype).clone()
        wrong.view(-1)[position] = value
        return wrong

    return change


def timed(subject: Subject) -> dict[str, Any]:
    """What a subject for workloads leaves out."""
    return {"cases": (), "mistakes": {}, "rebatched": None, "name": subject.name}
