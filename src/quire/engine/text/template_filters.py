"""The filters and tests of chat templates, with a charge, and with the owners of characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final

import jinja2
from jinja2.exceptions import FilterArgumentError
from jinja2.filters import make_attrgetter
from markupsafe import Markup

from quire.engine.text.client_text import (
    Client,
    ClientMarkup,
    ClientText,
    filled,
    from_template,
    joined,
    made_of,
    owned,
    plain,
)
from quire.engine.text.template_meter import (
    CALL_STEPS,
    CHARACTERS_PER_STEP,
    LIST_FILTERS,
    NUMBER_FILTERS,
    TEXT_FILTERS,
    Meter,
    names_in,
)

_SHORT_FILTERS: Final = names_in("capitalize lower safe string trim upper")
_TEXT_OPTIONS: Final = names_in("attr join replace")
_OWNERLESS_FILTERS: Final = names_in("e escape indent title truncate")
_TEXT_TESTS: Final = names_in("lower upper")
_REMAINDER_TESTS: Final = names_in("divisibleby even odd")
_COMPARING_TESTS: Final = names_in("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in")
_CHEAP_FILTERS: Final = names_in("count d default first last length")


def metered_filters(every: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters that a chat template can use, of those of Jinja."""
    own = {"join": _join, "safe": _safe, "format": _format}
    names = TEXT_FILTERS | NUMBER_FILTERS | LIST_FILTERS | {"attr"}
    charged = {name: _charged_filter(name, own.get(name, every[name])) for name in sorted(names)}
    return {name: every[name] for name in _CHEAP_FILTERS} | charged | {"tojson": _tojson}


def metered_tests(every: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of Jinja."""
    costly = _COMPARING_TESTS | _TEXT_TESTS | _REMAINDER_TESTS
    return {**every, **{name: _charged_test(name, every[name]) for name in costly}}


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with a charge, which returns a list where Jinja's filter is lazy."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def charged(context: Meter, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _SHORT_FILTERS and value.__class__ is str and not args and not kwargs and value.isascii():
            context.charge(CALL_STEPS + len(value) // CHARACTERS_PER_STEP)
            return function(value)
        context.charge(CALL_STEPS)
        if name in TEXT_FILTERS:
            value = value if isinstance(value, str) else context.text(value)
        if name in _TEXT_OPTIONS:
            args = tuple(_text_option(context, option) for option in args)
            kwargs = {key: _text_option(context, option) for key, option in kwargs.items()}
        options = [*args, *kwargs.values()]
        context.filter(name, value, options)
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        inputs = (value, *args)
        if name in _OWNERLESS_FILTERS:
            inputs, kwargs = tuple(map(_unowned, inputs)), {key: _unowned(option) for key, option in kwargs.items()}
        elif name == "replace" and not isinstance(value, Client):
            inputs = (from_template(value), *args)
        result = function(*first.get(wanted, ()), *inputs, **kwargs)
        if isinstance(result, Iterator):
            result = list(result)
        elif name in _OWNERLESS_FILTERS or isinstance(result, Markup):
            result = made_of(result, (value, *options))
        return context.weigh(result) if "default" in kwargs else context.read(result)

    return charged


def _unowned(value: Any) -> Any:
    return plain(value) if isinstance(value, ClientText) else value


def _text_option(context: Meter, option: Any) -> Any:
    """Return an option that a filter would turn into text as text; a number or None can be an option of its own."""
    return option if option is None or isinstance(option, str | int | float) else context.text(option)


def _charged_test(name: str, function: Any) -> Callable[..., Any]:
    """Return a test with a charge for its arguments."""

    @jinja2.pass_context
    def charged(context: Meter, value: Any, *args: Any) -> Any:
        if name in _TEXT_TESTS:
            value = context.text(value)
        elif name in _REMAINDER_TESTS and isinstance(value, str):  # the test's % fills in a text, too
            context.fill(value, list(args))
        else:
            context.key(value)
        for other in args:
            context.held(other)
        return function(value, *args)

    return charged


@jinja2.pass_context
def _tojson(
    context: Meter,
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Any:
    context.charge(CALL_STEPS)
    # Jinja's own filter escapes "<" for HTML; models were trained on the plain character.
    context.weigh_text(value, encode_basestring_ascii if ensure_ascii else encode_basestring)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return context.read(owned(encoder.encode(value), ""))
    context.pad([indent, *(separators or ())])
    pieces: list[str] = []
    num_characters, most = 0, context.left * CHARACTERS_PER_STEP
    for piece in encoder.iterencode(value):
        num_characters += CHARACTERS_PER_STEP + len(piece)
        pieces.append(piece)
        if num_characters > most:
            break
    context.charge(num_characters // CHARACTERS_PER_STEP)
    return owned("".join(pieces), "")


@jinja2.pass_context
def _join(context: Meter, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return joined(str(d), [context.text(item) for item in value])


def _safe(value: str) -> Markup:
    return ClientMarkup(value, value.owners) if isinstance(value, Client) else Markup(value)


def _format(value: str, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    if isinstance(value, Markup):
        return value % (kwargs or args)
    return filled(value, lambda *values, **named: plain(value) % (named or values), args, kwargs)
