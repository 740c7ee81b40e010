"""GrammarRows: the tokens that are allowed next in rows that must follow a grammar.

    row starts, token sampled ──► request the next masks                                  nothing waits
    step computed             ──► masks ready? wait a little ──► draw; else the row is late: no token

As with `RowRules`, everything depends only on the tokens before the draw: if a row restarts (after a preemption, or as
a branch of `n`), the grammar follows its text again, and nothing is saved, moved or forked. It does not follow a text
past its end: with several steps in flight there is one more draw after the end, which is never read.

Other processes (`MaskService`) make the masks while steps run. Steps leave out a row whose masks are late until they
arrive, and the row gets no token meanwhile: the scheduler plans its last token again. A step waits a little for masks
that are known to be cheap, but all steps together at most `PATIENCE_SHARE` of their compute time. If no row of a step
can continue without masks, the step waits for one.

Guesses follow the grammar too: they are cut at the first token that it refuses, and the draft model draws under masks.
Each guess costs a mask, so only rows whose masks are known to be cheap get guesses. A draw after guesses counts only if
its mask was made.

If the masks of a row cannot be made, only that row fails.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.compute.arrays import IntArray, MaskArray
from quire.compute.sampling.draws import NO_MASK, TokenMasks
from quire.core.errors import ExecutionError
from quire.core.grammar import CANNOT_HOLD
from quire.core.guesses import Guesses
from quire.core.step import RowStart

if TYPE_CHECKING:
    from quire.compute.grammar import HeldText, MaskService

NO_MASKS_MADE = "a grammar needs the tokens of the model, and this worker does not have them"
PATIENCE_SHARE: Final = 0.25
MAX_PATIENCE_S: Final = 0.02
"""The most waiting time that steps without waits can save up for later steps."""
MOST_UNSURE: Final = 6
"""The most guesses for a row whose grammar does not force them: each costs a mask."""
NO_GUESSES: Final[Mapping[int, int]] = MappingProxyType({})
FORESIGHT_S: Final = 0.0005
"""How long a step waits at most for a grammar's verdict on guesses: long enough to make many masks."""
PATIENCE_ALONE_S: Final = 0.02
"""How long a step waits if none of its rows can continue; new requests and aborts wait as long."""


@dataclass(slots=True)
class GrammarRow:
    """One row with a grammar, and how many tokens of its text the grammar has followed."""

    held: HeldText
    num_followed: int
    has_ended: bool = False
    is_late: bool = False
    foreseen_from: int = 0
    foreseen: Sequence[int] = ()
    """Tokens from position `foreseen_from` on: drafts, then tokens that the grammar forces after them."""
    num_drafts: int = 0

    def foresee(self) -> None:
        """Store the tokens that the last answer predicts, unless another answer is awaited. Mutates."""
        if not self.held.is_awaited:
            self.foreseen_from, self.foreseen = self.num_followed, (*self.held.drafts, *self.held.forced)
            self.num_drafts = len(self.held.drafts)

    def forced(self, text: array[int]) -> Sequence[int]:
        """Return the tokens predicted after a text; none until the text has all the drafts. Does not mutate."""
        num_new = len(text) - self.foreseen_from
        is_as_foreseen = text[self.foreseen_from :].tolist() == list(self.foreseen[:num_new])
        return self.foreseen[num_new:] if is_as_foreseen and num_new >= self.num_drafts else ()

    def allowed(self, guesses: array[int]) -> array[int]:
        """Return the guesses before the first one that the available masks refuse. Does not mutate.

        The last request for masks must have been for these guesses.
        """
        masks = self.held.masks
        if masks is None or self.has_ended:
            return guesses
        for place, token in enumerate(guesses):
            if place == len(masks) or not masks[place][token // 8] >> token % 8 & 1:
                return guesses[:place]
        return guesses

    def follow(self, text: array[int], eos_token_ids: frozenset[int]) -> None:
        """Catch up with a text. Mutates; O(new tokens)."""
        new = text[self.num_followed :].tolist()
        self.num_followed = len(text)
        going_on = before_end(new, eos_token_ids)
        if not self.has_ended:
            self.held.tokens += going_on
        self.has_ended |= len(going_on) < len(new)


class GrammarRows:
    """The rows of a worker that have a grammar. If `masks` is None, no row can have one."""

    def __init__(self, masks: MaskService | None, eos_token_ids: frozenset[int]) -> None:
        self._masks = masks
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, GrammarRow] = {}
        self._patience_s = MAX_PATIENCE_S

    def start(self, start: RowStart) -> None:
        """Note the grammar of a request that takes a row, if it has one; raises if it cannot be followed. Mutates."""
        self.release(start.row)
        if start.sampling.grammar is None:
            return
        if self._masks is None:
            raise ExecutionError(NO_MASKS_MADE)
        held = self._masks.follow(start.sampling.grammar)
        self._rows[start.row] = GrammarRow(held, start.num_prompt_tokens)
        self.ask({start.row: start.tokens})

    def release(self, row: int) -> None:
        """Forget the grammar of a row. Mutates."""
        found = self._rows.pop(row, None)
        if found is not None and self._masks is not None:
            self._masks.drop(found.held)

    def ask(self, texts: Mapping[int, array[int]], guesses: Mapping[int, int] = NO_GUESSES) -> None:
        """Request the masks that rows need next, by their texts. Mutates the state of texts.

        `guesses`: by row, the most tokens to predict if the grammar forces them.
        """
        for row, text in texts.items():
            if row in self._rows and self._masks is not None:
                self._rows[row].follow(text, self._eos_token_ids)
                if not self._rows[row].has_ended:
                    self._masks.ask(self._rows[row].held, most_forced=guesses.get(row, 0))
        if self._masks is not None and self._rows:
            self._masks.flush()

    def ask_behind(
        self,
        texts: Mapping[int, array[int]],
        drafts: Mapping[int, Sequence[int]],
        guesses: Mapping[int, int] = NO_GUESSES,
    ) -> None:
        """Request the masks after drafts, while a step computes them. Mutates the state of texts.

        `guesses`: by row, the most tokens to predict after the drafts.
        """
        if self._masks is None or not self._rows:
            return
        for row, tokens in drafts.items():
            if row in self._rows:
                self._ask_behind(self._rows[row], texts[row], tokens, guesses.get(row, 0))
        self._masks.flush()

    def may_guess(self, row: int) -> bool:
        """Return whether guesses for a row cannot slow down its text, or make its masks late."""
        return row not in self._rows or (self._masks is not None and self._masks.is_cheap(self._rows[row].held))

    def forced(self, texts: Mapping[int, array[int]]) -> dict[int, Sequence[int]]:
        """Return the next tokens that the grammars of rows force, as far as known. Mutates the state of texts."""
        held = {row: text for row, text in texts.items() if row in self._rows and not self._rows[row].has_ended}
        if self._masks is None or not self._masks.foresees or not held:
            return {}
        self._wait_a_little([row for row, text in held.items() if not self._rows[row].forced(text)])
        for row in held:
            self._rows[row].foresee()
        return {row: self._rows[row].forced(text) for row, text in held.items()}

    def cut(self, texts: Mapping[int, array[int]], guesses: Mapping[int, Guesses]) -> dict[int, Guesses]:
        """Return guesses of texts up to the first that a grammar refuses. Mutates the state of texts.

        Keeps up to `MOST_UNSURE` of them if the grammar's answer does not arrive in time.
        """
        unsure = {
            row: found.tokens[:MOST_UNSURE]
            for row, found in guesses.items()
            if row in self._rows and found.guesser != "forced"
        }
        if not unsure:
            return dict(guesses)
        self.ask_behind(texts, unsure)
        self._wait_a_little(unsure)
        allowed = {row: self._rows[row].allowed(tokens) for row, tokens in unsure.items()}
        kept = {row: found._replace(tokens=allowed.get(row, found.tokens)) for row, found in guesses.items()}
        return {row: found for row, found in kept.items() if found.tokens}

    def masks_behind(self, guesses: Mapping[int, Sequence[int]]) -> RowMasks:
        """Return the requested masks of rows for the token after some guesses; leaves out those that are late."""
        rows = [row for row in guesses if row in self._rows]
        if not rows:
            return NO_MASKS
        self._wait_a_little(rows)
        found = _Collected()
        for row in rows:
            place = len(guesses[row])
            found.add(row, (self._rows[row].held.masks or [])[place : place + 1], 1)
        return found.joined()

    def __contains__(self, row: int) -> bool:
        """Whether a row has a grammar."""
        return row in self._rows

    def late(self, rows: Collection[int]) -> set[int]:
        """Return the rows of a step that still wait for masks. If all do, waits for one. Mutates."""
        late = {row for row in rows if row in self._rows and self._rows[row].is_late}
        if late and self._masks is not None:
            awaited = [self._rows[row].held for row in late]
            self._masks.wait(awaited, PATIENCE_ALONE_S if len(late) == len(rows) else 0.0, any)
            late = {row for row in late if self._rows[row].held.is_awaited}
        return late

    def mask(
        self,
        texts: Mapping[int, array[int]],
        drafts: Mapping[int, Sequence[int]],
        *,
        step_s: float,
        num_entries: int,
    ) -> RowMasks:
        """Return the masks of the rows that draw, by their texts and drafts. Mutates the state of texts.

        `step_s`: the compute time of the step; `num_entries`: its number of rows.
        """
        held = [row for row in texts if row in self._rows]
        if self._masks is None or not held:
            return NO_MASKS
        self.ask({row: texts[row] for row in held if not drafts.get(row)})
        self.ask_behind(texts, {row: drafts[row] for row in held if drafts.get(row)})
        texts_held = [self._rows[row].held for row in held]
        cheap = [text for text in texts_held if self._masks.is_cheap(text)]
        if len(held) == num_entries and all(text.is_awaited for text in texts_held):
            self._masks.wait(texts_held, PATIENCE_ALONE_S, any)
        self._patience_s = min(MAX_PATIENCE_S, self._patience_s + PATIENCE_SHARE * step_s)
        began_s = time.perf_counter()
        self._masks.wait(cheap, max(0.0, self._patience_s))
        self._patience_s -= time.perf_counter() - began_s
        return self._collected(held, drafts)

    def close(self) -> None:
        """End the processes that make masks; may be called twice."""
        if self._masks is not None:
            self._masks.close()

    def _wait_a_little(self, rows: Collection[int]) -> None:
        """Wait for the cheap masks of rows. Mutates the state of texts."""
        if self._masks is None or not rows:
            return
        began_s = time.perf_counter()
        cheap = [held for row in rows if self._masks.is_cheap(held := self._rows[row].held)]
        self._masks.wait(cheap, max(0.0, min(self._patience_s, FORESIGHT_S)))
        self._patience_s -= time.perf_counter() - began_s

    def _ask_behind(self, row: GrammarRow, text: array[int], drafts: Sequence[int], most_forced: int) -> None:
        row.follow(text, self._eos_token_ids)
        if self._masks is not None and not row.has_ended:
            self._masks.ask(row.held, before_end(drafts, self._eos_token_ids), most_forced)

    def _collected(self, rows: Iterable[int], drafts: Mapping[int, Sequence[int]]) -> RowMasks:
        found = _Collected()
        for row in rows:
            entry = self._rows[row]
            entry.foresee()
            entry.is_late = entry.held.is_awaited and not entry.has_ended
            if entry.held.failure and not entry.has_ended:
                prefix = "" if entry.held.is_engine_fault else f"{CANNOT_HOLD}: "
                found.failures[row] = prefix + entry.held.failure
            elif entry.is_late:
                found.late.add(row)
            else:
                made = [] if entry.has_ended else entry.held.masks or []
                found.add(row, made, 1 + len(drafts.get(row, ())))
        return found.joined()


@dataclass(slots=True)
class _Collected:
    masks: list[bytes] = field(default_factory=list)
    places: dict[int, IntArray] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)

    def add(self, row: int, made: Sequence[bytes], num_draws: int) -> None:
        """Add the masks of a row's first draws. Mutates."""
        made = made[:num_draws]
        at = np.arange(len(self.masks), len(self.masks) + num_draws)
        self.places[row] = np.where(at < len(self.masks) + len(made), at, NO_MASK)
        self.masks += made

    def joined(self) -> RowMasks:
        """Return the masks of all rows. Does not mutate."""
        words = np.frombuffer(b"".join(self.masks), "<u4").astype(np.uint32)
        shape = (len(self.masks), -1) if self.masks else (0, 0)
        return RowMasks(words.reshape(shape), self.places, self.failures, frozenset(self.late))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a step, their indices by row, the rows that have failed, and the rows that are late."""

    words: MaskArray  # [num_masks, num_words]
    places: Mapping[int, IntArray]  # by row: one index per draw, the later ones after its drafts; NO_MASK: none
    failures: Mapping[int, str]
    late: frozenset[int] = frozenset()

    def of_draws(self, rows: IntArray, num_draws: IntArray, drafted: IntArray) -> TokenMasks:
        """Return the masks of draws: each draw of an entry follows a draft, or all follow the same token."""
        if not self.places:
            return TokenMasks.none(int(num_draws.sum()))
        parts = [
            self.places[row] if row in self.places and along else np.full(count, self._first(row), np.int64)
            for row, count, along in zip(rows.tolist(), num_draws.tolist(), drafted.tolist(), strict=True)
        ]
        return TokenMasks(np.concatenate(parts), self.words)

    def most_draws(self, row: int) -> int | None:
        """Return the number of a row's draws that have their mask; None: they need none. Does not mutate."""
        return int((self.places[row] != NO_MASK).sum()) or None if row in self.places else None

    def _first(self, row: int) -> int:
        return int(self.places[row][0]) if row in self.places else NO_MASK


NO_MASKS = RowMasks(np.zeros((0, 0), np.uint32), {}, {})


def before_end(tokens: Sequence[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens before the first one that ends a text. Does not mutate.

    >>> before_end([5, 6, 0, 7], frozenset([0]))
    [5, 6]
    """
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return list(tokens[:index])
    return list(tokens)
