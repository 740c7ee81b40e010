"""Masks by other processes: an expensive one holds nobody else up and has an end; a process that dies costs no text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.compute.grammar import GrammarCompiler, GrammarLimits, HeldText, MaskService
from quire.compute.grammar.mask_service import DEAR_NICENESS, MAX_DEATHS, SILENCE_S
from quire.core.grammar import Grammar
from support.grammars import vocabulary_of
from support.tiny_tokenizer import byte_level, word_piece

LIBRARY = byte_level()
ENDS = frozenset([LIBRARY.token_to_id("<|endoftext|>")])
VOCABULARY = vocabulary_of(LIBRARY, eos_token_ids=ENDS)
AMBIGUOUS = "start: s\ns: s t | t s | s s | u s | s u | W\nt: s s | t t | W\nu: t s | s t | u u | W\nW: /[a-z ]/"
EXPENSIVE = Grammar("lark", AMBIGUOUS, owner="expensive")
CHEAP = replace(Grammar.regex("[a-z]{1,200}"), owner="cheap")
LETTERS = LIBRARY.encode("thequickbrownfoxjumpsoverthelazydog" * 6).ids
LONG_S = 60.0


class AdjustableClock:
    """The system's clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.added_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self.added_s


@pytest.fixture
def clock() -> AdjustableClock:
    return AdjustableClock()


@pytest.fixture
def service(clock: AdjustableClock) -> Iterator[MaskService]:
    found = MaskService(VOCABULARY, limits=GrammarLimits(text_s=0.5, token_s=0.0), clock=clock)
    yield found
    found.close()


def write_on(service: MaskService, text: HeldText, num_tokens: int) -> list[bytes]:
    """Go on by tokens of `LETTERS`, one at a time; return the masks before each."""
    found: list[bytes] = []
    for _ in range(num_tokens):
        service.ask(text)
        service.wait([text], LONG_S)
        if text.failure:
            break
        assert text.masks is not None
        found += text.masks
        text.tokens.append(LETTERS[len(text.tokens)])
    return found


def processes_of(service: MaskService) -> list[int]:
    """Return the processes that make masks for a service: those that its child has forked."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _parent(_parent(int(process.name))) == os.getpid():
            found.append(int(process.name))
    return found


def _parent(process: int) -> int:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def expected_masks(num_tokens: int) -> list[bytes]:
    matcher, found = GrammarCompiler(VOCABULARY).matcher(CHEAP), []
    for token in LETTERS[:num_tokens]:
        found.append(matcher.mask())
        matcher.advance([token])
    return found


def test_a_text_that_takes_too_much_fails_and_says_so(service: MaskService) -> None:
    text = service.follow(EXPENSIVE)
    assert len(write_on(service, text, len(LETTERS))) < len(LETTERS)
    assert "too expensive to follow" in text.failure
    service.ask(text)
    assert not text.is_awaited


@pytest.mark.parametrize("is_cheap", [False, True])
def test_only_where_masks_are_cheap_is_anything_foreseen(monkeypatch: pytest.MonkeyPatch, is_cheap: bool) -> None:
    """What is only foreseen must not use up the time that a text has."""
    service = MaskService(VOCABULARY, most_forced=3)
    monkeypatch.setattr(service, "is_cheap", lambda text: is_cheap)
    try:
        text = service.follow(Grammar.regex("(thequickbrownfox){3}"))
        assert len(write_on(service, text, 5)) == 5
        assert not text.forced  # nobody has asked for it
        service.ask(text, most_forced=9)
        service.wait([text], LONG_S)
        num_forced = 3 if is_cheap else 0
        assert len(text.forced) == num_forced and len(text.masks or ()) == 1 + num_forced
        assert text.has_asked(text.forced)
    finally:
        service.close()


def test_others_get_their_masks_while_one_is_being_made(clock: AdjustableClock) -> None:
    service = MaskService(VOCABULARY, limits=GrammarLimits(text_s=600.0), clock=clock)  # nothing ends it here
    try:
        expensive, cheap = service.follow(EXPENSIVE), service.follow(CHEAP)
        own = service.follow(replace(CHEAP, owner=EXPENSIVE.owner))
        expensive.tokens += LETTERS[:180]
        service.ask(expensive)  # minutes
        assert write_on(service, cheap, 20) == expected_masks(20)
        assert expensive.is_awaited
        while not service.is_expensive(expensive):  # it takes more than a quick worker allows
            service.wait([expensive], 0.01)
        assert write_on(service, own, 20) == expected_masks(20)  # of the same tenant
        assert expensive.is_awaited and service.is_expensive(expensive) and not service.is_expensive(own)
        nicenesses = sorted(os.getpriority(os.PRIO_PROCESS, each) for each in processes_of(service))
        assert nicenesses[-1] == DEAR_NICENESS and nicenesses[0] < DEAR_NICENESS
    finally:
        service.close()


def test_a_long_text_that_turns_expensive_ends_one_quick_worker(service: MaskService) -> None:
    """However cheap its many tokens were: it is not taken for cheap because they are told again."""
    long = Grammar.lark(f"start: /[0-9]{{4000}}/ s\n{AMBIGUOUS.removeprefix('start: s')}")
    text, digit = service.follow(long), LIBRARY.encode("7").ids[0]
    text.tokens += [digit] * 4000 + LETTERS[:90]
    service.ask(text)
    forks: list[int] = []
    fork = service._parent.fork
    service._parent.fork = lambda niceness: (forks.append(niceness), fork(niceness))[1]  # type: ignore[method-assign]
    service.wait([text], LONG_S)
    assert text.failure and forks == [DEAR_NICENESS]


def test_tenants_share_no_process(service: MaskService) -> None:
    for owner in ("a", "b", "a"):
        assert write_on(service, service.follow(replace(CHEAP, owner=owner)), 1)
    assert len(processes_of(service)) == 2


@pytest.mark.parametrize("num_known", [0, 1, 7])
def test_a_process_that_dies_costs_no_text(service: MaskService, num_known: int) -> None:
    texts = [service.follow(CHEAP) for _ in range(3)]
    found = [write_on(service, text, num_known) for text in texts]
    for process in processes_of(service):
        os.kill(process, signal.SIGKILL)
    for text, masks in zip(texts, found, strict=True):
        assert masks + write_on(service, text, 12 - num_known) == expected_masks(12)
        assert not text.failure


def test_a_text_fails_if_its_slow_processes_are_killed_again_and_again() -> None:
    service = MaskService(VOCABULARY, limits=GrammarLimits(text_s=600.0))  # time does not end it
    try:
        text, failures = service.follow(EXPENSIVE), []
        text.tokens += LETTERS[:180]
        service.ask(text)
        for number in range(1, MAX_DEATHS + 1):
            while text.num_deaths < number:
                service.wait([text], 0.01)
                slow = service._workers.get((EXPENSIVE.owner, True))
                for process in processes_of(service) if slow is not None and slow.has_begun else ():
                    os.kill(process, signal.SIGKILL)
            failures.append(bool(text.failure))
        assert failures == [False] * (MAX_DEATHS - 1) + [True]
    finally:
        service.close()


def test_a_process_that_stands_still_is_given_up(service: MaskService, clock: AdjustableClock) -> None:
    text = service.follow(CHEAP)
    found = write_on(service, text, 3)
    stopped = processes_of(service)
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    try:
        service.ask(text)
        service.wait([text], 0.05)
        assert text.is_awaited
        clock.added_s += SILENCE_S + 1
        assert found + write_on(service, text, 3) == expected_masks(6)
    finally:
        for process in stopped:
            os.kill(process, signal.SIGKILL)


def test_without_the_parent_there_is_a_new_one(service: MaskService) -> None:
    text = service.follow(CHEAP)
    found = write_on(service, text, 3)
    parents = {_parent(process) for process in processes_of(service)}
    for process in [*processes_of(service), *parents]:
        os.kill(process, signal.SIGKILL)
    assert found + write_on(service, text, 3) == expected_masks(6)


def test_a_tokenizer_that_is_of_no_use_fails_every_text() -> None:
    service = MaskService(vocabulary_of(word_piece(), eos_token_ids=frozenset([1])))
    try:
        for _ in range(2):
            text = service.follow(CHEAP)
            service.ask(text)
            service.wait([text], LONG_S)
            assert "none with this model's tokenizer" in text.failure
    finally:
        service.close()


def test_texts_fail_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.core.python_process.sys.executable", "/bin/false")
    service = MaskService(VOCABULARY)
    try:
        text = service.follow(CHEAP)
        service.ask(text)
        service.wait([text], LONG_S)
        assert text.failure.startswith("the process that makes masks could not be started")
    finally:
        service.close()


def test_closing_ends_all_processes(service: MaskService) -> None:
    write_on(service, service.follow(CHEAP), 1)
    expensive = service.follow(EXPENSIVE)
    expensive.tokens += LETTERS[:180]
    service.ask(expensive)
    service.wait([expensive], 0.5)
    processes = processes_of(service)
    processes += {_parent(process) for process in processes}
    service.close()
    service.close()
    end = time.monotonic() + 20
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.01)


def _is_alive(process: int) -> bool:
    try:
        stat: Any = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_few_idle_workers_are_kept(service: MaskService) -> None:
    for number in range(10):
        text = service.follow(replace(CHEAP, owner=str(number)))
        write_on(service, text, 1)
        service.drop(text)
    assert len(service._workers) < 8
