"""Whoever sends many grammars holds up nobody else: tenants take turns, and what is known waits for nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.engine.text.grammar_turns import GrammarTurns


class SlowChecker:
    """Knows what it has checked, refuses what has "bad" in it, and waits for leave before each check."""

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.checked: list[str] = []

    def knows(self, grammar: Grammar) -> bool:
        return grammar.text in self.checked

    def check(self, grammar: Grammar) -> None:
        if not self.knows(grammar):
            self.leave.acquire()
            self.checked.append(grammar.text)
        if "bad" in grammar.text:
            raise InvalidRequestError("grammar", grammar.text, "a good one")

    def condemn(self, grammar: Grammar, reason: str) -> None:
        raise AssertionError("turns check grammars; who has seen a text fail condemns them")

    def close(self) -> None:
        self.leave.release(1000)


async def started(*tasks: asyncio.Task[None]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_tenants_take_turns() -> None:
    checker = SlowChecker()

    async def run() -> None:
        turns = GrammarTurns(checker)
        many = [
            asyncio.create_task(turns.check_beside(replace(Grammar.regex(f"a{index}"), owner="a")))
            for index in range(5)
        ]
        await started(*many)
        late = asyncio.create_task(turns.check_beside(replace(Grammar.regex("b"), owner="b")))
        await started(late)
        checker.leave.release(6)
        await asyncio.gather(late, *many)
        turns.close()

    asyncio.run(run())
    assert checker.checked == ["a0", "b", "a1", "a2", "a3", "a4"]


def test_what_is_known_waits_for_nobody() -> None:
    checker = SlowChecker()
    checker.checked += ["known", "bad"]

    async def run() -> None:
        turns = GrammarTurns(checker)
        slow = asyncio.create_task(turns.check_beside(replace(Grammar.regex("slow"), owner="a")))
        await started(slow)
        await turns.check_beside(replace(Grammar.regex("known"), owner="a"))
        with pytest.raises(InvalidRequestError):
            await turns.check_beside(replace(Grammar.regex("bad"), owner="a"))
        assert not slow.done()
        checker.leave.release()
        await slow
        turns.close()

    asyncio.run(run())


def test_who_leaves_makes_room_for_the_next() -> None:
    checker = SlowChecker()

    async def run() -> None:
        turns = GrammarTurns(checker)
        tasks = [
            asyncio.create_task(turns.check_beside(replace(Grammar.regex(text), owner="a")))
            for text in ("1", "2", "bad")
        ]
        await started(*tasks)
        tasks[1].cancel()
        await started(*tasks)
        checker.leave.release(3)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), asyncio.CancelledError, InvalidRequestError]
        turns.close()

    asyncio.run(run())
    assert checker.checked == ["1", "bad"]


def test_without_a_tokenizer_there_are_no_grammars() -> None:
    turns = GrammarTurns(None)
    with pytest.raises(InvalidRequestError, match="has no tokenizer"):
        asyncio.run(turns.check_beside(Grammar.regex("a")))
    turns.close()
