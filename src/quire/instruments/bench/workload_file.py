"""Workloads in files: one request per line, as JSON. The runners of other engines read the same lines.

    {"id": 0, "prompt_token_ids": [300, 301, …], "max_tokens": 64, "n": 1}

Prompts are token ids, so that no tokenizer is needed. The end of text is ignored, so that every output has the length
in its line. A single output is greedy, several outputs are drawn at temperature 1. All requests are added at once. Ids
are shifted from repeat to repeat, so that repeats do not hit each other's blocks, while prompts of one repeat keep
their shared prefixes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from quire.core.errors import InvalidValueError
from quire.core.pooling import Pooling
from quire.core.sampling_params import SamplingParams

LOWEST_ID = 300
"""Lower ids may be special tokens."""

ID_STEP = 977
"""The shift of ids from one repeat to the next."""


class WorkloadError(InvalidValueError):
    """A workload file has a line that is not a request."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One line of a workload. `fields` are further fields of the HTTP request, which override the others.

    `adapter`: the digest of the request's adapter. `pooling`: the request embeds its prompt. `temperature` None: 0 for
    a single output, 1 for several.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    pooling: Pooling | None = None
    temperature: float | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the request."""
        temperature = float(self.n > 1) if self.temperature is None else self.temperature
        return SamplingParams(n=self.n, temperature=temperature, max_tokens=self.max_tokens, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a file."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(request.max_tokens * request.n for request in self.requests)

    def shifted(self, repeat: int, vocab_size: int) -> Workload:
        """Return the workload of another repeat; if a vocabulary is too small for the shift, uses all of its ids.

        >>> Workload("", (WorkloadRequest((300, 301), 1),)).shifted(2, 151_936).requests[0].prompt_token_ids
        (2254, 2255)
        """
        most = int(vocab_size * 0.95)
        least = LOWEST_ID if most > 2 * LOWEST_ID else 0
        span = max(most - least, 1)
        shift = ID_STEP * repeat - least
        prompts = ((token + shift) % span + least for each in self.requests for token in each.prompt_token_ids)
        moved = (tuple(islice(prompts, len(each.prompt_token_ids))) for each in self.requests)
        requests = (replace(each, prompt_token_ids=ids) for each, ids in zip(self.requests, moved, strict=True))
        return Workload(self.name, tuple(requests))


def read_workload(path: str | Path, limit: int = 0) -> Workload:
    """Return the requests of a file; only the first `limit`, unless it is 0.

    Raises `WorkloadError`, with file and line, if a line is not a request; `OSError` if the file cannot be read.
    """
    place = Path(path)
    try:
        lines = place.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise WorkloadError("workload", str(place), "a text in UTF-8, one JSON object per line") from None
    found = [_request(f"{place}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise WorkloadError("workload", str(place), "a file with one request or more")
    name = place.name.removeprefix("workload_").removesuffix(".jsonl")
    return Workload(name, tuple(found[:limit] if limit else found))


def _request(where: str, line: str) -> WorkloadRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise WorkloadError(where, line, "a JSON object with prompt_token_ids, max_tokens and n") from None
    if not isinstance(fields, dict):
        raise WorkloadError(where, line, "a JSON object with prompt_token_ids, max_tokens and n")
    prompt = fields.get("prompt_token_ids")
    if not isinstance(prompt, list) or not prompt or not all(_is_integer(token, 0) for token in prompt):
        raise WorkloadError(f"{where}: prompt_token_ids", prompt, "a list of one or more token ids")
    return WorkloadRequest(tuple(prompt), _count(where, fields, "max_tokens"), _count(where, fields, "n", 1))


def _count(where: str, fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if not _is_integer(value, 1):
        raise WorkloadError(f"{where}: {name}", value, "an integer, 1 or more")
    return int(value)  # type: ignore[arg-type]


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def single_request(workload: Workload) -> WorkloadRequest | None:
    """Return the request of a workload that measures decoding: one request with one output of several tokens."""
    requests: Sequence[WorkloadRequest] = workload.requests
    if len(requests) == 1 and requests[0].n == 1 and requests[0].max_tokens > 1:
        return requests[0]
    return None
