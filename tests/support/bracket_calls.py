"""Two ways to write calls with values in brackets, and texts that are no calls, for tests of what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.serve.reader import ReadAnswer
from quire.serve.tools import gemma4, lfm2
from quire.serve.tools.base import Event, Tool, ToolFormat
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH
from quire.serve.tools.gemma4_values import QUOTE
from support.pieces import parsed

TOOLS = [Tool("weather", {}), Tool("now", {})]
ARGUMENTS = '{"city": "Rome", "days": [1, 2.5, true], "place": {"x": null}}'


@dataclass(frozen=True)
class Dialect:
    """How a family writes calls: `call` has `ARGUMENTS`, which begin with `bracket`; `bare` lacks its marks.

    `bits`: what a text may consist of. `hostile`: texts of a size that could take long.
    """

    format: ToolFormat
    marks: tuple[str, str]
    call: str
    bracket: str
    bare: str
    bits: tuple[str, ...]
    no_calls: tuple[str, ...]
    hostile: tuple[Callable[[int], str], ...]

    def events_of(self, pieces: list[str]) -> list[Event]:
        return parsed(self.format.parser(TOOLS), pieces)

    def read(self, text: str) -> ReadAnswer:
        return ReadAnswer.of(self.events_of([text]))


def _of_gemma4() -> Dialect:
    opener, closer = gemma4.OPENER, gemma4.CLOSER
    call = f"{opener}call:weather{{city:{QUOTE}Rome{QUOTE},days:[1,2.5,true],place:{{x:null}}}}{closer}"
    now = f"{opener}call:now"
    return Dialect(
        gemma4.GEMMA4,
        (opener, closer),
        call,
        "{",
        "call:now{}",
        bits=(
            *(opener, closer, QUOTE, "call:", "weather", "now", "{", "}", "[", "]", ",", ":", "a:", "<", "<|", "|>"),
            *('"', " ", "\n", "\\", "5", "-1.5", "true", "null", "é", "no", call, f"{opener}call:weather{{", now),
            *(f"{QUOTE}Rome{QUOTE}", "x" * MAX_KEY_LENGTH),
        ),
        no_calls=(
            *(f"{opener}call:other{{}}{closer}", f"{opener}now{{}}{closer}", f"{now}(){closer}"),
            f'{opener}{{"name": "now", "arguments": {{}}}}{closer}',
            *("So: call:now{}", "call:other{}", "call:now", "cal", f"{opener}{closer}"),
        ),
        hostile=(
            lambda size: (opener + "call:") * (size // 17),
            lambda size: f"{now}{' ' * size}",
            lambda size: f"{now}{{a:{'[' * size}",
            lambda size: f"{now}{{a:{'5' * size}",
            lambda size: f"{now}{{a:{QUOTE}{QUOTE[:-1] * (size // 4)}",
            lambda size: f"{now}{{a:1{' ' * size}",
            lambda size: f"{now}{{a:1,{' ' * size}",
            lambda size: (f"{now}{{{'k' * 200}") * (size // 220),
            lambda size: (f"{now}{{a:1 b}}") * (size // 24),
        ),
    )


def _of_lfm2() -> Dialect:
    opener, closer = lfm2.OPENER, lfm2.CLOSER
    call = f"{opener}[weather(city=\"Rome\", days=[1, 2.5, True], place={{'x': None}})]{closer}"
    now = f"{opener}[now"
    return Dialect(
        lfm2.LFM2,
        (opener, closer),
        call,
        "(",
        "[now()]",
        bits=(
            *(opener, closer, "weather", "now", "{", "}", "[", "]", "(", ")", ",", ":", "=", "a=", "<", "<|", "|>"),
            *('"', "'", " ", "\n", "\\", "u00e9", "x4", "5", "-1.5", "True", "null", "é", "no", call),
            *(f"{opener}[weather(", f"{opener}now(", "'Rome'", "'a': ", "x" * 2 * MAX_KEY_LENGTH),
        ),
        no_calls=(
            *(f"{opener}[other()]{closer}", f"{now}{{}}]{closer}"),
            f'{opener}[{{"name": "now", "arguments": {{}}}}]{closer}',
            *("So: [now()]", "[now](url) and [other(a=1)]", "[other()]", "[now", "["),
            *(f"{opener}{closer}", f"{opener}[]{closer}"),
        ),
        hostile=(
            lambda size: (opener + "[") * (size // 20),
            lambda size: f"{now}{' ' * size}",
            lambda size: f"{now}(a={'[' * size}",
            lambda size: f"{now}(a={'5' * size}",
            lambda size: f"{now}(a='{chr(92) * size}",
            lambda size: f"{now}(a='{f'{chr(92)}u00e' * (size // 5)}",
            lambda size: f"{now}(a=1{' ' * size}",
            lambda size: f"{now}(a=1,{' ' * size}",
            lambda size: f"{opener}[{'now(),' * (size // 6)}",
            lambda size: (f"{now}({'k' * 200}") * (size // 222),
            lambda size: (f"{now}(a='' b)") * (size // 32),
        ),
    )


GEMMA4_CALLS, LFM2_CALLS = _of_gemma4(), _of_lfm2()
