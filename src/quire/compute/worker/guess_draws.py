"""GuessDraws: draws guesses as the model draws tokens.

A guess is drawn with the row's settings, rules, random seed and position, and with the mask of its grammar if that
arrives in time. The masks after a guess are requested when it is known, so that they are made during the next pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.compute.arrays import Logits
from quire.compute.sampling.draws import Sampler
from quire.compute.worker.grammar_rows import NO_MASKS, GrammarRows
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.sampling_columns import SamplingColumns


@dataclass(frozen=True, slots=True)
class GuessDraws:
    """Draws the guesses of a worker's rows.

    `sees_rules`: whether the guessing model has all tokens of the model, which rules and masks name.
    """

    sampler: Sampler
    columns: SamplingColumns
    grammars: GrammarRows
    sees_rules: bool = True

    def draw(
        self, logits: Logits, logit_rows: Sequence[int], made: Mapping[int, array[int]], batch: InputBatch
    ) -> list[int]:
        """Return the next guess of each row in `made`, which has its guesses so far. Does not mutate.

        `logit_rows`: the row of the logits of each.
        """
        texts = {row: batch.tokens(row) for row in made}
        positions = [len(texts[row]) + len(guesses) for row, guesses in made.items()]
        of_rules = [(texts[row], guesses) for row, guesses in made.items()] if self.sees_rules else []
        masks = self.grammars.masks_behind(made) if self.sees_rules else NO_MASKS
        draws = self.columns.guesses(list(made), positions, of_rules, masks)
        draws.logit_rows[:] = logit_rows
        tokens: list[int] = self.sampler.sample(logits, draws).tokens.tolist()
        return tokens

    def ask(self, made: Mapping[int, array[int]], batch: InputBatch) -> None:
        """Request the masks for the guesses that follow those of rows. Mutates the state of their texts."""
        if self.sees_rules:
            self.grammars.ask_behind({row: batch.tokens(row) for row in made}, made)
