"""HeldBlocks: the blocks that one engine can hit, from its reports.

Reports may arrive late, twice or not at all. Each has a number; a report that was seen, or is older, is ignored. A gap
means that changes are unknown, so a survey is requested, once, and the last known state is kept until it begins. If the
first report of a survey is lost, its later reports name the survey, and another survey is requested. The state never
grows between a gap and the survey, so it has only blocks that the engine once held.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from quire.memory.cache_journal import CacheNews, split_digests


class HeldChange(NamedTuple):
    """The blocks that an engine can hit since a report, and those that it can no longer hit."""

    added: Collection[bytes]
    removed: Collection[bytes]


NO_CHANGE: Final = HeldChange((), ())


class HeldBlocks:
    """The digests of the blocks that an engine can hit, as far as it has reported them.

    >>> held = HeldBlocks()
    >>> held.note(CacheNews(1, 1, True, b"block  1block  2", b"")), b"block  2" in held
    (HeldChange(added=[b'block  1', b'block  2'], removed=[]), True)
    >>> held.note(CacheNews(3, 1, False, b"", b"block  2")), b"block  2" in held  # the second report is missing
    (None, True)
    >>> held.note(CacheNews(4, 2, True, b"block  1", b"")), b"block  2" in held  # the survey
    (HeldChange(added=[b'block  1'], removed=[b'block  2']), False)
    """

    __slots__ = ("_digests", "_last_seq", "_asked_in", "_is_whole")

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._last_seq = 0
        self._asked_in = 0  # the latest survey when the last gap was found
        self._is_whole = False  # every report since a survey began has arrived

    def __contains__(self, digest: bytes) -> bool:
        """Return whether the engine can hit a block."""
        return digest in self._digests

    def __len__(self) -> int:
        """Return how many blocks the engine can hit."""
        return len(self._digests)

    def note(self, news: CacheNews) -> HeldChange | None:
        """Process a report and return its changes; None: request a survey from the engine. Mutates."""
        if news.seq <= self._last_seq:
            return NO_CHANGE
        self._is_whole = news.begins or (self._is_whole and news.seq == self._last_seq + 1)
        self._last_seq = news.seq
        if not self._is_whole:
            was_asked, self._asked_in = news.survey <= self._asked_in, max(news.survey, self._asked_in)
            return NO_CHANGE if was_asked else None
        added, removed = split_digests(news.added), split_digests(news.removed)
        if news.begins:
            removed = list(self._digests.difference(added))
        self._digests.difference_update(removed)
        self._digests.update(added)
        return HeldChange(added, removed)
