"""Faults of processes and files: killed, stopped or frozen processes, and broken model folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.core.python_process import run_python
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.http.sockets import Stream
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.stage import ServerSpec, Stage, TortureServer, wait_until

LONG: dict[str, Any] = {"prompt": [9] * 16, "max_tokens": 1500, "stream": True, "ignore_eos": True}
READY_S = 20.0
NUM_STREAMS = 9
TRUTH_S = 1.0


def engine_killed(stage: Stage) -> str:
    """F10: the engine's process is killed; readiness reports it, it restarts, and the stream continues unchanged."""
    with stage.serving(ServerSpec.of(max_num_seqs=32)) as server:
        server.may_lose_bystanders = True
        num_tokens = 500 if stage.is_quick else LONG["max_tokens"]
        calm, engine = _text(server, num_tokens), engine_process(server.process)
        with _stream(server, num_tokens) as stream:
            events = stream.read_events(3)
            os.kill(engine, signal.SIGKILL)
            noticed_s = wait_until(lambda: not server.is_ready(), "reporting that it is not ready", TRUTH_S)
            events += stream.read_events(10_000)
        require(_text_of(events) == calm, "the text differs from the text without the kill")
        back = wait_until(server.is_ready, "back", READY_S)
        require(engine_process(server.process) != engine, "the engine's process is the old one")
        require(server.complete().status == 200, "the new engine does not serve")
    return f"not ready after {1e3 * noticed_s:.0f} ms, back after {back:.1f} s, no text lost"


def worker_lost(stage: Stage) -> str:
    """F13: of three engines one is killed, then one freezes: no text is lost, changed or refused."""
    with stage.serving(ServerSpec.of({"QUIRE_REPLICAS": "3"}, kv_memory="48MiB")) as server:
        wait_until(lambda: len(server.process.engines()) == 3, "three engines", READY_S)
        calm, waits = _text(server), []
        for number in (signal.SIGKILL, signal.SIGSTOP):
            wait_until(lambda: server.metric("quire_replica_ready") == 3, "ready in each engine", READY_S)
            streams = [_stream(server) for _ in range(NUM_STREAMS)]
            begun = [stream.read_events(3) for stream in streams]
            os.kill(server.process.engines()[0], number)
            began_s = time.monotonic()
            for stream, first in zip(streams, begun, strict=True):
                with stream:
                    events = [*first, *stream.read_events(10_000)]
                require(_text_of(events) == calm, f"after {number.name} a text has changed")
            waits.append(time.monotonic() - began_s)
        wait_until(lambda: server.metric("quire_replica_ready") == 3, "ready in each engine", READY_S)
        num_continued = server.metric("quire_texts_continued_total")
        require(num_continued > 0, "no text continued in another engine")
    ended = f"all ended {waits[0]:.1f} s after a kill, {waits[1]:.1f} s after a stop"
    return f"{num_continued:.0f} texts continued elsewhere; {ended}"


def _stream(server: TortureServer, num_tokens: int = LONG["max_tokens"]) -> Stream:
    body = {"model": server.model, **LONG, "max_tokens": num_tokens, "seed": 7}
    return Stream(server.address, "/v1/completions", body)


def _text(server: TortureServer, num_tokens: int = LONG["max_tokens"]) -> str:
    with _stream(server, num_tokens) as stream:
        return _text_of(stream.read_events(10_000))


def _text_of(events: list[bytes]) -> str:
    """Return the text of a stream that has ended in order."""
    require(events[-1:] == [b"[DONE]"], f"a stream ended with {events[-1:]}")
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def front_killed(stage: Stage) -> str:
    """F11: the front process is killed; the engine's process notices, and ends."""
    with stage.serving(ServerSpec.of(max_num_seqs=31)) as server:
        server.is_spoiled = True
        children = server.process.children()
        require(bool(children), "the engine has no process of its own")
        with Stream(server.address, "/v1/completions", {"model": server.model, **LONG}) as stream:
            stream.read_events(3)
            os.kill(server.process.pid, signal.SIGKILL)
            waited = wait_until(lambda: not any(map(_is_alive, children)), "rid of the engine's process", 10.0)
    return f"the engine's process ended after {waited:.1f} s"


def stopped_under_load(stage: Stage) -> str:
    """F12: SIGTERM: running requests finish, new ones are rejected, exit 0; a second signal ends it at once."""
    with stage.serving(ServerSpec.of(max_num_seqs=30)) as server:
        server.is_spoiled = True
        body = {"model": server.model, **LONG, "max_tokens": 800}
        with Stream(server.address, "/v1/completions", body) as stream:
            stream.read_events(3)
            os.kill(server.process.pid, signal.SIGTERM)
            noticed_s = wait_until(lambda: not server.is_ready(), "reporting that it is not ready", TRUTH_S)
            refused = server.complete()
            require(refused.status == 503, f"a new request got {refused.status}")
            require("retry-after" in refused.headers, "the rejection has no Retry-After")
            events = stream.read_events(10_000)
        require(events[-1:] == [b"[DONE]"], "the stream was not served to its end")
        wait_until(lambda: server.process.exit_status is not None, "at its end", 40.0)
        require(server.process.exit_status == 0, f"the exit status is {server.process.exit_status}")
    with stage.serving(ServerSpec.of(max_num_seqs=29)) as server:
        server.is_spoiled = True
        with Stream(server.address, "/v1/completions", {"model": server.model, **LONG}) as stream:
            stream.read_events(3)
            for _ in range(2):
                os.kill(server.process.pid, signal.SIGTERM)
                time.sleep(0.2)
            ended = wait_until(lambda: server.process.exit_status is not None, "at its end", 5.0)
    return f"not ready after {1e3 * noticed_s:.0f} ms; at the second signal it ended after {ended:.1f} s"


def broken_folders(stage: Stage) -> str:
    """F15: model folders, each broken in a different way: one line names the fault, in less than five seconds."""
    from quire.guide import GUIDE_FOLDER

    slowest = 0.0
    with stage.serving():
        for name, damage in DAMAGES.items():
            folder = stage.folder / name.replace(" ", "-")
            shutil.copytree(GUIDE_FOLDER, folder)
            damage(folder)
            started = time.monotonic()
            ended = run_python("-m", "quire", "serve", str(folder), "--port", "0")
            slowest = max(slowest, time.monotonic() - started)
            lines = [line for line in (ended.stdout + ended.stderr).splitlines() if "error:" in line]
            require(ended.returncode not in (0, None), f"{name}: the exit status is {ended.returncode}")
            require(len(lines) == 1 and "Traceback" not in ended.stderr, f"{name}: it printed {ended.stderr[-200:]!r}")
    require(slowest < 5.0, f"the error took {slowest:.1f} s")
    return f"{len(DAMAGES)} folders, {slowest:.1f} s at most"


def frozen(stage: Stage) -> str:
    """F16: the front process freezes for 2 s, then the engine process does; then a prompt takes long to encode."""
    with stage.serving() as server:
        for pid in (server.process.pid, engine_process(server.process)):
            with Stream(
                server.address, "/v1/completions", {"model": server.model, **LONG, "max_tokens": 400}
            ) as stream:
                stream.read_events(3)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(2.0)
                os.kill(pid, signal.SIGCONT)
                events = stream.read_events(10_000)
            require(events[-1:] == [b"[DONE]"], "a stream did not survive two seconds of silence")
        slow = server.complete(prompt="A very long prompt. " * 100_000, timeout_s=120.0)
        require(slow.status == 400, f"two megabytes of text got {slow.status}")
        require(server.complete().status == 200, "the server does not serve afterwards")
    return f"nothing lost; two megabytes of text were refused after {slow.seconds:.1f} s"


# ---- processes and folders ------------------------------------------------------------------------------------------


def engine_process(server: ServerProcess) -> int:
    """Return the engine's process: the child with the most memory."""
    children = server.children()
    require(bool(children), "the engine has no process of its own")
    return max(children, key=_resident_pages)


def _resident_pages(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _rewrite_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a function that changes the header of the weights; data after the last tensor is cut off."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text, end = json.dumps(header).encode(), max(tensor["data_offsets"][1] for tensor in _tensors(header).values())
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length : 8 + length + end])

    return damage


def _weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def _config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")

    return damage


def _tensors(header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: value for name, value in header.items() if name != "__metadata__"}


def _retype(header: dict[str, Any]) -> None:
    """Change the type of a tensor to integers of the same size."""
    first = next(iter(_tensors(header).values()))
    first["dtype"] = {"F32": "I32", "BF16": "I16", "F16": "I16"}[first["dtype"]]


def _overlap(header: dict[str, Any]) -> None:
    first, second = list(_tensors(header).values())[:2]
    start, (begin, end) = first["data_offsets"][0], second["data_offsets"]
    second["data_offsets"] = [start, start + end - begin]


def _drop(header: dict[str, Any]) -> None:
    """Remove the last tensor: removing another would leave a gap."""
    tensors = _tensors(header)
    del header[max(tensors, key=lambda name: tensors[name]["data_offsets"][1])]


def _torn_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"{")


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "missing.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "half of the weights": _weights(lambda data: data[: len(data) // 2]),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "empty weights": _weights(lambda _: b""),
    "a header of 2^60 bytes": _weights(lambda data: (1 << 60).to_bytes(8, "little") + data[8:]),
    "a header that is no JSON": _weights(lambda data: data[:8] + b"x" + data[9:]),
    "tensors that overlap": _rewrite_header(_overlap),
    "a tensor of another type": _rewrite_header(_retype),
    "a tensor too few": _rewrite_header(_drop),
    "a config that is no JSON": _torn_config,
    "a config of another shape": _config(hidden_size=7),
    "an unknown family": _config(architectures=["NoSuchModel"]),
    "a missing shard": _missing_shard,
}

PROCESS_FAULTS = (
    Case("F10", "an engine that is killed", engine_killed),
    Case("F11", "a front that is killed", front_killed),
    Case("F12", "a server that is stopped", stopped_under_load),
    Case("F13", "a worker of several that is lost", worker_lost),
    Case("F15", "model folders that are broken", broken_folders),
    Case("F16", "processes that stand still", frozen),
)
