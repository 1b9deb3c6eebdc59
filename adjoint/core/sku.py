"""The identity of a plan."""

from typing import NamedTuple


class Sku(NamedTuple):
    """The identity of a plan: plans with equal SKUs give equal bits."""

    op: str
    backend: str
    kernel: str
    revision: int
    arch: str
    elements: str
    layout: str
    numeric: str

    def __str__(self) -> str:
        return "/".join((self.op, self.backend, self.kernel, f"r{self.revision}", *filter(None, self[4:])))
