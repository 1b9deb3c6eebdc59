"""The exceptions, and the device status word behind `check()`.

A mistake that metadata shows (shape, dtype, device, layout) raises before any kernel runs. A mistake that only values
show raises at once on the CPU. On an accelerator that would cost a synchronisation. So the kernel stays in bounds and
records a fault in its device's status word, and `check()` raises it later.

A status word is an int64 tensor `[MAX_FAULTS, 2]`. Each kind of fault owns one row. A kernel records the fault of an
element by two atomic minima, so the row always describes the *first* offending element, in whatever order programs run:

    word[row, 0] = min(word[row, 0], position << 32 | low half of the value)
    word[row, 1] = min(word[row, 1], position << 32 | high half of the value)

The functions for kernels are in `adjoint.device.faults`. `check()` waits for all work of the device. Then it takes and
clears each number in one atomic exchange, so a fault is raised once and none is lost, whatever other threads and
streams do meanwhile. A word belongs to a device and not to a thread or a stream: kernels of the backward run on
autograd's own thread, and kernels of a replayed graph on no thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


class ArgumentError(ValueError):
    """An argument is wrong; the sentence names the op, the argument, what was expected and what came."""


class Unsupported(RuntimeError):
    """The request is well-formed, but no plan can serve it; the sentence gives every reason."""


class WrongResult(RuntimeError):
    """A plan's result is not within its guarantee, so no result of the plan on this device can be trusted."""


def second_derivative(op: str) -> Unsupported:
    """The error for a backward of which a gradient is asked."""
    return Unsupported(
        f"{op}: second derivatives are not implemented, and create_graph=True asks for one. "
        f"Call backward or torch.autograd.grad with create_graph=False."
    )


MAX_FAULTS = 64
"""How many kinds of value error one device's status word can tell apart."""

MAX_POSITION = 2**31 - 2
"""An element past this position is reported at this position (31 bits, less the pattern that means clear)."""

_CLEAR = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Fault:
    """One kind of value error: its row in the status word and the template of its sentence.

    The template is formatted with `position` and `value` of the first offending element.
    """

    row: int
    template: str

    def error(self, position: int, value: int) -> ArgumentError:
        return ArgumentError(self.template.format(position=position, value=value))


_lock = threading.Lock()
_taking = threading.Lock()
_faults: list[Fault] = []
_words: dict[torch.device, Tensor] = {}


def register_fault(template: str) -> Fault:
    """Registers a kind of value error; called once, when the module of its op is imported."""
    with _lock:
        for fault in _faults:
            if fault.template == template:
                return fault
        if len(_faults) == MAX_FAULTS:
            raise Unsupported(f"the status word holds {MAX_FAULTS} kinds of fault, and all are taken")
        fault = Fault(len(_faults), template)
        _faults.append(fault)
        return fault


def status_word(device: torch.device) -> Tensor:
    """The status word of a device. It is allocated on first use and never moves."""
    word = _words.get(device)
    if word is not None:
        return word
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            f"the status word of {device} must exist before a CUDA graph is captured: "
            f"call plan.prepare() or run the op once first"
        )
    with _lock, torch.inference_mode(False):
        if device not in _words:
            word = torch.full((MAX_FAULTS, 2), _CLEAR, dtype=torch.int64, device=device)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # clear before a kernel of another stream records
            _words[device] = word
        return _words[device]


def report(fault: Fault, values: Tensor, faulty: Tensor) -> None:
    """Raises the error of the first faulty value on the CPU; elsewhere records it in the status word, without waiting.

    Paths in plain PyTorch call it.
    """
    is_cpu = values.device.type == "cpu"
    if values.numel() == 0 or (is_cpu and not faulty.any()):
        return
    values, faulty = values.reshape(-1).long(), faulty.reshape(-1)
    if is_cpu:
        first = int(faulty.to(torch.int8).argmax())
        raise fault.error(first, int(values[first]))
    positions = torch.arange(values.numel(), device=values.device).clamp_max_(MAX_POSITION) << 32
    halves = torch.stack([positions | ((values >> shift) & 0xFFFFFFFF) for shift in (0, 32)])
    earliest = torch.where(faulty, halves, _CLEAR).amin(1)
    # On a GPU scatter_reduce_ is an atomic minimum: kernels of other streams may record at the same time.
    row = status_word(values.device)[fault.row]
    row.scatter_reduce_(0, torch.arange(2, device=row.device), earliest, "amin")


def check() -> None:
    """Raises the value errors that kernels have recorded since the last call, and clears them.

    It waits for every device that has a status word. If there are several faults, the error names the first
    registered one and lists the others as notes. If several threads call it, only one of them raises a fault, and it
    need not be the thread that caused it.
    """
    errors = []
    for device, word in list(_words.items()):
        rows = _take(device, word)
        errors += [_faults[row].error(*_decode(*pair)) for row, pair in enumerate(rows) if pair[0] != _CLEAR]
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"also: {other}")
        raise first


def _take(device: torch.device, word: Tensor) -> list[tuple[int, int]]:
    """Takes the records of a device and clears them; waits for all of the device's work.

    Work that another thread submits meanwhile may have written only one half of a record. Then the positions in the
    two halves differ, and the loop waits for that work, which writes the other half.
    """
    rows = [(_CLEAR, _CLEAR)] * MAX_FAULTS
    with _taking:
        while True:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            recorded = _exchange(device, word)
            rows = [(min(a, c), min(b, d)) for (a, b), (c, d) in zip(rows, recorded, strict=True)]
            if all(low >> 32 == high >> 32 for low, high in rows):
                return rows


def _exchange(device: torch.device, word: Tensor) -> list[list[int]]:
    from adjoint.core.kernels import why_not_triton

    if why_not_triton(device):  # here only PyTorch records, and it has no atomic exchange: two steps
        recorded = word.clone()
        word.fill_(_CLEAR)
        return recorded.tolist()  # type: ignore[no-any-return]
    from adjoint.device.faults import exchange

    return exchange(word, _CLEAR).tolist()


def _decode(low: int, high: int) -> tuple[int, int]:
    """Position and value (a signed 64-bit integer) from the two words of a fault."""
    mask = 2**32 - 1
    value = ((high & mask) << 32) | (low & mask)
    return low >> 32, value - 2**64 if value >= 2**63 else value


class _Checking(threading.local):
    def __init__(self) -> None:
        self.depth = 0


_checking = _Checking()


def is_checking() -> bool:
    """Whether this thread is inside `checked()`. There, ops also verify what their caller promises."""
    return _checking.depth > 0


@contextmanager
def checked() -> Iterator[None]:
    """Runs a block in checking mode. On leaving it, raises the faults that its kernels have recorded.

    Faults that were recorded before are raised on entering. If the block itself raises an exception, that exception
    goes on, and the recorded faults are its note. A GPU does not know which thread launched a kernel. So of two blocks
    that are open in two threads, the one that ends first raises the faults that the kernels of both have recorded by
    then, and the other one raises the later faults. On the CPU an error is raised where it is caused.
    """
    check()
    _checking.depth += 1
    try:
        yield
    except BaseException as error:
        try:
            check()
        except ArgumentError as fault:
            error.add_note(f"meanwhile, a kernel recorded: {fault}")
        raise
    finally:
        _checking.depth -= 1
    check()
