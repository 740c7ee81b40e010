"""The root of quire's errors, and the errors that several packages raise or handle.

    QuireError
    ├── InvalidValueError (also ValueError)     an invalid value: names the field, the value and the allowed values
    │   ├── InvalidRequestError                 … in a request
    │   │   └── RequestTooLargeError            … that can never fit, whatever else runs
    │   ├── InvalidConfigError                  … in the configuration of the engine
    │   │   └── DoesNotFitError                 … that needs more memory than is free
    │   └── CheckpointError                     … in a model folder
    │       └── ModelError                      … that is missing or cannot be run: says what to do
    ├── RequestStateError                       a call that the state of the request does not allow
    ├── StaleMatchError                         a prefix match whose blocks have been evicted
    ├── UnknownRequestError (also KeyError)     an unknown request id
    ├── TooManyJobsError                        too many jobs of one kind or tenant wait
    ├── ExecutionError                          the compute plane failed a step
    │   ├── OutOfMemoryError                    … for lack of memory: a smaller step may succeed
    │   └── ExecutorLostError                   … and cannot go on
    ├── StepLogError                            a step log was altered, or has another format
    │   └── TornStepLogError                    … or ends within a record; the records before it are intact
    └── InvariantError                          a bug in quire, found by a check: please report it

Running out of blocks is not an error: it is the value ``None``, and the scheduler acts on it. Invariants raise
`InvariantError` rather than use ``assert``, so that ``python -O`` keeps them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, Self

MAX_SHOWN: Final = 80
"""The most characters of a value or a name that an error shows."""

MAX_PRINTED: Final = 1000
"""The limit of each text in an error about a model folder; it is higher, for paths and for commands to copy."""

MAX_SENTENCE: Final = 2000
"""The limit of a sentence about a model folder: it can have a path and the names of all families."""


def shortened(text: str) -> str:
    """Return a text, cut to the length that an error may show. Does not mutate."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _shown(value: object, room: int) -> str:
    """Return the beginning of `repr(value)`, at a cost that does not grow with the value."""
    if room <= 0:
        return "..."
    if isinstance(value, str | bytes | bytearray | array):
        return repr(value[:room])
    if type(value) is dict:
        return (
            "{" + _joined((f"{_shown(key, room)}: {_shown(item, room - 2)}" for key, item in value.items()), room) + "}"
        )
    if type(value) is list:
        return "[" + _joined((_shown(item, room - 2) for item in value), room) + "]"
    if type(value) is tuple and len(value) > 1:
        return "(" + _joined((_shown(item, room - 2) for item in value), room) + ")"
    try:
        return repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a {type(value).__name__} too large to print"


def _joined(pieces: Iterator[str], room: int) -> str:
    """Join pieces with commas until they fill the room."""
    taken: list[str] = []
    for piece in pieces:
        taken.append(piece)
        room -= len(piece) + 2
        if room <= 0:
            break
    return ", ".join(taken)


def _printable(text: str, most: int = MAX_PRINTED) -> str:
    """Return a text as one printable line, without the middle if it is long."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class QuireError(Exception):
    """The root of all errors raised by quire."""


class InvalidValueError(QuireError, ValueError):
    """A value from outside is not allowed; the message names the field, the value and what is allowed.

    >>> raise InvalidValueError("block_size", 0, "an integer from 1 to 4096")
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidValueError: block_size is 0; allowed: an integer from 1 to 4096

    `saying` gives the error a sentence as its message instead.

    >>> print(InvalidValueError("prompt", "9 tokens", "at most 8").saying("the prompt has 9 tokens; shorten it"))
    the prompt has 9 tokens; shorten it
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {shortened(_shown(value, MAX_SHOWN + 4))}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed
        self.sentence = ""

    def saying(self, sentence: str) -> Self:
        """Return this error with a sentence as its message. Mutates."""
        self.sentence = sentence
        return self

    def __str__(self) -> str:
        return self.sentence or super().__str__()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.field, self.value, self.allowed), self.__dict__


class InvalidRequestError(InvalidValueError):
    """A request carries a value that is not allowed; nothing was enqueued."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(shortened(field), value, allowed)  # a client may have chosen a part of the name


class RequestTooLargeError(InvalidRequestError):
    """A request can never fit into the context or the memory, whatever else runs.

    `numbers_first`: the same sentence from "9 tokens > 8 maximum" on, if its prompt alone is too long; else empty.
    """

    numbers_first = ""


class InvalidConfigError(InvalidValueError):
    """A setting of the engine is not allowed; nothing was built."""


class DoesNotFitError(InvalidConfigError):
    """The settings need more memory than is free. `flags`: options to add so that they fit; often empty."""

    def __init__(self, field: str, value: object, allowed: str, flags: str = "") -> None:
        super().__init__(field, value, allowed)
        self.flags = flags


class CheckpointError(InvalidValueError):
    """A model folder cannot be read: a file is missing, torn, or not what its header says.

    Names of tensors and keys come from a stranger, so the message shortens and escapes them.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(_printable(field), value, _printable(allowed))


class ModelError(CheckpointError):
    """A model does not exist or cannot be run; the message is a sentence that says what to do.

    >>> raise ModelError("qwen", 'No folder named "qwen". Give a model folder')
    Traceback (most recent call last):
    ...
    quire.core.errors.ModelError: No folder named "qwen". Give a model folder
    """

    def __init__(self, model: str, sentence: str) -> None:
        super().__init__("model", model, sentence)
        self.sentence = self.allowed = _printable(sentence, MAX_SENTENCE)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.value, self.allowed)


class RequestStateError(QuireError):
    """The state of the request does not allow the call."""


class StaleMatchError(QuireError):
    """A prefix match is out of date: some of its blocks have been evicted. Match again."""


class UnknownRequestError(QuireError, KeyError):
    """No request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id!r} is unknown: it has ended or was never added"


class TooManyJobsError(QuireError):
    """Too many jobs of one tenant, or adapters, wait for a thread; the caller may try again later."""


class ExecutionError(QuireError):
    """The compute plane failed a whole step."""


class OutOfMemoryError(ExecutionError):
    """A step ran out of memory. The changes in its plan have taken effect, and a smaller step may succeed."""


class ExecutorLostError(ExecutionError):
    """The compute plane cannot go on: its state is lost, and with it the engine."""


class StepLogError(QuireError):
    """A step log was altered, or has another format."""


class TornStepLogError(StepLogError):
    """A step log ends within a record; the records before it are the log of a shorter run."""


class InvariantError(QuireError):
    """An invariant does not hold. This is a bug in quire, never in its caller."""
