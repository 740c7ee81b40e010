"""A scheduler of a few lines, for tests that say by hand what happens to the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.core.config import MemoryConfig
from quire.core.kv_spec import RECURRENT, RECURRENT_WINDOW, KVCacheSpec, KVGroup
from quire.core.request import DEFAULT_SCOPE, CacheScope, Request
from quire.memory.block_pool import BlockPool
from quire.memory.changes import MemoryChanges
from quire.memory.manager import KVCacheManager


class FailingPool(BlockPool):
    """A pool whose next allocation finds no block if it is told so."""

    fails_next = False

    def allocate(self, num_blocks: int) -> list[int] | None:
        if self.fails_next:
            self.fails_next = False
            return None
        return super().allocate(num_blocks)


class ByHand:
    """A memory manager, and requests that do what they are told. All books are checked after every call."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 10,
        windows: Sequence[int | None] = (None,),
        make_pool: Callable[..., BlockPool] = BlockPool,
        **config: Any,
    ) -> None:
        groups = tuple(
            KVGroup((layer,), RECURRENT_WINDOW, recurrent=True) if window == RECURRENT else KVGroup((layer,), window)
            for layer, window in enumerate(windows)
        )
        spec = KVCacheSpec(block_size, 1, 8, "float32", groups)
        self.manager = KVCacheManager(spec, MemoryConfig(num_blocks=num_blocks, **config), make_pool=make_pool)
        self.pool = self.manager.pool

    def request(
        self, tokens: Iterable[int], scope: CacheScope = DEFAULT_SCOPE, *, name: str = "r", priority: int = 0
    ) -> Request:
        """Return a request that holds nothing yet."""
        return Request(name, tokens, scope=scope, priority=priority)

    def open(self, request: Request, end: int | None = None) -> bool:
        """Admit a request with what the cache holds of it, and get room up to `end` (all its tokens)."""
        match = self.manager.match_prefix(request)
        if not self.manager.allocate_slots(request, len(request.tokens) if end is None else end, match):
            self.manager.check()
            return False
        request.num_computed = request.num_planned = match.num_tokens
        self.manager.check()
        return True

    def allocate(self, request: Request, end: int) -> bool:
        """Get room for a request that runs."""
        found = self.manager.allocate_slots(request, end)
        self.manager.check()
        return found

    def plan(self, request: Request, end: int) -> None:
        """Hand out a step that computes up to `end`; its result is not in."""
        request.num_planned = end
        self.manager.check()

    def commit(self, request: Request, end: int | None = None) -> None:
        """Compute up to `end` (all tokens), and commit."""
        request.num_computed = request.num_planned = len(request.tokens) if end is None else end
        self.manager.commit(request, request.num_computed)
        self.manager.check()

    def run(
        self, tokens: Iterable[int], scope: CacheScope = DEFAULT_SCOPE, *, name: str = "r", priority: int = 0
    ) -> Request:
        """Admit a request and compute all its tokens."""
        request = self.request(tokens, scope, name=name, priority=priority)
        assert self.open(request)
        self.commit(request)
        return request

    def leave_cached(self, tokens: Iterable[int], scope: CacheScope = DEFAULT_SCOPE, *, priority: int = 0) -> list[int]:
        """Run a request and let it go; return the blocks that it held in the first group."""
        request = self.run(tokens, scope, priority=priority)
        table = self.table(request)
        self.free(request)
        return table

    def grow(self, request: Request, *tokens: int) -> None:
        """Append tokens, get room for them, and compute them one by one."""
        for token in tokens:
            request.tokens.append(token)
            assert self.allocate(request, len(request.tokens))
            self.commit(request)

    def fork(self, parent: Request) -> Request:
        """Return a second sequence on the same blocks."""
        child = parent.open_branch(parent.branch + 1)
        self.manager.fork(parent, child)
        self.manager.check()
        return child

    def free(self, request: Request) -> None:
        """Let a request go."""
        self.manager.free(request)
        self.manager.check()

    def tables(self, request: Request) -> list[list[int]]:
        """The block ids of a request, a list per KV group."""
        return self.manager.block_tables(request)

    def table(self, request: Request) -> list[int]:
        """The block ids of a request in the first KV group."""
        return self.tables(request)[0]

    def num_hit(self, tokens: Iterable[int], scope: CacheScope = DEFAULT_SCOPE) -> int:
        """How many of these tokens the cache would serve."""
        return self.manager.match_prefix(self.request(tokens, scope)).num_tokens

    def changes(self) -> MemoryChanges:
        """End the plan in the making."""
        changes = self.manager.take_changes()
        self.manager.check()
        return changes

    def ref_counts(self) -> list[int]:
        """The reference count of every block."""
        return [block.ref_count for block in self.pool.blocks]
