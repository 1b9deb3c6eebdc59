"""`Rotary` as a module, which makes cos and sin of positions and has an empty state dict."""

from numbers import Real
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.arguments import require_ids, require_size
from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.device.sequences import check_bounds, require_cu_seqlens
from adjoint.ops.rotary import rotary


class Rotary(nn.Module):
    """Rotates q and k by the angles position·inv_freq, by `adjoint.rotary`.

    inv_freq_i = base^(−2i/R), for the R/2 pairs among the first R = dim·partial_rotary_factor columns of a head. As in
    Hugging Face's modules, it is in no state dict. It stays float32 when the module is cast.

    Args:
        dim: D, the number of columns of a head.
        base: θ; Qwen3-Next has 1e7.
        partial_rotary_factor: the part of a head that is rotated; 0.25 for Qwen3-Next.
        interleaved: whether pairs are neighbouring columns; otherwise they have a column in each of two halves.
        table_dtype: the dtype of cos and sin; Hugging Face's modules round them to the dtype of q.
        device: the device of inv_freq.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: R is not an even number from 2 to dim, base or the factor is not a positive number, or
            table_dtype is not floating.

    >>> import torch
    >>> q = torch.tensor([1.0, 0.0, 5.0]).expand(1, 2, 1, 3)
    >>> Rotary(3, partial_rotary_factor=2 / 3)(q)[0].flatten(1)
    tensor([[1.0000, 0.0000, 5.0000, 0.5403, 0.8415, 5.0000]])
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        partial_rotary_factor: float = 1.0,
        interleaved: bool = False,
        table_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        preference: Preference | None = None,
    ) -> None:
        super().__init__()
        dim = require_size("Rotary", "dim", dim)
        if not isinstance(table_dtype, torch.dtype) or not table_dtype.is_floating_point:
            raise ArgumentError(f"Rotary: table_dtype must be a floating torch.dtype, got {table_dtype!r}")
        for name, value in (("base", base), ("partial_rotary_factor", partial_rotary_factor)):
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < float("inf"):
                raise ArgumentError(f"Rotary: {name} must be a positive number, got {value!r}")
        self.dim, self.base, self.partial_rotary_factor = dim, base, partial_rotary_factor
        self.rotary_dim = round(dim * partial_rotary_factor)
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= dim:
            raise ArgumentError(
                f"Rotary: dim·partial_rotary_factor, the number of columns that are rotated, must be even, from 2 to "
                f"the {dim} columns of a head, got {self.rotary_dim}"
            )
        self.interleaved, self.table_dtype, self.preference = interleaved, table_dtype, preference
        self.register_buffer("inv_freq", self._inverse_frequencies(device), persistent=False)

    def _inverse_frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=device).float() / self.rotary_dim
        return 1.0 / self.base**exponents  # type: ignore[no-any-return]

    def _apply(self, fn: Any, recurse: bool = True) -> "Rotary":
        """Moves the frequencies as other modules do, but does not cast them. `to_empty` of a module on meta computes
        them."""
        before = self.inv_freq
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        if before.is_meta:
            self.inv_freq = self._inverse_frequencies(device)
        elif device.type != "meta":
            self.inv_freq = before.to(device)
        return self

    @torch.no_grad()
    def tables(self, positions: Int[Tensor, "*batch time"]) -> tuple[Float[Tensor, "*batch time pairs"], ...]:
        """cos and sin of the angles of tokens at these positions, one number for each pair.

        `rotary` takes them with `rotary_dim=self.rotary_dim`. The layers of a model can share them.
        """
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.is_complex():
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise ArgumentError(f"Rotary: positions must be a tensor of whole numbers, got {got}")
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos().to(self.table_dtype), angles.sin().to(self.table_dtype)

    def forward(
        self,
        q: Float[Tensor, "batch time heads D"],
        k: Float[Tensor, "batch time key_heads D"] | None = None,
        position_ids: Int[Tensor, "*batch time"] | None = None,
        *,
        cu_seqlens: Int[Tensor, " bounds"] | None = None,
        in_place: bool = False,
    ) -> tuple[Float[Tensor, "batch time heads D"], Float[Tensor, "batch time key_heads D"] | None]:
        """The rotated q and k.

        Args:
            q, k: as for `adjoint.rotary`.
            position_ids: integers, [time] or [batch, time]; by default 0, 1, 2, … in every row.
            cu_seqlens: the bounds of packed sequences in a batch of one row, int32 or int64. Each sequence begins at
                position 0.
            in_place: whether to overwrite the rotated columns of q and k. This is not differentiable.

        Raises:
            ArgumentError: as `adjoint.rotary`, or positions are of a wrong shape or dtype, or given in two ways.
        """
        return rotary(
            q, k, *self.tables(self._positions(q, position_ids, cu_seqlens)), interleaved=self.interleaved,
            rotary_dim=self.rotary_dim, in_place=in_place, preference=self.preference,
        )  # fmt: skip

    def _positions(self, q: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        if not isinstance(q, Tensor) or q.dim() != 4:
            shape = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
            raise ArgumentError(f"Rotary: q must be a tensor with axes [batch, time, heads, D], got {shape}")
        if position_ids is not None and cu_seqlens is not None:
            raise ArgumentError("Rotary: position_ids and cu_seqlens both say where tokens are; pass one of them")
        if position_ids is not None:
            require_ids("Rotary", "position_ids", position_ids, "q", q)
            batch, time = q.shape[:2]
            if tuple(position_ids.shape) not in ((time,), (1, time), (batch, time)):
                raise ArgumentError(
                    f"Rotary: position_ids must have shape ({time},) or ({batch}, {time}), the tokens of q, got "
                    f"{tuple(position_ids.shape)}"
                )
            return position_ids
        tokens = torch.arange(q.shape[1], device=q.device)
        if cu_seqlens is None:
            return tokens
        require_cu_seqlens("Rotary", cu_seqlens, q)
        if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
            check_bounds("Rotary", cu_seqlens.tolist(), q.shape[1])
        bounds = cu_seqlens.long()
        sequence = torch.searchsorted(bounds, tokens, right=True) - 1
        return tokens - bounds[sequence.clamp_min(0)]

    def extra_repr(self) -> str:
        options = [f"{self.dim}, base={self.base:g}"]
        if self.rotary_dim != self.dim:
            options.append(f"partial_rotary_factor={self.partial_rotary_factor:g}")
        options += ["interleaved=True"] * self.interleaved
        options += [f"table_dtype={self.table_dtype}"] * (self.table_dtype != torch.float32)
        return ", ".join(options + [f"preference={self.preference!r}"] * (self.preference is not None))
