"""What the router's losses are tested and verified on."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from adjoint.contract import batching
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.contract.mistakes import answers, zeros
from adjoint.core.plan import Call, bind
from adjoint.ops.moe.losses import load_balancing_loss, reference, z_loss
from adjoint.ops.moe.values import changing, laid_across, shaped, values, with_index


def _choices(tokens: tuple[int, ...], experts: int, k: int, masked: bool, hot: bool = False) -> Make:
    """Logits, choices and a mask. A token that does not count has NaN logits."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits = values(generator, dtype, device, *tokens, experts, scale=2)
        indices = torch.randint(1 if hot else experts, (*tokens, k), generator=generator).to(device)
        mask = (torch.rand(tokens, generator=generator) < 0.7).to(device) if masked else None
        if mask is not None and mask.numel():
            logits = torch.where(mask[..., None], logits, float("nan"))
        return logits, indices, mask

    return make


def _strided(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    logits, indices, mask = _choices((3, 2, 2), 33, 2, True)(dtype, device, generator)
    return (
        laid_across(logits, 2, 1, 0, 3),
        laid_across(indices, 1, 0, 2, 3).int(),
        torch.stack((mask, mask), -1)[..., 0],
    )


_CASES = (
    Case("few tokens", _choices((5,), 12, 3, False)),
    Case("a mask", _choices((35,), 40, 2, True)),
    Case("strided", _strided),
    Case("one expert", _choices((4,), 1, 1, False)),
    Case("no tokens", _choices((0,), 8, 2, True)),
    Case("all on one expert", _choices((20000,), 512, 8, True, hot=True), heavy=True),
    Case("1024 experts", _choices((3000,), 1024, 4, True), heavy=True),
)
_WITHOUT_INDICES = tuple(replace(case, make=lambda *of, make=case.make: make(*of)[::2]) for case in _CASES)


def _mistakes(forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> dict[str, Callable[..., Answers]]:
    def scaled(loss: float, gradient: float) -> Callable[..., Answers]:
        return answers(lambda *inputs: loss * forward(*inputs), lambda *inputs: gradient * backward(*inputs))

    return {
        "zero output": zeros,
        "a sum instead of a mean": scaled(35, 35),
        "half the gradient": scaled(1, 0.5),
        "the sign exchanged": scaled(1, -1),
        "the mask ignored": answers(
            lambda logits, *rest: forward(logits.nan_to_num(), *rest[:-1], None),
            lambda dloss, logits, *rest: backward(dloss, logits.nan_to_num(), *rest[:-1], None),
        ),
    }


def _resized(inputs: Inputs, upstream: tuple[Tensor, ...], size: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same tokens, repeated to `size` of them."""
    return batching.resized(inputs, (), size, 0, (True,) * len(inputs))[0], upstream


def _subject(
    function: Callable[..., Tensor], inputs: tuple[str, ...], cases: tuple[Case, ...], *dtypes: torch.dtype
) -> Subject:
    name = function.__name__
    forward, backward = getattr(reference, name), getattr(reference, f"{name}_backward")
    return Subject(
        name=f"moe.{name}",
        function=function,
        inputs=inputs,
        reference=lambda *tensors: (forward(*tensors),),
        reference_backward=lambda *tensors: (backward(*tensors),),
        cases=cases,
        mistakes=_mistakes(forward, backward),
        dtypes=dtypes,
        resized=_resized,
    )


SUBJECTS = (
    _subject(load_balancing_loss, ("logits", "indices", "mask"), _CASES, torch.float64, torch.float32, torch.bfloat16),
    _subject(z_loss, ("logits", "mask"), _WITHOUT_INDICES, torch.float64, torch.float16, torch.bfloat16),
)

WORKLOADS: tuple[Workload, ...] = ()


# ----------------------------------------------------------------------------------------- bad calls


def _mask(device: torch.device) -> Tensor:
    return torch.ones(4, dtype=torch.bool, device=device)


_balance = changing(
    load_balancing_loss,
    lambda device: {
        "logits": torch.zeros(4, 12, device=device),
        "indices": torch.zeros(4, 2, dtype=torch.int64, device=device),
        "mask": _mask(device),
    },
)
_layers = changing(
    load_balancing_loss,
    lambda device: {
        "logits": [torch.zeros(4, 12, device=device) for _ in range(2)],
        "indices": [torch.zeros(4, 2, dtype=torch.int64, device=device) for _ in range(2)],
        "mask": _mask(device),
    },
)
_z = changing(z_loss, lambda device: {"logits": torch.zeros(4, 12, device=device), "mask": _mask(device)})


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    return _balance(logits=shaped(40, 12), indices=with_index(40, 12, position, value, dtype), mask=None)


BAD_CALLS = (
    BadCall("indices for other tokens", _balance(indices=shaped(3, 2)), "indices", "(3, 2)"),
    BadCall("indices without a slot", _balance(indices=shaped(4)), "indices", "(4,)"),
    BadCall("more choices than experts", _balance(indices=shaped(4, 13)), "indices", "from 1 to 12", "got 13"),
    BadCall(
        "layers without indices", _balance(logits=lambda x: [x, x]), "list or tuple of as many", "2 logits", "Tensor"
    ),
    BadCall("no layers", _balance(logits=[], indices=[]), "at least 1", "0 logits and 0"),
    BadCall("fewer indices than layers", _layers(indices=lambda i: i[:1]), "2 logits and 1 for indices"),
    BadCall("layers of other tokens", _layers(logits=lambda x: [x[0], x[1][:3]]), "logits[1]", "(4, 12)", "(3, 12)"),
    BadCall("layers of other types", _layers(logits=lambda x: [x[0], x[1].double()]), "logits[1]", "float64"),
    BadCall("a layer that is no tensor", _layers(logits=lambda x: [x[0], None]), "logits", "tensor", "NoneType"),
    BadCall(
        "indices of a layer that are floats", _layers(indices=lambda i: [i[0], i[1].float()]), "indices[1]", "int64"
    ),
    BadCall(
        "another number of choices in a layer", _layers(indices=lambda i: [i[0], i[1][:, :1]]), "indices[1]", "(4, 1)"
    ),
    BadCall("a mask for two layers", _layers(mask=shaped(2, 4)), "mask", "(4,)", "(2, 4)"),
    BadCall("a mask of integers", _z(mask=Tensor.long), "mask", "bool", "int64"),
    BadCall("a mask too long", _z(mask=shaped(5)), "z_loss: mask", "(4,)", "(5,)"),
    BadCall("a mask elsewhere", _balance(mask=lambda mask: mask.to("meta")), "mask", "logits", "meta"),
    BadCall("a mask that is a list", _z(mask=[True]), "mask", "list"),
    BadCall("the first index too large", _with_index(0, 12), "indices[0]", "is 12", "no expert"),
    BadCall("a negative index", _with_index(33, -1), "indices[33]", "is -1"),
    BadCall("the last index too large", _with_index(79, 99, torch.int32), "indices[79]", "is 99"),
    BadCall("an index that is an expert modulo 2^32", _with_index(40, 2**32 + 2), "indices[40]", "4294967298"),
)


# -------------------------------------------------------------------------------------------- builds


def built_calls() -> Iterator[Call]:
    """Calls with few experts in 16 bits, and with many in 32 bits and a mask."""
    for experts, k, dtype, masked in ((128, 8, torch.bfloat16, False), (512, 10, torch.float32, True)):
        logits = torch.empty(64, experts, dtype=dtype, device="meta")
        mask = torch.empty(64, dtype=torch.bool, device="meta") if masked else None
        yield bind(load_balancing_loss, logits, torch.empty(64, k, dtype=torch.int64, device="meta"), mask)
        yield bind(z_loss, logits, mask)
