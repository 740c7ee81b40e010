"""GrammarLimits: what a grammar may cost, in counts of work where they exist, and in seconds for the rest.

A client writes the grammar, so whatever it costs must have an end, and the same grammar must be refused on every
machine and on every day. So the limits count what llguidance counts: fuel (nodes of regular expressions made and
derived), items of its parser, states of its lexer. The defaults leave room for schemas of a thousand properties, and
for texts of 10,000 characters in a string that has a greatest length.

What no count ends, time does: `trial` where a grammar is compiled, `mask_service` where a text is followed. Counts are
no measure of that: with 50,000 items of an ambiguous grammar, one mask takes from 0.01 to 14 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost to compile, and one mask to make.

    `compile_fuel` and `max_symbols` bound the compilation, `mask_fuel`, `mask_items` and `max_row_items` one mask, and
    `max_states` the memory of a grammar: its lexer makes states as texts reach them, and all its rows share them. All
    masks of one text may take `text_s` seconds of a processor, and `token_s` more for each of its tokens.
    """

    compile_fuel: int = 500_000
    max_symbols: int = 100_000
    mask_fuel: int = 200_000
    mask_items: int = 50_000
    max_row_items: int = 10_000
    max_states: int = 16_000
    text_s: float = 2.0
    token_s: float = 0.01

    def for_library(self) -> LLParserLimits:
        """Return them as llguidance takes them. Its messages are kept short: they may name no text of a client."""
        from llguidance import LLParserLimits

        return LLParserLimits(
            initial_lexer_fuel=self.compile_fuel,
            max_grammar_size=self.max_symbols,
            step_lexer_fuel=self.mask_fuel,
            step_max_items=self.mask_items,
            max_items_in_row=self.max_row_items,
            max_lexer_states=self.max_states,
            verbose_errors=False,
        )
