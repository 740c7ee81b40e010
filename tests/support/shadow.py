"""A cache that holds, instead of keys and values, what they stand for: and an executor that computes on it.

Every slot remembers the KV group, the position and a digest of **all tokens up to there** (seeded by the salt). A token
is "computed" by reading the digests of its context *out of the cache, through the block table*, and its successor is
drawn from its own digest. So a wrong block, a stale slot, a missed copy or a hit across salts raises `ShadowError` at
once.

Beams: which beam each one continues is drawn from the digests of all beams of the search, so it looks random, and yet
`expected_search` can say without any engine what must come out. With `ends_searches`, some are over before their beams
are as long as they may become; they have found the texts of their beams then, from the last to the first.

The block of a recurrent layer holds the content of its last token alone: what a state has taken in stays in it, and the
next token needs the state before it, or one that has this very token already, which is then computed again.

A step that is told to fail, or that a `fault` strikes, is lost with all behind it. What these steps had computed is
then spoilt, so that whoever reads it all the same is found out; copies and moves stay done, as the contract says.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from quire.core.errors import ExecutionError
from quire.core.guesses import Guesses
from quire.core.hypothesis import Hypothesis
from quire.core.images import Image
from quire.core.kv_spec import KVCacheSpec
from quire.core.logprobs import TokenLogprobs
from quire.core.step import NO_BLOCK, StepPlan, StepResult

if TYPE_CHECKING:
    from support.shadow_disk import ShadowDisk
NO_GROUP = -1
"""Of content that no token of a text stands for."""

_PRIME = 1099511628211
_MASK = (1 << 64) - 1

Guess = Callable[[str, "array[int]", int], Sequence[int]]
"""Asked for a request, its known tokens and a number: at most so many guesses of the tokens that follow."""

Fault = Callable[[StepPlan, dict[int, str]], ExecutionError | None]
"""Asked for each plan, with the request of each row in it: the error that the step fails with, or None."""


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


def seen(tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
    """The tokens of a prompt, those of images told apart by what they show."""
    found = list(tokens)
    for image in images:
        for position in range(image.start, image.end):
            found[position] = (int.from_bytes(image.digest[:7]) << 8) + position - image.start
    return found


class ShadowCache:
    """Slots of the device and blocks of the host."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._device: dict[int, dict[int, Content]] = {}  # block → offset → content
        self._host: dict[int, dict[int, Content]] = {}
        self._written: list[tuple[int, int, int]] = []
        self._num_applied = 0
        self._filled: dict[int, int] = {}  # block → the plan that last copied or moved something into it

    def apply(self, plan: StepPlan) -> None:
        """Carry out moves and copies in the order of the contract."""
        plan.check()
        self._num_applied += 1
        filled = [copy.destination for copy in plan.copies] + [move.device_block for move in plan.moves_in]
        self._filled |= dict.fromkeys(filled, self._num_applied)
        for move in plan.moves_out:
            self._host[move.host_block] = dict(self._device.get(move.device_block, {}))
        for copy in plan.copies:
            self._device[copy.destination] = dict(self._device.get(copy.source, {}))
        for move in plan.moves_in:
            self._device[move.device_block] = dict(self._host.get(move.host_block, {}))

    def block(self, block: int) -> dict[int, Content]:
        """Return a copy of what a block holds."""
        return dict(self._device.get(block, {}))

    def read_host(self, block: int, expected: Content) -> None:
        """Read a position of a block of the host and compare."""
        found = self._host.get(block, {}).get(expected.position % self.block_size)
        if found != expected:
            raise ShadowError(f"host block {block}: expected {expected}, found {found}")

    def put(self, block: int, content: dict[int, Content]) -> None:
        """Replace what a block holds."""
        self._device[block] = dict(content)
        self._filled[block] = self._num_applied + 1

    def write(self, table: list[int], content: Content) -> None:
        """Write the content of a position."""
        index, offset = divmod(content.position, self.block_size)
        if index >= len(table) or table[index] == NO_BLOCK:
            raise ShadowError(f"position {content.position} is written and has no block")
        self._device.setdefault(table[index], {})[offset] = content
        self._written.append((table[index], offset, self._num_applied))

    def write_state(self, table: list[int], content: Content) -> None:
        """Write the state after a position in place of what its block holds."""
        index = content.position // self.block_size
        if index < len(table):
            self._device.pop(table[index], None)
        self.write(table, content)

    def read_state(self, table: list[int], allowed: Sequence[Content]) -> None:
        """Read the state in the block of the first position of some contents, and require that it is one of these."""
        index = allowed[0].position // self.block_size
        found = list(self._device.get(table[index], {}).values()) if index < len(table) else []
        if len(found) != 1 or found[0] not in allowed:
            raise ShadowError(f"expected one of {allowed}, found {found}")

    def take_written(self) -> list[tuple[int, int, int]]:
        """Return block and offset of what was written since the last call, and the plan that did."""
        written, self._written = self._written, []
        return written

    def spoil(self, written: list[tuple[int, int, int]]) -> None:
        """Make what was written unfit to be read, unless a later plan has put something else there."""
        for block, offset, plan in written:
            if self._filled.get(block, 0) <= plan:
                self._device.get(block, {}).pop(offset, None)

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
    request_id: str
    branch: int
    num_beams: int  # 1: no beam search
    num_prompt_tokens: int
    num_prompt_logits: int = 0
    images: tuple[Image, ...] = ()
    failed: bool = False


class ShadowExecutor:
    """Computes plans on a `ShadowCache`; reads the whole context of every token that it computes if `thorough`."""

    def __init__(
        self,
        spec: KVCacheSpec,
        vocab_size: int,
        *,
        salt_of: Callable[[str], str] = lambda request_id: "",
        thorough: bool = True,
        ends_searches: bool = False,
        disk: ShadowDisk | None = None,
    ) -> None:
        self._disk = disk
        self.cache = ShadowCache(spec.block_size)
        self._spec = spec
        self._vocab_size = vocab_size
        self._salt_of = salt_of
        self._thorough = thorough
        self._ends_searches = ends_searches
        self._rows: dict[int, _Row] = {}
        self._results: deque[tuple[StepResult | ExecutionError, list[tuple[int, int, int]]]] = deque()
        self.guess: Guess = lambda request_id, tokens, most: ()
        self.fault: Fault = lambda plan, requests: None
        self.fail_next_collect = False
        self.fail_rows: set[int] = set()  # rows that fail from the next plan that has them, until they are released
        self.is_late: Callable[[], bool] = lambda: False  # asked for each sample: whether the step is postponed
        self.num_postponed = 0
        self.num_tokens_computed = 0
        self.plans = hashlib.blake2b()  # the digest of all plans

    def start(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def collect(self) -> StepResult:
        """Return the oldest result, or fail: because the step did, or because told to."""
        if self.fail_next_collect:
            self.fail_next_collect = False
            self._lose(ExecutionError("told to fail"))
        result, _ = self._results[0]
        if isinstance(result, ExecutionError):
            self._lose(result)
        else:
            self._results.popleft()
            if self._disk is None:
                return result
            return StepResult.from_bytes(replace(result, transfers=self._disk.collect(self.cache)).to_bytes())

    def _lose(self, error: ExecutionError) -> NoReturn:
        for _, written in self._results:
            self.cache.spoil(written)
        self._results.clear()
        raise error

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan at once. It goes through the wire form first, so that nothing travels by reference."""
        data = plan.to_bytes()
        self.plans.update(data)
        plan = StepPlan.from_bytes(data)
        for row in plan.released_rows:
            del self._rows[row]
        for start in plan.row_starts:
            if start.row in self._rows:
                raise ShadowError(f"row {start.row} starts and was not released")
            digests = [root_digest(self._salt_of(start.request_id))]
            for token in seen(start.tokens, start.images):
                digests.append(extend(digests[-1], token))
            tables: list[list[int]] = [[] for _ in self._spec.groups]
            tokens = array("i", start.tokens)
            self._rows[start.row] = _Row(
                tokens,
                tables,
                digests,
                start.request_id,
                start.branch,
                start.sampling.num_beams,
                start.num_prompt_tokens,
                start.num_prompt_logits,
                start.images,
            )
        changes = plan.tables
        for row, group, index, block in zip(changes.rows, changes.groups, changes.indices, changes.blocks, strict=True):
            table = self._rows[row].tables[group]
            table.extend([NO_BLOCK] * (index + 1 - len(table)))
            table[index] = block
        if self._disk is not None:
            self._disk.apply(plan, self.cache)
        self.cache.apply(plan)
        failure = self._failure(plan)
        if failure is not None:
            self._results.append((failure, self.cache.take_written()))
            return
        result = StepResult.from_bytes(self._compute(plan).to_bytes())
        self._results.append((result, self.cache.take_written()))

    def _failure(self, plan: StepPlan) -> ExecutionError | None:
        """Why a step fails, half done: as wished, or because one before it does."""
        if any(isinstance(result, ExecutionError) for result, _ in self._results):
            return ExecutionError("behind a step that failed")
        failure = self.fault(plan, {row: self._rows[row].request_id for row in plan.rows})
        if failure is not None:
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
                state, drafts = self._rows[row], plan.drafts.get(row, array("i"))
                if not state.failed and start + count - len(drafts) <= len(state.tokens):
                    self._write(state, start, count, drafts)
        return failure

    def _compute(self, plan: StepPlan) -> StepResult:
        entries = list(zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True))
        late, left_out = self._postponed(plan)
        for row, start, count, _ in entries:  # all are written before any is read, as in a layer of a model
            if row in self.fail_rows:
                self._rows[row].failed = True
            if self._rows[row].failed or row in left_out:
                continue
            self._write(self._rows[row], start, count, plan.drafts.get(row, array("i")))
        beams, searches = self._choose_beams({row: samples for row, _, _, samples in entries})
        num_tokens, tokens, parents, failures, reported = array("i"), array("i"), array("i"), {}, {}
        proposals: dict[int, Guesses] = {}
        for index, (row, start, count, samples) in enumerate(entries):
            drafts = plan.drafts.get(row, array("i"))
            parents.append(beams[row][0] if row in beams else row)
            if self._rows[row].failed:
                self.fail_rows.discard(row)
                failures[row] = "told to fail"
                num_tokens.append(0)
                continue
            if index < plan.num_decodes and (count, samples, len(drafts)) != (1, 1, 0):
                raise ShadowError("an entry among the plain decodes is none")
            if row in left_out:
                num_tokens.append(0)
                continue
            self._read(self._rows[row], start, count, drafts)
            wanted = range(start, min(start + count, self._rows[row].num_prompt_logits))
            if wanted:
                reported[row] = report_prompt(self._rows[row].tokens, self._rows[row].digests, wanted)
            if row in late or any(row in rows for rows in searches.values()):
                sampled = []
            elif row in beams:
                sampled = [beams[row][1]]
                self._grow(self._rows[row], sampled)  # good only for a beam that continues itself
            else:
                sampled = self._sample(self._rows[row], samples, drafts)
            num_tokens.append(len(sampled))
            tokens.extend(sampled)
            if sampled and row in plan.proposals:
                state, most = self._rows[row], plan.proposals[row]
                if guesses := list(self.guess(state.request_id, state.tokens, most))[:most]:
                    proposals[row] = Guesses("draft_model" if row in plan.depths else "ngram", array("i", guesses))
                self._scribble(state, plan.depths.get(row, 0))
        return StepResult(
            plan.step_id,
            num_tokens,
            tokens,
            parents if beams else array("i"),
            failures,
            prompt_logprobs=reported,
            searches={rows[0]: self._found(rows) for rows in searches.values()},
            proposals=proposals,
        )

    def _scribble(self, state: _Row, depth: int) -> None:
        """Write what nobody may read into the slots that a draft model writes for guesses: they are the row's alone."""
        for table in state.tables:
            for position in range(len(state.tokens) - 1, len(state.tokens) - 1 + depth):
                self.cache.write(table, Content(NO_GROUP, position, 0))

    def _postponed(self, plan: StepPlan) -> tuple[set[int], set[int]]:
        """Return the rows that sample nothing in a step, and those that compute nothing either."""
        late: set[int] = set()
        left_out: set[int] = set()
        for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            state, num_drafts = self._rows[row], len(plan.drafts.get(row, ()))
            if start + count - num_drafts > len(state.tokens):  # planned behind a step that was postponed
                left_out.add(row)
            elif samples and state.num_beams == 1 and self.is_late():
                late.add(row)
                if count == 1 + num_drafts and self.is_late():
                    left_out.add(row)
        self.num_postponed += len(late)
        return late, left_out

    def _found(self, rows: list[int]) -> tuple[Hypothesis, ...]:
        """What a search that is over has found, its rows given in the order of its branches."""
        first = self._rows[rows[0]]
        if len(rows) == 1:
            texts = [[self._draw(first.digests[-1], branch)] for branch in range(first.num_beams)]
        else:
            texts = [self._rows[row].tokens[first.num_prompt_tokens :].tolist() for row in reversed(rows)]
        return tuple(Hypothesis(tuple(text), -float(len(text)), -1.0) for text in texts)

    def _choose_beams(self, samples: dict[int, int]) -> tuple[dict[int, tuple[int, int]], dict[str, list[int]]]:
        """For each row that is a beam taking a step: the row that it continues, and its token.

        Then, by request, the rows of searches that are over.
        """
        searches: dict[str, list[tuple[int, int]]] = {}
        over: dict[str, list[int]] = {}
        for row, wanted in samples.items():
            state = self._rows[row]
            if wanted > 1 and state.num_beams > 1 and not state.failed and self._is_over(state.digests[-1:]):
                over[state.request_id] = [row]
            if state.num_beams > 1 and wanted == 1:
                searches.setdefault(state.request_id, []).append((state.branch, row))
        chosen: dict[int, tuple[int, int]] = {}
        for found in searches.values():
            rows = [row for _, row in sorted(found)]
            states = [self._rows[row] for row in rows]
            if len(rows) != states[0].num_beams or len({len(state.tokens) for state in states}) != 1:
                raise ShadowError("the beams of a search do not move together")
            digests = [state.digests[-1] for state in states]
            choices = choose_beams(digests, self._vocab_size)
            if any(state.failed for state in states):
                choices = [(index, 0) for index in range(len(rows))]  # the search is about to end
            elif self._is_over(digests):
                over[states[0].request_id] = rows
            chosen |= {row: (rows[parent], token) for row, (parent, token) in zip(rows, choices, strict=True)}
        return chosen, over

    def _is_over(self, digests: list[int]) -> bool:
        return self._ends_searches and is_over(digests)

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
        for group, (kind, table) in enumerate(zip(self._spec.groups, row.tables, strict=True)):
            contents = [Content(group, position, digests[position + 1]) for position in range(start, start + count)]
            if not kind.recurrent:
                for content in contents:
                    self.cache.write(table, content)
                continue
            if start:
                self.cache.read_state(table, [Content(group, start - 1, digests[start]), contents[0]])
            for content in contents:
                if content is contents[-1] or (content.position + 1) % self.cache.block_size == 0:
                    self.cache.write_state(table, content)

    def _read(self, row: _Row, start: int, count: int, drafts: array[int]) -> None:
        _, digests = self._context(row, drafts)
        for image in row.images:
            has_all = start <= image.start and image.end <= start + count
            if image.is_whole and image.start < start + count and start < image.end and not has_all:
                raise ShadowError(f"a step from {start} of {count} tokens splits an image")
        for group, kind in enumerate(self._spec.groups):
            first = start + count - 1 if kind.recurrent else kind.first_needed(start)
            if not self._thorough:
                first = max(first, start - 1)
            for position in range(first, start + count):
                self.cache.read(row.tables[group], Content(group, position, digests[position + 1]))

    def _draw(self, digest: int, branch: int = 0) -> int:
        return draw(digest, self._vocab_size, branch)

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


def report_prompt(tokens: Sequence[int], digests: list[int], positions: range) -> tuple[TokenLogprobs, ...]:
    """What stands for the log-probabilities of the tokens after these positions."""
    return tuple(
        TokenLogprobs(-float(digests[position + 1] % 1000), tokens[position + 1], array("i", [position]), array("d"))
        for position in positions
    )


def expected_report(prompt: list[int], salt: str = "", images: Sequence[Image] = ()) -> list[TokenLogprobs]:
    """What a `ShadowExecutor` must report of a prompt, whatever else runs."""
    digests = [root_digest(salt)]
    for token in seen(prompt, images):
        digests.append(extend(digests[-1], token))
    return list(report_prompt(prompt, digests, range(len(prompt) - 1)))


def draw(digest: int, vocab_size: int, branch: int = 0) -> int:
    """The token that comes after a sequence; of several drawn at once, that of a branch."""
    return extend(digest, 1 << 20, branch) % vocab_size


def choose_beams(digests: list[int], vocab_size: int) -> list[tuple[int, int]]:
    """For each beam of a search, in the order of their branches: which one it continues, and with which token."""
    mixed = extend(0, *digests)
    num_children: Counter[int] = Counter()
    choices = []
    for index in range(len(digests)):
        drawn = extend(mixed, index)
        parent = index if drawn & 1 else (drawn >> 1) % len(digests)
        choices.append((parent, draw(digests[parent], vocab_size, num_children[parent])))
        num_children[parent] += 1
    return choices


def is_over(digests: list[int]) -> bool:
    """Whether a search ends, seen the digests of all its beams; of its prompt alone before it has opened."""
    return extend(1, *digests) % 13 == 0


def expected_tokens(
    prompt: list[int], num_tokens: int, vocab_size: int, *, salt: str = "", branch: int = 0
) -> list[int]:
    """What a `ShadowExecutor` must bring for a prompt, whatever else runs."""
    digest = extend(root_digest(salt), *prompt)
    tokens: list[int] = []
    for index in range(num_tokens):
        tokens.append(draw(digest, vocab_size, branch if index == 0 else 0))
        digest = extend(digest, tokens[-1])
    return tokens


def expected_search(
    prompt: list[int], num_beams: int, num_tokens: int, vocab_size: int, *, salt: str = "", can_end: bool = False
) -> tuple[list[list[int]], bool]:
    """The beams of a search after so many tokens, by branch, whatever else runs; and whether it is over by then."""
    root = extend(root_digest(salt), *prompt)
    beams = [[draw(root, vocab_size, branch)] for branch in range(num_beams)]
    if can_end and num_tokens and is_over([root]):
        return beams, True
    for _ in range(num_tokens - 1):
        digests = [extend(root, *beam) for beam in beams]
        if can_end and is_over(digests):
            return beams[::-1], True
        choices = choose_beams(digests, vocab_size)
        beams = [[*beams[parent], token] for parent, token in choices]
    return (beams if num_tokens else [[] for _ in beams]), False
