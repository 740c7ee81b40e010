"""L9: grammars whose masks are expensive, while another tenant's texts keep their rate.

alone     the other tenant requests texts, with and without a schema, in a closed loop
together  at the same time a tenant sends grammars whose masks take seconds, a new grammar each time
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from quire.instruments.http.plain import Answer, ask
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.stage import KEY, KEYED, OTHER_KEY, Stage, TortureServer

LEAST_SHARE: Final = 0.2
"""Share of the rate without these grammars, which keep a core busy. It was 0.005 when steps waited for masks."""
NUM_HOSTILE: Final = 4
TURNED_AWAY: Final = (429, 503)
GIVEN_UP: Final = 0
PATIENCE_S: Final = 10.0

Form = dict[str, Any]
SCHEMA: Final[Form] = {
    "type": "object",
    "properties": {"term": {"type": "string", "maxLength": 20}, "blocks": {"type": "integer"}},
    "required": ["term", "blocks"],
    "additionalProperties": False,
}
TEXTS: Final[tuple[Form, ...]] = (
    {"prompt": "A block is", "max_tokens": 16, "ignore_eos": True},
    {"prompt": "A block table", "max_tokens": 24, "structured_outputs": {"json": SCHEMA}},
)
DEAR: Final[tuple[tuple[str, str], ...]] = (
    ("grammar", "start: s\ns: s s | W\nW: /[a-z ]/\n// {}\n"),
    ("grammar", "start: s\ns: s t | t s | u s | W\nt: s s | t t | W\nu: t s | s t | u u | W\nW: /[a-z ]/\n// {}\n"),
    ("regex", "((([a-z ]{1,20}){1,20}){1,20}){1,20}|{}"),
)


def expensive_grammars(stage: Stage) -> str:
    """L9: another tenant's texts keep their rate and bits, and the sender of the grammars gets the reason."""
    seconds = 3.0 if stage.is_quick else 15.0
    with stage.serving(KEYED) as server:
        expected = [_text(server, form) for form in TEXTS]
        before = _rates(server, expected, seconds)
        statuses: list[int] = []
        with _expensive_texts(server, statuses):
            beside = _rates(server, expected, 2 * seconds)
        after = _rates(server, expected, seconds)
        require(set(statuses) <= {GIVEN_UP, 200, 400, *TURNED_AWAY}, f"the grammars got {sorted(set(statuses))}")
        for _ in range(2):  # the second time from the cache
            status = _ask(server, KEY, _expensive_body(server, 999_999)).status
            require(status == 400, f"a grammar that is too expensive got {status}")
        alone = [(first + last) / 2 for first, last in zip(before, after, strict=True)]
        shares = [rate / most for rate, most in zip(beside, alone, strict=True)]
        for share, what in zip(shares, ("free texts", "texts held to a schema"), strict=True):
            require(share >= LEAST_SHARE, f"{what} of another tenant kept only {share:.2f} of their rate")
    rates = f"free texts {beside[0]:.1f}/s of {alone[0]:.1f}/s, with a schema {beside[1]:.1f}/s of {alone[1]:.1f}/s"
    return f"{rates}; {statuses.count(400)} of {len(statuses)} expensive calls were refused"


def _text(server: TortureServer, form: Form) -> str:
    """Return a text of the other tenant."""
    body = {"model": server.model, "temperature": 0.7, "seed": 5, **form}
    answer = _ask(server, OTHER_KEY, body)
    require(answer.status == 200, f"another tenant got {answer.status}: {answer.body[:120]!r}")
    return str(answer.json()["choices"][0]["text"])


def _rates(server: TortureServer, expected: Sequence[str], seconds: float) -> list[float]:
    """Return the texts per second of each kind, with all kinds requested at once."""
    counts = [0] * len(TEXTS)
    failures: list[str] = []
    end_s = time.monotonic() + seconds

    def ask_on(kind: int) -> None:
        try:
            while time.monotonic() < end_s:
                require(_text(server, TEXTS[kind]) == expected[kind], "another tenant's text has changed")
                counts[kind] += 1
        except Exception as error:  # raised by the waiting thread
            failures.append(str(error))

    threads = [threading.Thread(target=ask_on, args=(kind,)) for kind in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(not failures, "; ".join(failures[:1]))
    return [count / seconds for count in counts]


@contextmanager
def _expensive_texts(server: TortureServer, statuses: list[int]) -> Iterator[None]:
    """Send requests with expensive grammars in the background; each is new, because a second use is refused at once."""
    over, numbers = threading.Event(), itertools.count()

    def ask_on() -> None:
        while not over.is_set():
            try:
                statuses.append(_ask(server, KEY, _expensive_body(server, next(numbers)), timeout_s=PATIENCE_S).status)
            except OSError:
                statuses.append(GIVEN_UP)

    threads = [threading.Thread(target=ask_on) for _ in range(NUM_HOSTILE)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _expensive_body(server: TortureServer, number: int) -> Form:
    """Return a request with a grammar that is different for each number."""
    kind, text = DEAR[number % len(DEAR)]
    body = {"model": server.model, "prompt": "A block", "max_tokens": 400, "temperature": 1.0, "seed": number}
    return body | {"n": 1 + number % 3, "structured_outputs": {kind: text.replace("{}", str(number))}}


def _ask(server: TortureServer, key: str, body: Form, *, timeout_s: float = 120.0) -> Answer:
    headers = {"Authorization": f"Bearer {key}"}
    return ask(f"{server.url}/v1/completions", body, headers=headers, timeout_s=timeout_s)


GRAMMARS = (Case("L9", "grammars that are expensive to follow", expensive_grammars),)
