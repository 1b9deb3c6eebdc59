"""A problem of the convolution as its plans and kernels see it: sizes, what there is, and how tensors lie."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from adjoint.core.launch import Setup, is_aligned
from adjoint.core.layout import copied_names
from adjoint.core.op import Facts
from adjoint.core.problem import Problem, wide_dtype
from adjoint.ops.conv.arguments import MAX_PARTS

NEVER = 2**30
"""A run longer than a launch has tokens, and a multiple of 16."""

STEP = "causal_conv1d_step"
"""The name that the operators of a step begin with."""

STATES = frozenset(("dfinal_state", "dnew_state"))
"""Names of the gradients that are not of a part of y."""


def _adjacent(x: Tensor) -> str:
    """Whether channels or time are adjacent in memory. Empty if neither is; then kernels read a copy."""
    _, time, channel = x.stride()
    if channel == 1 or x.shape[2] == 1:
        return "channels"
    return "time" if time == 1 or x.shape[1] == 1 else ""


def describe(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, numbers: Tensor | None, sequences: int,
    upstream: Mapping[str, Tensor | None] | None = None, part_count: int = 1,
) -> Facts:  # fmt: skip
    """The facts of a problem: the layout of x, the tensors that are present or copied, and absent upstream gradients.

    Args:
        numbers: the bounds of packed sequences, or the states' indices.
        sequences: the number of sequences; for a pool, the number of its states.
        upstream: the gradients of the parts of y, which are read with adjacent channels, and of the final states.
        part_count: the number of parts of y.
    """
    adjacent = _adjacent(x)
    words = [adjacent or "channels"]
    words += ["bias"] * (bias is not None) + ["state"] * (state is not None) + ["numbers"] * (numbers is not None)
    copied = [] if adjacent else ["x"]
    if upstream is not None:
        copied += [
            name
            for name, dy in upstream.items()
            if dy is not None and name not in STATES and _adjacent(dy) != "channels"
        ]
        absent = [name for name, gradient in upstream.items() if gradient is None]
        words += [f"{', '.join(absent)} absent"] * bool(absent)
    words += [f"{', '.join(copied)} copied"] * bool(copied)
    own = (x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    dtypes = own if numbers is None else (*own, numbers.dtype)
    return Facts(dtypes, "; ".join(words), (*x.shape, weight.shape[1], sequences, part_count))


@dataclass(frozen=True)
class Shape:
    """The facts of a problem by name.

    Attributes:
        sequences: the number of sequences; for a pool, the number of its states.
        parts: the channels of each part of y.
        absent: the names of absent upstream gradients.
    """

    element: torch.dtype
    weight: torch.dtype
    bias: torch.dtype
    numbers: torch.dtype | None
    batch: int
    time: int
    channels: int
    width: int
    sequences: int
    is_step: bool
    is_silu: bool
    parts: tuple[int, ...]
    is_time_adjacent: bool
    has_bias: bool
    has_state: bool
    absent: frozenset[str]
    copied: tuple[str, ...]

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(problem: Problem) -> "Shape":
        element, weight, bias, *numbers = problem.dtypes
        batch, time, channels, width, sequences, part_count = problem.sizes
        words = problem.layout.split("; ")
        absent = [word.removesuffix(" absent") for word in words if word.endswith(" absent")]
        return Shape(
            element=element,
            weight=weight,
            bias=bias,
            numbers=numbers[0] if numbers else None,
            batch=batch,
            time=time,
            channels=channels,
            width=width,
            sequences=sequences,
            is_step=problem.op.startswith(STEP),
            is_silu=problem.options[0],
            parts=problem.options[2 : 2 + part_count] if part_count > 1 else (channels,),
            is_time_adjacent=words[0] == "time",
            has_bias="bias" in words,
            has_state="state" in words,
            absent=frozenset(name for names in absent for name in names.split(", ")),
            copied=tuple(copied_names(problem.layout)),
        )

    @property
    def is_indexed(self) -> bool:
        """Whether the states of rows are picked from a pool."""
        return self.numbers is not None and self.is_step

    @property
    def is_packed(self) -> bool:
        return self.numbers is not None and not self.is_step

    @property
    def index(self) -> torch.dtype:
        """The type of the states' indices, or of what kernels take in their place."""
        return self.numbers if self.numbers is not None and self.is_step else torch.int32

    @property
    def bound(self) -> torch.dtype:
        """The type of the sequences' bounds, or of what kernels take in their place."""
        return self.numbers if self.numbers is not None and not self.is_step else torch.int32

    @property
    def has_final_gradient(self) -> bool:
        return not self.absent & STATES

    @property
    def tokens(self) -> int:
        return self.batch * self.time

    @property
    def types(self) -> dict[str, Any]:
        return {"element": self.element, "weight": self.weight, "bias": self.bias}

    @property
    def computed(self) -> torch.dtype:
        return wide_dtype(self.element)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The first channel of each part, and the end of the last, as often as kernels have places for parts."""
        ends = [sum(self.parts[: n + 1]) for n in range(len(self.parts))]
        return (0, *ends, *(ends[-1],) * (MAX_PARTS - len(ends)))

    def part_names(self, prefix: str) -> tuple[str, ...]:
        return part_names(len(self.parts), prefix)

    # ------------------------------------------------------------------------------------ tiles of channels

    def channel_block(self, channels: int) -> int:
        """The channels of a tile: as many as the schedule says, or fewer if no part has so many."""
        return max(16, min(channels, 1 << max(0, max(self.parts) - 1).bit_length()))

    def fills(self, block: int) -> bool:
        """Whether no tile has columns past the end of its part."""
        return all(part % block == 0 for part in self.parts)

    def tiles(self, block: int) -> tuple[int, tuple[int, ...]]:
        """How many tiles all parts have, and the number of the first tile of each."""
        counts = [-(-part // block) for part in self.parts]
        firsts = [sum(counts[:n]) for n in range(len(counts))]
        return sum(counts), (*firsts, *(sum(counts),) * (MAX_PARTS - len(counts)))

    @staticmethod
    def warps(block: int, warps: int) -> int:
        """The number of warps: as many as the schedule says, or fewer if a tile is small."""
        return max(1, min(warps, block // 32))

    # ----------------------------------------------------------------------------------------------- memory

    def add_copies(self, setup: Setup) -> None:
        """Adds room for copies of the tensors that kernels cannot read in place."""
        sizes = dict(zip(self.part_names("dy"), self.parts, strict=True)) | {"x": self.channels}
        setup.copies(**{name: (self.element, self.tokens * sizes[name]) for name in self.copied})

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """The strides of rows and of tokens (of channels, if time is adjacent), and the length of a run of tokens.

        Token n lies at (n // run)·row + (n % run)·token. If all tokens are evenly spaced, they are one run.
        """
        row, token, channel = x.stride()
        if self.is_time_adjacent:
            token, step = 1, 0 if self.channels == 1 else channel
        else:
            step = 0 if self.time == 1 else token
        if self.batch == 1 or (row == self.time * token and self.time > 1):
            return 0, step, NEVER
        return row, step, self.time

    def upstream_strides(self, dy: Tensor) -> tuple[int, int, int]:
        """The same for a gradient of y, whose channels are adjacent."""
        row, token, _ = dy.stride()
        token = 0 if self.time == 1 else token
        if self.batch == 1 or (row == self.time * token and self.time > 1):
            return 0, token, NEVER
        return row, token, self.time

    def aligned_run(self, run: int) -> int:
        """The run if it decides whether blocks are aligned, else a multiple of 16."""
        return run if self.is_time_adjacent else NEVER

    def is_aligned(self, tensors: Iterable[Tensor | None], strides: Iterable[int], run: int) -> bool:
        """Whether all blocks that kernels read or write begin at multiples of 16 bytes, or of 16 elements."""
        if any(step % 16 for step in (*strides, self.aligned_run(run), *self.begins)):
            return False
        return is_aligned(*tensors)

    def constants(self, nvidia: bool) -> dict[str, Any]:
        """The facts for which kernels of both directions are compiled."""
        return {
            "WIDTH": self.width, "HAS_BIAS": self.has_bias, "HAS_STATE": self.has_state, "SILU": self.is_silu,
            "NARROW": self.element.itemsize == 2, "NATIVE": nvidia, "DOUBLE": self.computed == torch.float64,
        }  # fmt: skip


def part_names(count: int, prefix: str) -> tuple[str, ...]:
    """The names of the parts of y, or of their gradients."""
    return (prefix,) if count == 1 else tuple(f"{prefix}_{number}" for number in range(count))


def named_strides(name: str, tensor: Tensor | None, *axes: str) -> dict[str, int]:
    """The strides of a tensor by their names in kernels; 0 if there is no tensor."""
    strides = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_{axis}": step for axis, step in zip(axes, strides, strict=True)}
