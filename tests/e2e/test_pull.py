"""`quire models pull` against a hub on this machine: ended in every way and started again."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.compute.models.hub_blobs import Blob, _fetch
from quire.compute.models.pooling import pooling_of
from quire.compute.models.source import ModelFolder
from quire.core.errors import ModelError
from support.gguf_models import write_gguf
from support.local_hub import COMMIT, PIECE, LocalHub
from support.model_stores import VARIABLES
from support.tiny_checkpoint import write_tiny_llama

NAME, FILE = "org/m:Q8_0", "m-Q8_0.gguf"
GATE = 25 << 20
MAX_LOST = 10 << 20  # huggingface_hub writes pieces of this size
WAIT_S = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model, with bytes behind it to make it large."""
    folder = tmp_path_factory.mktemp("model")
    return write_gguf(write_tiny_llama(folder / "llama"), folder / FILE, "Q8_0").read_bytes() + random.Random(
        1
    ).randbytes(32 << 20)


@pytest.fixture
def hub(model: bytes) -> Iterator[LocalHub]:
    with LocalHub({FILE: model}) as hub:
        yield hub


class Pulls:
    """Runs `quire` with a home of its own."""

    def __init__(self, home: Path, url: str) -> None:
        self.cache = home / ".cache" / "huggingface" / "hub" / "models--org--m"
        kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self.environ = kept | {"HOME": str(home), "HF_ENDPOINT": url, "HF_TOKEN": "hf_secret"}
        # A hub that waits at its gate is not one that is lost: after 10 s the client would ask for the rest again.
        self.environ |= dict.fromkeys(("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"), str(WAIT_S))
        self._home = home

    def start(self, *arguments: str, stderr: int = subprocess.PIPE, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("quire")), *(arguments or ("models", "pull", NAME))],
            cwd=self._home,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        child = self.start(*arguments, **environ)
        out, err = child.communicate(timeout=WAIT_S)
        return child.returncode, out, err

    @property
    def fetched(self) -> Path:
        return self.cache / "snapshots" / COMMIT / FILE


@pytest.fixture
def pulls(tmp_path: Path, hub: LocalHub) -> Pulls:
    return Pulls(tmp_path, hub.url)


def ended_half_way(pulls: Pulls, hub: LocalHub, number: int) -> tuple[int, str]:
    """Start a pull, end it by a signal when the hub has sent a part, and return its status and what it printed."""
    hub.gate = GATE
    child = pulls.start()
    assert hub.reached.wait(WAIT_S)
    for _ in range(WAIT_S * 10):
        if sum(path.stat().st_size for path in pulls.cache.glob("blobs/*.incomplete")) >= GATE - MAX_LOST:
            break
        threading.Event().wait(0.1)
    child.send_signal(number)
    _, err = child.communicate(timeout=WAIT_S)
    assert not pulls.fetched.exists()
    hub.opened.set()
    return child.returncode, err


def on_a_terminal(pulls: Pulls) -> tuple[int, str, str]:
    """Return the status of a pull, what it printed, and what a terminal showed."""
    terminal, theirs = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    child = pulls.start(stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # the other end is closed
        os.close(terminal)
    out, _ = child.communicate(timeout=WAIT_S)
    return child.returncode, out, shown.decode()


def test_a_pull_that_was_killed_goes_on_where_it_stopped_as_a_terminal_shows(
    pulls: Pulls, hub: LocalHub, model: bytes
) -> None:
    assert ended_half_way(pulls, hub, signal.SIGKILL)[0] == -signal.SIGKILL
    status, out, shown = on_a_terminal(pulls)
    assert (status, out.splitlines()[0]) == (0, f"{NAME} is in {pulls.fetched}")
    assert re.search(rf"{re.escape(FILE)}: +100%.*33\.\dM/33\.\dM", shown), shown
    first, second = hub.starts
    assert first == 0 and second >= GATE - MAX_LOST
    assert hub.num_sent <= len(model) + MAX_LOST + (4 << 20)  # what was lost, and what was under way to the first
    assert pulls.fetched.read_bytes() == model
    assert not list(pulls.cache.glob("blobs/*.incomplete"))
    assert hub.tokens["api"] == "Bearer hf_secret" and hub.tokens["blobs"] is None  # another host


def test_ctrl_c_leaves_nothing_that_chat_would_open(pulls: Pulls, hub: LocalHub, model: bytes) -> None:
    status, err = ended_half_way(pulls, hub, signal.SIGINT)
    assert status == 130 and "Traceback" not in err
    status, out, err = pulls.run("chat", NAME, HF_HUB_OFFLINE="1")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and f"{NAME} is not in the local cache, and the hub cannot be reached" in err
    assert "org/m" not in pulls.run("models")[1]
    assert pulls.run()[0] == 0
    assert hub.starts[1] >= GATE - MAX_LOST and pulls.fetched.read_bytes() == model


def test_a_pull_fetches_the_steps_after_the_model_but_no_other_folders(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = {"model.safetensors": files.pop("model.safetensors")}
    steps = {"1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}'}
    with LocalHub(weights, files | steps | {"onnx/config.json": b"{}"}) as hub:
        status, _, err = Pulls(tmp_path, hub.url).run("models", "pull", "org/m")
    assert status == 0, err
    fetched = Pulls(tmp_path, hub.url).cache / "snapshots" / COMMIT
    assert pooling_of(ModelFolder(fetched)) == "mean"
    assert not (fetched / "onnx").exists()


def test_two_pulls_at_once_fetch_the_file_once(pulls: Pulls, hub: LocalHub, model: bytes) -> None:
    hub.gate = GATE
    first = pulls.start()
    assert hub.reached.wait(WAIT_S)
    num_lists = hub.asked.count("/api/models/org/m")
    second = pulls.start()
    for _ in range(WAIT_S * 10):
        if hub.asked.count("/api/models/org/m") > num_lists:
            break
        threading.Event().wait(0.1)
    hub.opened.set()
    for child in (first, second):
        _, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err
    assert hub.starts == [0] and hub.num_sent == len(model)
    assert pulls.fetched.read_bytes() == model


def test_a_file_of_another_digest_is_refused_and_one_that_is_cut_short_goes_on(
    pulls: Pulls, hub: LocalHub, model: bytes
) -> None:
    hub.large[FILE] = model[:-1] + b"?"
    status, out, err = pulls.run()
    assert (status, out) == (2, "")
    assert f"quire: error: {FILE} was not fetched: its SHA-256 is " in err.splitlines()[-1]
    assert not pulls.fetched.exists()
    hub.large[FILE] = model
    hub.sends_only = 12 << 20
    status, out, err = pulls.run()
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert f"quire: error: {FILE} was not fetched: " in last and "the same command resumes the download" in last
    hub.sends_only = len(model)
    assert pulls.run()[0] == 0
    assert hub.starts == [0, 0, 12 << 20] and pulls.fetched.read_bytes() == model


def test_a_disk_that_is_full_is_one_line(pulls: Pulls, hub: LocalHub, model: bytes) -> None:
    """A limit on the size of files stands for the end of the disk: writing fails in the same way."""
    hub.gate, limit = PIECE, 15 << 20
    child = pulls.start()
    assert hub.reached.wait(WAIT_S)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
    hub.opened.set()
    out, err = child.communicate(timeout=WAIT_S)
    assert (child.returncode, out) == (2, "")
    last = err.splitlines()[-1]
    assert (
        last
        == f"quire: error: {FILE} was not fetched: File too large. The part fetched so far is kept: the same command "
        + ("resumes the download")
    )
    assert pulls.run()[0] == 0
    assert hub.starts[1] > 0 and pulls.fetched.read_bytes() == model


def test_a_disk_with_too_little_room_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 5 << 20))  # type: ignore[attr-defined]
    blob = Blob(FILE, "http://127.0.0.1:9/", 32 << 20, tmp_path / "blobs" / ("0" * 64))
    with pytest.raises(ModelError) as refused:
        _fetch(blob)
    assert (
        str(refused.value) == f"{FILE} was not fetched: it takes 32.0 MiB more, and {blob.path.parent} has 5.0 MiB left"
    )


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path) -> None:
    status, out, err = Pulls(tmp_path, "http://127.0.0.1:9").run()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith(
        f"quire: error: {NAME} is not in the local cache, and the hub cannot"
    )
    assert err.endswith('hf download org/m --include "*Q8_0*.gguf"\n')
