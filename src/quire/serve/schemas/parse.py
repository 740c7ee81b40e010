r"""Turns a body into a request: one strict reader for all endpoints.

    bytes ── counted ──► UTF-8 ──► text ── JSON ──► object ── ignored and unknown fields ──► struct

`require_bounded` counts a body's values before any becomes an object, also in ignored fields. msgspec alone would parse
a struct faster, but of two equal keys it would silently take the last.

Standard JSON parsers are too lenient for a server. Here a repeated key is an error (two parsers would see two different
requests), as are NaN and Infinity (not JSON), half a surrogate pair and NUL (no tokenizer takes them), and nesting
deeper than Python's stack. null means "not set". An error names the field at fault.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from quire.core.errors import shortened
from quire.core.json_bounds import DEFAULT_BOUNDS, JsonBounds, require_bounded
from quire.serve.errors import ApiError, unsupported
from quire.serve.schemas.fields import IGNORED, REFUSED

Request = TypeVar("Request", bound=msgspec.Struct)

SHORT_BODY: Final = 16 << 10
"""The event loop parses bodies of fewer bytes itself: that takes a few milliseconds at most."""

MAX_MESSAGE: Final = 200
_FIELD: Final = re.compile(r"(?:unknown|required) field `(?P<name>.*)`\Z", re.DOTALL)
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


def parse(body: bytes | bytearray, kind: type[Request], bounds: JsonBounds = DEFAULT_BOUNDS) -> Request:
    """Return the request in a body; raises `ApiError` if it is not a valid request. Does not mutate.

    Also raises `InvalidRequestError`, before building any object, for a body with more values than the bounds.

    >>> class Greeting(msgspec.Struct, forbid_unknown_fields=True):
    ...     name: str
    ...     times: int | None = None
    >>> parse(b'{"name": "you", "times": null, "user": "ignored"}', Greeting)
    Greeting(name='you', times=None)
    >>> parse(b'{"name": "you", "times": "2"}', Greeting)
    Traceback (most recent call last):
    ...
    quire.serve.errors.ApiError: times: Expected `int | null`, got `str`
    """
    try:
        if len(body) >= SHORT_BODY:
            require_bounded(body, bounds)
    except RecursionError:
        raise _too_deep() from None
    fields = _read_object(body)
    known = frozenset(kind.__struct_encode_fields__)
    for name in fields:
        if name not in known and name in REFUSED and not _says_nothing(name, fields[name]):
            raise unsupported(name, REFUSED[name].why)
    wanted = {name: value for name, value in fields.items() if name in known or not _is_ignored(name)}
    try:
        return msgspec.convert(wanted, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), (*known, *getattr(kind, "paths", ())), kind) from None
    except RecursionError:
        raise _too_deep() from None


def _is_ignored(name: str) -> bool:
    return name in IGNORED or name in REFUSED  # refused fields that are left have neutral values


def _says_nothing(name: str, value: object) -> bool:
    """Return whether the value of a refused field is neutral: as if the field were absent."""
    return value is None or any(type(value) is type(nothing) and value == nothing for nothing in REFUSED[name].nothing)


def _read_object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise _not_json("it is empty")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _not_json(" ".join(str(error).split())[:200]) from None
    except ValueError:  # only integers raise it
        raise _not_json(f"an integer has more than {sys.get_int_max_str_digits():,} digits") from None
    if not isinstance(value, dict):
        raise _not_json(f"it is a JSON {_name_of(value)}, not an object")
    if "\\u" in text:  # only an escape can write a non-character
        _require_characters(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        shown = _HALF_PAIR.sub("\ufffd", shortened(_first_twice(pairs)))
        raise ApiError(400, f"the key {shown!r} occurs twice in one object", code="invalid_json", param=shown)
    return found


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""


def _refuse_constant(name: str) -> None:
    raise _not_json(f"{name} is not JSON")


def _require_characters(fields: Mapping[str, Any]) -> None:
    """Raise for half a surrogate pair and for NUL, anywhere in the fields."""
    for name, value in fields.items():
        left = [name, value]
        while left:
            each = left.pop()
            if isinstance(each, str):
                if "\0" in each or not _has_utf8(each):
                    what = "NUL" if "\0" in each else "half a surrogate pair, which is not a character"
                    shown = _HALF_PAIR.sub("\ufffd", shortened(name)).replace("\0", "\ufffd")
                    raise ApiError(400, f"{shown} has a text with {what}", code="invalid_value", param=shown)
            elif isinstance(each, dict):
                left += [*each, *each.values()]
            elif isinstance(each, list):
                left += each


def _has_utf8(text: str) -> bool:
    """Return whether a text has only valid characters. Encoding it is ten times as fast as a search."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _invalid(message: str, names: Sequence[str], kind: type[msgspec.Struct]) -> ApiError:
    """Return the error for a message of msgspec: "Expected `int`, got `str` - at `$.n`"; `names`: known fields."""
    what, _, path = message.rpartition(" - at `$") if message.endswith("`") else (message, "", "")
    if not what:
        what, path = message, ""
    param = shortened(path.removesuffix("`").removeprefix(".").removesuffix("[...]"))
    if field := _FIELD.search(what):
        param = shortened(f"{param}.{field['name']}" if param else field["name"])
        code = "missing_required_parameter" if "required" in what else "unknown_parameter"
        within = [name for name in names if name.endswith(f".{param}")]
        near = [f"; did you mean {name}?" for name in (within or get_close_matches(param, names, n=1))[:1]]
        unknown = "".join([f"{param} is not a field of this request", *near])
        return ApiError(400, f"{param} is required" if "required" in what else unknown, code=code, param=param)
    what = what[:MAX_MESSAGE]  # it may contain a client's text
    if what.startswith("Invalid ") and (words := _words(msgspec.inspect.type_info(kind), param.split("."))):
        what = f"{what}; allowed: {', '.join(words)}"
    return ApiError(400, f"{param}: {what}" if param else what, code="invalid_type", param=param or None)


def _words(place: msgspec.inspect.Type, path: Sequence[str]) -> list[str]:
    """Return the words that are allowed at a path of fields: those of a literal, or the tags of a union."""
    words: list[str] = []
    for each in place.types if isinstance(place, msgspec.inspect.UnionType) else (place,):
        if isinstance(each, msgspec.inspect.LiteralType) and not path:
            words += map(str, each.values)
        elif isinstance(each, msgspec.inspect.StructType) and path:
            if each.tag_field == path[0]:
                words.append(str(each.tag))
            for field in each.fields:
                if field.encode_name == path[0]:
                    words += _words(field.type, path[1:])
    return words


def _not_json(why: str) -> ApiError:
    return ApiError(400, f"the request body must be one JSON object: {why}", code="invalid_json")


def _too_deep() -> ApiError:
    return ApiError(400, "the request body is nested too deeply", code="invalid_json")


def _name_of(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
