"""Faults within a server: steps that fail, too little memory, clients that disconnect or do not read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.instruments.http.plain import Answer
from quire.instruments.http.sockets import Stream
from quire.instruments.torture.bystanders import NUM_THREADS, outcome_of
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.in_process import FailingAllocations, run_prompts
from quire.instruments.torture.stage import ServerSpec, Stage, TortureServer, wait_until

STREAM = {"stream": True, "ignore_eos": True}
GONE_S = 1.0
"""The time until the requests of a disconnected client must be gone; their texts would take longer."""

MAX_HELD_BYTES = 128e6
"""A text that no client reads is kept in the engine's form, up to the requested length."""


def failing_forward(stage: Stage) -> str:
    """F1: every step with a certain token raises; only the request with that token fails."""
    token = stage.rare_token()
    with stage.serving(ServerSpec.of({"QUIRE_FAILPOINTS": f"error:token={token}"})) as server:
        answers = [_poisoned(server, token) for _ in range(3)]
        status, events = _poisoned_stream(server, token)
        for answer in answers:
            require(answer.status == 500, f"the culprit got {answer.status}")
            require(answer.error.get("type") == "server_error", f"its error is {answer.error}")
            require(answer.headers.get("x-should-retry") == "false", "the answer tells the client to retry")
        ended = status == 500 or (bool(events) and b'"error"' in events[-1])
        require(ended, f"the culprit's stream got {status} and ended with {events[-1:]}")
        failed = server.wait_for_metric("quire_failed_steps_total")
        require(failed > 0, "no step has failed: the fault was not injected")
        _wait_for_bystanders(server, 4)
    return f"{failed:.0f} steps failed, {len(answers) + 1} culprits ended alone"


def not_finite(stage: Stage) -> str:
    """F2: the logits of one sequence are not finite."""
    token = stage.rare_token()
    with stage.serving(ServerSpec.of({"QUIRE_FAILPOINTS": f"nan:token={token}"})) as server:
        answer = _poisoned(server, token)
        require(answer.status == 500, f"the sequence got {answer.status}")
        require(b"NaN" not in answer.body and b"Infinity" not in answer.body, "NaN has reached JSON")
        corrupted = server.wait_for_metric("quire_corrupted_requests_total")
        require(corrupted == 1, f"corrupted requests: {corrupted:.0f}, not 1")
        _wait_for_bystanders(server, 4)
    return "the request failed alone, and is counted"


def pool_exhausted(stage: Stage) -> str:
    """F3: more sequences decode than fit into memory; some are preempted, and their tokens stay the same."""
    bodies = [
        {"prompt": f"Page {index} of", "max_tokens": 160, "seed": index, "temperature": 0.8, "ignore_eos": True}
        for index in range(12)
    ]
    with stage.serving() as roomy:
        expected = _token_ids(roomy, bodies)
    with stage.serving(ServerSpec.of(kv_memory="1MiB")) as server:
        found = _token_ids(server, bodies)
        preemptions = server.metric("quire_preemptions_total")
        require(preemptions > 0, "no request was preempted: the pool is too large for this case")
        require(found == expected, "a preempted request got other tokens")
    return f"{preemptions:.0f} preemptions, the same tokens"


def larger_than_the_pool(stage: Stage) -> str:
    """F4: a request that can never fit is refused at once."""
    with stage.serving(ServerSpec.of(kv_memory="1MiB")) as server:
        answer = server.complete(prompt=[5] * 1500, max_tokens=400, timeout_s=10.0)
        require(answer.status == 400, f"it got {answer.status}")
        require(answer.error.get("code") == "context_length_exceeded", f"its code is {answer.error.get('code')}")
        require(answer.seconds < 1.0, f"the answer took {answer.seconds:.1f} s")
    return f"400 after {1e3 * answer.seconds:.0f} ms"


def out_of_memory(stage: Stage) -> str:
    """F5: every step of 64 tokens or more runs out of memory; the engine keeps to smaller steps."""
    with stage.serving(ServerSpec.of({"QUIRE_FAILPOINTS": "memory:tokens=64"})) as server:
        answers = _at_once(lambda index: server.complete(prompt=[7 + index] * 100, max_tokens=4), range(4))
        require(all(answer.status == 200 for answer in answers), f"statuses: {[a.status for a in answers]}")
        failed = server.wait_for_metric("quire_failed_steps_total")
        require(failed > 0, "no step has failed: the fault was not injected")
        _wait_for_bystanders(server, 2)
        failed = server.metric("quire_failed_steps_total")
        again = _at_once(lambda index: server.complete(prompt=[70 + index] * 100, max_tokens=4), range(4))
        require(all(answer.status == 200 for answer in again), f"statuses: {[a.status for a in again]}")
        _wait_for_bystanders(server, 2)
        require(server.metric("quire_failed_steps_total") == failed, "the limit was not remembered")
    return f"{failed:.0f} steps failed, then none"


def failing_allocation(stage: Stage) -> str:
    """F6: allocation N fails, for every N, alone and three in a row."""
    rng = random.Random(stage.seed)
    shared = [rng.randrange(300, 2000) for _ in range(20)]
    prompts = [shared + [rng.randrange(300, 2000) for _ in range(10 + 7 * index)] for index in range(6)]
    num_runs = 0
    with stage.serving():
        expected, _ = run_prompts(prompts, {"num_blocks": 64})
        for count in (1, 3):
            first, has_struck = 0, True
            while has_struck:
                faults = FailingAllocations(first, count)
                found, held = run_prompts(prompts, {"num_blocks": 64}, faults.make_pool)
                require(held == 0, f"{held} blocks are held after allocation {first} failed")
                require(found == expected, f"other tokens after allocation {first} failed")
                has_struck, first, num_runs = faults.has_struck, first + (4 if stage.is_quick else 1), num_runs + 1
    return f"{num_runs} runs"


def client_leaves(stage: Stage) -> str:
    """F7: clients disconnect while waiting, in prefill, in decode, at the end, and without a stream."""
    spec = ServerSpec.of(max_num_seqs=4)
    seconds = []
    with stage.serving(spec) as server:
        long = {"max_tokens": 1500, **STREAM}
        prompts = [{"prompt": list(range(300 + index, 1800)), "max_tokens": 400, **STREAM} for index in range(6)]
        leaves: dict[str, Callable[[], None]] = {
            "queued": lambda: _leave_after(server, [{"prompt": [9] * 32, **long}] * 12, 0),
            "in its prompt": lambda: _leave_after(server, prompts, 0),
            "decoding": lambda: _leave_after(server, [{"prompt": [11] * 8, **long}] * 3, 3),
            "without a stream": lambda: _leave_after(server, [{**long, "prompt": [11] * 8, "stream": False}] * 12, 0),
            "at its end": lambda: _leave_at_the_end(server),
        }
        for name, leave in leaves.items():
            leave()
            waited = wait_until(lambda: _only_bystanders(server), f"rid of clients that left {name}", GONE_S)
            seconds.append(waited)
    return f"gone after {1e3 * max(seconds):.0f} ms at most"


def children_of_a_client(stage: Stage) -> str:
    """F8: a client with several texts and several prompts disconnects; all of its sequences end."""
    with stage.serving() as server:
        bodies = [
            {"prompt": [13] * 8, "n": 8, "max_tokens": 1500, "temperature": 1.0, **STREAM},
            {"prompt": [[17] * 8, [19] * 8, [23] * 8], "n": 2, "max_tokens": 1500, "temperature": 1.0, **STREAM},
        ]
        _leave_after(server, bodies, 4)
        waited = wait_until(lambda: _only_bystanders(server), "rid of the children", GONE_S)
    return f"14 texts gone after {1e3 * waited:.0f} ms"


def slow_reader(stage: Stage) -> str:
    """F9: a client requests megabytes and reads nothing; it is disconnected, and other clients are not affected."""
    spec = ServerSpec.of({"QUIRE_WRITE_TIMEOUT_S": "1"}, touch_kv_memory="start")
    body = {"prompt": [29] * 8, "n": 32, "max_tokens": 1900, "logprobs": 20, "temperature": 1.0, **STREAM}
    with stage.serving(spec) as server:
        before = server.process.resident_bytes() or 0
        with Stream(server.address, "/v1/completions", {"model": server.model, **body}, receive_bytes=4096):
            wait_until(lambda: not _only_bystanders(server), "begun", 10.0)
            waited = wait_until(lambda: _only_bystanders(server), "rid of the slow reader", 90.0)
            held = (server.process.resident_bytes() or 0) - before
        _wait_for_bystanders(server, 4)
        require(held < MAX_HELD_BYTES, f"{held / 1e6:.0f} MB wait for a client that does not read")
    return f"disconnected after {waited:.1f} s, {max(held, 0) / 1e6:.0f} MB held"


def _poisoned(server: TortureServer, token: int) -> Answer:
    return server.complete(prompt=[31, 37, token, 41], max_tokens=4)


def _poisoned_stream(server: TortureServer, token: int) -> tuple[int, list[bytes]]:
    """Make the token the first of a text: the next step fails, whether or not the token has been sent."""
    body = {"model": server.model, "prompt": [31, 37, 43], "max_tokens": 8, "temperature": 0.0, **STREAM}
    body |= {"allowed_token_ids": [token], "min_tokens": 8}
    with Stream(server.address, "/v1/completions", body) as stream:
        events = stream.read_events(100)
        return stream.status, events


def _wait_for_bystanders(server: TortureServer, count: int) -> None:
    """Wait until this many more bystanders have been served."""
    assert server.bystanders is not None
    counts = server.bystanders.counts
    wanted = counts.num_same + count
    wait_until(lambda: counts.num_same >= wanted, "serving bystanders", 60.0)


def _token_ids(server: TortureServer, bodies: Sequence[dict[str, Any]]) -> list[object]:
    answers = _at_once(
        lambda index: server.complete(return_token_ids=True, logprobs=1, **bodies[index]), range(len(bodies))
    )
    for answer in answers:
        require(answer.status == 200, f"one of the requests got {answer.status}: {answer.error.get('message')}")
    return [outcome_of(answer) for answer in answers]


def _at_once(call: Callable[[int], Answer], indices: Sequence[int]) -> list[Answer]:
    with ThreadPoolExecutor(max_workers=len(indices)) as pool:
        return list(pool.map(call, indices))


def _leave_after(server: TortureServer, bodies: Sequence[dict[str, Any]], num_events: int) -> None:
    """Send all bodies, read this many events of each answer, and disconnect."""
    streams = [Stream(server.address, "/v1/completions", {"model": server.model, **body}) for body in bodies]
    wait_until(lambda: server.metric("quire_sequences_admitted") >= len(bodies), "let in", 10.0)
    for stream in streams:
        stream.read_events(num_events)
    for stream in streams:
        stream.leave()


def _leave_at_the_end(server: TortureServer) -> None:
    """Disconnect after the last token, before the end of the stream."""
    body = {"model": server.model, "prompt": [47] * 8, "max_tokens": 3, **STREAM}
    for _ in range(20):
        with Stream(server.address, "/v1/completions", body) as stream:
            while events := stream.read_events(1):
                if any(b'"length"' in event for event in events):
                    break


def _only_bystanders(server: TortureServer) -> bool:
    """Whether only bystanders are served: two at a time, with at most two texts each."""
    texts = server.metric("quire_requests_running") + server.metric("quire_requests_waiting")
    return server.metric("quire_sequences_admitted") <= NUM_THREADS and texts <= 2 * NUM_THREADS


FAULTS = (
    Case("F1", "a forward that fails", failing_forward),
    Case("F2", "numbers that are not finite", not_finite),
    Case("F3", "a pool that runs empty", pool_exhausted),
    Case("F4", "a request larger than the pool", larger_than_the_pool),
    Case("F5", "memory that falls short in a step", out_of_memory),
    Case("F6", "allocations that fail", failing_allocation),
    Case("F7", "clients that leave", client_leaves),
    Case("F8", "clients of many texts that leave", children_of_a_client),
    Case("F9", "clients that do not read", slow_reader),
)
