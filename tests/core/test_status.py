"""The status word: a toy op whose kernel finds negative ids, and the host's side of it."""

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
