"""Messages of mask workers: what was framed is read, however a stream cuts it, and no more is taken than is whole."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.grammar.mask_messages import BEGUN, MaskAnswer, MaskJob, forget_frame, take_frames
from quire.core.errors import StepLogError
from quire.core.grammar import GRAMMAR_KINDS, Grammar

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TOKENS = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4)
NUMBERS = st.floats(allow_nan=False)
JOBS = st.builds(
    MaskJob,
    INT64,
    INT64,
    NUMBERS,
    st.none() | st.builds(Grammar, st.sampled_from(GRAMMAR_KINDS), st.text()),
    TOKENS,
    TOKENS,
    INT64,
)
ANSWERS = st.builds(MaskAnswer, INT64, NUMBERS, st.text(), st.binary(max_size=40), TOKENS)


@given(st.lists(JOBS | ANSWERS, max_size=5), st.integers(0, 1 << 40))
def test_what_was_framed_is_read_wherever_the_stream_is_cut(messages: list[MaskJob | MaskAnswer], seed: int) -> None:
    rng, stream = random.Random(seed), b"".join(message.to_bytes() for message in messages)
    received, found = bytearray(), []
    while stream:
        size = rng.randint(1, len(stream))
        received += stream[:size]
        stream = stream[size:]
        for frame in take_frames(received):
            kind = type(messages[len(found)])
            found.append(kind.from_bytes(frame))
    assert found == messages
    assert received == b""


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8])
def test_what_is_not_whole_is_left(size: int) -> None:
    frame = struct.pack("<I", 5) + b"abcde"
    received = bytearray(frame + frame[:size])
    assert list(take_frames(received)) == [b"abcde"]
    assert received == frame[:size]


def test_a_frame_of_nothing_is_a_frame() -> None:
    assert list(take_frames(bytearray(8))) == [b"", b""]


def test_the_owner_of_a_grammar_stays_where_it_is() -> None:
    """A worker knows no tenants: what it follows is text."""
    job = MaskJob(1, 2, 0.5, Grammar("lark", "a", owner="me"), [3], [4])
    (frame,) = take_frames(bytearray(job.to_bytes()))
    assert MaskJob.from_bytes(frame) == MaskJob(1, 2, 0.5, Grammar("lark", "a"), [3], [4])


def test_a_text_is_forgotten_by_a_job_that_does_nothing() -> None:
    (frame,) = take_frames(bytearray(forget_frame(7)))
    assert MaskJob.from_bytes(frame) == MaskJob(BEGUN, 7, 0.0, None, [], [])
    with pytest.raises(StepLogError):
        MaskJob.from_bytes(frame[:-1])
    assert MaskAnswer(1, 0.5) == MaskAnswer(1, 0.5, "", b"")
