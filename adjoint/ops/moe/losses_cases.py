"""The logits and choices that the router's losses are tested and verified on."""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Make, Subject
from adjoint.ops.moe import losses_reference as reference
from adjoint.ops.moe.losses import load_balancing_loss, z_loss
from adjoint.ops.moe.route_cases import logits_of


def _choices(tokens: tuple[int, ...], experts: int, k: int, masked: bool, hot: bool = False) -> Make:
    """Logits, choices and a mask; a token that does not count has NaN logits."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits = logits_of(generator, dtype, device, *tokens, experts)
        indices = torch.randint(1 if hot else experts, (*tokens, k), generator=generator).to(device)
        mask = (torch.rand(tokens, generator=generator) < 0.7).to(device) if masked else None
        if mask is not None and mask.numel():
            logits = torch.where(mask[..., None], logits, float("nan"))
        return logits, indices, mask

    return make


def _strided(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    logits, indices, mask = _choices((3, 2, 2), 33, 2, True)(dtype, device, generator)
    turned = logits.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    return turned, indices.transpose(0, 1).contiguous().transpose(0, 1).int(), torch.stack((mask, mask), -1)[..., 0]


def _without_indices(make: Make) -> Make:
    def made(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits, _, mask = make(dtype, device, generator)
        return logits, mask

    return made


_MAKES: dict[str, Make] = {
    "few tokens": _choices((5,), 12, 3, False),
    "a mask": _choices((35,), 40, 2, True),
    "strided": _strided,
    "one expert": _choices((4,), 1, 1, False),
    "no tokens": _choices((0,), 8, 2, True),
}
_HEAVY: dict[str, Make] = {
    "all on one expert": _choices((20000,), 512, 8, True, hot=True),
    "1024 experts": _choices((3000,), 1024, 4, True),
}


def _cases(change: Callable[[Make], Make]) -> tuple[Case, ...]:
    light = (Case(name, change(make)) for name, make in _MAKES.items())
    return (*light, *(Case(name, change(make), heavy=True) for name, make in _HEAVY.items()))


def _mistakes(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> dict[str, Callable[[tuple[Tensor, ...], Inputs], Answers]]:
    def wrong(scale: float, of_gradient: float, counted: bool = True) -> Callable[..., Answers]:
        def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
            logits, *rest = inputs
            if not counted:
                rest[-1] = None
                logits = logits.nan_to_num()
            exact = forward(logits.double(), *rest)
            gradient = backward(upstream[0].double(), logits.double(), *rest)
            return ((exact * scale).float(),), ((gradient * of_gradient).to(logits.dtype),)

        return answer

    return {
        "zero output": wrong(0, 0),
        "a sum instead of a mean": wrong(35, 35),
        "half the gradient": wrong(1, 0.5),
        "the sign exchanged": wrong(1, -1),
        "the mask ignored": wrong(1, 1, counted=False),
    }


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """`size` tokens: the same ones over again."""

    def fitted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * -(-size // len(tensor)))[:size].contiguous()

    return tuple(None if tensor is None else fitted(tensor) for tensor in inputs), upstream


SUBJECTS = (
    Subject(
        name="moe.load_balancing_loss",
        function=load_balancing_loss,
        inputs=("logits", "indices", "mask"),
        reference=lambda logits, indices, mask: (reference.load_balancing_loss(logits, indices, mask),),
        reference_backward=lambda dloss, *inputs: (reference.load_balancing_loss_backward(dloss, *inputs),),
        cases=_cases(lambda make: make),
        mistakes=_mistakes(reference.load_balancing_loss, reference.load_balancing_loss_backward),
        dtypes=(torch.float32, torch.bfloat16),
        resized=_resized,
    ),
    Subject(
        name="moe.z_loss",
        function=z_loss,
        inputs=("logits", "mask"),
        reference=lambda logits, mask: (reference.z_loss(logits, mask),),
        reference_backward=lambda dloss, *inputs: (reference.z_loss_backward(dloss, *inputs),),
        cases=_cases(_without_indices),
        mistakes=_mistakes(reference.z_loss, reference.z_loss_backward),
        dtypes=(torch.float16, torch.bfloat16),
        resized=_resized,
    ),
)
