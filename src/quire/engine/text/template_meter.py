"""The costs of a chat template's operations, in steps; see `template_sandbox` for why and when they are charged."""

from __future__ import annotations

import re
from typing import Any, Final

import jinja2.runtime

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
CHARACTERS_PER_STEP: Final = 8

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
        return value if value.__class__ is str else self.read(str(value))

    def add(self, left: Any, right: Any) -> Any:
        """Return left + right, charged afterwards: it is at most twice as large as values that were already charged."""
        result = left + right
        if result.__class__ is str:  # the usual case, without another call
            self.left -= len(result) // CHARACTERS_PER_STEP
            if self.left >= 0:
                return result
        return self.short(result) if isinstance(result, tuple) else self.read(result)

    def concat(self, pieces: list[str]) -> str:
        """Return the concatenation of pieces of text."""
        self.charge(sum(map(len, pieces)) // CHARACTERS_PER_STEP)
        return "".join(pieces)

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
        self.weigh_times([values, " " * MAX_WIDTH], form.count("%") + form.count("{"))

    def pad(self, options: list[Any], num_places: int = 1) -> None:
        """Charge for padding at some places of a text, by the largest number or the longest text of the options."""
        widths = [len(option) if isinstance(option, str) else option for option in options]
        width = max([0, *(width for width in widths if isinstance(width, int))])
        if width > MAX_WIDTH:
            raise OverflowError(f"a width of more than {MAX_WIDTH}")
        self.charge(width * num_places // CHARACTERS_PER_STEP)

    def replace(self, text: Any, options: list[Any]) -> None:
        """Charge for replacing one text in another."""
        first, second = [*(option for option in options if isinstance(option, str)), "", ""][:2]
        longest = max(text.count(first) * len(second), text.count(second) * len(first))
        self.charge(longest // CHARACTERS_PER_STEP)

    def strip(self, text: Any, options: list[Any]) -> None:
        """Charge for stripping characters: each character of the text can be compared with each of them."""
        self.charge(len(text) * _longest(options) // CHARACTERS_PER_STEP)

    def join(self, values: Any, options: list[Any]) -> None:
        """Charge for the texts of values with a separator between them."""
        self.weigh(values)
        if isinstance(values, SIZED):
            self.charge(len(values) * _longest(options) // CHARACTERS_PER_STEP)

    def method(self, subject: Any, name: str, options: list[Any]) -> None:
        """Charge for a method of plain data."""
        self.read(subject)
        match name:
            case "format":
                self.fill(subject, options)
            case "split" | "rsplit" | "splitlines":
                separators = [option for option in options if isinstance(option, str) and option]
                num_pieces = subject.count(separators[0]) if separators else len(subject) // 2
                self.charge(num_pieces * ITEM_STEPS)
            case "center" | "ljust" | "rjust" | "zfill":
                self.pad(options[:1])
            case "strip" | "lstrip" | "rstrip":
                self.strip(subject, options)
            case "replace":
                self.replace(subject, options)
            case "join":
                self.join(options[0] if options else "", [subject])
            case "count" | "index":
                self.weigh(subject)

    def filter(self, name: str, value: Any, options: list[Any]) -> None:
        """Charge for a filter."""
        self.read(value)
        if isinstance(value, SIZED) and name in LIST_FILTERS:
            lengths = sum(len(option) for option in options if isinstance(option, str))
            self.charge(len(value) * (ITEM_STEPS + lengths))
        match name:
            case "join" | "dictsort" | "max" | "min" | "sort" | "unique":
                self.join(value, options)
            case "format":
                self.fill(self.text(value), options)
            case "center" | "indent" | "round":
                self.pad(options, value.count("\n") + 1 if isinstance(value, str) else 1)
            case "replace" if isinstance(value, str):
                self.replace(value, options)
            case "title" if isinstance(value, str):  # it is split into words
                self.charge(len(value))
            case "trim" if isinstance(value, str):
                self.strip(value, options)
            case "int" if isinstance(value, str) and len(value) > MAX_DIGITS:
                raise OverflowError(f"a number of more than {MAX_DIGITS} digits")


def _longest(options: list[Any]) -> int:
    return max((len(option) for option in options if isinstance(option, str)), default=0)
