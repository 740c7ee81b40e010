"""Text in a chat template that knows which of its characters a client wrote.

A template can remove text (`content.replace('/think', '')`) or write two fields without anything between them. So a
client could write a control token in pieces: "<|im_/thinkend|>". Therefore every text of a client is a `ClientText`, a
`str` with one more field, and what a template makes from one keeps the field. To the template it is the same text: it
has the same length, and "</think>" is in it. After rendering, `control_text` takes only special tokens that the
template wrote itself for control tokens.

Sums, slices, joins, replacements, splits, padding and formats keep the owner of each character. The result of another
operation with a client's text is the client's altogether, and so are JSON, and the text of a list or an object. Numbers
belong to nobody: they are the template's when they become text.

Rejected: private characters instead of a client's special tokens, which sees only those that are complete in one text.
Rejected: rendering twice, with harmless text the second time: a template that looks at the text renders something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any, Final, SupportsIndex

from markupsafe import Markup

TEMPLATE, CLIENT = "t", "c"
_PLACEHOLDER: Final = "\u2980"  # in place of a client's characters in a trial; `repr` does not change it
_CONTAINERS: Final[Any] = (list, tuple, dict)
_OPAQUE: Final[Any] = (type({}.items()), type({}.keys()), type({}.values()), MethodType, BuiltinMethodType)


class _TextMethods(str):
    """The methods of `str` that return text, with owners."""

    __slots__ = ("owners",)
    owners: str
    """The owner of each character; "" if all are the client's."""

    def _changed(self, text: str) -> str:
        """Return a text that was made of this one, character by character if its length is the same."""
        return owned(text, self.owners if len(text) == len(self) else "")

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))

    def casefold(self) -> str:
        return self._changed(str.casefold(self))

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def swapcase(self) -> str:
        return self._changed(str.swapcase(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def zfill(self, width: SupportsIndex) -> str:
        return self._changed(str.zfill(self, width))

    def _padded(self, text: str, num_left: int, fill: str) -> str:
        own, fillers = owners_of(self), owners_of(fill)
        num_right = len(text) - num_left - len(self)
        return owned(text, fillers * num_left + own + fillers * num_right)

    def center(self, width: SupportsIndex, fillchar: str = " ") -> str:
        text = str.center(self, width, fillchar)
        padding = len(text) - len(self)
        return self._padded(text, padding // 2 + (padding & width.__index__() & 1), fillchar)  # as Python rounds

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        return self._padded(str.ljust(self, width, fillchar), 0, fillchar)

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> str:
        text = str.rjust(self, width, fillchar)
        return self._padded(text, len(text) - len(self), fillchar)

    def join(self, values: Iterable[str]) -> str:
        return joined(self, list(values))

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:  # it is between all characters
            return owned(str.replace(self, old, new, count), "")
        return joined(new, self.split(old, count))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = zip(str.splitlines(self, keepends), self._pieces(str.splitlines(self, True), ""), strict=True)
        return [whole[: len(line)] for line, whole in lines]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._pieces(str.partition(self, sep), "")
        return before, found, after

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, after = self._pieces(str.rpartition(self, sep), "")
        return before, found, after

    def _pieces(self, pieces: Iterable[str], separator: str | None) -> list[str]:
        """Return consecutive pieces of this text, between separators or between white space, with their owners."""
        parts, end = [], -len(separator or "")
        for piece in pieces:
            start = str.find(self, piece, max(end, 0)) if separator is None else end + len(separator)
            end = start + len(piece)
            parts.append(self[start:end])
        return parts


class ClientText(_TextMethods):
    """A text of which a client wrote at least one character. Immutable."""

    __slots__ = ()

    def __new__(cls, text: str, owners: str = "") -> ClientText:
        """Make a text; `owners` has a letter for each character, or is empty."""
        made = str.__new__(cls, text)
        made.owners = owners
        return made

    def __str__(self) -> str:
        """Return the text itself, with its owners."""
        return self

    def __add__(self, other: str) -> str:
        """Return the sum; one with `Markup` escapes this text."""
        if isinstance(other, Markup):
            return NotImplemented
        return owned(str.__add__(self, other), owners_of(self) + owners_of(other))

    def __radd__(self, other: str) -> str:
        """Return the sum."""
        return owned(str.__add__(other, self), owners_of(other) + owners_of(self))

    def __mul__(self, times: SupportsIndex) -> str:
        """Return the text several times."""
        return owned(str.__mul__(self, times), self.owners * max(times.__index__(), 0))

    __rmul__ = __mul__

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        """Return a part."""
        return owned(str.__getitem__(self, key), self.owners and self.owners[key])

    def __iter__(self) -> Iterator[str]:
        """Iterate over the characters, each with its owner."""
        if not self.owners:
            return map(ClientText, str.__iter__(self))
        return map(owned, str.__iter__(self), self.owners)


class ClientMarkup(Markup):
    """Markup of which a client wrote at least one character. Immutable."""

    __slots__ = ("owners",)
    owners: str

    def __new__(cls, text: str = "", owners: str = "") -> ClientMarkup:
        """Make markup; Jinja and `Markup` call this for the results of operations."""
        made = super().__new__(cls, plain(text))
        made.owners = owners
        return made

    def __str__(self) -> str:
        """Return the text, with its owners."""
        return ClientText(plain(self), self.owners)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the characters."""
        return (self[index] for index in range(len(self)))


Client: Final = (ClientText, ClientMarkup)


def plain(text: str) -> str:
    """Return a text without owners."""
    return str.__str__(text)


def owners_of(text: str) -> str:
    """Return the owner of each character."""
    return text.owners or CLIENT * len(text) if isinstance(text, Client) else TEMPLATE * len(text)


def owned(text: str, owners: str) -> str:
    """Return a text with the owners of its characters; "" if all are the client's."""
    if not text or (owners and CLIENT not in owners):
        return plain(text)
    return ClientText(text, owners if TEMPLATE in owners else "")


def joined(separator: str, pieces: Sequence[str]) -> str:
    """Return pieces of text with a separator between them, and the owners of all characters."""
    text = str.join(plain(separator), pieces)
    for piece in (separator, *pieces):
        if piece.__class__ is not str:
            break
    else:
        return text
    return owned(text, owners_of(separator).join(map(owners_of, pieces)))


def filled(form: str, fill: Callable[..., str], values: tuple[Any, ...], named: Mapping[str, Any]) -> str:
    """Return a format string with its values, and the owners of all characters.

    They are found by filling in the same number of other characters. If the result has another form, it is the
    client's altogether.
    """
    text = plain(fill(*values, **named))
    if isinstance(form, Client) or _is_opaque([*values, *named.values()]):
        return owned(text, "")
    if not any(map(_may_be_clients, (*values, *named.values()))):
        return text
    trial = plain(fill(*map(_placeholders, values), **{name: _placeholders(value) for name, value in named.items()}))
    owners, is_same = [], len(trial) == len(text)
    for run in re.finditer(f"{_PLACEHOLDER}+|[^{_PLACEHOLDER}]+", trial):
        is_clients = run[0][0] == _PLACEHOLDER
        owners.append((CLIENT if is_clients else TEMPLATE) * len(run[0]))
        is_same = is_same and (is_clients or run[0] == text[slice(*run.span())])
    return owned(text, "".join(owners) if is_same else "")


def made_of(result: Any, inputs: Iterable[Any]) -> Any:
    """Return the result of an operation that keeps no owners: all is the client's, if an input may be."""
    if isinstance(result, Client) or not any(map(_may_be_clients, inputs)):
        return result
    if isinstance(result, Markup):
        return ClientMarkup(result)
    if isinstance(result, list | tuple):
        return type(result)(made_of(item, inputs) for item in result)
    return owned(result, "") if isinstance(result, str) else result


def from_client(value: Any) -> Any:
    """Return JSON data in which each text is a client's, except the characters that already have another owner."""
    if isinstance(value, str):
        return value if isinstance(value, ClientText) else ClientText(value)
    if isinstance(value, dict):
        return {ClientText(key): from_client(item) for key, item in value.items()}
    return [from_client(item) for item in value] if isinstance(value, list) else value


def from_template(text: str) -> ClientText:
    """Return a text of the template in the type whose methods keep owners."""
    return ClientText(text, TEMPLATE * len(text))


def _may_be_clients(value: Any) -> bool:
    return isinstance(value, (*Client, *_CONTAINERS, *_OPAQUE))


def _is_opaque(value: Any) -> bool:
    """Return whether a value can have a client's text where a trial cannot replace it, such as a key."""
    if isinstance(value, dict):
        return any(isinstance(key, Client) for key in value) or any(map(_is_opaque, value.values()))
    return any(map(_is_opaque, value)) if isinstance(value, list | tuple) else isinstance(value, _OPAQUE)


def _placeholders(value: Any) -> Any:
    if isinstance(value, Client):
        own, owners = plain(value), owners_of(value)
        runs = re.finditer(f"{CLIENT}+|{TEMPLATE}+", owners)
        return "".join([_PLACEHOLDER * len(run[0]) if run[0][0] == CLIENT else own[slice(*run.span())] for run in runs])
    if isinstance(value, dict):
        return {key: _placeholders(item) for key, item in value.items()}
    return type(value)(map(_placeholders, value)) if isinstance(value, list | tuple) else value
