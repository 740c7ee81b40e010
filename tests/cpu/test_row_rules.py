"""Rules of rows: what stands in a text decides them, however the text came about; by hand and by whole workers."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.compute.sampling.draws import TokenRules
from quire.compute.worker.row_rules import BadWords, RowRules
from quire.compute.worker.sampling_columns import Sampling, SamplingColumns
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart, StepResult, column
from support.native_runs import NativeRun
from support.reference_runs import ReferenceRun
from support.step_plans import GREEDY, Work
from support.tiny_checkpoint import write_tiny_qwen3

EOS = frozenset({9})
PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]
VARIED = SamplingParams(
    temperature=1.3,
    seed=3,
    repetition_penalty=1.5,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias={4: 2.0, 80: -3.0},
    bad_words_ids=tuple((i,) for i in range(20)) + tuple((i, i + 7) for i in range(20, 100)),
    min_tokens=4,
    stop_token_ids=(30, 31, 32),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


def rules_of(tokens: Sequence[int], num_prompt: int, drafts: Sequence[int] = (), **wanted: Any) -> list[dict[str, Any]]:
    """Return the rules behind a text and its drafts, by name, as plain values."""
    start = RowStart(0, "r", array("i", tokens), num_prompt, SamplingParams(**wanted), 99)
    found = RowRules(start, EOS).at(array("i", tokens), drafts)
    return [
        {
            "allowed": rules.allowed.tolist(),
            "banned": rules.banned.tolist(),
            "biased": dict(zip(rules.biased.tolist(), rules.biases.tolist(), strict=True)),
            "seen": dict(zip(rules.seen.tolist(), rules.counts.tolist(), strict=True)),
        }
        for rules in found
    ]


# ---- by hand ------------------------------------------------------------------------------------------------------


def test_repetition_sees_prompt_and_output_the_others_the_output_only() -> None:
    (both,) = rules_of([5, 6, 6, 7, 6], 3, repetition_penalty=1.2)
    assert both["seen"] == {5: 0, 6: 1, 7: 1}
    for penalty in ("presence_penalty", "frequency_penalty"):
        (output,) = rules_of([5, 6, 6, 7, 6], 3, **{penalty: 0.5})
        assert output["seen"] == {7: 1, 6: 1}
    (mixed,) = rules_of([5, 6, 6, 7, 6], 3, repetition_penalty=1.2, presence_penalty=0.5)
    assert mixed["seen"] == both["seen"]


def test_with_a_window_every_penalty_sees_the_last_tokens_of_prompt_and_output() -> None:
    for wanted in ({"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        seen = [rules_of([5, 6, 6, 7, 6], 3, penalty_window=size, **wanted)[0]["seen"] for size in range(1, 7)]
        assert seen == [{6: 1}, {7: 1, 6: 1}, {6: 2, 7: 1}, {6: 3, 7: 1}, {5: 1, 6: 3, 7: 1}, {5: 1, 6: 3, 7: 1}]
    found = rules_of([5, 6, 7], 2, [8, 8, 1], frequency_penalty=0.5, penalty_window=2)
    assert [rules["seen"] for rules in found] == [{6: 1, 7: 1}, {7: 1, 8: 1}, {8: 2}, {8: 1, 1: 1}]


@pytest.mark.parametrize("window", [0, 1, 7, 64, 150, 10_000])
def test_a_text_that_grows_is_counted_as_if_it_were_new(window: int) -> None:
    chance = random.Random(4)
    text = array("i", [chance.randrange(200) for _ in range(100)])
    sampling = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, penalty_window=window)
    start = RowStart(0, "r", text[:], 30, sampling, 99)
    rules = RowRules(start, EOS)
    for _ in range(60):
        (found,) = rules.at(text)
        counts = Counter(text[-window:] if window else text[30:])
        expected = {token: counts[token] for token in (text[-window:] if window else text)}
        assert dict(zip(found.seen.tolist(), found.counts.tolist(), strict=True)) == expected
        drafts = [chance.randrange(200) for _ in range(chance.randrange(4))]
        for index, guessed in enumerate(rules.at(text, drafts)):
            behind = text + array("i", drafts[:index])
            (alone,) = RowRules(replace(start, tokens=behind), EOS).at(behind)
            assert {*zip(guessed.seen.tolist(), guessed.counts.tolist(), strict=True)} == {
                *zip(alone.seen.tolist(), alone.counts.tolist(), strict=True)
            }
        text.extend(drafts[: chance.randrange(4)] or [chance.randrange(200)])


def test_drafts_are_seen_by_the_draws_behind_them_alone() -> None:
    wanted = {"frequency_penalty": 0.5, "bad_words_ids": ((8, 9), (7, 8, 3)), "min_tokens": 3}
    found = rules_of([5, 6, 7], 2, [8, 8, 1], **wanted)
    assert [rules["seen"] for rules in found] == [{7: 1}, {7: 1, 8: 1}, {7: 1, 8: 2}, {7: 1, 8: 2, 1: 1}]
    assert [rules["banned"] for rules in found] == [[9], [3, 9], [9], []]
    assert rules_of([5, 6, 7], 2, **wanted) == found[:1]  # and leave nothing behind


@pytest.mark.parametrize(
    ("text", "banned"),
    [([1], {7}), ([1, 2], {3, 7}), ([0, 1, 2], {3, 7}), ([2, 1], {7}), ([4, 5], {7}), ([3, 4, 5], {6, 7}), ([5], {7})],
)
def test_a_bad_word_bans_its_last_token_where_the_others_stand_before_it(text: list[int], banned: set[int]) -> None:
    words = BadWords([(7,), (1, 2, 3), (3, 4, 5, 6)])
    assert words.banned_after(array("i", text)) == banned


def test_what_would_end_a_text_is_banned_until_enough_is_there() -> None:
    lengths = range(2, 6)
    ends = [rules_of([1] * n, 2, min_tokens=2, stop_token_ids=(4, 4))[0]["banned"] for n in lengths]
    assert ends == [[4, 9], [4, 9], [], []]
    ignored = [rules_of([1] * n, 2, min_tokens=2, stop_token_ids=(4,), ignore_eos=True)[0]["banned"] for n in lengths]
    assert ignored == [[4], [4], [], []]


def test_allowed_ids_and_biases_are_the_same_everywhere() -> None:
    first, second = rules_of([1], 1, [2], allowed_token_ids=(8, 3, 3), logit_bias={5: 1.5, 2: -1})
    assert first == second == {"allowed": [3, 8], "banned": [], "biased": {2: -1.0, 5: 1.5}, "seen": {}}


def test_rows_without_rules_have_none_beside_rows_that_do() -> None:
    columns = SamplingColumns(EOS)
    for row, sampling in enumerate([GREEDY, VARIED, GREEDY]):
        columns.start(RowStart(row, "r", array("i", [1, 2]), 2, sampling, 99))
    draws = columns.draws(
        Sampling(
            rows=np.array([0, 1, 2]),
            logit_starts=np.array([0, 2, 5]),
            next_positions=np.array([2, 2, 2]),
            num_draws=np.array([2, 3, 1]),
            drafted=np.array([0, 1, 0]),
            texts=[array("i", [1, 2])] * 3,
            drafts=[(), (5, 6), ()],
        )
    )
    assert draws.rules.seen.starts.tolist() == [0, 0, 0, 2, 5, 9, 9]
    assert draws.parameter("repetition_penalty").tolist() == pytest.approx([1, 1, 1.5, 1.5, 1.5, 1])
    assert draws.logit_rows.tolist() == [0, 0, 2, 3, 4, 5]
    columns.release(1)
    assert not columns._rules


def test_rows_without_rules_pay_for_none() -> None:
    rules = TokenRules.none(3)
    assert not len(rules.allowed.ids) and rules.seen.starts.tolist() == [0, 0, 0, 0]


# ---- by whole workers ---------------------------------------------------------------------------------------------


def new_run(folder: Path, kind: type[ReferenceRun]) -> ReferenceRun:
    return kind(folder) if kind is NativeRun else kind(folder, block_size=16)


def text_of(run: ReferenceRun, row: int, sampling: SamplingParams, count: int) -> list[int]:
    run.driver.open(row, PROMPT, sampling)
    return [run.step(Work(row, 0, 40, 1)).tokens[0], *run.decode(row, 40, count - 1)]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", [ReferenceRun, NativeRun])
def test_the_text_is_the_same_with_drafts_and_from_any_known_tokens(
    folder: Path, kind: type[ReferenceRun], window: int
) -> None:
    run, varied = new_run(folder, kind), replace(VARIED, penalty_window=window)
    text = text_of(run, 0, varied, 12)
    assert text != text_of(run, 1, SamplingParams(temperature=1.3, seed=3), 12)
    run.driver.open(2, PROMPT, varied)
    assert run.step(Work(2, 0, 40, 1)).tokens.tolist() == text[:1]
    wrong = (text[3] + 1) % 128
    assert run.step(Work(2, 40, 4, 1, drafts=[*text[1:3], wrong])).tokens.tolist() == text[1:4]
    assert run.step(Work(2, 43, 5, 1, drafts=text[4:8])).tokens.tolist() == text[4:9]
    assert run.decode(2, 48, 3) == text[9:12]
    # As after a preemption: the row is taken anew with everything known, in chunks.
    for known in (1, 5, 11):
        row = 10 + known
        start = RowStart(row, f"r{row}", array("i", PROMPT + text[:known]), 40, varied, 99)
        run.driver.open(row, PROMPT)
        run.driver._starts[-1] = start
        run.step(Work(row, 0, 23))
        assert run.step(Work(row, 23, 17 + known, 1)).tokens.tolist() == text[known : known + 1]


@pytest.mark.parametrize("window", [0, 6])
def test_reference_and_native_write_the_same_text(folder: Path, window: int) -> None:
    varied = replace(VARIED, penalty_window=window)
    texts = [text_of(new_run(folder, kind), 0, varied, 20) for kind in (ReferenceRun, NativeRun)]
    assert texts[0] == texts[1]


def test_a_rule_that_names_no_token_is_refused_by_the_worker_too(folder: Path) -> None:
    run = ReferenceRun(folder)
    bad: list[dict[str, Any]] = [
        {"logit_bias": {128: 1.0}},
        {"bad_words_ids": [[1, -1]]},
        {"allowed_token_ids": [128]},
        {"stop_token_ids": [1 << 20]},
    ]
    for row, wanted in enumerate(bad):
        run.driver.open(row, PROMPT, SamplingParams(**wanted))
    result = run.step(*(Work(row, 0, 40, 1) for row in range(len(bad))))
    assert set(result.failures.values()) == {"a rule is out of range; allowed: a token id from 0 to 127"}


# ---- log-probabilities of prompts ----------------------------------------------------------------------------------


def open_reported(run: ReferenceRun, row: int, k: int, count: int = 39) -> None:
    sampling = replace(GREEDY, prompt_logprobs=k)
    run.driver.open(row, PROMPT, sampling)
    run.driver._starts[-1] = RowStart(row, f"r{row}", array("i", PROMPT), 40, sampling, 99, num_prompt_logits=count)


@pytest.mark.parametrize("kind", [ReferenceRun, NativeRun])
@pytest.mark.parametrize("chunks", [[40], [1, 39], [16, 7, 16, 1], [39, 1]])
def test_the_tokens_of_a_prompt_are_reported_with_the_chunks_that_reach_them(
    folder: Path, kind: type[ReferenceRun], chunks: list[int]
) -> None:
    run = new_run(folder, kind)
    open_reported(run, 0, 3)
    run.driver.open(1, PROMPT[5:], VARIED)  # a neighbour that samples
    start, found, results = 0, [], []
    for index, count in enumerate(chunks):
        beside = [Work(1, 0, 35, 1)] if not index else [Work(1, 34 + index, 1, 1)]
        result = run.step(*beside, Work(0, start, count, int(start + count == 40)))
        results.append(result)
        reported = result.prompt_logprobs.get(0, ())
        start += count
        assert len(reported) == min(start, 39) - len(found)
        found += reported
    assert list(results[-1].num_tokens) == [1, 1]
    assert StepResult.from_bytes(results[0].to_bytes()) == results[0]
    for position, entry in enumerate(found):
        exact = run.logits[0, position].astype(np.float64)
        exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
        order = np.argsort(-exact, kind="stable")
        token = PROMPT[position + 1]
        assert entry.logprob == pytest.approx(exact[token], abs=1e-5)
        assert order[entry.rank - 1] == token
        assert entry.top_ids.tolist() == order[:3].tolist()
    plain = new_run(folder, kind)
    expected = [plain.prefill(0, PROMPT), *plain.decode(0, 40, 2)]
    assert [results[-1].tokens[1], *run.decode(0, 40, 2)] == expected


def test_drafts_behind_a_reported_prompt_are_verified_as_ever(folder: Path) -> None:
    run = ReferenceRun(folder)
    expected = [run.prefill(0, PROMPT), *run.decode(0, 40, 3)]
    open_reported(run, 1, 0)
    result = run.step(Work(1, 0, 43, 1, drafts=expected[:3]))
    assert result.tokens.tolist() == expected
    assert len(result.prompt_logprobs[1]) == 39


def test_nothing_is_reported_of_a_row_that_fails_or_did_not_ask(folder: Path) -> None:
    run = ReferenceRun(folder)
    open_reported(run, 0, 1)
    run.driver.open(1, PROMPT)
    open_reported(run, 2, 1)
    run.driver._starts[-1] = replace(run.driver._starts[-1], tokens=column(*PROMPT[:-1], 128))
    result = run.step(*(Work(row, 0, 40, 1) for row in range(3)))
    assert list(result.prompt_logprobs) == [0]
    assert list(result.failures) == [2]
