"""A reader of `GET /live`: it reads in a thread of its own, and puts the lines together as a page would."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.engine.records.live import MOST_UNSEEN

ENDS = {"finished", "aborted", "failed"}


@dataclass
class Picture:
    """What the frames add up to: blocks that are not free, requests, and all events."""

    blocks: dict[int, list[Any]] = field(default_factory=dict)
    requests: dict[int, list[Any]] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    num_listed: int = 0  # ended requests
    tokens_from_disk: int = 0  # of requests that have gone
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)  # of engines: the last frame that had each

    def take_in(self, frame: dict[str, Any]) -> None:
        """Add a frame."""
        if frame["full"]:
            self.blocks, self.requests = {}, {}
        else:
            assert frame["t"] >= self.last["t"]
        assert not self.last or frame["seq"] == self.last["seq"] + 1
        for row in frame["blocks"]:
            self.blocks[row[0]] = row
            if row[1] == 0:
                assert row[2:5] == [0, -1, -2]
                del self.blocks[row[0]]
        before = set(self.requests)
        for row in frame["requests"]:
            self.requests[row[0]] = row
        assert len({row[0] for row in frame["gone"]} - before) <= MOST_UNSEEN
        ends = {number for _, kind, number, _ in frame["events"] if kind in ENDS}
        self.num_listed += sum(row[0] in ends for row in frame["gone"])  # the others are beams that were replaced
        assert frame["num_ended"] >= self.num_listed
        for number, computed, total, cached, from_disk, from_host in frame["gone"]:
            del self.requests[number]
            assert total > 0 and computed >= 0 and cached >= from_disk + from_host >= from_host >= 0
            self.tokens_from_disk += from_disk
        self.events += frame["events"]
        self.failures |= {row["failure"]: frame for row in frame["replicas"] if row["failure"]}
        self.last = frame
        self.check()

    def check(self) -> None:
        """The sums of a frame are those of its rows."""
        ledger, rows = self.last["ledger"], self.blocks.values()
        used = [row for row in rows if row[1] == 1]
        assert ledger["used"] == len(used)
        assert ledger["cached"] == len(rows) - len(used)
        assert ledger["saved"] == sum(row[2] - 1 for row in used)
        assert {row[3] for row in used} <= self.requests.keys()
        assert all(row[4] < 0 or row[4] in self.blocks for row in rows)


class LiveLines:
    """Reads until `close`. All lines are kept."""

    def __init__(
        self, port: int, key: str = "", *, query: str = "", receive_buffer: int | None = None, reads: bool = True
    ) -> None:
        self._socket = socket.socket()
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.settimeout(300)
        self._socket.connect(("127.0.0.1", port))
        headers = f"Authorization: Bearer {key}\r\n" if key else ""
        self._socket.sendall(f"GET /live{query} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        self._answer = http.client.HTTPResponse(self._socket)
        self.text = b""
        self.hello: dict[str, Any] = {}
        self.picture = Picture()
        self.failure: BaseException | None = None
        self.has_ended = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._thread.start()

    def until(self, condition: Callable[[Picture], bool], seconds: float = 300.0) -> Picture:
        """Wait until the picture is so; return it."""
        end = time.monotonic() + seconds
        with self._changed:
            while not (self.picture.last and condition(self.picture)):
                self.check()
                assert not self.has_ended.is_set(), "the stream has ended"
                assert time.monotonic() < end, f"it never came to that: {self.picture.last}"
                self._changed.wait(0.1)
        return self.picture

    def check(self) -> None:
        """Raise what went wrong."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Leave."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(300)
        self._answer.close()
        self._socket.close()
        self.check()

    def __enter__(self) -> LiveLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            self._answer.begin()
            assert self._answer.status == 200
            while line := self._answer.readline():
                self.text += line
                self._take_in(json.loads(line))
        except (OSError, http.client.HTTPException):
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self.has_ended.set()

    def _take_in(self, value: dict[str, Any]) -> None:
        with self._changed:
            if value["type"] == "hello":
                self.hello = value
            else:
                self.picture.take_in(value)
            self._changed.notify_all()
