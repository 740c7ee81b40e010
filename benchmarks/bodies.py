"""Sends bodies that are made to hurt to a server of the guide, and writes what each cost it.

    python benchmarks/bodies.py --markdown benchmarks/RESULTS.md
    python benchmarks/bodies.py --before OTHER/.venv/bin/python      sent to the quire of another tree first

Each body is sent at its full size and, as what is too large is refused unread, at the size that is just allowed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from quire.core.config import EngineConfig
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.torture.floods import FLOODS, MEBIBYTE, Flood, limit_of, send_flood, watching
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark

HEADER = ("body", "server", "path", "MiB", "status", "s", "grew by, MiB", "slowest /livez, ms")
TEXT = """Each body is sent to a server of the guide, at its full size and at the largest size that the server allows.
The columns: the status, the time of the answer, the peak growth of the front process, and the slowest answer to
`/livez`, which a separate process requests every 50 ms to see how long the event loop was blocked."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--before", metavar="PYTHON", help="the interpreter of another tree, whose server is asked first")
    made.add_argument("--only", nargs="+", default=(), metavar="WORD", help="bodies whose names have such a word")
    made.add_argument("--title", help="title of the part")
    made.add_argument("--json", metavar="FILE", help="write all samples")
    made.add_argument("--markdown", metavar="FILE", help="write the part of a page of results")
    return made


def measured(options: argparse.Namespace, tell: Tell) -> Iterator[Section]:
    config = EngineConfig(model="guide", kv_memory="16MiB", num_threads=1)
    servers = {"before": options.before, "now": sys.executable} if options.before else {"now": sys.executable}
    rows: list[tuple[str, ...]] = []
    for flood in FLOODS:
        if options.only and not any(word in flood.name for word in options.only):
            continue
        for name, python in servers.items():
            with ServerProcess(config, python=python) as server:
                ask(f"{server.url}/tokenize", {"prompt": "warm up"})
                for row in rows_of(server, flood):
                    rows.append((row[0], name, *row[1:]))
                    tell(" · ".join(rows[-1]))
    samples: dict[str, object] = {f"{row[0]}, {row[1]}, {row[3]} MiB": row[4:] for row in rows}
    yield Section("Bodies that are made to hurt", TEXT, HEADER, rows, samples)


def rows_of(server: ServerProcess, flood: Flood) -> Iterator[tuple[str, ...]]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    address = host, int(port)
    limit = limit_of(address, flood.path, {})
    for num_bytes in sorted({flood.num_bytes, min(flood.num_bytes, limit)}, reverse=True):
        body = flood.body(num_bytes)
        with watching(server.pid, server.url) as watched:
            try:
                answer = send_flood(address, flood.path, body, {})
                status, seconds = str(answer.status), f"{answer.seconds:.2f}"
            except OSError as error:
                status, seconds = type(error).__name__, "–"
        grown, slowest = watched.growth_bytes / MEBIBYTE, 1e3 * watched.slowest_s
        yield flood.name, flood.path, f"{len(body) / MEBIBYTE:.2f}", status, seconds, f"{grown:.0f}", f"{slowest:.0f}"


if __name__ == "__main__":
    options = parser().parse_args()
    program = "python benchmarks/bodies.py"
    raise SystemExit(run_benchmark(options, "Bodies", lambda tell: measured(options, tell), program=program))
