"""`Embedding` and `EmbeddingBag` as modules: torch's own modules with the lookups and gradients of adjoint."""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.ops.embedding import embedding, embedding_bag
from adjoint.ops.embedding.bag import MODES, Mode
from adjoint.ops.embedding.embedding import OutOfRange
from adjoint.ops.embedding.embedding.plans import OUT_OF_RANGE
from adjoint.ops.embedding.table import padding_row


class Embedding(nn.Embedding):
    """out[n, :] = weight[ids[n], :], by `adjoint.embedding`.

    It is a `torch.nn.Embedding` with the same arguments, initial values, attributes and state dict, so each loads the
    state dict of the other. To add the gradient to a buffer of your own, call
    `adjoint.embedding(ids, module.weight, accumulate_into=buffer)`.

    Args:
        num_embeddings: the number of rows of the table.
        embedding_dim: the number of its columns.
        padding_idx: a row that starts as 0 and gets no gradient. A negative number counts from the end.
        max_norm: not supported.
        norm_type: the norm for `max_norm`; it has no effect.
        scale_grad_by_freq: not supported.
        sparse: whether the gradient is a row-sparse tensor, for optimizers such as `torch.optim.SparseAdam`. This is
            not available under `torch.compile`.
        out_of_range: "raise" or "zero", as for `adjoint.embedding`.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: an option is not supported, or `padding_idx` or the table does not fit.

    >>> import torch
    >>> module = Embedding(3, 2, padding_idx=-1)
    >>> module
    Embedding(3, 2, padding_idx=2)
    >>> module(torch.tensor([[2, 2]]))
    tensor([[[0., 0.],
             [0., 0.]]], grad_fn=<_EmbeddingBackward>)
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_of_range: OutOfRange = "raise",
        preference: Preference | None = None,
    ) -> None:
        _check("Embedding", num_embeddings, embedding_dim, padding_idx, max_norm, scale_grad_by_freq, _weight)
        _check_choice("Embedding", "out_of_range", out_of_range, tuple(OUT_OF_RANGE))
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, None, norm_type, False, sparse, _weight, _freeze, device, dtype
        )
        self.out_of_range: OutOfRange = out_of_range
        self.preference = preference

    def forward(self, input: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        return embedding(
            input, self.weight, padding_idx=self.padding_idx, out_of_range=self.out_of_range, sparse=self.sparse,
            preference=self.preference,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = [f"out_of_range={self.out_of_range!r}"] * (self.out_of_range != "raise")
        return ", ".join((super().extra_repr(), *options, *_preferred(self.preference)))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Float[Tensor, "rows columns"],
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        out_of_range: OutOfRange = "raise",
        preference: Preference | None = None,
    ) -> "Embedding":
        """A module that shares an existing table; frozen by default.

        >>> import torch
        >>> module = Embedding.from_pretrained(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out_of_range="zero")
        >>> module(torch.tensor([1, 7]))
        tensor([[3., 4.],
                [0., 0.]])
        """
        return cls(
            *_table_shape("Embedding", embeddings), padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            embeddings, freeze, out_of_range=out_of_range, preference=preference,
        )  # fmt: skip


class EmbeddingBag(nn.EmbeddingBag):
    """The sum, mean or maximum of the rows of each bag of ids, by `adjoint.embedding_bag`.

    It is a `torch.nn.EmbeddingBag` with the same arguments, initial values, attributes and state dict, so each loads
    the state dict of the other.

    Args:
        num_embeddings: the number of rows of the table.
        embedding_dim: the number of its columns.
        max_norm: not supported.
        norm_type: the norm for `max_norm`; it has no effect.
        scale_grad_by_freq: not supported.
        mode: "mean", "sum" or "max".
        sparse: not supported.
        include_last_offset: whether the last offset is the end of the last bag.
        padding_idx: a row that starts as 0 and that bags leave out. A negative number counts from the end.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: an option is not supported, the mode is unknown, or `padding_idx` or the table does not fit.

    >>> import torch
    >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> EmbeddingBag.from_pretrained(table, mode="sum")(torch.tensor([0, 1, 1]), torch.tensor([0, 2]))
    tensor([[4., 6.],
            [3., 4.]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Mode = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        preference: Preference | None = None,
    ) -> None:
        _check("EmbeddingBag", num_embeddings, embedding_dim, padding_idx, max_norm, scale_grad_by_freq, _weight)
        _check_choice("EmbeddingBag", "mode", mode, MODES)
        if sparse:
            raise ArgumentError(
                "EmbeddingBag: sparse=True is not supported; leave it out, the gradient is then dense, or look the "
                "rows up with Embedding(sparse=True) and reduce them"
            )
        super().__init__(
            num_embeddings, embedding_dim, None, norm_type, False, mode, False, _weight, include_last_offset,
            padding_idx, device, dtype,
        )  # fmt: skip
        self.preference = preference

    def forward(
        self,
        input: Int[Tensor, "*shape"],
        offsets: Int[Tensor, " offsets"] | None = None,
        per_sample_weights: Float[Tensor, "*shape"] | None = None,
    ) -> Float[Tensor, "bags columns"]:
        return embedding_bag(
            input, self.weight, offsets, mode=cast(Mode, self.mode), per_sample_weights=per_sample_weights,
            padding_idx=self.padding_idx, include_last_offset=self.include_last_offset, preference=self.preference,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join((super().extra_repr(), *_preferred(self.preference)))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Float[Tensor, "rows columns"],
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        preference: Preference | None = None,
    ) -> "EmbeddingBag":
        """A module that shares an existing table; frozen by default."""
        module = cls(
            *_table_shape("EmbeddingBag", embeddings), max_norm, norm_type, scale_grad_by_freq, cast(Mode, mode),
            sparse, embeddings, include_last_offset, padding_idx, preference=preference,
        )  # fmt: skip
        module.weight.requires_grad_(not freeze)
        return module


# --------------------------------------------------------------------------------------------- checks


def _check(
    module: str,
    rows: int,
    columns: int,
    padding_idx: int | None,
    max_norm: float | None,
    scale_grad_by_freq: bool,
    weight: Tensor | None,
) -> None:
    """Refuses arguments that torch takes and these modules do not, and arguments against which torch has an assertion.

    The errors name the argument.
    """
    if max_norm is not None:
        raise ArgumentError(
            f"{module}: max_norm={max_norm!r} is not supported, because a lookup would overwrite rows of weight; "
            f"leave it out (norm_type too), and bound the rows after each step of the optimizer: "
            f"weight.data.renorm_(norm_type, 0, max_norm)"
        )
    if scale_grad_by_freq:
        raise ArgumentError(
            f"{module}: scale_grad_by_freq=True is not supported; leave it out, and divide each row of weight.grad by "
            f"the times its id occurs: ids.reshape(-1).bincount(minlength=num_embeddings).clamp(min=1)[:, None]"
        )
    for name, size in (("num_embeddings", rows), ("embedding_dim", columns)):
        if size < 0:
            raise ArgumentError(f"{module}: {name} must be at least 0, got {size}")
    padding_row(module, padding_idx, rows)
    if weight is not None and tuple(weight.shape) != (rows, columns):
        raise ArgumentError(
            f"{module}: _weight must have the shape (num_embeddings, embedding_dim), {(rows, columns)}, "
            f"got {tuple(weight.shape)}"
        )


def _check_choice(module: str, name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ArgumentError(f"{module}: {name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _table_shape(module: str, table: Tensor) -> tuple[int, int]:
    if table.dim() != 2:
        raise ArgumentError(
            f"{module}: embeddings must have two axes, rows and columns, got shape {tuple(table.shape)}"
        )
    rows, columns = table.shape
    return rows, columns


def _preferred(preference: Preference | None) -> list[str]:
    """The preference as it is written in a call, in a list; an empty list if there is none."""
    return [f"preference={preference!r}"] * (preference is not None)
