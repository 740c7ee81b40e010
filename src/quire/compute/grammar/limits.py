"""GrammarLimits: limits on the cost of a grammar, as counts of work if possible, else in seconds.

Clients write grammars, so their cost must have a limit, and whether a grammar is refused must not depend on the machine
or its load. So the limits use the counters of llguidance: fuel (nodes of regular expressions made and derived), items
of its parser, states of its lexer. The defaults allow schemas of a thousand properties, and strings of 10,000
characters with a maximum length.

Some work has no counter: with 50,000 items of an ambiguous grammar, one mask takes from 0.01 to 14 seconds. Time limits
apply to such work: `trial` limits compiling, and `mask_service` following a text.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits


MEMORY_BYTES: Final = 1 << 30
"""The limit of memory of a process that compiles grammars, in addition to its memory at the start."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The most that compiling one grammar and making one mask may cost.

    `compile_fuel` and `max_symbols` limit the compilation; `mask_fuel`, `mask_items` and `max_row_items` one mask; and
    `max_states` the memory of a grammar, whose lexer makes states as texts reach them and shares them among rows. All
    masks of one text may take `text_s` seconds of processor time, plus `token_s` for each of its tokens.
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
        """Return the limits for llguidance, with short messages: they must not quote a client's text."""
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


def limit_memory() -> None:
    """Limit the memory of this process to `MEMORY_BYTES` more than it has now. Mutates."""
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
