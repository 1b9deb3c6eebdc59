"""The status word: a toy op whose kernel finds negative ids, and the host's side of it."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

import adjoint
from adjoint.core import errors

FAULT = errors.register_fault("toy: ids must not be negative, got {value} at position {position}")


@pytest.fixture(autouse=True)
def clean() -> None:
    for word in errors._words.values():
        word.fill_(errors._CLEAR)


def _record(device: torch.device, fault: errors.Fault, position: int, value: int) -> None:
    """What a kernel does, on the host."""
    word = errors.status_word(device)
    mask = 2**32 - 1
    for column, half in enumerate((value & mask, (value >> 32) & mask)):
        word[fault.row, column] = min(int(word[fault.row, column]), position << 32 | half)


@pytest.mark.parametrize("value", [-1, -(2**63), 2**63 - 1, 2**40 + 3, 0])
def test_check_reports_position_and_value(device: torch.device, value: int) -> None:
    _record(device, FAULT, 5, value)
    with pytest.raises(adjoint.ArgumentError, match=f"got {value} at position 5"):
        adjoint.check()
    adjoint.check()  # cleared


def test_the_first_position_wins(device: torch.device) -> None:
    for position, value in ((9, -3), (2, 2**40), (7, 1)):
        _record(device, FAULT, position, value)
    with pytest.raises(adjoint.ArgumentError, match=f"got {2**40} at position 2"):
        adjoint.check()


def test_several_faults_are_all_named(device: torch.device) -> None:
    other = errors.register_fault("toy: another fault, {value} at {position}")
    _record(device, other, 1, 8)
    _record(device, FAULT, 0, -1)
    with pytest.raises(adjoint.ArgumentError, match="ids must not be negative") as caught:
        adjoint.check()
    assert caught.value.__notes__ == ["also: toy: another fault, 8 at 1"]


def test_checked_raises_on_leaving(device: torch.device) -> None:
    with pytest.raises(adjoint.ArgumentError, match="position 3"), adjoint.checked():
        assert errors.is_checking()
        _record(device, FAULT, 3, -1)
    assert not errors.is_checking()


def test_an_exception_inside_checked_takes_precedence(device: torch.device) -> None:
    with pytest.raises(KeyError), adjoint.checked():
        _record(device, FAULT, 3, -1)
        raise KeyError
    assert not errors.is_checking()


def test_registering_a_fault_twice_is_one_fault() -> None:
    assert errors.register_fault(FAULT.template) is FAULT


def test_the_word_keeps_its_address(device: torch.device) -> None:
    assert errors.status_word(device).data_ptr() == errors.status_word(device).data_ptr()


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_kernel_records_its_first_fault(device: torch.device, dtype: torch.dtype) -> None:
    from tests.core.status_kernels import find_negative

    ids = torch.arange(1000, device=device, dtype=dtype)
    ids[[333, 700, 998]] = torch.tensor([-5, -6, -7], device=device, dtype=dtype)
    word = errors.status_word(device)
    find_negative[(8,)](ids, word, FAULT.row, ids.numel(), BLOCK=128)
    with pytest.raises(adjoint.ArgumentError, match="got -5 at position 333"):
        adjoint.check()
    find_negative[(8,)](ids.abs(), word, FAULT.row, ids.numel(), BLOCK=128)
    adjoint.check()


def test_half_a_record_waits_for_the_other_half(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of another thread may be between its two minima when the word is read."""
    clear, position, other = errors._CLEAR, 4, 9
    steps = [
        {FAULT.row: [position << 32 | 7, other << 32 | 0]},  # the first minimum of one record, both of an earlier one
        {FAULT.row: [clear, position << 32 | 2]},
    ]

    def exchange(device: torch.device, word: torch.Tensor) -> list[list[int]]:
        recorded = steps.pop(0)
        return [recorded.get(row, [clear, clear]) for row in range(errors.MAX_FAULTS)]

    errors.status_word(device)
    monkeypatch.setattr(errors, "_words", {device: errors._words[device]})
    monkeypatch.setattr(errors, "_exchange", exchange)
    with pytest.raises(adjoint.ArgumentError, match=f"got {2 << 32 | 7} at position {position}"):
        adjoint.check()
    assert not steps


def test_of_two_threads_that_check_one_raises(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = Counter[str]()
    exchange = errors._exchange

    def exchange_slowly(device: torch.device, word: torch.Tensor) -> list[list[int]]:
        recorded = exchange(device, word)
        time.sleep(0.05)
        return recorded

    monkeypatch.setattr(errors, "_exchange", exchange_slowly)
    _record(device, FAULT, 3, -1)
    threads = [threading.Thread(target=_collect, args=(raised, threading.Event(), 1)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == {FAULT.template: 1}


_counting = threading.Lock()


def _collect(raised: Counter[str], ended: threading.Event, times: int) -> None:
    """Calls `check()` some times, or until told to end, and counts the faults it raises."""
    while times and not ended.is_set():
        times -= 1
        try:
            adjoint.check()
        except adjoint.ArgumentError as error:
            for sentence in (str(error), *getattr(error, "__notes__", ())):
                for fault in errors._faults:
                    pattern = re.escape(fault.template).replace(r"\{value\}", ".*").replace(r"\{position\}", ".*")
                    if re.fullmatch(f"(also: )?{pattern}", sentence):
                        with _counting:
                            raised[fault.template] += 1


@pytest.mark.gpu
def test_no_fault_is_lost_or_raised_twice_among_threads_streams_and_graphs(device: torch.device) -> None:
    """Each recorder records again once its fault was raised; two threads check all the while."""
    from tests.core.status_kernels import find_negative

    rounds, ids = 100, torch.full((100,), -1, device=device)
    word, raised, ended = errors.status_word(device), Counter[str](), threading.Event()
    faults = {
        kind: errors.register_fault(f"toy: {kind} got {{value}} at {{position}}")
        for kind in ("kernel", "graph", "eager")
    }
    for fault in faults.values():
        find_negative[(1,)](ids.abs(), word, fault.row, ids.numel(), BLOCK=128)  # compiles, records nothing
    adjoint.check()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(10_000)
        find_negative[(1,)](ids, word, faults["graph"].row, ids.numel(), BLOCK=128)
    record: dict[str, Callable[[], object]] = {
        "kernel": lambda: find_negative[(1,)](ids, word, faults["kernel"].row, ids.numel(), BLOCK=128),
        "graph": graph.replay,
        "eager": lambda: errors.report(faults["eager"], ids, ids < 0),
    }
    late: list[str] = []

    def keep_recording(kind: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for number in range(rounds):
                record[kind]()
                patience = time.monotonic() + 20
                while raised[faults[kind].template] <= number:
                    if time.monotonic() > patience:
                        late.append(f"{kind}: fault {number} was never raised")
                        return
                    time.sleep(0)

    recorders = [threading.Thread(target=keep_recording, args=(kind,)) for kind in record]
    checkers = [threading.Thread(target=_collect, args=(raised, ended, -1)) for _ in range(2)]
    for thread in (*checkers, *recorders):
        thread.start()
    for thread in recorders:
        thread.join()
    time.sleep(0.1)
    ended.set()
    for thread in checkers:
        thread.join()
    adjoint.check()
    assert not late
    assert raised == {fault.template: rounds for fault in faults.values()}


def test_a_block_does_not_begin_on_what_was_recorded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise adjoint.ArgumentError("recorded before")

    monkeypatch.setattr(errors, "check", find)
    with pytest.raises(adjoint.ArgumentError, match="recorded before"), adjoint.checked():
        raise AssertionError("the block began")
    assert not errors.is_checking()
