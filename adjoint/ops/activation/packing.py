"""The three ways one tensor holds gate and up along its last axis, as views."""

from torch import Tensor

ORDERS = ("gate_up", "up_gate", "interleaved")


def unpack(packed: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Views of the gate and the up inside a packed tensor; nothing is copied."""
    if order == "interleaved":
        return packed[..., 0::2], packed[..., 1::2]
    half = packed.shape[-1] // 2
    first, second = packed.narrow(-1, 0, half), packed.narrow(-1, half, half)
    return (first, second) if order == "gate_up" else (second, first)
