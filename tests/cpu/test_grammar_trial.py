"""The trial of grammars: a death of the child is a verdict only where the grammar has caused it."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.compute.grammar import GrammarVerdicts
from quire.compute.grammar.limits import GrammarLimits
from quire.compute.grammar.trial import TOO_MUCH, GrammarTrial, TrialSettings
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.core.grammar import Grammar
from support.grammars import vocabulary_of
from support.tiny_tokenizer import byte_level

SETTINGS = TrialSettings(400, {300: "<end>"}, [300], GrammarLimits())
GOOD = Grammar.choice(["yes", "no"])
CHAIN = Grammar.lark("start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(5000)) + '\nr5000: "b"')


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    found = GrammarTrial(SETTINGS)
    yield found
    found.close()


@pytest.fixture
def verdicts() -> Iterator[GrammarVerdicts]:
    library = byte_level()
    ends = frozenset([library.token_to_id("<|endoftext|>")])
    found = GrammarVerdicts(vocabulary_of(library, eos_token_ids=ends))
    yield found
    found.close()


def child_of(trial: GrammarTrial) -> int:
    assert trial._child is not None
    return trial._child.pid


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGPROF, signal.SIGSEGV])
def test_a_child_that_dies_before_the_trial_says_nothing(trial: GrammarTrial, signal_number: int) -> None:
    assert trial.reason(Grammar.regex("a")) == ""
    os.kill(child_of(trial), signal_number)
    assert trial.reason(GOOD) == ""


def test_a_child_that_stands_still_is_ended_and_another_one_asked() -> None:
    trial = GrammarTrial(replace(SETTINGS, answer_s=2.0))
    try:
        assert trial.reason(Grammar.regex("a")) == ""
        os.kill(child_of(trial), signal.SIGSTOP)
        assert trial.reason(GOOD) == ""
    finally:
        trial.close()


def wrapped_python(folder: Path, script: str) -> str:
    """Return a program that runs a line of shell, in which "$PYTHON" "$@" is the child."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\nPYTHON={sys.executable}\n{script}\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


ONCE = 'if mkdir "$0.once" 2>/dev/null; then {first}; else exec "$PYTHON" "$@"; fi'
READY = """echo '"ready"'; read settings; read grammar"""
BEGUN = """echo '"begun"'"""


@pytest.mark.parametrize(
    "first",
    ["exit 1", f"{READY}; kill -KILL $$", f"{READY}; {BEGUN}; kill -KILL $$", f"{READY}; echo nonsense"],
    ids=["at the start", "before the trial", "in the trial", "nonsense"],
)
def test_a_death_is_followed_by_another_try(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    program = wrapped_python(tmp_path, ONCE.format(first=first))
    monkeypatch.setattr("quire.core.python_process.sys.executable", program)
    assert trial.reason(GOOD) == ""
    assert (tmp_path / "python.once").is_dir()


@pytest.mark.parametrize(
    "each", ["exit 1", f"{READY}; kill -KILL $$", ONCE.format(first=f"{READY}; {BEGUN}; kill -KILL $$").replace(
        'exec "$PYTHON" "$@"', f"{READY}; kill -KILL $$")], ids=["at the start", "before", "in, then before"]
)  # fmt: skip
def test_where_no_child_lives_to_try_nothing_is_known(
    verdicts: GrammarVerdicts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("quire.core.python_process.sys.executable", wrapped_python(tmp_path, each))
        with pytest.raises(ExecutionError, match="try again"):
            verdicts.check(GOOD)
        assert not verdicts.knows(GOOD)
    verdicts.check(GOOD)
    assert verdicts.knows(GOOD)


def test_a_grammar_that_takes_two_children_down_is_too_much(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'echo x >> "$0.log"; {READY}; {BEGUN}; kill -KILL $$'
    monkeypatch.setattr("quire.core.python_process.sys.executable", wrapped_python(tmp_path, script))
    assert trial.reason(GOOD) == TOO_MUCH
    assert (tmp_path / "python.log").read_text().count("x") == 2


def test_a_death_before_the_trial_does_not_count_as_one_of_the_two(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_trial = f'echo x >> "$0.log"; {READY}; {BEGUN}; kill -ABRT $$'
    script = ONCE.format(first=f"{READY}; kill -KILL $$").replace('exec "$PYTHON" "$@"', in_trial)
    monkeypatch.setattr("quire.core.python_process.sys.executable", wrapped_python(tmp_path, script))
    assert trial.reason(GOOD) == TOO_MUCH
    assert (tmp_path / "python.log").read_text().count("x") == 2


def test_the_processor_time_of_a_trial_is_a_verdict_at_once(
    trial: GrammarTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'echo x >> "$0.log"; {READY}; {BEGUN}; kill -PROF $$'
    monkeypatch.setattr("quire.core.python_process.sys.executable", wrapped_python(tmp_path, script))
    assert trial.reason(GOOD) == TOO_MUCH
    assert (tmp_path / "python.log").read_text().count("x") == 1


def test_what_takes_the_stack_is_too_much(trial: GrammarTrial) -> None:
    assert trial.reason(CHAIN) == TOO_MUCH
    assert trial.reason(GOOD) == ""


def test_tenants_share_no_verdict(verdicts: GrammarVerdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Grammar] = []
    reason = GrammarTrial.reason
    monkeypatch.setattr(
        GrammarTrial, "reason", lambda trial, grammar: (tried.append(grammar), reason(trial, grammar))[1]
    )
    mine, yours = replace(GOOD, owner="a"), replace(GOOD, owner="b")
    for grammar in (mine, mine, yours):
        verdicts.check(grammar)
    assert tried == [mine, yours]
    assert not verdicts.knows(replace(GOOD, owner="c"))


def test_a_condemned_grammar_is_refused_to_its_owner_alone(verdicts: GrammarVerdicts) -> None:
    mine, yours = replace(GOOD, owner="a"), replace(GOOD, owner="b")
    verdicts.check(mine)
    verdicts.condemn(mine, "it was too much")
    with pytest.raises(InvalidRequestError, match="it was too much"):
        verdicts.check(mine)
    verdicts.check(yours)
    for number in range(20_000):  # what is kept of verdicts is bounded
        verdicts.condemn(Grammar.regex(f"{number}"), "too much")
    assert verdicts._verdicts.num_bytes <= verdicts._verdicts.max_bytes
    verdicts._verdicts.check()
