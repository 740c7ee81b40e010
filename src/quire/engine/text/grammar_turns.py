"""GrammarTurns: checks new grammars off the event loop, one tenant after another.

A check can take half a second of CPU time, and a tenant that sends two hundred grammars must delay only itself. So
grammars have their own thread (`TenantPool`), separate from those that tokenize texts. More threads would gain nothing:
the slow part runs in one process (`quire.compute.grammar`), and the other cores compute steps. A known grammar is
checked at once.
"""

from __future__ import annotations

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar, GrammarChecker
from quire.engine.text.tenant_pool import TenantPool


class GrammarTurns:
    """Checks grammars for many callers; `grammars` None: refuses every grammar."""

    def __init__(self, grammars: GrammarChecker | None) -> None:
        self._grammars = grammars
        self._pool = TenantPool("quire-grammar-check", num_threads=1)

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` unless the grammar can be enforced. Can take long; call from any thread."""
        if self._grammars is None:
            raise InvalidRequestError("grammar", grammar, "none, because this engine has no tokenizer")
        self._grammars.check(grammar)

    async def check_beside(self, grammar: Grammar) -> None:
        """Raise as `check` does, without blocking the event loop."""
        if self._grammars is None or self._grammars.knows(grammar):
            self.check(grammar)
        else:
            await self._pool.run(grammar.owner, lambda: self.check(grammar))

    def close(self) -> None:
        """End the thread, and the processes that checks have started. May be called twice."""
        self._pool.close()
        if self._grammars is not None:
            self._grammars.close()
