"""CarefulRows: the rows whose tokens need individual care in each step.

A row is careful if its draw depends on more than its logits (rules, grammars, beams), or if its request needs more than
the token (log-probabilities). The other rows take the short way for decodes. Steps ahead also take rows with rules that
the runner can apply while only the runner knows the last token.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.step import RowStart, StepPlan


class CarefulRows:
    """Tracks which rows are careful, as requests take and leave rows.

    `is_ahead`: for steps ahead, which apply all rules except bad words of several tokens and penalties with a window,
    return no hidden states, and support no adapters.
    """

    def __init__(self, *, is_ahead: bool = False) -> None:
        self._is_ahead = is_ahead
        self._rows: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Note which requests leave and take rows. Mutates."""
        self._rows.difference_update(plan.released_rows)
        for start in plan.row_starts:
            self._rows.discard(start.row)
            if _has_more(start) or (_waits_ahead(start) if self._is_ahead else start.sampling.has_rules):
                self._rows.add(start.row)

    def isdisjoint(self, rows: Iterable[int]) -> bool:
        """Return whether none of the rows is careful. Does not mutate."""
        return self._rows.isdisjoint(rows)


def _has_more(start: RowStart) -> bool:
    sampling = start.sampling
    has_reports = sampling.logprobs is not None or bool(start.num_prompt_logits)
    return sampling.grammar is not None or sampling.beam_search or has_reports


def _waits_ahead(start: RowStart) -> bool:
    sampling = start.sampling
    bans_after_others = any(len(word) > 1 for word in sampling.bad_words_ids)
    has_window = sampling.has_penalties and sampling.penalty_window > 0
    return bans_after_others or has_window or start.pooling is not None or bool(start.scope.adapter)
