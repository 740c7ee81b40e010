"""A Ray cluster of this machine, with a home of its own, so that nothing of another cluster is seen or ended.

These tests run with Ray from an environment of its own (`make test-cluster`).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.ray_cluster import SETTINGS, ClusterHome, texts
from support.served_process import served_process


@pytest.fixture(scope="session")
def home() -> Iterator[ClusterHome]:
    """A home, in a folder with a short path: sockets stand in it."""
    folder = Path(tempfile.mkdtemp(prefix="qc-", dir="/tmp"))
    kept = {name: os.environ.get(name) for name in ("HOME", "RAY_TMPDIR", "RAY_ADDRESS")}
    os.environ.update(HOME=str(folder), RAY_TMPDIR=str(folder))
    os.environ.pop("RAY_ADDRESS", None)
    found = ClusterHome(folder)
    try:
        yield found
    finally:
        found.end_all()
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(home: ClusterHome) -> str:
    """The address of a cluster that `quire cluster start` has begun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = home.run("cluster", "start", "--port", str(port))
    assert started.returncode == 0, started.stdout
    assert str(home.token) in started.stdout
    assert home.token.stat().st_mode & 0o777 == 0o600
    return f"127.0.0.1:{port}"


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The texts of one engine on this machine, which nothing happens to."""
    with served_process(tmp_path_factory.mktemp("calm"), *SETTINGS) as server:
        return texts(server)
