"""Load: more than the server can serve, thousands of connections, long prompts, too little memory, restarts."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from quire.core.config import EngineConfig
from quire.instruments.bench.load_figures import BETWEEN_TOKENS, REJECTION, summarize_load
from quire.instruments.bench.load_run import Target, run_closed, run_open
from quire.instruments.bench.offered_load import COMPLETIONS, DrawnShape, drawn_requests
from quire.instruments.bench.serve import request_rate
from quire.instruments.bench.shapes import write_byte_tokenizer, write_random_checkpoint
from quire.instruments.http.connection import HttpClient
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.http.sockets import Stream
from quire.instruments.torture.bystanders import outcome_of
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.prober import start_prober
from quire.instruments.torture.retries import RetryingClient
from quire.instruments.torture.stage import VOCAB_SIZE, ServerSpec, Stage, TortureServer
from quire.reporting.samples import percentile
from quire.simulate.workload.arrivals import POISSON, arrival_times

MAX_GROWTH_BYTES = 5e6
MAX_PROBE_MS = 50.0

LONG_MODEL: dict[str, object] = {"max_position_embeddings": 40_960, "vocab_size": 256}
"""A model that reads long prompts quickly."""

SLOW_MODEL: dict[str, object] = {
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
}
"""A model with realistic step times: with the guide, the server itself would be the bottleneck."""

WARM_UP_CYCLES = 1000
NUM_FLOODS = 24
"""Enough clients that other requests always wait ahead."""


def overload(stage: Stage) -> str:
    """L1: twice the capacity, in an open loop: goodput holds, and the rest is rejected at once with Retry-After."""
    seconds = 20.0 if stage.is_quick else 600.0
    model = _random_model(stage, "slow", SLOW_MODEL)
    spec = ServerSpec.of(model=model, kv_memory="64MiB", max_num_seqs=16, touch_kv_memory="start")
    with stage.serving(spec) as server:
        target, shape = Target(server.url, server.model, COMPLETIONS), DrawnShape(48, 40)
        closed = run_closed(target, drawn_requests(shape, VOCAB_SIZE, stage.seed), 16, max(8.0, seconds / 20), 10.0)
        figures = summarize_load("closed", closed, {})
        peak = request_rate(closed, figures)
        before = server.process.resident_bytes() or 0
        arrivals = arrival_times(2 * peak, seconds, pattern=POISSON, seed=stage.seed)
        result = run_open(target, drawn_requests(shape, VOCAB_SIZE, stage.seed + 1), arrivals, seconds, 60.0)
        growth = (server.process.resident_bytes() or 0) - before
        found = summarize_load("2×", result, {})
        require(found.num_failed == 0, f"{found.num_failed} requests failed: {found.first_error}")
        require(found.num_rejected > 0, "no request was rejected: the queue has no limit, or this was not an overload")
        slowest = found.times_ms[REJECTION].p99
        require(found.good >= 0.95 * peak, f"goodput is {found.good:.1f}/s, and the peak is {peak:.1f}/s")
        require(slowest < 50.0, f"the p99 of rejections is {slowest:.0f} ms")
        require(growth < 4 * MAX_GROWTH_BYTES, f"memory grew by {growth / 1e6:.1f} MB")
    return f"goodput {found.good / peak:.2f} of the peak, rejections {slowest:.0f} ms at p99, {growth / 1e6:+.1f} MB"


def many_connections(stage: Stage) -> str:
    """L2: a thousand idle connections and 200 streams: every stream is served, and probes are answered at once."""
    num_idle = 200 if stage.is_quick else 1000
    _allow_files(num_idle + 600)
    spec = ServerSpec.of(model=_random_model(stage, "slow", SLOW_MODEL), kv_memory="192MiB", max_num_seqs=64)
    with stage.serving(spec) as server, ExitStack() as stack:
        for _ in range(num_idle):
            stack.enter_context(_idle_connection(server))
        prober = stack.enter_context(start_prober(f"{server.url}/livez"))
        target = Target(server.url, server.model, COMPLETIONS)
        requests = itertools.islice(drawn_requests(DrawnShape(16, 64), VOCAB_SIZE, stage.seed), 200)
        arrivals = [0.02 * index for index in range(200)]
        result = run_open(target, requests, arrivals, 4.0, 300.0)
        probes = json.loads(prober.communicate(timeout=30.0)[0])
        lost = [outcome.error or "cut off" for outcome in result.outcomes if not outcome.is_done]
        require(not lost, f"{len(lost)} streams were not served: {lost[:1]}")
        require(len(probes) > 20, f"{len(probes)} probes were answered")
        slowest = 1e3 * percentile(probes, 0.99)
        require(slowest < MAX_PROBE_MS, f"the p99 of /livez is {slowest:.0f} ms")
    return f"200 streams and {num_idle} idle connections, /livez {slowest:.0f} ms at p99"


def long_prompt(stage: Stage) -> str:
    """L3: a prompt of 32,000 tokens arrives during 50 chats; the time between their tokens stays bounded."""
    folder = _random_model(stage, "long", LONG_MODEL)
    spec = ServerSpec.of(model=folder, kv_memory="64MiB", max_num_seqs=64, max_num_batched_tokens=128)
    length = 8_000 if stage.is_quick else 32_000
    with stage.serving(), ServerProcess(spec.config) as process:
        target = Target(process.url, str(ask(f"{process.url}/v1/models").json()["data"][0]["id"]), COMPLETIONS)
        done: list[float] = []
        thread = threading.Thread(target=lambda: done.append(_prefill(target, length)))
        timer = threading.Timer(2.0, thread.start)
        timer.start()
        result = run_closed(target, drawn_requests(DrawnShape(16, 128), 256, stage.seed), 50, 6.0, 60.0)
        timer.join()
        thread.join()
        figures = summarize_load("50 chats", result, {})
        require(figures.num_failed == 0, f"{figures.num_failed} chats failed: {figures.first_error}")
    worst, alone = figures.times_ms[BETWEEN_TOKENS].p99, 1e3 * done[0]
    require(worst < 250.0, f"the p99 between tokens is {worst:.0f} ms")
    require(worst < alone / 4, f"the p99 between tokens is {worst:.0f} ms, and the prompt took {alone:.0f} ms")
    return f"{length:,} tokens in {alone:.0f} ms; between tokens {worst:.0f} ms at p99"


def connect_and_leave(stage: Stage) -> str:
    """L4: clients connect and disconnect ten thousand times: memory, blocks and files are as before."""
    num_cycles = 400 if stage.is_quick else 10_000
    with stage.serving(ServerSpec.of(touch_kv_memory="start")) as server:
        body = {"model": server.model, "prompt": [9] * 24, "max_tokens": 200, "stream": True, "ignore_eos": True}
        asyncio.run(_come_and_leave(server, body, WARM_UP_CYCLES))  # for memory that is allocated only once
        before = server.process.resident_bytes() or 0
        asyncio.run(_come_and_leave(server, body, num_cycles))
        server.wait_idle()
        growth = (server.process.resident_bytes() or 0) - before
        require(growth < MAX_GROWTH_BYTES, f"memory grew by {growth / 1e6:.1f} MB")
    return f"{num_cycles:,} times, {growth / 1e6:+.1f} MB"


def soak(stage: Stage) -> str:
    """L5: an hour of mixed load: valid requests, bad requests, clients that disconnect, steps that fail."""
    seconds = 20.0 if stage.is_quick else 3600.0
    token, rng = stage.rare_token(), random.Random(stage.seed)
    never = {str(token): -100.0}  # other requests must not draw the failing token
    with stage.serving(ServerSpec.of({"QUIRE_FAILPOINTS": f"error:token={token}"}, kv_memory="4MiB")) as server:
        acts: tuple[Callable[[], None], ...] = (
            lambda: _expect(server, {200}, prompt=[rng.randrange(300, 1900)] * rng.randrange(1, 200), max_tokens=32),
            lambda: _expect(server, {400}, temperature=-1),
            lambda: _expect(server, {500}, prompt=[5, token, 7]),
            lambda: _leave(server, rng.randrange(5), never),
            lambda: _expect(server, {200}, prompt=[11] * 64, n=4, max_tokens=64, temperature=1.0, logit_bias=never),
        )
        end, num_acts = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            rng.choice(acts)()
            num_acts += 1
    return f"{num_acts:,} acts in {seconds:.0f} s, {stage.books.num_bystanders:,} bystanders"


def cache_thrash(stage: Stage) -> str:
    """L6: prompts that together need three times the memory, repeatedly: the right tokens, and always progress."""
    rounds = 2 if stage.is_quick else 10
    rng = random.Random(stage.seed)
    prompts = [[rng.randrange(300, 1900) for _ in range(120)] for _ in range(32)]
    fields: dict[str, Any] = {"max_tokens": 8, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    with stage.serving() as roomy:
        expected = [outcome_of(roomy.complete(prompt=prompt, **fields)) for prompt in prompts]
    with stage.serving(ServerSpec.of(kv_memory="2MiB")) as server:
        for _ in range(rounds):
            found = [outcome_of(server.complete(prompt=prompt, **fields)) for prompt in prompts]
            require(found == expected, "a prompt got other tokens")
        evictions = server.metric("quire_evictions_total")
        require(evictions > 0, "nothing was evicted: the memory is too large for this case")
    return f"{rounds * len(prompts)} prompts, {evictions:.0f} evictions"


def priorities(stage: Stage) -> str:
    """L7: requests of higher priority never stop; the lowest one is still served, because waiting raises priority."""
    spec = ServerSpec.of({"QUIRE_MAX_QUEUED_SEQUENCES": "64"}, policy="priority", max_num_seqs=2)
    with stage.serving(spec) as server:
        over = threading.Event()
        floods = [threading.Thread(target=_flood, args=(server, over)) for _ in range(NUM_FLOODS)]
        for thread in floods:
            thread.start()
        try:
            time.sleep(1.0)
            answer = server.complete(priority=1, max_tokens=4, timeout_s=150.0)
        finally:
            over.set()
            for thread in floods:
                thread.join()
        require(answer.status == 200, f"the lowest request got {answer.status}")
    return f"served after {answer.seconds:.1f} s"


def rolling_restart(stage: Stage) -> str:
    """L8: two servers are restarted in turn under load; clients that retry, like OpenAI's, see no failure."""
    config = EngineConfig(model="guide", kv_memory="8MiB", num_threads=1)
    num_restarts = 2 if stage.is_quick else 6
    with stage.serving(), ExitStack() as stack:
        servers = [stack.enter_context(ServerProcess(config)) for _ in range(2)]
        client = RetryingClient(lambda: [server.url for server in servers], seed=stage.seed)
        over = threading.Event()
        threads = [threading.Thread(target=client.call_on, args=(over,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for index in range(num_restarts):
                time.sleep(1.0)
                status = servers[index % 2].stop(60.0)
                require(status == 0, f"a server ended with status {status}")
                servers[index % 2] = stack.enter_context(ServerProcess(config))
            time.sleep(1.0)
        finally:
            over.set()
            for thread in threads:
                thread.join()
    require(not client.failures, f"{len(client.failures)} calls failed: {client.failures[:1]}")
    require(client.num_served > 20, f"only {client.num_served} calls were served")
    return f"{client.num_served} calls over {num_restarts} restarts, {client.num_retries} retries"


# ---- steps of the cases ---------------------------------------------------------------------------------------------


def _allow_files(count: int) -> None:
    """Allow this process, and servers that it starts later, to open this many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def _idle_connection(server: TortureServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=30.0)


def _random_model(stage: Stage, name: str, settings: dict[str, object]) -> str:
    """Return a folder with a model of random weights; each folder is made only once."""
    folder = stage.folder / name
    if not folder.exists():
        write_random_checkpoint(folder, "tiny", settings)
        write_byte_tokenizer(folder, int(str(settings["vocab_size"])))
    return str(folder)


def _prefill(target: Target, length: int) -> float:
    body = {"model": target.model, "prompt": [7] * length, "max_tokens": 1}
    answer = ask(f"{target.url}/v1/completions", body, timeout_s=300.0)
    require(answer.status == 200, f"the long prompt got {answer.status}: {answer.error.get('message')}")
    return answer.seconds


async def _come_and_leave(server: TortureServer, body: dict[str, Any], count: int) -> None:
    """Disconnect at once, or after one, two or three pieces of the answer; eight clients at a time."""
    client = HttpClient(server.url)
    request = client.post_request("/v1/completions", json.dumps(body).encode())
    numbers = iter(range(count))

    async def one_after_another() -> None:
        for number in numbers:
            pieces: asyncio.Queue[bytes] = asyncio.Queue()
            task = asyncio.create_task(client.exchange(request, pieces.put_nowait))
            for _ in range(number % 4):
                piece = asyncio.create_task(pieces.get())
                await asyncio.wait((task, piece), timeout=30.0, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    status = task.result().status if task.done() else 0
                    require(status == 200, f"client {number} got {status or 'nothing'}")
                    break  # the whole answer had fewer pieces
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one_after_another() for _ in range(8)))
    client.close()


def _expect(server: TortureServer, statuses: set[int], **fields: Any) -> None:
    answer = server.complete(**fields)
    require(answer.status in statuses, f"{list(fields)} got {answer.status}: {answer.error.get('message')}")


def _leave(server: TortureServer, num_events: int, logit_bias: dict[str, float]) -> None:
    body = {"model": server.model, "prompt": [13] * 40, "max_tokens": 400, "n": 2, "stream": True, "temperature": 1.0}
    body["logit_bias"] = logit_bias
    with Stream(server.address, "/v1/completions", body) as stream:
        if num_events:
            stream.read_events(num_events)


def _flood(server: TortureServer, over: threading.Event) -> None:
    while not over.is_set():
        server.complete(priority=0, max_tokens=128, ignore_eos=True, prompt=[17] * 8)


LOADS = (
    Case("L1", "twice of what can be done", overload),
    Case("L2", "a thousand connections", many_connections),
    Case("L3", "a long prompt among chats", long_prompt),
    Case("L4", "clients that come and leave", connect_and_leave),
    Case("L5", "everything at once, for long", soak),
    Case("L6", "a cache that is too small", cache_thrash),
    Case("L7", "the last in order", priorities),
    Case("L8", "restarts in turn", rolling_restart),
)
