"""Adapters as the control plane knows them: a folder, the digest of its files, and how much memory they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

READY: Final = "ready"
LOADING: Final = "loading"
LOAD_S: Final = 60.0
"""How long an adapter may take to be checked, and how long to be loaded: a disk may never answer."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter that was checked and fits the model. `base`: the model that it was trained for, as its folder says."""

    folder: str
    digest: str
    rank: int
    num_bytes: int
    base: str = ""


class AdapterLoading(Protocol):
    """Loads adapters for the steps to come, while steps run."""

    def load(self, digest: str, folder: str) -> None:
        """Begin to load an adapter; nothing if it is there or on its way. Mutates."""
        ...

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter that no request has. Mutates."""
        ...

    def states(self) -> Mapping[str, str]:
        """Return by digest `READY`, `LOADING`, or why an adapter could not be loaded. Does not mutate."""
        ...

    def close(self) -> None:
        """Load nothing more. Mutates."""
        ...
