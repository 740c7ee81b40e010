"""Faults on demand: who is struck is decided by the tokens of the step, and everybody else computes as before."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.worker.failing_runner import FailingRunner
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.core.failpoints import Failpoint, parse_failpoints

VOCAB = 5


def step_of(sequences: list[list[int]], num_logits: list[int]) -> StepInputs:
    """A step of sequences, each with logits for its last tokens."""
    counts = [len(tokens) for tokens in sequences]
    starts = np.cumsum([0, *counts])
    indices = [end - count + place for end, count in zip(starts[1:], num_logits, strict=True) for place in range(count)]
    return StepInputs(
        entries=tuple(range(len(sequences))),
        query_starts=starts,
        token_ids=np.array([token for tokens in sequences for token in tokens]),
        positions=np.array([place for count in counts for place in range(count)]),
        slots=(),
        block_tables=(),
        logit_starts=np.cumsum([0, *num_logits]),
        logit_indices=np.array(indices, np.int64),
        rows=np.arange(len(sequences)),
    )


class Runner:
    """A model whose logits are the ids of the tokens before them; it counts its steps."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.num_runs = 0

    def run(self, inputs: StepInputs, cache: Any) -> StepOutputs:
        self.num_runs += 1
        logits = np.repeat(inputs.token_ids[inputs.logit_indices].astype(np.float32)[:, None], VOCAB, axis=1)
        return StepOutputs(logits, np.ones(len(inputs.token_ids), np.bool_), np.ones(len(logits), np.bool_))


sequences = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=5)


@given(drawn=sequences, token=st.integers(0, 9), data=st.data())
def test_numbers_are_spoilt_of_the_sequences_that_compute_the_token_and_of_no_others(
    drawn: list[list[int]], token: int, data: st.DataObject
) -> None:
    num_logits = [data.draw(st.integers(0, len(tokens))) for tokens in drawn]
    inputs = step_of(drawn, num_logits)
    plain = Runner().run(inputs, None)
    found = FailingRunner(Runner(), [Failpoint("nan", "token", token)]).run(inputs, None)
    for sequence, tokens in enumerate(drawn):
        is_struck = token in tokens
        mine, logits = inputs.tokens_of(sequence), inputs.logits_of(sequence)
        assert found.finite[mine].tolist() == [not is_struck] * len(tokens)
        assert found.finite_logits[logits].tolist() == [not is_struck] * num_logits[sequence]
        if is_struck:
            assert np.isnan(found.logits[logits]).all()
        else:
            assert np.array_equal(found.logits[logits], plain.logits[logits])


@given(drawn=sequences, number=st.integers(0, 12))
def test_a_size_strikes_every_step_that_reaches_it(drawn: list[list[int]], number: int) -> None:
    model = Runner()
    runner = FailingRunner(model, [Failpoint("memory", "tokens", number)])
    inputs = step_of(drawn, [1] * len(drawn))
    for _ in range(2):
        if sum(map(len, drawn)) >= number:
            with pytest.raises(MemoryError, match=rf"^memory:tokens={number}$"):
                runner.run(inputs, None)
            assert model.num_runs == 0, "it fails before the model has written anything"
        else:
            runner.run(inputs, None)


def test_a_numbered_step_fails_once_and_is_counted_from_one() -> None:
    runner = FailingRunner(Runner(), [Failpoint("error", "step", 3)])
    inputs = step_of([[1], [2]], [1, 1])
    results = []
    for _ in range(6):
        try:
            runner.run(inputs, None)
            results.append("ran")
        except RuntimeError as error:
            results.append(str(error))
    assert results == ["ran", "ran", "error:step=3", "ran", "ran", "ran"]


def test_of_several_that_strike_at_once_all_take_effect_until_one_ends_the_step() -> None:
    inputs = step_of([[1], [2], [3]], [1, 1, 1])
    both = [Failpoint("nan", "token", 1), Failpoint("nan", "token", 3), Failpoint("error", "token", 9)]
    found = FailingRunner(Runner(), both).run(inputs, None)
    assert found.finite.tolist() == [False, True, False]
    with pytest.raises(RuntimeError, match=r"^error:token=2$"):
        FailingRunner(Runner(), [Failpoint("nan", "step", 1), Failpoint("error", "token", 2)]).run(inputs, None)


def test_a_sleep_is_as_long_as_it_is_named_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    inputs = step_of([[1], [2]], [1, 1])
    runner = FailingRunner(Runner(), parse_failpoints("sleep9:token=2, sleep0.25:step=1, sleep7:token=8"))
    for _ in range(2):
        assert np.array_equal(runner.run(inputs, None).logits, Runner().run(inputs, None).logits)
    assert naps == [9, 0.25, 9]


def test_without_failpoints_the_outputs_are_the_very_ones_of_the_model() -> None:
    model = Runner()
    inputs, runner = step_of([[1, 2]], [1]), FailingRunner(model, [])
    outputs = model.run(inputs, None)
    model.run = lambda *_: outputs  # type: ignore[method-assign]
    assert runner.run(inputs, None) is outputs
    assert runner.vocab_size == VOCAB
