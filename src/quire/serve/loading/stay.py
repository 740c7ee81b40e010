"""Stay: a call at a loaded model."""

from __future__ import annotations

from collections.abc import Callable


class Stay:
    """While it lasts, the model is not unloaded. A context manager; `end` is called when it is left the first time."""

    __slots__ = ("_end",)

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def leave(self) -> None:
        """The call has ended. May be called more than once. Mutates."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def __enter__(self) -> Stay:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
