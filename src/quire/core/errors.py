"""Every error that quire raises on purpose.

    QuireError
    ├── InvalidValueError (also ValueError)     a value from outside is not allowed: field, value, what is
    │   ├── InvalidRequestError                 … in a request
    │   │   └── RequestTooLargeError            … because it can never fit, whatever else runs
    │   ├── InvalidConfigError                  … in the configuration of the engine
    │   │   └── DoesNotFitError                 … which needs more memory than there is
    │   └── CheckpointError                     … in a model folder
    │       └── ModelError                      … which is no model that can be run: says what to do
    ├── RequestStateError                       a call that the state of the request does not allow
    ├── StaleMatchError                         a prefix match whose blocks were evicted since
    ├── UnknownRequestError (also KeyError)     a request id that is not here
    ├── TooManyJobsError                        too many texts of one tenant wait to be worked on
    ├── ExecutionError                          the compute plane failed a step
    │   ├── OutOfMemoryError                    … for lack of memory: a smaller step may do
    │   └── ExecutorLostError                   … and cannot go on
    ├── StepLogError                            a step log was altered, or written by another format
    │   └── TornStepLogError                    … ends within a record; what stands before is whole
    └── InvariantError                          our own mistake, found by a check: please report it

Running out of blocks is not an error: it is the value ``None``, and the scheduler acts on it. Invariants raise
`InvariantError` rather than use ``assert``, so that ``python -O`` keeps them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

MAX_SHOWN: Final = 80
"""Characters of a value that an error shows; of a name, too."""

MAX_PRINTED: Final = 1000
"""Characters of what an error says of a model folder: paths, and commands to copy."""


def shortened(text: str) -> str:
    """Return a text, or its beginning, as long as an error may show it. Does not mutate."""
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _shown(value: object, room: int) -> str:
    """Return what `repr` begins with, at a cost that does not grow with the value."""
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
    """Return pieces with commas between them, until they fill the room."""
    taken: list[str] = []
    for piece in pieces:
        taken.append(piece)
        room -= len(piece) + 2
        if room <= 0:
            break
    return ", ".join(taken)


def _printable(text: str) -> str:
    """Return a text in one line that a terminal can print; the middle of a long one is left out."""
    if len(text) > MAX_PRINTED:
        text = f"{text[: MAX_PRINTED // 2]} … {text[-MAX_PRINTED // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class QuireError(Exception):
    """The root of all errors raised by quire."""


class InvalidValueError(QuireError, ValueError):
    """A value from outside is not allowed; the message names the field, the value and what is allowed.

    >>> raise InvalidValueError("block_size", 0, "an integer from 1 to 4096")
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidValueError: block_size is 0; allowed: an integer from 1 to 4096
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {shortened(_shown(value, MAX_SHOWN + 4))}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[InvalidValueError], tuple[object, ...]]:
        return type(self), (self.field, self.value, self.allowed)


class InvalidRequestError(InvalidValueError):
    """A request carries a value that is not allowed; nothing was enqueued."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(shortened(field), value, allowed)  # a client may have chosen a part of the name


class RequestTooLargeError(InvalidRequestError):
    """A request can never fit into the context or the memory, whatever else runs."""


class InvalidConfigError(InvalidValueError):
    """A setting of the engine is not allowed; nothing was built."""


class DoesNotFitError(InvalidConfigError):
    """The settings need more memory than there is. `flags`: what to add to a command so that it fits; often empty."""

    def __init__(self, field: str, value: object, allowed: str, flags: str = "") -> None:
        super().__init__(field, value, allowed)
        self.flags = flags


class CheckpointError(InvalidValueError):
    """A model folder cannot be read: a file is missing, torn, or not what its header says.

    Names in it, of tensors or keys, are a stranger's: what is printed of them is short and printable.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(_printable(field), value, _printable(allowed))


class ModelError(CheckpointError):
    """A model is not here, or is none that can be run; the message is a sentence that says what to do.

    >>> raise ModelError("qwen", 'No folder named "qwen". Give a model folder')
    Traceback (most recent call last):
    ...
    quire.core.errors.ModelError: No folder named "qwen". Give a model folder
    """

    def __init__(self, model: str, sentence: str) -> None:
        super().__init__("model", model, sentence)
        self.args = (self.allowed,)

    def __reduce__(self) -> tuple[type[InvalidValueError], tuple[object, ...]]:
        return type(self), (self.value, self.allowed)


class RequestStateError(QuireError):
    """The state of the request does not allow the call."""


class StaleMatchError(QuireError):
    """A prefix match is older than the cache: blocks that it names were evicted since. Match again."""


class UnknownRequestError(QuireError, KeyError):
    """No request of that id is here."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id!r} is unknown: it has ended or was never added"


class TooManyJobsError(QuireError):
    """Too many texts of one tenant wait to be worked on; the call may be tried again later."""


class ExecutionError(QuireError):
    """The compute plane failed a whole step."""


class OutOfMemoryError(ExecutionError):
    """The memory did not suffice to compute a step; what its plan carried has taken effect, a smaller step may do."""


class ExecutorLostError(ExecutionError):
    """The compute plane cannot go on: whatever it held is lost, and the engine with it."""


class StepLogError(QuireError):
    """A step log was altered, or was written by another format."""


class TornStepLogError(StepLogError):
    """A step log ends within a record; what stands before that is the log of a shorter run."""


class InvariantError(QuireError):
    """An invariant of quire does not hold. This is a bug of quire, never of its caller."""
