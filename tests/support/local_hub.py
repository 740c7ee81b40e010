"""A hub of models on this machine, with the parts of its HTTP interface that huggingface_hub uses for downloads."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40
PIECE = 1 << 18
NO_GATE = 1 << 62


@dataclass
class LocalHub:
    """Serves one repository, org/m. Small files are sent at once, large ones after a redirect to another host name.

    Sending a large file stops at byte `gate` until `opened` is set, so that a test can end the client there.
    """

    large: dict[str, bytes]
    small: dict[str, bytes] = field(default_factory=dict)
    gate: int = NO_GATE
    sends_only: int = NO_GATE
    """Bytes that a large file seems to have when it is sent."""

    def __post_init__(self) -> None:
        self.digests = {name: hashlib.sha256(data).hexdigest() for name, data in self.large.items()}
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.asked: list[str] = []
        self.starts: list[int] = []
        self.tokens: dict[str, str | None] = {}
        self.num_sent = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        self._server.shutdown()
        self._server.server_close()

    def files(self) -> list[dict[str, Any]]:
        """Return the list of files as the hub gives it, with the digests that large ones should have."""
        small = [{"rfilename": name, "size": len(data), "blobId": "b" * 40} for name, data in self.small.items()]
        large = [
            {"rfilename": name, "size": len(data), "blobId": "b" * 40}
            | {"lfs": {"sha256": self.digests[name], "size": len(data), "pointerSize": 134}}
            for name, data in self.large.items()
        ]
        return small + large

    def tree(self) -> list[dict[str, Any]]:
        """Return the same as a tree."""
        return [
            {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": each["blobId"]}
            | ({"lfs": {"oid": each["lfs"]["sha256"], **each["lfs"]}} if "lfs" in each else {})
            for each in self.files()
        ]

    def note_sent(self, count: int) -> None:
        with self._lock:
            self.num_sent += count


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(path)
        self.hub.tokens[path.split("/")[1]] = self.headers.get("Authorization")
        if path.startswith("/api/models/org/m/tree/"):
            self._send(json.dumps(self.hub.tree()).encode())
        elif path.startswith("/api/models/org/m"):
            self._send(json.dumps({"id": "org/m", "sha": COMMIT, "siblings": self.hub.files()}).encode())
        elif path.startswith(f"/org/m/resolve/{COMMIT}/"):
            self._resolve(path.removeprefix(f"/org/m/resolve/{COMMIT}/"))
        elif path.startswith("/blobs/"):
            self._blob(self.hub.large[path.rpartition("/")[2]])
        else:
            self._send(b"", 404, {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, name: str) -> None:
        commit = {"X-Repo-Commit": COMMIT}
        if name in self.hub.small:
            data = self.hub.small[name]
            self._send(data, headers=commit | {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        else:
            linked = {"X-Linked-Etag": f'"{self.hub.digests[name]}"', "X-Linked-Size": str(len(self.hub.large[name]))}
            location = {"Location": f"http://localhost:{self.hub.port}/blobs/{name}"}
            self._send(b"", 302, commit | linked | location)

    def _blob(self, data: bytes) -> None:
        hub, start = self.hub, int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        hub.starts.append(start)
        end = min(len(data), hub.sends_only)
        content_range = {"Content-Range": f"bytes {start}-{end - 1}/{end}"} if start else {}
        self._head(206 if start else 200, end - start, content_range)
        for at in range(start, end, PIECE):
            if at >= hub.gate and not hub.opened.is_set():
                hub.reached.set()
                hub.opened.wait()
            piece = data[at : min(at + PIECE, end)]
            hub.note_sent(len(piece))  # before the client can have it, and end the test
            try:
                self.wfile.write(piece)
            except OSError:  # the client is gone
                self.close_connection = True
                return

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
