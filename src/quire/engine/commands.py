"""Commands to a running engine. Each verb is one type, with one wire form.

    any door ── send(command) ──► EngineThread, EngineMessages ──► EngineClient ──► EngineCore.send ──► step log

Commands take effect between two steps, in the order in which they were sent. They have no answers: the results of a
request come back as updates.

To add a verb, write its class here, implement it in `carry_out`, and test it: every door can then send it. A verb for
operators also needs an entry in `OPERATOR_COMMANDS` and a method in `OperatorVerbs`. That makes it a method of `LLM`
and `AsyncLLM`, and a path of the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, get_args

from quire.core.errors import StepLogError
from quire.core.images import Image, names_of
from quire.core.kept_block import KeptBlock
from quire.core.pooling import Pooling
from quire.core.request import DEFAULT_SCOPE, CacheScope, Request
from quire.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array  # msgspec reads this at run time, when an array type cannot be subscripted


class Command:
    """The base of all commands."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Add(Command):
    """Add a request. The engine sets its `arrival_s`.

    `output_token_ids`: tokens of its text that another engine has already generated. Generation continues after them,
    as if this engine had generated them; updates report only the tokens that follow. `images`: those of the prompt.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    scope: CacheScope = DEFAULT_SCOPE
    priority: int = 0
    arrival_s: float = 0.0
    pooling: Pooling | None = None
    output_token_ids: TokenIds = field(default_factory=lambda: array("i"))
    images: tuple[Image, ...] = ()

    @classmethod
    def of(cls, request: Request) -> Add:
        """Return the command that adds a request as it is. Does not mutate."""
        return cls(
            request.request_id,
            request.tokens[: request.num_prompt_tokens],
            request.sampling,
            request.scope,
            request.priority,
            request.arrival_s,
            request.pooling,
            request.tokens[request.num_prompt_tokens :],
            request.images,
        )

    def names(self, block_size: int) -> array[int]:
        """Return the names of the prompt's tokens in a cache; see `quire.core.images`. Does not mutate."""
        return names_of(self.prompt_token_ids, self.images, block_size)

    def to_request(self) -> Request:
        """Return the request in the form of the control plane. Does not mutate."""
        request = Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling,
            scope=self.scope,
            priority=self.priority,
            arrival_s=self.arrival_s,
        )
        request.pooling, request.images = self.pooling, self.images
        if self.output_token_ids:
            request.begin_with(self.output_token_ids)
        return request


@dataclass(frozen=True, slots=True)
class Abort(Command):
    """End a request and all its sequences; does nothing if it has already ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Fail(Command):
    """End a request with an error, and drop the cached blocks that it alone used."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class Stop(Command):
    """End one sequence, because its text reached a stop string; does nothing if it has already ended."""

    request_id: str
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Clear(Command):
    """Empty the prefix cache; running requests go on."""


@dataclass(frozen=True, slots=True)
class LimitPrompts(Command):
    """While requests generate, compute at most this many prompt tokens in a step, plus one token for each request."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class AskDisk(Command):
    """Collect the disk's finished writes although no step runs, and send it the next ones."""


@dataclass(frozen=True, slots=True)
class AwaitImages(Command):
    """Do not start a request until its images are encoded; or they are: start it."""

    request_id: str
    is_waiting: bool


@dataclass(frozen=True, slots=True)
class KeepPrompt(Command):
    """Write the cached blocks of a prompt to the disk; `EngineStats.jobs` has the progress of each job, by name.

    Its tokens are given by their names in the cache (`quire.core.images`).
    """

    job: str
    prompt_token_ids: TokenIds
    scope: CacheScope
    wants_slots: bool = False


@dataclass(frozen=True, slots=True)
class TakeBlocks(Command):
    """Write the blocks of a bundle to the disk, parents first, as a job. Each block's `slot` is its place there."""

    job: str
    bundle: str
    blocks: tuple[KeptBlock, ...]


@dataclass(frozen=True, slots=True)
class EndJob(Command):
    """Stop reporting a job."""

    job: str


@dataclass(frozen=True, slots=True)
class LoadAdapter(Command):
    """Load the adapter in a folder, whose files have this digest; does nothing if it is loaded or loading."""

    digest: str
    folder: str


@dataclass(frozen=True, slots=True)
class DropAdapter(Command):
    """Free the memory of an adapter once no request uses it."""

    digest: str


@dataclass(frozen=True, slots=True)
class Watch(Command):
    """Report memory events, at most once in this many seconds, beginning with the present state; None: stop."""

    every_s: float | None


@dataclass(frozen=True, slots=True)
class Survey(Command):
    """Report which blocks are cache hits, for a router: first the present ones, then changes."""


AnyCommand = (
    Add
    | Abort
    | Fail
    | Stop
    | Clear
    | LimitPrompts
    | AskDisk
    | AwaitImages
    | KeepPrompt
    | TakeBlocks
    | EndJob
    | LoadAdapter
    | DropAdapter
    | Watch
    | Survey
)


OPERATOR_COMMANDS: Final[Mapping[str, AnyCommand]] = MappingProxyType({"reset_prefix_cache": Clear()})
"""The commands that operators can send, by the name that every door uses."""


class OperatorVerbs(ABC):
    """Methods for the operator commands, for every model that can `send` a command."""

    @abstractmethod
    def send(self, command: AnyCommand) -> None:
        """Send a command, which takes effect before the next step. Mutates."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; running requests go on. Mutates."""
        self.send(OPERATOR_COMMANDS["reset_prefix_cache"])


def carry_out(command: Command, scheduler: Scheduler) -> None:
    """Apply a command to a scheduler. Mutates the scheduler.

    Commands for adapters do nothing here: they change what is computed, not when. `Watch` and `Survey` change no
    decision either, and never reach a scheduler.
    """
    match command:
        case Add():
            scheduler.add(command.to_request())
        case Abort(request_id):
            scheduler.abort(request_id)
        case Fail(request_id, message):
            scheduler.fail(request_id, message)
        case Stop(request_id, branch):
            scheduler.stop(request_id, branch)
        case Clear():
            scheduler.memory.reset()
        case LimitPrompts(num_tokens):
            scheduler.prompt_limit = num_tokens
        case AskDisk():
            scheduler.memory.disk.ask()
        case AwaitImages(request_id, is_waiting):
            scheduler.await_images(request_id, is_waiting)
        case KeepPrompt(job, prompt, scope, wants_slots):
            scheduler.memory.jobs.keep(job, prompt, scope, wants_slots=wants_slots)
        case TakeBlocks(job, bundle, blocks):
            scheduler.memory.jobs.take(job, bundle, blocks)
        case EndJob(job):
            scheduler.memory.jobs.end(job)
        case LoadAdapter() | DropAdapter():
            pass
        case _:
            raise StepLogError(f"{type(command).__name__} is not a scheduler command")


def command_bytes(command: Command) -> bytes:
    """Return the wire form of a command: its name and its fields. Does not mutate."""
    import msgspec  # imported late: an engine in this process without a log does not need it

    values = [getattr(command, field.name) for field in fields(cast(Any, command))]
    return msgspec.msgpack.encode([type(command).__name__, *values], enc_hook=_encode_column)


def read_command(data: bytes) -> AnyCommand:
    """Return the command of a wire form; raises `StepLogError` for an invalid one. Pure.

    >>> read_command(command_bytes(Stop("one", 2)))
    Stop(request_id='one', branch=2)
    """
    import msgspec

    try:
        name, *values = msgspec.msgpack.decode(data, type=list[Any])
        kind = _KINDS[name]
        given = dict(zip([field.name for field in fields(kind)], values, strict=True))
        found: AnyCommand = msgspec.convert(given, kind, dec_hook=_decode_column)
        return found
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise StepLogError(f"a command cannot be read: {error}") from error


def _encode_column(value: object) -> bytes:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(type(value).__name__)  # msgspec expects this error for other types


def _decode_column(kind: type, data: object) -> array[int]:
    if kind is not array or not isinstance(data, bytes):
        raise ValueError("a column of token ids is bytes")
    column = array("i")
    column.frombytes(data)
    return column


_KINDS: Final[Mapping[str, type[AnyCommand]]] = MappingProxyType({kind.__name__: kind for kind in get_args(AnyCommand)})
