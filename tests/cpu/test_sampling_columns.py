"""SamplingColumns: every draw of a step has the settings, the seed, the place and the rules of its own row."""

from __future__ import annotations

import random
from array import array
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.worker.row_rules import RowRules
from quire.compute.worker.sampling_columns import Sampling, SamplingColumns, seed_of
from quire.core.sampling_params import DRAW_PARAMETERS, MAX_SEED, SamplingParams
from quire.core.step import RowStart

EOS = frozenset({9})
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_n_sigma": 2.0, "logprobs": 3},
    {"top_k": 1, "temperature": 0.75, "prompt_logprobs": 2},
    {"top_k": 2, "temperature": 0.75, "seed": MAX_SEED, "logprobs": 0},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 0},
    {"min_tokens": 3, "stop_token_ids": (4,), "bad_words_ids": ((5, 6), (7,)), "logit_bias": {3: 1.5}},
    {"allowed_token_ids": (1, 3, 2), "ignore_eos": True},
]


def row_start(row: int, sampling: SamplingParams, text: list[int], branch: int = 0) -> RowStart:
    return RowStart(row, f"request {row}", array("i", text), 2, sampling, 99, branch)


def sampling_of(entries: list[dict[str, Any]]) -> Sampling:
    columns = ("rows", "logit_starts", "next_positions", "num_draws", "drafted")
    arrays = {name: np.array([entry[name] for entry in entries], np.int64) for name in columns}
    return Sampling(**arrays, texts=[e["texts"] for e in entries], drafts=[e["drafts"] for e in entries])


@given(st.integers(0, 1 << 40))
def test_draws_are_those_of_a_loop_over_rows(seed: int) -> None:
    rng = random.Random(seed)
    columns = SamplingColumns(EOS)
    held: dict[int, RowStart] = {}
    for row in rng.sample(range(20), rng.randint(1, 6)):
        text = [rng.randrange(9) for _ in range(rng.randint(2, 7))]
        for _ in range(rng.randint(1, 2)):  # the second takes the place of the first
            held[row] = row_start(row, SamplingParams(**rng.choice(SETTINGS)), text, rng.randrange(3))
            columns.start(held[row])
    entries, first_logits = [], 0
    for row in rng.sample(sorted(held), rng.randint(1, len(held))):
        drafts = [rng.randrange(9) for _ in range(rng.randint(0, 2))]
        num_draws, drafted = (len(drafts) + 1, 1) if drafts else (rng.randint(1, 3), 0)
        place = rng.randint(1, 50)
        entries.append(
            {
                "rows": row,
                "logit_starts": first_logits,
                "next_positions": place,
                "num_draws": num_draws,
                "drafted": drafted,
                "texts": held[row].tokens[:],
                "drafts": drafts,
            }
        )
        first_logits += num_draws if drafted else 1
    draws = columns.draws(sampling_of(entries))
    at = 0
    for entry in entries:
        start, drafted = held[entry["rows"]], entry["drafted"]
        params = start.sampling
        rules = RowRules(start, EOS).at(entry["texts"][:], entry["drafts"])
        for index in range(entry["num_draws"]):
            along = index if drafted else 0
            assert draws.logit_rows[at] == entry["logit_starts"] + along
            assert draws.positions[at] == entry["next_positions"] + along
            assert draws.seeds[at] == (seed_of(start) + index - along) & MAX_SEED
            assert draws.num_logprobs[at] == (-1 if params.logprobs is None else params.logprobs)
            assert columns.num_prompt_logprobs(start.row) == (
                -1 if params.prompt_logprobs is None else params.prompt_logprobs
            )
            for name in DRAW_PARAMETERS:
                wanted = 0.0 if name == "temperature" and params.top_k == 1 else getattr(params, name)
                assert draws.parameter(name)[at] == np.float32(wanted)
            expected = rules[along]
            for name in ("allowed", "banned", "biased", "seen"):
                lists = getattr(draws.rules, name)
                assert lists.ids[lists.span(at)].tolist() == (
                    getattr(expected, name).tolist() if params.has_rules else []
                )
            if params.has_rules:
                assert draws.rules.biases[draws.rules.biased.span(at)].tolist() == expected.biases.tolist()
                assert draws.rules.counts[draws.rules.seen.span(at)].tolist() == expected.counts.tolist()
            at += 1
    assert len(draws) == at == len(draws.rules.masks.rows)
    assert (draws.rules.masks.rows == -1).all()


def test_a_row_that_is_released_leaves_no_rules_behind() -> None:
    columns = SamplingColumns(EOS)
    columns.start(row_start(0, SamplingParams(allowed_token_ids=(1,)), [1, 2]))
    entry = {"rows": 0, "logit_starts": 0, "next_positions": 2, "num_draws": 1, "drafted": 0}
    entries = [entry | {"texts": array("i", [1, 2]), "drafts": []}]
    assert columns.draws(sampling_of(entries)).rules.allowed.ids.tolist() == [1]
    columns.release(0)
    columns.release(0)
    assert columns.draws(sampling_of(entries)).rules.allowed.ids.tolist() == []


@pytest.mark.parametrize(
    ("seed", "branch", "expected"), [(7, 0, 7), (7, 3, 10), (MAX_SEED, 0, MAX_SEED), (MAX_SEED, 1, 0), (0, 0, 0)]
)
def test_a_branch_draws_with_the_seed_behind_the_one_before(seed: int, branch: int, expected: int) -> None:
    assert seed_of(row_start(0, SamplingParams(seed=seed), [1, 2], branch)) == expected


def test_without_a_seed_the_name_of_the_request_is_one() -> None:
    digest = blake2b(b"request 5", digest_size=8).digest()
    for branch in (0, 2):
        found = seed_of(row_start(5, SamplingParams(), [1, 2], branch))
        assert found == (int.from_bytes(digest, "little") + branch) % (MAX_SEED + 1)
