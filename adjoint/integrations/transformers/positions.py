"""Packed sequences that positions tell: their bounds, for the layers that are given no positions."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.core.errors import Unsupported


def by_name(self: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of a model's forward by their names."""
    bound = inspect.signature(type(self).forward).bind(self, *arguments, **kwargs).arguments
    others = bound.pop("kwargs", {})
    return {name: value for name, value in bound.items() if name != "self"} | others


def takes(self: Any, name: str) -> bool:
    """Whether a model's forward has an argument of this name, whose default is then in the model's configuration."""
    return name in inspect.signature(type(self).forward).parameters


def with_bounds(module: nn.Module, arguments: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a text model, with the bounds that its positions tell where they pack sequences."""
    named = by_name(module, arguments, kwargs) if arguments else kwargs
    positions, cache = named.get("position_ids"), named.get("past_key_values")
    mask = named.get("attention_mask")
    if named.get("cu_seq_lens_q") is not None:
        if mask is not None:
            _require_open(type(module).__name__, mask)
        if cache is not None or named.get("use_cache"):
            return arguments, kwargs
        return (), named | {"use_cache": False}  # whatever the configuration says
    if positions is None or positions.shape[-1] < 2 or (cache is not None and _goes_on(cache)):
        return arguments, kwargs
    if torch.compiler.is_exporting():
        raise Unsupported(
            f"{type(module).__name__}: an exported program cannot read in position_ids whether they pack sequences; "
            f"leave them out"
        )
    bounds = _read(type(module).__name__, positions, mask)
    if bounds is None:
        return arguments, kwargs
    if named.get("use_cache") or cache is not None:
        raise Unsupported(f"{type(module).__name__}: packed sequences cannot fill a cache; pass use_cache=False")
    told, longest = bounds
    packed = {"cu_seq_lens_q": told, "cu_seq_lens_k": told, "max_length_q": longest, "max_length_k": longest}
    return (), named | packed | {"use_cache": False}


@torch.compiler.disable(
    reason="a patched model reads in position_ids whether they pack sequences; without position_ids it compiles whole"
)
def _read(name: str, positions: Tensor, mask: Any) -> tuple[Tensor, int] | None:
    """The bounds that positions tell, and the longest sequence's length; None where they pack none."""
    if _is_masked(mask):
        return None
    if _are_several(positions):
        raise Unsupported(
            f"{name}: position_ids pack several sequences into each of several rows; lay the rows one after the other "
            f"in one, or pass an attention_mask where they are padded"
        )
    bounds = _bounds_of(positions)
    return None if bounds is None else (bounds, int(bounds.diff().max()))


@torch.compiler.disable(reason="a patched model reads whether an attention_mask beside cu_seq_lens_q hides tokens")
def _require_open(name: str, mask: Any) -> None:
    """Attention between bounds sees every token of a sequence."""
    if _is_masked(mask):
        raise Unsupported(
            f"{name}: an attention_mask that hides tokens, or is not [batch, time], has no effect beside "
            f"cu_seq_lens_q; leave out the tokens that it hides, or the bounds"
        )


def _is_masked(mask: Any) -> bool:
    """Whether a mask hides anything: positions then begin again, or stand still, where there is padding."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()))


def _goes_on(cache: Any) -> bool:
    """Whether a cache has tokens, which those of a call follow."""
    return torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length") or bool(cache.get_seq_length() > 0)


def _are_several(positions: Tensor) -> bool:
    """Whether a row of several begins again at 0."""
    if positions.dim() == 3 and positions.shape[0] != 4:
        return False
    rows = positions[0] if positions.dim() == 3 else positions
    return rows.dim() == 2 and rows.shape[0] > 1 and bool((rows[:, 1:] == 0).any())


def _bounds_of(positions: Tensor) -> Tensor | None:
    """The bounds of the sequences in the only row, of positions that go on by 1; None where it holds only one.

    Of four rows of positions the first is that of the text. Three are those of images and video alone: they stand still
    within a picture, which is no sequence of its own.
    """
    if positions.dim() == 3 and positions.shape[0] != 4:
        return None
    row = positions[0] if positions.dim() == 3 else positions
    if row.shape[0] != 1 or row.shape[1] < 2:
        return None
    begins = (row[0].diff() != 1).nonzero().flatten() + 1
    if begins.numel() == 0:
        return None
    ends = begins.new_tensor([row.shape[1]])
    return torch.cat((begins.new_zeros(1), begins, ends)).to(torch.int32)
