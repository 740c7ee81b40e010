"""The costs of a chat template's operations, in steps; see `template_sandbox` for why and when they are charged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import jinja2.runtime
from markupsafe import Markup

from quire.engine.text.client_text import joined, made_of, owned

MAX_STEPS: Final = 10_000_000
"""The steps of one rendering: about a second of loops, or 80 million generated characters."""

MAX_WIDTH: Final = 1024
"""The maximum width of padding, of an indentation, and of a formatted field."""

MAX_DEPTH: Final = 100
MAX_BITS: Final = 4096
MAX_DIGITS: Final = 4300  # Python's own limit for converting text to a number
MAX_TUPLE: Final = 64  # a tuple can be a key, and each look-up hashes it completely
MAX_FORM: Final = 4096
MAX_PRODUCT: Final = 1 << 20
MAX_EXPONENT: Final = 64
CALL_STEPS: Final = 20
ITEM_STEPS: Final = 4
PIECE_STEPS: Final = 8  # a new text has a header of 50 to 80 bytes
CHARACTERS_PER_STEP: Final = 8
COMPARISONS_PER_STEP: Final = 64
ESCAPED_CHARACTERS: Final = 5  # "&" becomes "&amp;"
CHUNK: Final = 1 << 16
LINE_BREAKS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

VIEWS: Final[tuple[type, ...]] = (type({}.items()), type({}.keys()), type({}.values()))
CONTAINERS: Final[Any] = (list, tuple, dict, range, *VIEWS)
SIZED: Final[Any] = (str, *CONTAINERS)


def names_in(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_SCALARS: Final = frozenset({bool, int, float, type(None)})
LIST_FILTERS: Final = names_in(
    "dictsort items join list map max min reject rejectattr reverse select selectattr sort unique"
)
TEXT_FILTERS: Final = names_in(
    "capitalize center e escape format indent lower replace safe string title trim truncate upper"
)
"""Filters of a text; another value becomes its text first."""

NUMBER_FILTERS: Final = names_in("abs float int round")


class Meter(jinja2.runtime.Context):
    """The variables of one rendering, with its remaining steps. Every method can raise `OverflowError`."""

    left = MAX_STEPS

    def charge(self, steps: int) -> None:
        """Subtract steps, 0 or more, from the remaining ones. Mutates."""
        self.left -= steps
        if self.left < 0:
            raise OverflowError(f"it needs more than {MAX_STEPS:,} steps")

    def read(self, value: Any) -> Any:
        """Charge for reading or making a value, without the contents of its items. Returns the value."""
        if isinstance(value, str):
            self.charge(len(value) // CHARACTERS_PER_STEP)
        elif isinstance(value, CONTAINERS):
            self.charge(len(value) * ITEM_STEPS)
        elif isinstance(value, jinja2.runtime.LoopContext):
            raise OverflowError("a loop is not a list")
        return value

    def weigh(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """Charge for a value and all its contents, at every depth. Returns the value."""
        if value.__class__ in _SCALARS:
            return value
        self.read(value)
        if isinstance(value, CONTAINERS):
            if not depth:
                raise OverflowError(f"a value is nested more than {MAX_DEPTH} levels deep")
            for item in value:
                self.weigh(item, depth - 1)
            for item in value.values() if isinstance(value, dict) else ():
                self.weigh(item, depth - 1)
        return value

    def weigh_times(self, value: Any, times: int) -> None:
        """Charge for a value and all its contents, as many times as it is used."""
        before = self.left
        self.weigh(value)
        self.charge((before - self.left + 1) * max(times, 0))

    def weigh_text(self, value: Any, escape: Callable[[str], str] = repr, depth: int = MAX_DEPTH) -> None:
        """Charge for the text of a value before it is made; `escape` is how it contains a text.

        A value can be short and have a long text, because it contains another one many times.
        """
        if isinstance(value, str):
            if len(value) <= CHUNK:
                length = len(escape(value))
            else:
                length = sum(len(escape(value[start : start + CHUNK])) for start in range(0, len(value), CHUNK))
            self.charge(length // CHARACTERS_PER_STEP)
        elif isinstance(value, CONTAINERS):
            self.read(value)
            if not depth:
                raise OverflowError(f"a value is nested more than {MAX_DEPTH} levels deep")
            for item in value:
                self.weigh_text(item, escape, depth - 1)
            for item in value.values() if isinstance(value, dict) else ():
                self.weigh_text(item, escape, depth - 1)
        elif isinstance(value, int):
            self.charge(value.bit_length() // CHARACTERS_PER_STEP)
        elif value.__class__ not in _SCALARS:  # the name of a macro can be long
            self.charge(len(str(value)) // CHARACTERS_PER_STEP)

    # ---- called by the code of a template ---------------------------------------------------------------------------

    def held(self, value: Any) -> Any:
        """Charge for a search in a value. Returns the value."""
        return value if isinstance(value, dict) else self.weigh(value)

    def short(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Charge for a tuple; raises for a long one, or one that contains a tuple. Returns the tuple."""
        if len(value) > MAX_TUPLE or any(isinstance(item, tuple) for item in value):
            raise OverflowError(f"a tuple has more than {MAX_TUPLE} values, or contains a tuple")
        self.weigh(value)
        return value

    def text(self, value: Any) -> str:
        """Return the text of a value."""
        if value.__class__ is str:
            return value
        if not isinstance(value, str):
            self.weigh_text(value)
            text = str(value)
            value = text if value.__class__ in _SCALARS else owned(text, "")  # which can contain a client's text
        self.read(value)
        return str(value)

    def key(self, value: Any) -> Any:
        """Charge for looking up a value, which can be compared with a key. Returns the value."""
        if isinstance(value, str):
            self.charge(len(value) // CHARACTERS_PER_STEP)
        return value

    def add(self, left: Any, right: Any) -> Any:
        """Return left + right, charged afterwards: it is at most twice as large as values that were already charged."""
        if isinstance(left, Markup) or isinstance(right, Markup):
            self.weigh_times([left, right], ESCAPED_CHARACTERS)
        result = left + right
        if result.__class__ is str:  # the usual case, without another call
            self.left -= len(result) // CHARACTERS_PER_STEP
            if self.left >= 0:
                return result
        if isinstance(result, Markup):
            result = made_of(result, (left, right))
        return self.short(result) if isinstance(result, tuple) else self.read(result)

    def concat(self, pieces: list[str]) -> str:
        """Return the concatenation of pieces of text."""
        self.charge(sum(map(len, pieces)) // CHARACTERS_PER_STEP)
        text = joined("", pieces)
        if text.__class__ is not str:  # to keep owners takes time, too
            self.charge(CALL_STEPS)
        return text

    def str_join(self, values: tuple[Any, ...]) -> str:
        """Return the concatenation of the texts of values."""
        return self.concat([self.text(value) for value in values])

    # ---- charged before the operation -------------------------------------------------------------------------------

    def multiply(self, operator: str, left: Any, right: Any) -> None:
        """Charge for left * right or left ** right."""
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                if len(value) * times > (MAX_TUPLE if isinstance(value, tuple) else MAX_PRODUCT):
                    raise OverflowError("the product is too large")
                if isinstance(value, str):
                    self.charge(len(value) * max(times, 0) // CHARACTERS_PER_STEP)
                else:
                    self.weigh_times(value, times)
        if operator == "**" and isinstance(right, int | float) and abs(right) > MAX_EXPONENT:
            raise OverflowError("the exponent is too large")
        if isinstance(left, int) and isinstance(right, int):
            bits, others = left.bit_length(), right.bit_length()
            if (bits * abs(right) if operator == "**" else bits + others) > MAX_BITS:
                raise OverflowError("the product is too large")

    def fill(self, form: str, values: list[Any]) -> None:
        """Charge for filling in a format string; raises for widths that are large or that are values themselves."""
        is_wide = any(len(digits) > 3 for digits in re.findall(r"\d+", form[:MAX_FORM]))
        if is_wide or len(form) > MAX_FORM or "*" in form or re.search(r"\{[^{}]*\{", form):
            raise OverflowError("a format string is too long, or one of its fields too wide")
        before = self.left
        self.weigh_text([values, " " * MAX_WIDTH], ascii)
        times = (form.count("%") + form.count("{")) * (ESCAPED_CHARACTERS if isinstance(form, Markup) else 1)
        self.charge((before - self.left + 1) * times)

    def pad(self, options: list[Any], num_places: int = 1) -> None:
        """Charge for padding at some places of a text, by the largest number or the longest text of the options."""
        widths = [len(option) if isinstance(option, str) else option for option in options]
        width = max([0, *(abs(width) for width in widths if isinstance(width, int))])
        if width > MAX_WIDTH:
            raise OverflowError(f"a width of more than {MAX_WIDTH}")
        self.charge(width * num_places // CHARACTERS_PER_STEP)

    def replace(self, text: Any, options: list[Any]) -> None:
        """Charge for replacing one text in another."""
        first, second = [*(option for option in options if isinstance(option, str)), "", ""][:2]
        longest = max(text.count(first) * len(second), text.count(second) * len(first))
        num_pieces = max(text.count(option) if option else 0 for option in (first, second))
        self.charge(longest // CHARACTERS_PER_STEP + num_pieces * PIECE_STEPS)

    def strip(self, text: Any, options: list[Any]) -> None:
        """Charge for stripping characters: each character of the text can be compared with each of them."""
        self.charge(len(text) * _longest(options) // CHARACTERS_PER_STEP)

    def join(self, values: Any, options: list[Any]) -> None:
        """Charge for the texts of values with a separator between them."""
        self.weigh_text(values)
        if isinstance(values, SIZED):
            self.charge(len(values) * _longest(options) // CHARACTERS_PER_STEP)

    def split(self, text: str, options: list[Any]) -> None:
        """Charge for the pieces of a text between separators, or between white space."""
        separators = [option for option in options if isinstance(option, str) and option]
        self.charge(((text.count(separators[0]) if separators else len(text) // 2) + 1) * PIECE_STEPS)

    def search_back(self, text: str, options: list[Any]) -> None:
        """Charge for a search from the end, in which Python can compare the whole pattern at every place."""
        self.charge(len(text) * _longest(options) // COMPARISONS_PER_STEP)

    def change_case(self, text: str) -> None:
        """Charge for changing letters, of which some become up to three."""
        self.charge(0 if text.isascii() else 2 * len(text) // CHARACTERS_PER_STEP)

    def number(self, name: str, value: Any, options: list[Any]) -> None:
        """Charge for a filter of numbers; raises for text that is too long for one."""
        if isinstance(value, str) and len(value) > MAX_DIGITS:
            raise OverflowError(f"a number of more than {MAX_DIGITS} digits")
        if name == "round":
            if isinstance(value, SIZED):  # it would be multiplied
                raise OverflowError("only numbers can be rounded")
            self.pad(options)

    def method(self, subject: Any, name: str, options: list[Any]) -> None:
        """Charge for a method of plain data."""
        self.read(subject)
        if isinstance(subject, Markup):  # it escapes what it is given
            self.weigh_times(options, ESCAPED_CHARACTERS)
        match name:
            case "format":
                self.fill(subject, options)
                return
            case "join":
                self.join(options[0] if options else "", [subject])
                return
            case "center" | "ljust" | "rjust" | "zfill":
                self.pad(options[:1])
            case "strip" | "lstrip" | "rstrip":
                self.strip(subject, options)
            case "replace":
                self.replace(subject, options)
            case "splitlines":
                self.charge(num_lines(subject) * PIECE_STEPS)
            case "split" | "rsplit":
                self.split(subject, options)
            case "capitalize" | "casefold" | "lower" | "swapcase" | "title" | "upper":
                self.change_case(subject)
            case "count" | "index" if not isinstance(subject, str):
                self.weigh(subject)
        if name in ("rfind", "rindex", "rpartition", "rsplit"):
            self.search_back(subject, options)
        self.weigh_text(options)  # an error can contain them

    def filter(self, name: str, value: Any, options: list[Any]) -> None:
        """Charge for a filter."""
        self.read(value)
        for option in options:
            self.key(option)
        if isinstance(value, SIZED) and name in LIST_FILTERS:
            lengths = sum(len(option) for option in options if isinstance(option, str))
            self.charge(len(value) * (ITEM_STEPS + lengths))
        match name:
            case "join":
                self.join(value, options)
            case "dictsort" | "max" | "min" | "sort" | "unique":  # they compare copies in lower case
                self.weigh_times(value, 1)
            case "format":
                self.fill(value, options)
            case "center":
                self.pad(options)
            case "indent":
                self.pad(options or [ITEM_STEPS], num_lines(value))
                self.charge(num_lines(value) * PIECE_STEPS)
            case "replace":
                self.replace(value, options)
            case "title":  # it is split into words
                self.charge(len(value) * ITEM_STEPS)
            case "trim":
                self.strip(value, options)
            case "e" | "escape":
                self.charge(len(value) * ESCAPED_CHARACTERS // CHARACTERS_PER_STEP)
            case "capitalize" | "lower" | "upper":
                self.change_case(value)
            case "float" | "int" | "round":
                self.number(name, value, options)


def num_lines(text: str) -> int:
    """Return at least the number of a text's lines, as Python splits them."""
    return 1 + sum(map(text.count, LINE_BREAKS))


def _longest(options: list[Any]) -> int:
    return max((len(option) for option in options if isinstance(option, str)), default=0)
