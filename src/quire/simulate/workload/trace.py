"""Traces: requests from a file, one per line, in published formats.

    azure       TIMESTAMP, ContextTokens, GeneratedTokens             (Azure LLM inference traces, 2023 and 2024)
    mooncake    timestamp (ms), input_length, output_length, hash_ids     (Mooncake traces)

as CSV with a header, or as one JSON object per line; the names of the fields determine the format. Lines are read when
they are needed and not kept, so a trace can have any length. Times count from the first line and must not decrease. An
invalid line is refused by its number, or, on request, skipped and counted.

An Azure trace has only lengths, so its prompts share nothing. A Mooncake trace names each 512 tokens by a hash of them
*and of all before them*: equal ids become equal tokens, so its sharing is real.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quire.core.errors import InvalidValueError
from quire.core.setting_checks import require_number, require_one_of
from quire.simulate.workload.drawn import draw_tokens
from quire.simulate.workload.offered import OfferedRequest

REFUSE, SKIP = "refuse", "skip"
MOONCAKE_BLOCK_TOKENS = 512
MAX_LENGTH = 1 << 24
MAX_LINE_CHARACTERS = 1 << 24

Fields = Mapping[str, Any]


class TraceError(InvalidValueError):
    """A trace has an invalid line."""


class Trace:
    """The requests of a trace, for a single pass. `malformed`: what to do with invalid lines.

    >>> lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.68,374,44", "soon,1,1"]
    >>> trace = Trace(lines, name="azure.csv", malformed="skip")
    >>> [(request.due_s, len(request.prompt), request.num_output_tokens) for request in trace], trace.num_skipped
    ([(0.0, 374, 44)], 1)
    """

    def __init__(
        self, lines: Iterable[str], *, name: str, malformed: str = REFUSE, speed: float = 1.0, seed: int = 0
    ) -> None:
        require_one_of("malformed", malformed, (REFUSE, SKIP))
        require_number("speed", speed, 1e-6, 1e6)
        self._lines = lines
        self._name = name
        self._malformed = malformed
        self._speed = speed
        self._rng = random.Random(f"trace {seed}")
        self._header: list[str] | None = None
        self._first_s = math.nan
        self._last_s = -math.inf
        self.num_read = 0
        self.num_skipped = 0

    def __iter__(self) -> Iterator[OfferedRequest]:
        """Yield the requests; raises `TraceError` at an invalid line, unless such lines are skipped. Mutates."""
        for number, line in enumerate(self._lines, start=1):
            if not line.strip():
                continue
            try:
                request = self._read(line, f"{self._name}, line {number}")
            except TraceError:
                if self._malformed == REFUSE:
                    raise
                self.num_skipped += 1
                continue
            if request is not None:
                self.num_read += 1
                yield request

    def _read(self, line: str, where: str) -> OfferedRequest | None:
        """Return the request of a line; None for the header of a CSV file."""
        if len(line) > MAX_LINE_CHARACTERS:
            raise TraceError(where, f"{len(line)} characters long", f"at most {MAX_LINE_CHARACTERS} characters")
        if line.lstrip().startswith("{"):
            fields = _read_object(line, where)
        else:
            cells = _read_cells(line, where)
            if self._header is None:
                self._header = [cell.strip().lstrip("\ufeff") for cell in cells]
                _require_names(self._header, where)
                return None
            if len(cells) != len(self._header):
                raise TraceError(where, line.strip(), f"{len(self._header)} cells: {', '.join(self._header)}")
            fields = dict(zip(self._header, cells, strict=True))
        return self._request(fields, where)

    def _request(self, fields: Fields, where: str) -> OfferedRequest:
        _require_names(list(fields), where)
        if "ContextTokens" in fields:
            time_s = _read_time(fields["TIMESTAMP"], f"{where}: TIMESTAMP")
            length = _read_length(fields, "ContextTokens", where)
            output = _read_length(fields, "GeneratedTokens", where)
            prompt = draw_tokens(self._rng, length)
        else:
            time_s = _read_number(fields["timestamp"], f"{where}: timestamp") / 1000.0
            length = _read_length(fields, "input_length", where)
            output = _read_length(fields, "output_length", where)
            prompt = tokens_of_blocks(_read_hash_ids(fields["hash_ids"], length, where), length)
        if time_s < self._last_s:
            raise TraceError(f"{where}: time", f"{time_s:g} s", f"{self._last_s:g} s (the line above) or later")
        self._last_s = time_s
        if math.isnan(self._first_s):
            self._first_s = time_s
        return OfferedRequest(f"r{self.num_read}", (time_s - self._first_s) / self._speed, prompt, output)


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    fields: tuple[str, ...]


_FORMATS = (
    _Format("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens")),
    _Format("mooncake", ("timestamp", "input_length", "output_length", "hash_ids")),
)


def tokens_of_blocks(hash_ids: list[int], num_tokens: int) -> array[int]:
    """Return a prompt in which blocks of 512 tokens with equal ids are equal.

    >>> first, second = tokens_of_blocks([7, 8], 600), tokens_of_blocks([7, 9], 600)
    >>> first[:512] == second[:512], first[512] == second[512]
    (True, False)
    """
    tokens = array("i")
    for hash_id in hash_ids[: _num_blocks(num_tokens)]:  # a line can have millions of unused ids
        drawn = hashlib.shake_128(b"block %d" % hash_id).digest(2 * MOONCAKE_BLOCK_TOKENS)
        tokens.extend(array("i", array("H", drawn)))
    return tokens[:num_tokens]


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // MOONCAKE_BLOCK_TOKENS)


def _require_names(names: list[str], where: str) -> None:
    if not any(set(kind.fields) <= set(names) for kind in _FORMATS):
        allowed = " or ".join(f"{', '.join(kind.fields)} ({kind.name})" for kind in _FORMATS)
        raise TraceError(f"{where}: fields", ", ".join(names), allowed)


def _read_cells(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except (csv.Error, StopIteration):
        raise TraceError(where, line.strip(), "cells separated by commas") from None


def _read_object(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(where, line.strip(), "a JSON object") from None
    if not isinstance(fields, dict):
        raise TraceError(where, line.strip(), "a JSON object")
    return fields


def _read_time(value: object, where: str) -> float:
    """Return a time in seconds: a date and time, or a number of seconds."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            pass
    return _read_number(value, where)


def _read_number(value: object, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < 1e15:
        raise TraceError(where, value, "a time")
    return number


def _read_length(fields: Fields, name: str, where: str) -> int:
    value = fields[name]
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LENGTH:
        raise TraceError(f"{where}: {name}", value, f"an integer from 1 to {MAX_LENGTH}")
    return value


def _read_hash_ids(value: object, num_tokens: int, where: str) -> list[int]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    num_blocks = _num_blocks(num_tokens)
    if not isinstance(value, list) or len(value) < num_blocks:
        raise TraceError(f"{where}: hash_ids", value, f"a list of {num_blocks} integers, one for each 512 tokens")
    for hash_id in value:
        if isinstance(hash_id, bool) or not isinstance(hash_id, int) or not -(1 << 63) <= hash_id < 1 << 64:
            raise TraceError(f"{where}: hash_ids", hash_id, "integers of 64 bits")
    return value
