"""A cache that holds, instead of keys and values, what they stand for: and an executor that computes on it.

Every slot remembers the KV group, the position and a digest of **all tokens up to there** (seeded by the salt). A token
is "computed" by reading the digests of its context *out of the cache, through the block table*, and its successor is drawn
from its own digest. So a wrong block, a stale slot, a missed copy or a hit across salts raises `ShadowError` at once.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.core.errors import ExecutionError
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import NO_BLOCK, StepPlan, StepResult

_PRIME = 1099511628211
_MASK = (1 << 64) - 1


class ShadowError(AssertionError):
    """The cache does not hold what the tables say it holds."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a slot stands for."""

    group: int
    position: int
    digest: int


def root_digest(salt: str) -> int:
    """The digest of no tokens at all."""
    return extend(14695981039346656037, *salt.encode())


def extend(digest: int, *tokens: int) -> int:
    """The digest of a sequence grown by tokens."""
    for token in tokens:
        digest = ((digest ^ (token + 0x9E3779B9)) * _PRIME) & _MASK
        digest ^= digest >> 29
    return digest


class ShadowCache:
    """Slots of the device and blocks of the host."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._device: dict[int, dict[int, Content]] = {}  # block → offset → content
        self._host: dict[int, dict[int, Content]] = {}

    def apply(self, plan: StepPlan) -> None:
        """Carry out moves and copies in the order of the contract."""
        plan.check()
        for move in plan.moves_out:
            self._host[move.host_block] = dict(self._device.get(move.device_block, {}))
        for copy in plan.copies:
            self._device[copy.destination] = dict(self._device.get(copy.source, {}))
        for move in plan.moves_in:
            self._device[move.device_block] = dict(self._host.get(move.host_block, {}))

    def write(self, table: list[int], content: Content) -> None:
        """Write the content of a position."""
        index, offset = divmod(content.position, self.block_size)
        if index >= len(table) or table[index] == NO_BLOCK:
            raise ShadowError(f"position {content.position} is written and has no block")
        self._device.setdefault(table[index], {})[offset] = content

    def read(self, table: list[int], expected: Content) -> None:
        """Read a position and compare."""
        index, offset = divmod(expected.position, self.block_size)
        if index >= len(table) or table[index] == NO_BLOCK:
            raise ShadowError(f"position {expected.position} is read and has no block")
        found = self._device.get(table[index], {}).get(offset)
        if found != expected:
            raise ShadowError(f"block {table[index]}, offset {offset}: expected {expected}, found {found}")


@dataclass
class _Row:
    tokens: array[int]
    tables: list[list[int]]
    digests: list[int]  # of the first p tokens, at index p
    branch: int
    fresh: bool = field(default=True)


class ShadowExecutor:
    """Computes plans on a `ShadowCache`; reads the whole context of every token that it computes if `thorough`."""

    def __init__(
        self,
        spec: KVCacheSpec,
        vocab_size: int,
        *,
        salt_of: Callable[[str], str] = lambda request_id: "",
        thorough: bool = True,
        seed: int = 0,
    ) -> None:
        self.cache = ShadowCache(spec.block_size)
        self._spec = spec
        self._vocab_size = vocab_size
        self._salt_of = salt_of
        self._thorough = thorough
        self._random = random.Random(seed)  # only for the parents of beams
        self._rows: dict[int, _Row] = {}
        self._results: deque[StepResult] = deque()
        self.fail_next_collect = False
        self.fail_rows: set[int] = set()  # rows that fail in the next plan that has them
        self.num_tokens_computed = 0

    def start(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def collect(self) -> StepResult:
        """Return the oldest result, or fail if told to."""
        if self.fail_next_collect:
            self.fail_next_collect = False
            self._results.clear()
            raise ExecutionError("told to fail")
        return self._results.popleft()

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan at once. It goes through the wire form first, so that nothing travels by reference."""
        plan = StepPlan.from_bytes(plan.to_bytes())
        for row in plan.released_rows:
            del self._rows[row]
        for start in plan.row_starts:
            if start.row in self._rows:
                raise ShadowError(f"row {start.row} starts and was not released")
            digests = [root_digest(self._salt_of(start.request_id))]
            for token in start.tokens:
                digests.append(extend(digests[-1], token))
            tables: list[list[int]] = [[] for _ in self._spec.groups]
            self._rows[start.row] = _Row(array("i", start.tokens), tables, digests, start.branch)
        changes = plan.tables
        for row, group, index, block in zip(changes.rows, changes.groups, changes.indices, changes.blocks, strict=True):
            table = self._rows[row].tables[group]
            table.extend([NO_BLOCK] * (index + 1 - len(table)))
            table[index] = block
        self.cache.apply(plan)
        self._results.append(StepResult.from_bytes(self._compute(plan).to_bytes()))

    def _compute(self, plan: StepPlan) -> StepResult:
        entries = list(zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True))
        for row, start, count, _ in entries:  # all are written before any is read, as in a layer of a model
            self._write(self._rows[row], start, count, plan.drafts.get(row, array("i")))
        num_tokens, tokens, failures = array("i"), array("i"), {}
        for index, (row, start, count, samples) in enumerate(entries):
            drafts = plan.drafts.get(row, array("i"))
            if index < plan.num_decodes and (count, samples, len(drafts)) != (1, 1, 0):
                raise ShadowError("an entry among the plain decodes is none")
            self._read(self._rows[row], start, count, drafts)
            if row in self.fail_rows:
                self.fail_rows.discard(row)
                failures[row] = "told to fail"
                num_tokens.append(0)
                continue
            sampled = self._sample(self._rows[row], samples, drafts)
            num_tokens.append(len(sampled))
            tokens.extend(sampled)
        return StepResult(plan.step_id, num_tokens, tokens, failures=failures)

    def _context(self, row: _Row, drafts: array[int]) -> tuple[array[int], list[int]]:
        digests = list(row.digests)
        for token in drafts:
            digests.append(extend(digests[-1], token))
        return row.tokens + drafts, digests

    def _write(self, row: _Row, start: int, count: int, drafts: array[int]) -> None:
        tokens, digests = self._context(row, drafts)
        if start + count > len(tokens):
            raise ShadowError("a token is to be computed that is not known")
        self.num_tokens_computed += count
        for position in range(start, start + count):
            for group, table in enumerate(row.tables):
                self.cache.write(table, Content(group, position, digests[position + 1]))

    def _read(self, row: _Row, start: int, count: int, drafts: array[int]) -> None:
        _, digests = self._context(row, drafts)
        for group, kind in enumerate(self._spec.groups):
            first = kind.first_needed(start)
            if not self._thorough:
                first = max(first, start - 1)
            for position in range(first, start + count):
                self.cache.read(row.tables[group], Content(group, position, digests[position + 1]))

    def _draw(self, digest: int, branch: int = 0) -> int:
        return extend(digest, 1 << 20, branch) % self._vocab_size

    def _sample(self, row: _Row, samples: int, drafts: array[int]) -> list[int]:
        if samples > 1:
            sampled = [self._draw(row.digests[-1], branch) for branch in range(samples)]
            self._grow(row, sampled[:1])
            return sampled
        if not samples:
            return []
        sampled = [self._draw(row.digests[-1])]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(self._draw(extend(row.digests[-1], *sampled)))
        self._grow(row, sampled)
        return sampled

    def _grow(self, row: _Row, tokens: list[int]) -> None:
        for token in tokens:
            row.tokens.append(token)
            row.digests.append(extend(row.digests[-1], token))


def expected_tokens(
    prompt: list[int], num_tokens: int, vocab_size: int, *, salt: str = "", branch: int = 0
) -> list[int]:
    """What a `ShadowExecutor` must bring for a prompt, whatever else runs."""
    digest = extend(root_digest(salt), *prompt)
    tokens: list[int] = []
    for index in range(num_tokens):
        tokens.append(extend(digest, 1 << 20, branch if index == 0 else 0) % vocab_size)
        digest = extend(digest, tokens[-1])
    return tokens
