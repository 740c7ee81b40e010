"""Adapters as the control plane sees them: a folder, the digest of its files, and their size in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

READY: Final = "ready"
LOADING: Final = "loading"
LOAD_S: Final = 60.0
"""The time limit for checking an adapter, and for loading it: a disk may never answer."""


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
        """Start loading an adapter, unless it is loaded or loading. Mutates."""
        ...

    def drop(self, digest: str) -> None:
        """Free the memory of an adapter that no request uses. Mutates."""
        ...

    def states(self) -> Mapping[str, str]:
        """Return for each digest `READY`, `LOADING`, or why the adapter could not be loaded. Does not mutate."""
        ...

    def close(self) -> None:
        """Stop loading adapters. Mutates."""
        ...
