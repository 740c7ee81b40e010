"""SamplingColumns: how each row chooses its tokens, and the draws of one step.

The settings of a row are stored once, when a request takes it, in one column per setting; a step gathers them by row.
`quire.core.sampling_params` declares which parameters draws have.
Usually a row makes one draw. A row that opens into k sequences makes k, all from the same logits, each with the seed
of its sequence. A row with d drafts makes 1 + d, from the logits after each of them: it accepts only drafts that it
would have drawn itself, so drafts change the number of steps and never the text. `row_rules` changes logits according
to the text; they cost nothing for rows without such rules.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.sampling.draws import Draws, TokenLists, TokenMasks, TokenRules, joined
from quire.compute.worker.grammar_rows import NO_MASKS, RowMasks
from quire.compute.worker.row_rules import NO_RULES, DrawRules, RowRules
from quire.core.sampling_params import DRAW_PARAMETERS, MAX_SEED
from quire.core.step import RowStart

NO_LOGPROBS: Final = -1
TEMPERATURE: Final = DRAW_PARAMETERS.index("temperature")


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rows that sample in a step, one entry each.

    `next_positions` is the position of the first token drawn. `num_draws` counts an entry's draws, and `drafted`
    distinguishes draws that follow drafts from draws that open sequences. `texts` are the known tokens of each row, and
    `masks` the tokens that grammars allow.
    """

    rows: IntArray
    logit_starts: IntArray
    next_positions: IntArray
    num_draws: IntArray
    drafted: IntArray  # 1 or 0
    texts: Sequence[array[int]]
    drafts: Sequence[Sequence[int]]
    masks: RowMasks = NO_MASKS


class SamplingColumns:
    """The sampling settings of a worker's rows."""

    def __init__(self, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._eos_token_ids = eos_token_ids
        self._parameters = np.zeros((len(DRAW_PARAMETERS), 1), np.float32)  # [num_parameters, num_rows]
        self._integers = np.zeros((3, 1), np.int64)  # seed, logprobs, prompt_logprobs: [3, num_rows]
        self._rules: dict[int, RowRules] = {}

    def start(self, start: RowStart) -> None:
        """Store the settings of a request that takes a row. Mutates."""
        row, sampling = start.row, start.sampling
        missing = row + 1 - self._parameters.shape[1]
        if missing > 0:
            width = ((0, 0), (0, max(missing, self._parameters.shape[1])))
            self._parameters = np.pad(self._parameters, width)
            self._integers = np.pad(self._integers, width)
        self._parameters[:, row] = [getattr(sampling, name) for name in DRAW_PARAMETERS]
        if sampling.top_k == 1:
            # top_k 1 is the greedy choice. With temperature 0, rounding cannot make two weights equal.
            self._parameters[TEMPERATURE, row] = 0.0
        logprobs = [NO_LOGPROBS if k is None else k for k in (sampling.logprobs, sampling.prompt_logprobs)]
        self._integers[:, row] = seed_of(start), *logprobs
        self.release(row)
        if sampling.has_rules:
            self._rules[row] = RowRules(start, self._eos_token_ids)

    def num_prompt_logprobs(self, row: int) -> int:
        """Return how many of the likeliest tokens to report at each position of a row's prompt. Does not mutate."""
        return int(self._integers[2, row])

    def release(self, row: int) -> None:
        """Forget the rules of a row. Mutates."""
        self._rules.pop(row, None)

    def draws(self, sampling: Sampling) -> Draws:
        """Return the draws of a step, entry by entry. Mutates only the token counts of texts."""
        counts = sampling.num_draws
        entry = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the entry
        along = index * sampling.drafted[entry]
        rows = sampling.rows[entry]
        seeds, logprobs, _ = self._integers[:, rows]
        return Draws(
            logit_rows=sampling.logit_starts[entry] + along,
            parameters=np.take(self._parameters, rows, axis=1),
            seeds=(seeds + index - along) & MAX_SEED,
            positions=sampling.next_positions[entry] + along,
            num_logprobs=np.ascontiguousarray(logprobs),
            rules=self._token_rules(sampling),
        )

    def guesses(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        texts: Sequence[tuple[array[int], Sequence[int]]],
        masks: RowMasks,
    ) -> Draws:
        """Return a draw for each row, by its seed, that guesses its token at a position; reports nothing.

        `texts`: the tokens that the rules see, known ones and then guesses; empty: no rules. `masks` has a mask for
        each row with a grammar. Mutates only the token counts of texts.
        """
        found = [
            NO_RULES if row not in self._rules else self._rules[row].at(text, guesses)[-1]
            for row, (text, guesses) in zip(rows, texts, strict=False)
        ]
        where, ones = np.array(rows, np.int64), np.ones(len(rows), np.int64)
        token_masks = masks.of_draws(where, ones, 0 * ones)
        return Draws(
            logit_rows=np.arange(len(rows)),
            parameters=np.take(self._parameters, where, axis=1),
            seeds=np.ascontiguousarray(self._integers[0, where]),
            positions=np.array(positions, np.int64),
            num_logprobs=np.full(len(rows), NO_LOGPROBS, np.int64),
            rules=_rules_of(found or [NO_RULES] * len(rows), token_masks),
        )

    def _token_rules(self, sampling: Sampling) -> TokenRules:
        masks = sampling.masks.of_draws(sampling.rows, sampling.num_draws, sampling.drafted)
        if self._rules.keys().isdisjoint(sampling.rows.tolist()):
            return replace(TokenRules.none(int(sampling.num_draws.sum())), masks=masks)
        found: list[DrawRules] = []
        for index, row in enumerate(sampling.rows.tolist()):
            rules, count = self._rules.get(row), int(sampling.num_draws[index])
            if rules is None:
                found += [NO_RULES] * count
            elif sampling.drafted[index]:
                found += rules.at(sampling.texts[index], sampling.drafts[index])
            else:
                found += rules.at(sampling.texts[index]) * count
        return _rules_of(found, masks)


def _rules_of(found: Sequence[DrawRules], masks: TokenMasks) -> TokenRules:
    """Return the rules of draws, at least one, and their masks as columns."""
    allowed, banned, biased, biases, seen, counts = zip(*found, strict=True)
    return TokenRules(
        allowed=TokenLists.of(allowed),
        banned=TokenLists.of(banned),
        biased=TokenLists.of(biased),
        biases=joined(biases, np.float32),
        seen=TokenLists.of(seen),
        counts=joined(counts, np.int64),
        masks=masks,
    )


def seed_of(start: RowStart) -> int:
    """Return the seed of a row: the request's seed, or one drawn from the request's id, plus its branch."""
    seed = start.sampling.seed
    if seed is None:
        digest = blake2b(start.request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    return (seed + start.branch) & MAX_SEED
