"""What the router's losses are tested and verified on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.losses import load_balancing_loss, reference, z_loss
from adjoint.ops.moe.route.cases import logits_of


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
    def without(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits, _, mask = make(dtype, device, generator)
        return logits, mask

    return without


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

WORKLOADS: tuple[Workload, ...] = ()


# ----------------------------------------------------------------------------------------- bad calls

TOKENS, EXPERTS = 4, 12


def _logits(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (TOKENS, EXPERTS), device=device)


def _indices(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape or (TOKENS, 2), dtype=torch.int64, device=device)


def _mask(device: torch.device | str, *shape: int) -> Tensor:
    return torch.ones(shape or (TOKENS,), dtype=torch.bool, device=device)


def _balance(device: torch.device, **changes: Any) -> Any:
    arguments = {"logits": _logits(device), "indices": _indices(device), "mask": None} | changes
    return load_balancing_loss(**arguments)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """Choices of 40 tokens, all right but one."""

    def call(device: torch.device) -> None:
        indices = torch.arange(80, device=device).remainder(EXPERTS).to(dtype)
        indices[position] = value
        load_balancing_loss(_logits(device, 40, EXPERTS), indices.view(40, 2))
        adjoint.check()

    return call


BAD_CALLS = (
    BadCall("indices for other tokens", lambda d: _balance(d, indices=_indices(d, 3, 2)), "indices", "(3, 2)"),
    BadCall("indices without a slot", lambda d: _balance(d, indices=_indices(d, TOKENS)), "indices", "(4,)"),
    BadCall(
        "more choices than experts",
        lambda d: _balance(d, indices=_indices(d, TOKENS, 13)),
        "indices",
        "from 1 to 12",
        "got 13",
    ),
    BadCall("a mask of integers", lambda d: z_loss(_logits(d), _mask(d).long()), "mask", "bool", "int64"),
    BadCall("a mask too long", lambda d: z_loss(_logits(d), _mask(d, 5)), "z_loss: mask", "(4,)", "(5,)"),
    BadCall("a mask elsewhere", lambda d: _balance(d, mask=_mask("meta")), "mask", "logits", "meta"),
    BadCall("a mask that is a list", lambda d: z_loss(_logits(d), [True]), "mask", "list"),  # type: ignore[arg-type]
    BadCall("the first index too large", _with_index(0, EXPERTS), "indices[0]", "is 12", "no expert"),
    BadCall("a negative index", _with_index(33, -1), "indices[33]", "is -1"),
    BadCall("the last index too large", _with_index(79, 99, torch.int32), "indices[79]", "is 99"),
    BadCall("an index that is an expert modulo 2^32", _with_index(40, 2**32 + 2), "indices[40]", "4294967298"),
)


# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Few experts in 16 bits, and many in 32 bits with a mask."""
    for experts, k, dtype, masked in ((128, 8, torch.bfloat16, False), (512, 10, torch.float32, True)):
        logits = torch.empty(64, experts, dtype=dtype, device="meta")
        mask = torch.empty(64, dtype=torch.bool, device="meta") if masked else None
        yield bind(load_balancing_loss, logits, torch.empty(64, k, dtype=torch.int64, device="meta"), mask)
        yield bind(z_loss, logits, mask)
