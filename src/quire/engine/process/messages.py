"""The typed messages between the server and the engine's process, over a pair of Unix sockets.

    server                                       engine process
      Configure ───────────────────────────────►            once: the settings
      ◄──────────────────── Loaded …, then Ready
      a command (`commands`) ──────────────────►
      ◄──────────────────── Blocks, Updates, Stats, Live    after a step
      ◄──────────────────── Failed                          the reason why the process ends
      Beat ────────────────►◄─────────────── Beat           once a second: the sender is alive
      Close, or the end of the connection ─────►            the process ends

A message is its length in four bytes and its fields in MessagePack, not pickle. Lengths are capped and types are
checked: an invalid message is refused, and no message can run code. Columns of numbers are sent as bytes: token ids
as 32-bit integers, log-probabilities as 64-bit floats, in the machine's byte order, which both sides share.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, StepLogError
from quire.core.logprobs import TokenLogprobs
from quire.core.request import FinishReason
from quire.core.validate import RequestLimits
from quire.engine.client import SequenceUpdate
from quire.engine.commands import AnyCommand, Command, command_bytes, read_command
from quire.engine.process.heartbeat import PATIENCE, Patience
from quire.engine.records.live import LiveFrame
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats
from quire.memory.cache_journal import CacheNews

LENGTH_BYTES: Final = 4
MAX_MESSAGE_BYTES: Final = 256 << 20


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Configure(Message, frozen=True):
    """Build the engine with these settings, and end it if a step or a silence takes too long.

    `hash_key`: the key of its prefix hashes, which engines share to name blocks alike; empty: a new one.
    """

    config: EngineConfig
    patience: Patience = PATIENCE
    hash_key: bytes = b""


class Asked(Message, frozen=True):
    """Carry out a command, given in its wire form."""

    command: bytes


class Beat(Message, frozen=True):
    """The sender is alive."""


class Close(Message, frozen=True):
    """Free the memory and end."""


class Loaded(Message, frozen=True):
    """The progress of loading, with the arguments of a `NoteLoaded`."""

    count: int
    total: int
    what: str


class Ready(Message, frozen=True):
    """The engine takes requests, with these limits. Engines of equal `fingerprint` compute the same bits."""

    limits: RequestLimits
    report: EngineReport
    fingerprint: str = ""


class Failed(Message, frozen=True):
    """The engine could not be built, or cannot go on; the process ends."""

    message: str


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """`TokenLogprobs` in a message."""

    logprob: float
    rank: int
    top_ids: bytes
    top_logprobs: bytes

    def __post_init__(self) -> None:
        if len(self.top_ids) % array("i").itemsize or len(self.top_logprobs) % array("d").itemsize:
            raise ValueError("a column of log-probabilities is cut off")


class Update(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """`SequenceUpdate` in a message."""

    request_id: str
    branch: int
    token_ids: list[int]
    num_cached_tokens: int
    logprobs: list[Entry] = []
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_logprobs: list[Entry] = []
    cumulative_logprob: float | None = None
    waited_s: float | None = None
    num_disk_tokens: int = 0
    num_host_tokens: int = 0
    vector: bytes = b""


class Updates(Message, frozen=True):
    """The updates of sequences; messages are numbered from 0."""

    entries: list[Update]
    number: int = 0

    @classmethod
    def of(cls, updates: Iterable[SequenceUpdate], number: int = 0) -> Updates:
        """Return a message with these updates."""
        return cls(
            [
                Update(
                    each.request_id,
                    each.branch,
                    each.token_ids,
                    each.num_cached_tokens,
                    [_entry(one) for one in each.logprobs],
                    each.finish_reason,
                    each.error,
                    [_entry(one) for one in each.prompt_logprobs],
                    each.cumulative_logprob,
                    each.waited_s,
                    each.num_disk_tokens,
                    each.num_host_tokens,
                    each.vector,
                )
                for each in updates
            ],
            number,
        )

    @property
    def updates(self) -> list[SequenceUpdate]:
        """The updates."""
        return [
            SequenceUpdate(
                each.request_id,
                each.branch,
                each.token_ids,
                [_token_logprobs(one) for one in each.logprobs],
                each.num_cached_tokens,
                each.finish_reason,
                each.error,
                tuple(_token_logprobs(one) for one in each.prompt_logprobs),
                each.cumulative_logprob,
                each.waited_s,
                each.num_disk_tokens,
                each.num_host_tokens,
                each.vector,
            )
            for each in self.entries
        ]


class Stats(Message, frozen=True):
    """The counters of the engine."""

    stats: EngineStats


class Live(Message, frozen=True):
    """Memory events."""

    frame: LiveFrame


class Blocks(Message, frozen=True):
    """The blocks that became or ceased to be cache hits; after a `Survey`."""

    news: CacheNews


Sent = Configure | Asked | Beat | Close
ToEngine = Configure | AnyCommand | Beat | Close
FromEngine = Loaded | Ready | Failed | Updates | Stats | Live | Blocks | Beat
Received = TypeVar("Received")


def encode_message(message: Message | Command) -> bytes:
    """Return the bytes of a message; raises `ExecutionError` if it is too long. Does not mutate."""
    body = _ENCODER.encode(Asked(command_bytes(message)) if isinstance(message, Command) else message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ExecutionError(f"a message of {len(body)} bytes is too long for the engine's connection")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def encode_updates(updates: Sequence[SequenceUpdate], number: int) -> list[bytes]:
    """Return the messages with these updates, numbered from `number`: one, or several if it would be too long.

    A single update always fits, because `validate` bounds its log-probabilities. Does not mutate.
    """
    try:
        return [encode_message(Updates.of(updates, number))]
    except ExecutionError:
        if len(updates) == 1:
            raise
    half = len(updates) // 2
    first = encode_updates(updates[:half], number)
    return first + encode_updates(updates[half:], number + len(first))


def message_to_engine(body: bytes) -> ToEngine:
    """Return the message that the engine received; raises `ExecutionError` if it is invalid. Does not mutate."""
    message = _decoded(_TO_ENGINE, body)
    if not isinstance(message, Asked):
        return message
    try:
        return read_command(message.command)
    except StepLogError as error:
        raise ExecutionError(f"the engine's connection delivered an invalid message: {error}") from error


def message_from_engine(body: bytes) -> FromEngine:
    """Return the message that the engine sent; raises `ExecutionError` if it is invalid. Does not mutate."""
    return _decoded(_FROM_ENGINE, body)


def body_length(head: bytes) -> int:
    """Return the length of the body that follows; raises `ExecutionError` if it is over the limit. Does not mutate.

    >>> body_length((5).to_bytes(4, "little"))
    5
    """
    length = int.from_bytes(head, "little")
    if length > MAX_MESSAGE_BYTES:
        raise ExecutionError(f"the engine's connection announced a message of {length} bytes")
    return length


def _column(typecode: str, data: bytes) -> array[Any]:
    column: array[Any] = array(typecode)
    column.frombytes(data)
    return column


def _entry(logprobs: TokenLogprobs) -> Entry:
    return Entry(logprobs.logprob, logprobs.rank, logprobs.top_ids.tobytes(), logprobs.top_logprobs.tobytes())


def _token_logprobs(entry: Entry) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, entry.rank, _column("i", entry.top_ids), _column("d", entry.top_logprobs))


_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_ENGINE: Final[msgspec.msgpack.Decoder[Sent]] = msgspec.msgpack.Decoder(Sent)
_FROM_ENGINE: Final[msgspec.msgpack.Decoder[FromEngine]] = msgspec.msgpack.Decoder(FromEngine)


def _decoded(decoder: msgspec.msgpack.Decoder[Received], body: bytes) -> Received:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ExecutionError(f"the engine's connection delivered an invalid message: {error}") from error
