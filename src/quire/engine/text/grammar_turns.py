"""GrammarTurns: new grammars are checked off the event loop, and tenants take turns.

A check may take half a second of a processor, and a tenant that sends two hundred grammars must hold up only itself. So
there is one thread for all grammars (`TenantPool`), apart from those in which texts are tokenized. More threads would
bring nothing: what takes long happens in one process (`quire.compute.grammar`), and the rest of the machine has steps
to compute. A grammar that is known is checked at once.
"""

from __future__ import annotations

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar, GrammarChecker
from quire.engine.text.tenant_pool import TenantPool


class GrammarTurns:
    """Checks grammars for many callers; `grammars` None: there can be none."""

    def __init__(self, grammars: GrammarChecker | None) -> None:
        self._grammars = grammars
        self._pool = TenantPool("quire-grammar-check", num_threads=1)

    def check(self, grammar: Grammar) -> None:
        """Raise `InvalidRequestError` unless texts can be held to it. May take a while; from any thread."""
        if self._grammars is None:
            raise InvalidRequestError("grammar", grammar, "none, because this engine has no tokenizer")
        self._grammars.check(grammar)

    async def check_beside(self, grammar: Grammar) -> None:
        """Raise as `check` does, and let the event loop go on meanwhile."""
        if self._grammars is None or self._grammars.knows(grammar):
            self.check(grammar)
        else:
            await self._pool.run(grammar.owner, lambda: self.check(grammar))

    def close(self) -> None:
        """End the thread, and the processes that checking has started. May be called twice."""
        self._pool.close()
        if self._grammars is not None:
            self._grammars.close()
