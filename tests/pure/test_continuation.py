"""Continuation: a request that begins with output of another engine goes on as if it had been there from the start."""

from __future__ import annotations

import io
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import InvalidRequestError
from quire.core.kv_spec import KVCacheSpec
from quire.core.pooling import Pooling
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.client import EngineClient, SequenceUpdate
from quire.engine.commands import Add
from quire.engine.core import EngineCore
from quire.engine.records.step_log import StepLogWriter, replay
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor, expected_tokens

VOCAB = 1000
SPEC = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
PROMPT = [7, 8, 9]
LIMITS = RequestLimits(VOCAB, 64, 64 * 4, 4, eos_token_ids=(900,), vector_size=8)


def client_of(log: io.BytesIO | None = None, num_blocks: int = 64, **settings: Any) -> EngineClient:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | settings)
    scheduler = Scheduler(config, KVCacheManager(SPEC, MemoryConfig(num_blocks=num_blocks)), LIMITS)
    writer = None if log is None else StepLogWriter(log, ManualClock())
    return EngineClient(EngineCore(scheduler, ShadowExecutor(SPEC, VOCAB), ManualClock(), log=writer))


def add(name: str, prompt: list[int], output: list[int], **sampling: Any) -> Add:
    return Add(name, array("i", prompt), SamplingParams(**sampling), output_token_ids=array("i", output))


def run(client: EngineClient) -> list[SequenceUpdate]:
    updates: list[SequenceUpdate] = []
    while not client.is_idle:
        updates += client.receive()
    return updates


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 11)), max_size=6), st.integers(1, 3))
def test_each_goes_on_with_the_tokens_that_it_would_have_had(requests: list[Any], depth: int) -> None:
    client = client_of(num_blocks=20, max_steps_under_way=depth)
    expected: dict[str, list[int]] = {}
    for index, (length, max_tokens, share) in enumerate(requests):
        prompt = list(range(index, index + length))
        tokens = expected_tokens(prompt, max_tokens, VOCAB)
        cut = min(share, max_tokens - 1)
        client.send(add(str(index), prompt, tokens[:cut], max_tokens=max_tokens, ignore_eos=True))
        expected[str(index)] = tokens[cut:]
    found: dict[str, list[int]] = {name: [] for name in expected}
    ends: dict[str, FinishReason | None] = {}
    for update in run(client):
        found[update.request_id] += update.token_ids
        ends[update.request_id] = update.finish_reason
    assert found == expected
    assert set(ends.values()) <= {FinishReason.LENGTH}
    assert client.stats().num_used_blocks == 0


def test_one_that_has_begun_is_served_before_those_that_wait() -> None:
    client = client_of(max_num_seqs=1)
    client.send(add("new", PROMPT, [], max_tokens=2, ignore_eos=True))
    client.send(add("newer", [1, 2], [], max_tokens=2, ignore_eos=True))
    client.send(add("begun", [3, 4], [5], max_tokens=3, ignore_eos=True))
    client.send(add("begun later", [4, 4], [5], max_tokens=3, ignore_eos=True))
    ends = [update.request_id for update in run(client) if update.finish_reason is not None]
    assert ends == ["begun", "begun later", "new", "newer"]


def test_a_log_of_it_can_be_replayed() -> None:
    log = io.BytesIO()
    client = client_of(log)
    client.send(add("begun", PROMPT, [5, 6, 7], max_tokens=9, ignore_eos=True, logprobs=1))
    client.send(add("new", PROMPT, [], max_tokens=9, ignore_eos=True))
    run(client)
    client.close()
    assert replay(io.BytesIO(log.getvalue())) > 0


REFUSED: list[tuple[Add, str]] = [
    (
        add("r", PROMPT, [5, VOCAB], max_tokens=9),
        "output_token_ids[1] is 1000; allowed: a token id from 0 to 999",
    ),
    (add("r", PROMPT, [-1], max_tokens=9), "output_token_ids[0] is -1; allowed: a token id from 0 to 999"),
    (add("r", [VOCAB], [5], max_tokens=9), "prompt[0] is 1000; allowed: a token id from 0 to 999"),
    (add("r", [], [5], max_tokens=9), "prompt is []; allowed: at least one token id"),
    (
        add("r", PROMPT, [5, 900, 6], max_tokens=9),
        "output_token_ids[1] is 900; allowed: a token that does not end the text",
    ),
    (
        add("r", PROMPT, [5, 6], max_tokens=9, stop_token_ids=(6,)),
        "output_token_ids[1] is 6; allowed: a token that does not end the text",
    ),
    (
        add("r", PROMPT, [5, 900, 6, 900], max_tokens=9, min_tokens=4),
        "output_token_ids[3] is 900; allowed: a token that does not end the text",
    ),
    (
        add("r", PROMPT, [5, 6], max_tokens=2),
        "output_token_ids is '2 tokens'; allowed: fewer than max_tokens, which is 2",
    ),
    (
        add("r", PROMPT, [5] * 61),
        "the prompt and its beginning of an answer have 64 tokens; this model's maximum context length is 64 tokens, "
        "of which 1 must stay free for the output. Shorten the prompt.",
    ),
    (
        add("r", PROMPT, [5], max_tokens=9, n=2),
        "output_token_ids is '1 tokens'; allowed: none for a vector, or for n, best_of and beams above 1; continue "
        "each sequence as its own request",
    ),
    (
        Add(
            "r",
            array("i", PROMPT),
            SamplingParams(max_tokens=1),
            pooling=Pooling("last"),
            output_token_ids=array("i", [5]),
        ),
        "output_token_ids is '1 tokens'; allowed: none for a vector, or for n, best_of and beams above 1; continue "
        "each sequence as its own request",
    ),
    (
        add("r", PROMPT, [5], max_tokens=9, prompt_logprobs=1),
        "prompt_logprobs is 1; allowed: None with output_token_ids",
    ),
]


@pytest.mark.parametrize(("request_", "message"), REFUSED)
def test_what_cannot_go_on_is_refused_in_one_line(request_: Add, message: str) -> None:
    client = client_of()
    with pytest.raises(InvalidRequestError) as caught:
        client.send(request_)
    assert str(caught.value) == message
    assert client.is_idle


@pytest.mark.parametrize(
    "fits",
    [
        add("r", PROMPT, [5, 900, 6], max_tokens=9, min_tokens=4),
        add("r", PROMPT, [5, 900, 6], max_tokens=9, ignore_eos=True),
        add("r", PROMPT, [5] * 60),
    ],
)
def test_a_token_that_did_not_end_the_text_is_no_end(fits: Add) -> None:
    client = client_of()
    client.send(fits)
    assert run(client)
