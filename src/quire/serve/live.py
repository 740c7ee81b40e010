"""Live: memory events, for clients that watch a server over HTTP.

    engine ── LiveFrame ──► LiveMirror ──► for each LiveReader: the blocks and requests that have changed since its last
    gate, generation ──► LiveTotals ──┘    line ──► a line of JSON, at its own pace

An engine records and sends events only while its memory has readers. With several engines, each reader watches one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from starlette.types import Send

import quire
from quire.core.clock import Clock
from quire.core.errors import ExecutionError
from quire.engine.records.live import LiveFrame
from quire.engine.records.stats import EngineStats, ModelState, ReplicaStats
from quire.serve.gate import Gate
from quire.serve.greeting import example_calls, use_of
from quire.serve.json_line import encode
from quire.serve.live_history import LiveHistory
from quire.serve.live_mirror import Holdings, LiveMirror
from quire.serve.live_places import LiveShared
from quire.serve.live_reader import Line, LiveReader
from quire.serve.model import ServedModel
from quire.serve.sse import HEADERS, LongAnswer
from quire.serve.tenants import ANYBODY, Tenant

FRAMES_EVERY_S: Final = 0.125
BEATS_EVERY_S: Final = 1.0
"""A reader gets a frame at least this often, even if nothing happens."""
ADDRESS: Final = "{address}"
"""A placeholder in example calls: the reader replaces it with the address that it uses for this server."""
MOST_CALLS: Final = 1 << 14
"""How many call ids to remember: the newest."""
LIVE_HEADERS: Final = ((b"content-type", b"application/x-ndjson"), *HEADERS)


@dataclass(slots=True)
class LiveTotals:
    """Token counts of a tenant's calls since the server started."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class LiveView:
    """One engine's memory, as its readers see it. `received_s`: when the engine's last frame arrived."""

    mirror: LiveMirror | None = None
    received_s: float = 0.0
    readers: set[LiveReader] = field(default_factory=set)

    def take_in(self, frame: LiveFrame, now_s: float) -> None:
        """Add a frame of the engine. Mutates."""
        if not self.readers:
            return  # left over from a watch that has ended
        if frame.begins:
            self.begin(LiveMirror(frame.num_blocks))
        if self.mirror is None:
            return
        self.received_s = now_s
        change = self.mirror.take_in(frame)
        for reader in self.readers:
            if reader.owe(self.mirror, change) and self.mirror.is_whole:
                reader.wake.set()

    def begin(self, mirror: LiveMirror | None) -> None:
        """Discard everything known, and start with this mirror. Mutates."""
        self.mirror = mirror
        for reader in self.readers:
            reader.begin()


class Live:
    """Watches the engines of a model for its readers. Use it in one event loop.

    Adds its model's name to `shared.served`.
    """

    def __init__(
        self, model: ServedModel, model_names: Sequence[str], gate: Gate, shared: LiveShared, clock: Clock
    ) -> None:
        self._model = model
        self._model_names = model_names
        self._gate = gate
        self._shared = shared
        shared.served.append(self.name_for)
        self._clock = clock
        self._readers: set[LiveReader] = set()
        self._totals: dict[str, LiveTotals] = {}
        self._calls: dict[str, str] = {}
        self._history = LiveHistory(clock, model.stats)
        self._views: dict[int, LiveView] = {}  # of the watched engines, by number
        self.is_closed = False

    @property
    def num_readers(self) -> int:
        """The number of readers."""
        return len(self._readers)

    @property
    def state(self) -> str:
        """The server's state, in one word."""
        return "draining" if self._gate.is_draining else self._model.state.value

    def name_for(self, tenant: Tenant) -> str:
        """Return a name by which a tenant may call the model or one of its adapters; "": none. Does not mutate."""
        return next((name for name in (*self._model_names, *self._model.adapters) if tenant.may_call(name)), "")

    def states(self, reader: LiveReader) -> tuple[str, ...]:
        """Return the server's state, and for an operator each engine's with its failure. Does not mutate."""
        replicas = self._model.stats().replicas if reader.name is None else ()
        return self.state, *(part for each in replicas for part in (each.state.value, each.failure))

    # ---- readers ------------------------------------------------------------------------------------------------

    def join(self, tenant: Tenant, replica: int = 0) -> LiveReader:
        """Return a new reader of one engine; raises `ApiError` at the limit of readers. Mutates."""
        self._shared.places.require(tenant, self._shared.watching)
        reader = LiveReader(tenant, self._calls, replica)
        reader.num_rejected = self._num_rejected(reader)
        view = self._views.setdefault(replica, LiveView())
        if view.mirror is not None or self.state != ModelState.READY.value:
            reader.wake.set()  # send what is known at once
        reader.states = self.states(reader)
        self._readers.add(reader)
        view.readers.add(reader)
        self._shared.watching.append(tenant)
        if len(view.readers) == 1:
            with suppress(ExecutionError):  # it is gone for good, as its state shows
                self._model.watch(FRAMES_EVERY_S, partial(self._take_in, view), replica)
        return reader

    def leave(self, reader: LiveReader) -> None:
        """Remove a reader; stop watching an engine without readers. Mutates."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        self._shared.watching.remove(reader.tenant)
        readers = self._views[reader.replica].readers
        readers.remove(reader)
        if not readers:
            del self._views[reader.replica]
            self._model.unwatch(reader.replica)

    def close(self) -> None:
        """End all streams. Mutates."""
        self.is_closed = True
        for reader in self._readers:
            reader.wake.set()

    # ---- records ------------------------------------------------------------------------------------------------

    def note_call(self, engine_id: str, call_id: str) -> None:
        """Note the engine's id of a request of this call. Mutates."""
        self._calls[engine_id] = call_id
        if len(self._calls) > MOST_CALLS:
            del self._calls[next(iter(self._calls))]

    def note_tokens(self, tenant: Tenant, num_prompt: int, num_generated: int, num_cached: int) -> None:
        """Add tokens to a tenant's counts. Mutates."""
        totals = self._totals.get(tenant.name)
        if totals is None:
            totals = self._totals[tenant.name] = LiveTotals()
        totals.prompt_tokens += num_prompt
        totals.generated_tokens += num_generated
        totals.cached_tokens += num_cached
        self._history.note_tokens(num_prompt, num_generated)

    def note_first_token(self, tenant: Tenant, seconds: float) -> None:
        """Note a tenant's time to first token. Mutates."""
        self._history.note_first_token(seconds)
        for reader in self._readers:
            if reader.name is None or reader.name == tenant.name:
                reader.first_tokens_s.append(seconds)

    def note_gap(self, tenant: Tenant, seconds: float) -> None:
        """Note the time between two pieces of a tenant's text. Mutates."""
        self._history.note_gap(seconds)
        for reader in self._readers:
            if reader.name is None or reader.name == tenant.name:
                reader.gaps_s.append(seconds)

    def _take_in(self, view: LiveView, frame: LiveFrame) -> None:
        view.take_in(frame, self._clock.now())

    # ---- lines --------------------------------------------------------------------------------------------------

    def hello(self, reader: LiveReader) -> Line:
        """Return a reader's first line. Does not mutate."""
        report, config, tokenizer = self._model.report, self._model.config, self._model.tokenizer
        plan, name = report.plan, self.name_for(reader.tenant)
        disk_cache = report.disk_cache if reader.name is None else ""  # a tenant must not see the operator's folders
        has_chat = tokenizer is not None and tokenizer.has_chat_template
        has_keys = reader.tenant.name != ANYBODY.name
        calls = example_calls(ADDRESS, name, has_keys=has_keys, use=use_of(config, has_chat=has_chat))
        return {
            "type": "hello",
            "version": quire.__version__,
            "model": name,
            "models": [each for name_for in self._shared.served if (each := name_for(reader.tenant))],
            "block_size": config.block_size,
            "num_blocks": plan.num_blocks,
            "bytes_per_block": plan.bytes_per_block,
            "num_groups": plan.num_groups,
            "replica": reader.replica,
            "num_replicas": report.num_replicas,
            "scope": "operator" if reader.name is None else "tenant",
            "tenant": reader.tenant.name,
            "max_num_seqs": config.max_num_seqs,
            "generates": not config.one_step,
            "reads_images": report.reads_images and has_chat,
            "facts": replace(report, model=name, disk_cache=disk_cache).facts(),
            "calls": {where: "\n".join(each) for where, each in calls.items()},
            "history": self._history.rows() if reader.name is None else [],
        }

    def frame(self, reader: LiveReader) -> Iterator[bytes]:
        """Yield a frame's line, in one piece unless it is very long. Mutates the reader."""
        stats, view = self._model.stats(), self._views[reader.replica]
        mirror = self._whole_mirror(reader.replica, stats)
        at_s = 0.0 if mirror is None else mirror.at_s + self._clock.now() - view.received_s
        owed, block_parts = reader.take(mirror, at_s)
        running, waiting = reader.num_running_and_waiting(mirror)
        replicas = stats.replicas if reader.name is None else ()  # a tenant must not see what others do
        if len(replicas) > 1:  # the mirror covers only one engine
            running, waiting = stats.num_running, stats.num_waiting
        elif mirror is not None:
            stats = mirror.stats  # of the same moment as the blocks
        rejected = self._num_rejected(reader)
        if rejected > reader.num_rejected:
            owed["events"].append([owed["t"], "rejected", -1, rejected - reader.num_rejected])
        reader.num_rejected, reader.states = rejected, self.states(reader)
        line = {
            "type": "frame",
            **owed,
            "step": None if reader.name is not None else 0 if mirror is None else mirror.stats.steps_total,
            "ledger": self._ledger(reader, mirror),
            "totals": self._totals_of(reader, mirror, stats),
            "running": running,
            "waiting": waiting,
            "state": self.state,
            "replicas": list(map(_replica_row, replicas)),
            **reader.take_latencies(),
        }
        piece = encode(line)[:-1] + b',"blocks":['
        for index, rows in enumerate(block_parts):
            if index:
                yield piece
                piece = b","
            piece += encode(rows)[1:-1]
        yield piece + b"]}\n"

    def _whole_mirror(self, replica: int, stats: EngineStats) -> LiveMirror | None:
        """Return an engine's mirror if it is complete, else None. Mutates: discards the mirror of a lost engine."""
        view, replicas = self._views[replica], stats.replicas
        state = replicas[replica].state if replica < len(replicas) else self._model.state
        if not state.has_engine and view.mirror is not None:
            view.begin(None)
        return view.mirror if view.mirror is not None and view.mirror.is_whole else None

    def _ledger(self, reader: LiveReader, mirror: LiveMirror | None) -> Line:
        """Return the use of all memory, or of a tenant's own, which has no free part."""
        size = self._model.config.block_size
        if mirror is None:
            free = self._model.report.plan.num_blocks if reader.name is None else 0
            names = ("used", "cached", "free", "stored", "reserved", "fragmented", "saved")
            return dict.fromkeys(names, 0) | {"free": free}
        held = mirror.holdings(reader.name)
        return {
            "used": held.used,
            "cached": held.cached,
            "free": mirror.num_blocks - held.used - held.cached if reader.name is None else 0,
            "stored": held.used * size - held.reserved - held.fragmented,
            "reserved": held.reserved,
            "fragmented": held.fragmented,
            "saved": held.saved,
        }

    def _totals_of(self, reader: LiveReader, mirror: LiveMirror | None, stats: EngineStats) -> Line:
        """Return the counts since the server started; for a tenant's memory, since the watch started."""
        if reader.name is None:
            every = list(self._totals.values())
            queried, hit = stats.queried_tokens_total, stats.hit_tokens_total
            evictions, preemptions = stats.evictions_total, stats.preemptions_total
            guesses = stats.num_verified_guesses, stats.num_right_guesses, stats.drafts_total
            disk = stats.num_disk_slots, stats.num_kept_blocks, stats.disk_hit_tokens_total
            host = stats.num_host_blocks, stats.num_cached_host_blocks, stats.host_hit_tokens_total
        else:
            every = [self._totals.get(reader.name, LiveTotals())]
            queried, hit = every[0].prompt_tokens, every[0].cached_tokens
            held = Holdings() if mirror is None else mirror.holdings(reader.name)
            evictions, preemptions = held.evictions, held.preemptions
            guesses = disk = host = 0, 0, 0  # others' counts would reveal what they send
        return {
            "prompt_tokens": sum(each.prompt_tokens for each in every),
            "generated_tokens": sum(each.generated_tokens for each in every),
            "queried_tokens": queried,
            "hit_tokens": hit,
            "evictions": evictions,
            "preemptions": preemptions,
            "verified_guesses": guesses[0],
            "right_guesses": guesses[1],
            "drafts": guesses[2],
            "disk_slots": disk[0],
            "disk_blocks": disk[1],
            "disk_tokens": disk[2],
            "host_blocks": host[0],
            "host_cached": host[1],
            "host_tokens": host[2],
            "rejected": self._num_rejected(reader),
        }

    def _num_rejected(self, reader: LiveReader) -> int:
        return self._gate.refusals.total() if reader.name is None else self._gate.refusals_of[reader.name]


def _replica_row(replica: ReplicaStats) -> Line:
    return {
        "state": replica.state.value,
        "failure": replica.failure,
        "texts": replica.num_texts,
        "restarts": replica.restarts_total,
        "routes": replica.routes,
        "blocks": replica.engine.num_blocks,
        "used": replica.engine.num_used_blocks,
        "cached": replica.engine.num_cached_blocks,
        "queried_tokens": replica.engine.queried_tokens_total,
        "hit_tokens": replica.engine.hit_tokens_total,
    }


async def lines(live: Live, reader: LiveReader) -> AsyncGenerator[bytes, None]:
    """Yield a reader's lines, at most one per `FRAMES_EVERY_S` and at least one per `BEATS_EVERY_S`."""
    yield encode(live.hello(reader)) + b"\n"
    while not live.is_closed:
        await _news(live, reader)
        for piece in live.frame(reader):
            yield piece
            await asyncio.sleep(0)  # let other tasks run
        await asyncio.sleep(FRAMES_EVERY_S)


async def _news(live: Live, reader: LiveReader) -> None:
    """Wait for news, a changed state, or `BEATS_EVERY_S`. Mutates."""
    now = asyncio.get_running_loop().time
    end_s = now() + BEATS_EVERY_S
    while not reader.wake.is_set() and live.states(reader) == reader.states and now() < end_s:
        with suppress(TimeoutError):
            async with asyncio.timeout(FRAMES_EVERY_S):
                await reader.wake.wait()
    reader.wake.clear()


class LiveStream(LongAnswer):
    """The answer to `GET /live`: lines, until the reader disconnects or the server stops."""

    has_begun = True  # a client that leaves is no error: most streams end this way

    def __init__(self, live: Live, tenant: Tenant, replica: int) -> None:
        self._live = live
        self._tenant = tenant
        self._replica = replica

    async def write(self, send: Send) -> None:
        """Send the lines; raises `ApiError` at the limit of readers. Mutates."""
        reader = self._live.join(self._tenant, self._replica)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(LIVE_HEADERS)})
            async with aclosing(lines(self._live, reader)) as written:
                async for piece in written:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._live.leave(reader)
