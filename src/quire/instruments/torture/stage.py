"""Stage: the servers of the cases, with bystanders on each, and the final checks.

    with stage.serving(spec) as server:        a server for these settings; bystanders start
        …                                      the case
                                               bystanders stop; all blocks must be free, files and threads as before

Cases with the same settings share a server as long as it is healthy: a case must have no effect on the next one. A case
that damages its server reports that, and the server is restarted.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.instruments.http.plain import Answer, ask
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.torture.bystanders import Bystanders, Outcome, expected_outcomes
from quire.instruments.torture.failure import CaseFailedError, require

IDLE_S = 15.0
STATS_S = 0.3
MORE_FILES, MORE_THREADS = 4, 12
KEY, OTHER_KEY = "torture-key-one", "torture-key-two"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The settings of a server: those of the engine, and environment variables for everything else."""

    engine: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None, **engine: Any) -> ServerSpec:
        """Return the spec with these settings."""
        return cls(tuple(sorted(engine.items())), tuple(sorted((environment or {}).items())))

    @property
    def config(self) -> EngineConfig:
        """The settings of the engine, with little memory, so that a lost block matters."""
        return EngineConfig(**{"model": "guide", "kv_memory": "16MiB", "num_threads": 1, **dict(self.engine)})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request: with a key, if the server requires one."""
        has_keys = not {"QUIRE_API_KEY", "QUIRE_API_KEYS_FILE"}.isdisjoint(dict(self.environment))
        return {"Authorization": f"Bearer {KEY}"} if has_keys else {}


VOCAB_SIZE = 2048
"""The size of the guide's vocabulary."""

PLAIN = ServerSpec.of()
KEYED = ServerSpec.of({"QUIRE_API_KEY": f"{KEY},{OTHER_KEY}", "QUIRE_OPEN_METRICS": "yes"})
KEPT = (PLAIN, KEYED)
"""Cases share these servers, one after another; any other server is for one case only."""


@dataclass(slots=True)
class Resources:
    """The resources of a server."""

    num_files: int
    num_threads: int

    @classmethod
    def of(cls, server: ServerProcess) -> Resources:
        """Count the resources of the front process."""
        process = Path("/proc") / str(server.pid)
        return cls(len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


class TortureServer:
    """A server under attack, with the requests and measurements of cases."""

    def __init__(self, spec: ServerSpec, process: ServerProcess, model: str) -> None:
        self.spec = spec
        self.process = process
        self.model = model
        self.headers = spec.headers
        self.expected: Sequence[Outcome] = ()  # the outcomes of its bystanders
        self.is_spoiled = False
        self.may_lose_bystanders = False
        self.bystanders: Bystanders | None = None
        self.resources = Resources.of(process)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self.process.url

    @property
    def address(self) -> tuple[str, int]:
        """The address of the server, for sockets."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def get(self, path: str, *, timeout_s: float = 30.0) -> Answer:
        """Get a path."""
        return ask(self.url + path, headers=self.headers, timeout_s=timeout_s)

    def complete(self, *, path: str = "/v1/completions", timeout_s: float = 120.0, **fields: Any) -> Answer:
        """Request a completion, by default a short greedy one."""
        asked = {"model": self.model, "prompt": "A block is", "max_tokens": 8, "temperature": 0.0, **fields}
        body = {name: value for name, value in asked.items() if value is not None}
        return ask(self.url + path, body, headers=self.headers, timeout_s=timeout_s)

    def metric(self, name: str) -> float:
        """Return a number of /metrics, summed over its labels."""
        value = self.process.metric(name, self.headers)
        require(value is not None, f"/metrics has no {name}")
        return value or 0.0

    def wait_for_metric(self, name: str) -> float:
        """Wait until a number of /metrics is 1 or more, because the engine reports with a delay; returns it."""
        wait_until(lambda: self.metric(name) >= 1, f"at {name} 1", 2.0, quietly=True)
        return self.metric(name)

    def is_ready(self) -> bool:
        """Whether /readyz reports ready."""
        try:
            return self.get("/readyz", timeout_s=5.0).status == 200
        except OSError:
            return False

    def wait_idle(self) -> int:
        """Wait until no request is served; returns the number of blocks still held."""
        wait_until(lambda: not self._num_busy(), "idle", IDLE_S, quietly=True)
        time.sleep(STATS_S)  # the engine's report may be this old
        return int(self.metric("quire_kv_blocks_used"))

    def _num_busy(self) -> float:
        return self.metric("quire_kv_blocks_used") + self.metric("quire_sequences_admitted")


@dataclass(slots=True)
class Books:
    """The counts of a case."""

    num_leaked_blocks: int = 0
    num_changed: int = 0
    num_bystanders: int = 0


class Stage:
    """Starts servers and keeps the counts. A context manager, which stops all servers at its end."""

    def __init__(self, *, seed: int, is_quick: bool) -> None:
        self.seed = seed
        self.is_quick = is_quick
        self.books = Books()
        self._servers: dict[ServerSpec, TortureServer] = {}
        self._expected: list[Outcome] = []
        self._tokens: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="quire-torture-")

    @property
    def folder(self) -> Path:
        """A folder for the files of cases."""
        return Path(self._folder.name)

    def rare_token(self) -> int:
        """Return a token that is in no bystander's text, so that it can trigger a fault."""
        return next(token for token in range(VOCAB_SIZE - 1, 0, -1) if token not in self._tokens)

    def begin_case(self) -> None:
        """Start new counts. Mutates."""
        self.books = Books()

    @contextmanager
    def serving(self, spec: ServerSpec = PLAIN) -> Iterator[TortureServer]:
        """Yield a server with bystanders; afterwards its state must be as before, or the case fails."""
        server = self._server(spec)
        headers = dict(server.headers)
        bystanders = server.bystanders = Bystanders(server.url, server.model, server.expected, headers)
        server.may_lose_bystanders = False
        bystanders.start()
        try:
            yield server
        except BaseException:
            server.is_spoiled = True
            raise
        finally:
            bystanders.stop()
            self.books.num_changed += len(bystanders.counts.changed)
            self.books.num_bystanders += bystanders.counts.num_same
            if server.is_spoiled:
                self._stop(server)
        require(not bystanders.counts.changed, "; ".join(bystanders.counts.changed[:1]))
        if not server.is_spoiled:
            self._settle(server, bystanders)

    def close(self) -> None:
        """Stop all servers. Can be called twice."""
        for server in list(self._servers.values()):
            self._stop(server)
        self._folder.cleanup()

    def __enter__(self) -> Stage:
        reference = self._server(PLAIN)
        self._expected = reference.expected = expected_outcomes(reference.url, reference.model)
        self._tokens = {token for outcome in self._expected for choice in outcome for token in choice.token_ids}
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _server(self, spec: ServerSpec) -> TortureServer:
        found = self._servers.get(spec)
        if found is not None:
            return found
        process = ServerProcess(spec.config, environment=dict(spec.environment), start_timeout_s=60.0).start()
        model = str(ask(f"{process.url}/v1/models", headers=spec.headers).json()["data"][0]["id"])
        server = self._servers[spec] = TortureServer(spec, process, model)
        is_guide = spec.config.model == "guide"
        server.expected = self._expected if is_guide else expected_outcomes(server.url, model, spec.headers)
        return server

    def _stop(self, server: TortureServer) -> None:
        self._servers.pop(server.spec, None)
        server.process.stop(5.0)

    def _settle(self, server: TortureServer, bystanders: Bystanders) -> None:
        """Raise unless the server is as before; count the blocks that it has not freed."""
        try:
            self.books.num_leaked_blocks += server.wait_idle()
            require(self.books.num_leaked_blocks == 0, f"{self.books.num_leaked_blocks} blocks are still held")
            if not server.may_lose_bystanders:
                require(not bystanders.counts.lost, f"a bystander was lost: {'; '.join(bystanders.counts.lost[:1])}")
            before = server.resources
            wait_until(lambda: Resources.of(server.process).num_files <= before.num_files + MORE_FILES, "rid of files")
            now = Resources.of(server.process)
            require(now.num_threads <= before.num_threads + MORE_THREADS, f"{now.num_threads} threads are left")
            require(server.is_ready(), "the server is not ready afterwards")
        except (CaseFailedError, OSError):
            self._stop(server)
            raise
        if server.spec not in KEPT:
            self._stop(server)


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = 10.0, *, quietly: bool = False) -> float:
    """Wait until `is_so` and return the seconds; raises `CaseFailedError` on timeout, unless `quietly`."""
    started = time.monotonic()
    while True:
        with suppress(OSError, ExecutionError):
            if is_so():
                return time.monotonic() - started
        if time.monotonic() - started > timeout_s:
            if quietly:
                return timeout_s
            raise CaseFailedError(f"not {what} after {timeout_s:g} s")
        time.sleep(0.02)
