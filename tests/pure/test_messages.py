"""Messages between server and engine: what goes in comes out, and nothing else does."""

from __future__ import annotations

from array import array

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.grammar import Grammar
from quire.core.logprobs import TokenLogprobs
from quire.core.request import CacheScope, FinishReason
from quire.core.sampling_params import MAX_LOGPROBS, SamplingParams
from quire.core.validate import MAX_PROMPT_LOGPROBS
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, Clear, Fail, Stop, Survey, Watch, command_bytes, read_command
from quire.engine.process import messages
from quire.engine.process.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    Blocks,
    Close,
    Configure,
    Failed,
    Live,
    Loaded,
    Stats,
    Updates,
    body_length,
    encode_message,
    encode_updates,
    message_from_engine,
    message_to_engine,
)
from quire.engine.records.live import LiveFrame, packed
from quire.engine.records.stats import EngineStats
from quire.memory.cache_journal import CacheNews

LOGPROBS = TokenLogprobs(-0.1 - 0.2, 3, array("i", [5, 2147483647]), array("d", [-1e-300, float("-inf")]))
SAMPLING = SamplingParams(
    n=2,
    best_of=4,
    seed=(1 << 63) - 1,
    temperature=0.1 + 0.2,
    stop=("a", "é"),
    stop_token_ids=(7,),
    logit_bias={3: -1.5, 9: 100.0},
    bad_words=("x",),
    bad_words_ids=((1, 2), (3,)),
    allowed_token_ids=(1, 2, 3),
    early_stopping="never",
)
REQUESTS = [
    Add("r", array("i", [1, 2, 3]), SAMPLING, CacheScope("t", "s", ("k",)), -5),
    Add("r", array("i", range(100_000)), SamplingParams()),
    Add("r", array("i", [1]), SamplingParams(grammar=Grammar.choice(["ä", "b"]))),
]
TO_ENGINE = [
    Configure(EngineConfig(model="guide", kv_memory="8MiB", max_model_len=64)),
    *REQUESTS,
    Abort("r"),
    Fail("r", "why"),
    Stop("r", 1),
    Watch(0.125),
    Configure(EngineConfig(model="guide"), hash_key=bytes(range(32))),
    Watch(None),
    Survey(),
    Clear(),
    Close(),
]
FRAME = LiveFrame(
    at_s=0.1 + 0.2,
    begins=True,
    is_whole=False,
    num_blocks=1 << 20,
    stats=EngineStats(num_running=3),
    tenants=["é"],
    blocks=packed([(1, 2, 3, -1, -2, 0)]),
    block_times=b"\x00" * 8,
    requests=packed([(7, 1, 0, 5, 4, 6, 0, 0)]),
    ids=["31"],
    gone=packed([(7, 30, 31, 16)]),
    slots=b"",
    events=b"",
    event_times=b"",
)
UPDATES = [
    SequenceUpdate("r", 1, [5, 6], [LOGPROBS], 16),
    SequenceUpdate("r", 0, [], [], 0, FinishReason.ERROR, "why", (LOGPROBS,), -1.25),
]
FROM_ENGINE = [
    Loaded(1 << 40, 1 << 41, "weights"),
    Failed("why"),
    Updates.of(UPDATES),
    Stats(EngineStats(num_running=3, busy_s_total=1.5)),
    Live(FRAME),
    Blocks(CacheNews(1 << 40, 3, True, bytes(range(16)), b"")),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_what_goes_to_the_engine_arrives_as_it_was(message: messages.ToEngine) -> None:
    framed = encode_message(message)
    assert body_length(framed[:LENGTH_BYTES]) == len(framed) - LENGTH_BYTES
    assert message_to_engine(framed[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_what_comes_from_the_engine_arrives_as_it_was(message: messages.FromEngine) -> None:
    assert message_from_engine(encode_message(message)[LENGTH_BYTES:]) == message


def test_columns_arrive_as_columns() -> None:
    for request in REQUESTS:
        found = message_to_engine(encode_message(request)[LENGTH_BYTES:])
        assert isinstance(found, Add)
        assert found.prompt_token_ids.typecode == "i"
        assert found == read_command(command_bytes(request)) == request
    found_updates = message_from_engine(encode_message(Updates.of(UPDATES))[LENGTH_BYTES:])
    assert isinstance(found_updates, Updates)
    assert found_updates.updates == UPDATES


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x93", b"\x92\xa7Unknown\x01", b"\x92\xa5Abort\x01", b"\x91\xa5Close\x01"]
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ExecutionError, match="invalid message"):
        message_to_engine(body)


def test_columns_that_are_cut_off_are_refused() -> None:
    update = SequenceUpdate("r", 0, [5], [TokenLogprobs(-1.0, 1, array("i", [7]), array("d", [-1.0]))], 0)
    body = encode_message(Updates.of([update]))[LENGTH_BYTES:]
    column = array("i", [7]).tobytes()
    torn = body.replace(b"\xc4\x04" + column, b"\xc4\x03" + column[:3])
    assert len(torn) == len(body) - 1
    with pytest.raises(ExecutionError, match=r"invalid message.*cut off"):
        message_from_engine(torn)


def test_a_message_for_the_other_side_is_refused() -> None:
    with pytest.raises(ExecutionError, match="invalid message"):
        message_from_engine(encode_message(Abort("r"))[LENGTH_BYTES:])


@pytest.mark.parametrize(("num_updates", "most"), [(1, 1 << 20), (2, 100), (7, 100), (7, 300)])
def test_updates_that_are_too_long_for_one_message_come_in_several(
    num_updates: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [SequenceUpdate(f"r{index}", 0, list(range(40)), [], index) for index in range(num_updates)]
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", most)
    received = [message_from_engine(each[LENGTH_BYTES:]) for each in encode_updates(updates, 3)]
    assert all(isinstance(each, Updates) for each in received)
    assert [each.number for each in received] == list(range(3, 3 + len(received)))
    assert [update for each in received for update in each.updates] == updates
    assert (len(received) > 1) == (most < 1 << 20)


@pytest.mark.parametrize("num_top", [0, 1, MAX_LOGPROBS])
def test_the_most_log_probabilities_of_a_prompt_fit_into_a_message(num_top: int) -> None:
    """Each log-probability that `validate` counts takes at most 12 bytes, so there is room for the rest."""
    count = 1000
    entry = TokenLogprobs(-0.1, 1 << 31, array("i", [1 << 30] * num_top), array("d", [-0.1] * num_top))
    update = SequenceUpdate("r", 0, [], [], 0, prompt_logprobs=(entry,) * count)
    (message,) = encode_updates([update], 0)
    assert len(message) <= count * 12 * (num_top + 2)
    assert 12 * MAX_PROMPT_LOGPROBS < 0.8 * MAX_MESSAGE_BYTES


def test_lengths_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ExecutionError, match="too long"):
        encode_message(Abort("r" * 200))
    with pytest.raises(ExecutionError, match="announced"):
        body_length((101).to_bytes(4, "little"))
