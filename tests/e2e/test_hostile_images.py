"""Images made to do harm: each is refused with one line, and another client's answers stay the same meanwhile."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from support.image_models import write_image_model
from support.server import RunningServer, running_server
from support.tiny_images import data_url, file_of, picture

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
GOOD = file_of(picture(60, 40))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_image_model(tmp_path_factory.mktemp("model"))
    with running_server(model=str(folder), settings={"num_threads": 1}) as running:
        yield running


def ask(server: RunningServer, *files: bytes) -> Any:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    return server.post(
        "/v1/chat/completions", {"messages": [message], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    )


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, content: bytes = b"", before: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@cache
def hostile() -> dict[str, bytes]:
    """Files that are refused, by what they do."""
    rows = zlib.compress(bytes(65 * 64))
    jpeg = file_of(picture(64, 64), "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return {
        "no bytes": b"",
        "of another format": b"BM" + bytes(100),
        "more pixels than memory": png(1 << 30, 1 << 30),
        "more pixels than allowed": png(6000, 6000, zlib.compress(bytes(6001 * 6000))),
        "of no size": png(0, 5, rows),
        "pixels that never come": png(4000, 4000, rows),
        "a bomb in a comment": png(64, 64, rows, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))) * 99),
        "very many chunks": png(64, 64, rows, chunk(b"prVt", b"") * 50_000),
        "very many scans": jpeg[:-2] + scan * 1000 + jpeg[-2:],
        "very many segments": jpeg[:2] + b"\xff\xfe\0\x02" * 50_000 + jpeg[2:],
        "a length beyond the end": png(64, 64)[:33] + b"\xff" * 40,
        "a wrong checksum": GOOD[:-20] + bytes(4) + GOOD[-16:],
        "nothing but a head": b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 20,
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_file_is_refused_in_one_line(server: RunningServer, name: str) -> None:
    answer = ask(server, GOOD, hostile()[name])
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["param"]) == (400, "messages[0].content[1].image_url.url"), answer.body
    assert "\n" not in error["message"] and len(error["message"]) < 400


def test_others_are_answered_as_ever_meanwhile(server: RunningServer) -> None:
    draw = random.Random(7)
    files = list(hostile().values())
    for kind in KINDS:
        data = file_of(picture(90, 70), kind)
        for _ in range(20):
            place = draw.randrange(len(data))
            files.append(data[:place] + draw.randbytes(draw.randrange(1, 40)) + data[place + draw.randrange(40) :])
    files += [file_of(Image.new("1", (5000, 5000))), file_of(Image.new("P", (5000, 5000)), "GIF")]
    draw.shuffle(files)
    expected = ask(server, GOOD)
    assert expected.status == 200
    with ThreadPoolExecutor(6) as threads:
        attacks = [threads.submit(ask, server, file) for file in files]
        for _ in range(10):
            answer = ask(server, GOOD)
            assert json.loads(answer.body)["choices"] == json.loads(expected.body)["choices"]
            assert server.get("/livez").status == 200
        assert {attack.result().status for attack in attacks} <= {200, 400}
    server.wait_until_idle()
    assert server.services.images.held_bytes == server.services.bodies.held_bytes == 0


def test_a_client_that_leaves_holds_nothing(server: RunningServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "image": data_url(GOOD)}]}]})
    for _ in range(5):
        with server.client(timeout=0.02) as client, suppress(openai.APITimeoutError):  # on a fast machine: answered
            client.post("/chat/completions", body=json.loads(body), cast_to=object)
    server.wait_until_idle()
    server.call(server.services.images.check)


def test_a_folder_of_hostile_settings_is_refused(tmp_path: Path) -> None:
    from quire import LLM
    from quire.core.errors import CheckpointError

    write_image_model(tmp_path)
    for settings in (
        "[]",
        "{",
        '{"size": {"longest_edge": 1e9}}',
        '{"image_processor_type": ["x"]}',
        '{"resample": -1}',
    ):
        (tmp_path / "preprocessor_config.json").write_text(settings)
        with pytest.raises(CheckpointError) as caught:
            LLM(tmp_path, kv_memory="8MiB")
        assert "\n" not in str(caught.value)
