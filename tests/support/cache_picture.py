"""The oracle of the cache's news: what a reader makes of them, against the prompts that the index would match."""

from __future__ import annotations

from array import array

from quire.core.request import CacheScope
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import root_key
from quire.memory.manager import KVCacheManager
from quire.memory.prefix import PrefixEntry
from quire.routing.held_blocks import HeldBlocks
from quire.routing.prompts import PromptNames


class CachePicture:
    """Reads the news of a manager, and asks for a survey now and then. Reports are taken every so many looks."""

    def __init__(self, manager: KVCacheManager, scopes: tuple[CacheScope, ...], *, taken_every: int = 1) -> None:
        self.taken_every = taken_every
        self._manager = manager
        self._scopes = {root_key(scope): scope for scope in scopes}
        self._names = PromptNames(manager.spec.block_size, manager.config.hash_key)
        windowless = [group for group, kind in enumerate(manager.spec.groups) if kind.window is None]
        self._groups = windowless or range(len(manager.spec.groups))
        self._held = HeldBlocks()
        self._num_looks = 0
        self.num_checks = 0
        manager.survey(at_once=3)

    def follow(self) -> None:
        """Take the news, when it is time, and compare."""
        self._num_looks += 1
        journal = self._manager.cache_journal
        assert journal is not None
        if self._num_looks % (20 * self.taken_every) == 0:
            self._manager.survey(at_once=3)
        if self._num_looks % self.taken_every:
            return
        news = journal.take()
        assert news is None or self._held.note(news) is not None, "a gap"
        if journal.has_news:
            return
        self.num_checks += 1
        wanted = {self._digest(entry) for entry in self._manager.index if self._can_be_hit(entry)}
        assert len(self._held) == len(wanted)
        assert all(digest in self._held for digest in wanted)

    def _can_be_hit(self, entry: PrefixEntry) -> bool:
        return all(entry.block_ids[group] != NO_BLOCK for group in self._groups)

    def _digest(self, entry: PrefixEntry) -> bytes:
        """The name of a block, from all the tokens before it."""
        keys: list[bytes] = []
        step = entry
        while step.parent is not None:
            keys.append(step.key)
            step = step.parent
        tokens = array("i")
        tokens.frombytes(b"".join(reversed(keys)))
        return self._names.of(tokens, self._scopes[step.key]).digests[-1]
