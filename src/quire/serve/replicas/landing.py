"""Landing: receives blocks of another engine into a store, on the store's machine. Call its methods in a thread.

read_chain(store) ── pieces of a bundle, checked ──► Landing: spool, checked ──► TakeBlocks ──► the engine's store
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.running import RunningStore
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.compute.worker.store.spool import Intake, IntakeLimits, Spool
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.core.kept_block import FetchError, KeptBlock
from quire.core.request import CacheScope
from quire.engine.replicas.fetches import FAILED

DAMAGED: Final = "damaged"
LOST: Final = "engine lost"


@dataclass(frozen=True, slots=True)
class Landed:
    """Blocks in a file that an engine can read; a `slot` is a place in the file. `num_bytes`: the bundle's size."""

    path: str
    blocks: tuple[KeptBlock, ...]
    num_bytes: int


@contextmanager
def fetch_errors() -> Iterator[None]:
    """Turn the errors of files and engines into `FetchError`."""
    try:
        yield
    except (DamagedBlockError, InvalidRequestError, KeyError, ValueError) as error:
        raise FetchError(DAMAGED) from error
    except ExecutionError as error:
        raise FetchError(LOST) from error
    except OSError as error:
        raise FetchError(FAILED) from error


def read_chain(store: Path, slots: tuple[int, ...], tokens: bytes, scope: CacheScope) -> Iterator[bytes]:
    """Yield the bundle of some tokens, from the slots of a store in use; raises `FetchError`."""
    with fetch_errors():
        source = RunningStore(store)
        try:
            yield from source.pieces(source.chain(slots, tokens, scope))
        finally:
            source.close()


class Landing:
    """A bundle received next to a store, of at most `max_blocks` blocks. Its methods raise `FetchError`."""

    def __init__(self, store: Path, max_blocks: int, vocab_size: int) -> None:
        self._store, self._max_blocks, self._vocab_size = store, max_blocks, vocab_size
        self._spool: Spool | None = None

    def take(self, pieces: Iterable[bytes], scope: CacheScope) -> Landed:
        """Receive a whole bundle, for requests of a scope. Mutates."""
        with fetch_errors():
            limits = IntakeLimits(meta_of(self._store), self._max_blocks, self._vocab_size)
            self._spool = Spool(self._store.parent)
            intake, num_bytes = Intake(self._spool, limits), 0
            for piece in pieces:
                intake.feed(piece)
                num_bytes += len(piece)
            intake.finish()
            return Landed(str(self._spool.path), intake.blocks(0, intake.num_blocks, scope), num_bytes)

    def close(self) -> None:
        """Delete the received bundle; may be called twice."""
        if self._spool is not None:
            self._spool.close()
