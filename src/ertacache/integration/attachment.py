"""What is attached to a pipeline, until it is detached. Knows how to let go, nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

__all__ = ["Attachment"]

_Own = TypeVar("_Own", bound="Attachment")


class Attachment:
    """Holds what is to be undone; also a context manager that detaches.

    Example:
        >>> undo, said = ExitStack(), []
        >>> _ = undo.callback(said.append, "undone")
        >>> with Attachment(undo):
        ...     said.append("attached")
        >>> said
        ['attached', 'undone']
    """

    def __init__(self, undo: ExitStack) -> None:
        """Take over what is to be undone."""
        self._undo = undo

    def detach(self) -> None:
        """Give the pipeline its own behaviour back, also in the middle of a run."""
        self._undo.close()

    def __enter__(self: _Own) -> _Own:
        """Return the handle itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Detach."""
        self.detach()
