"""The observer of the calls of ops: there is none, except while a model is audited."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjoint.core.op import Op

Observer = Callable[["Op", tuple[Any, ...], str, str, Callable[[], Any]], Any]
"""`observer(op, arguments, form, preference, run)` calls `run()` once and returns its result."""


class _Watch:
    """Attributes:
    observer: the observer of every call of an op in this process; None where there is none.
    """

    observer: Observer | None = None


watch = _Watch()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Passes every call of an op in this block through an observer."""
    if watch.observer is not None:
        raise RuntimeError("an audit is running already: one at a time")
    watch.observer = observer
    try:
        yield
    finally:
        watch.observer = None
