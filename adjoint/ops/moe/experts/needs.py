"""Bits of the gradients that a backward computes."""

NEED_X, NEED_GATE_UP, NEED_DOWN, NEED_WEIGHTS = 1, 2, 4, 8
