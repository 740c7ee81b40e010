"""Files of a model: what is read and what is refused, at both sides of each bound, in one line that names the file."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core import model_files
from quire.core.errors import CheckpointError
from quire.core.model_files import (
    LFS_POINTER,
    MAX_JSON_VALUES,
    is_there,
    open_model_file,
    parse_json_object,
    read_json_object,
    read_model_file,
    read_text,
    require_few_values,
)


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def test_a_file_may_be_as_large_as_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for size in (0, 4, 5):
        path.write_bytes(b"x" * size)
        assert read_model_file(path, max_bytes=5) == b"x" * size
    path.write_bytes(b"x" * 6)
    assert refusal(lambda: read_model_file(path, max_bytes=5)) == f"{path}: size is 6; allowed: at most 5 bytes"
    assert read_model_file(path) == b"x" * 6
    with open_model_file(path) as file:
        assert (file.read(), file.mode) == (b"x" * 6, "rb")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.mkdir(), "a folder"),
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
        (lambda path: path.symlink_to("nowhere"), "a broken link"),
        (lambda path: None, "No such file or directory"),
    ],
)
def test_what_is_no_plain_file_is_refused_as_what_it_is(
    tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    path = tmp_path / "config.json"
    make(path)
    allowed = "a plain file" if kind in ("a folder", "a pipe", "a device") else "a file that can be read"
    assert refusal(lambda: read_model_file(path)) == f"{path} is '{kind}'; allowed: {allowed}"
    assert is_there(path) == (kind != "No such file or directory")


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert refusal(lambda: read_model_file(Path("s"))) == "s is 'a socket'; allowed: a plain file"


def test_a_pointer_of_git_lfs_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(LFS_POINTER + b".com/spec/v1\noid 5")
    assert refusal(lambda: read_model_file(path)) == (
        f"{path} is 'a git-lfs pointer'; allowed: the file itself; fetch it with `git lfs pull`"
    )
    path.write_bytes(b" " + LFS_POINTER)
    assert read_text(path) == " version https://git-lfs"
    path.write_bytes(b"\xc3")
    assert refusal(lambda: read_text(path)).endswith("; allowed: a text file in UTF-8")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": {"b": 1, "b": 2}}', "where: key 'b' is 'given twice'; allowed: each key once"),
        (b"[1]", "where is 'a JSON list'; allowed: one JSON object"),
        (b"null", "where is 'a JSON NoneType'; allowed: one JSON object"),
        (b'"a"', "where is 'a JSON str'; allowed: one JSON object"),
    ],
)
def test_what_is_no_json_object_is_said(data: bytes, message: str) -> None:
    assert refusal(lambda: parse_json_object(data, "where")) == message


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}}", b"\xff", b'{"a": "\\ud800"}', b'{"\\uDC00": 1}', b'{"a":' * 100_000]
)
def test_what_cannot_be_read_or_written_again_is_no_json(data: bytes) -> None:
    message = refusal(lambda: parse_json_object(data, "where"))
    assert re.fullmatch(r"where is ['\"]not JSON: .*; allowed: one JSON object in UTF-8", message)


def test_whole_characters_are_text_however_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes('{"a": "\\ud83d\\ude00", "b": "ß"}'.encode())
    assert read_json_object(path) == {"a": "\U0001f600", "b": "ß"}


def test_a_text_of_too_many_values_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    data = b'{"a": [' + b"0," * MAX_JSON_VALUES + b"0]}"
    message = refusal(lambda: parse_json_object(data, "where"))
    assert message == f"where is 'JSON of more than {MAX_JSON_VALUES} values'; allowed: at most {MAX_JSON_VALUES}"


@pytest.mark.parametrize(("data", "num_values"), [(b"{}", 1), (b"[1, 2, 3]", 3), (b'{"a": [[], {}]}', 5)])
def test_json_may_hold_as_many_values_as_its_bound(data: bytes, num_values: int) -> None:
    require_few_values(data, "where", num_values)
    message = refusal(lambda: require_few_values(data, "where", num_values - 1))
    assert message == f"where is 'JSON of more than {num_values - 1} values'; allowed: at most {num_values - 1}"
