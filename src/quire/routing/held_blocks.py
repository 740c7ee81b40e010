"""HeldBlocks: what one engine can hit, from its news.

Reports may come late, twice or not at all. Each has a number: one that was seen, or is older, is ignored. A gap means
that something is unknown, so a survey is asked for, once, and until it begins the last known state stays. If the survey
itself is lost, its later reports name it, and another one is asked for. The state never grows between a gap and the
survey, so it is at most what the engine once held.
"""

from __future__ import annotations

from quire.memory.cache_journal import CacheNews, split_digests


class HeldBlocks:
    """The digests of the blocks that an engine can hit, as far as it has reported them.

    >>> held = HeldBlocks()
    >>> held.note(CacheNews(1, 1, True, b"block  1block  2", b"")), b"block  2" in held
    ([b'block  1', b'block  2'], True)
    >>> held.note(CacheNews(3, 1, False, b"", b"block  2")), b"block  2" in held  # the second report is missing
    (None, True)
    >>> held.note(CacheNews(4, 2, True, b"block  1", b"")), b"block  2" in held  # the survey
    ([b'block  1'], False)
    """

    __slots__ = ("_digests", "_last_seq", "_asked_in", "_is_whole")

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._last_seq = 0
        self._asked_in = 0  # the survey that the last gap followed
        self._is_whole = False  # every report since a survey began has come

    def __contains__(self, digest: bytes) -> bool:
        """Return whether the engine can hit a block."""
        return digest in self._digests

    def __len__(self) -> int:
        """Return how many blocks the engine can hit."""
        return len(self._digests)

    def note(self, news: CacheNews) -> list[bytes] | None:
        """Take a report in and return the blocks that it adds; None: ask the engine for a survey. Mutates."""
        if news.seq <= self._last_seq:
            return []
        self._is_whole = news.begins or (self._is_whole and news.seq == self._last_seq + 1)
        self._last_seq = news.seq
        if not self._is_whole:
            was_asked, self._asked_in = news.survey <= self._asked_in, max(news.survey, self._asked_in)
            return [] if was_asked else None
        if news.begins:
            self._digests.clear()
        added = split_digests(news.added)
        self._digests.difference_update(split_digests(news.removed))
        self._digests.update(added)
        return added
