"""Models that read images, from the picture to the answer, in a program and through a server."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, InvalidRequestError
from quire.engine.factory import plan_engine
from quire.engine.images.parts import SentImage
from support.image_models import PREPARED, write_image_model
from support.live_lines import LiveLines
from support.server import RunningServer, running_server
from support.tiny_images import asked_about, data_url, file_of, picture

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CAT, DOG = (file_of(picture(90, 60, seed=seed)) for seed in (1, 2))
TEXT = "What is this?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, kv_memory="8MiB", num_threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(model=str(folder)) as running:
        yield running


def test_answers_depend_on_the_image(llm: LLM) -> None:
    cat, dog, again, none = llm.chat([asked_about(CAT), asked_about(DOG), asked_about(CAT), asked_about()], GREEDY)
    assert cat.outputs[0].token_ids == again.outputs[0].token_ids
    assert cat.prompt_token_ids == dog.prompt_token_ids != none.prompt_token_ids
    assert len({tuple(each.outputs[0].token_ids) for each in (cat, dog, none)}) == 3
    assert "reads images" in str(llm.report)


def test_an_image_in_the_cache_is_a_hit_for_the_same_image_only(folder: Path) -> None:
    with LLM(folder, kv_memory="8MiB", num_threads=2) as llm:
        first = llm.chat(asked_about(CAT), GREEDY)[0]
        before = llm.stats().hit_tokens_total
        again = llm.chat(asked_about(CAT), GREEDY)[0]
        hits = llm.stats().hit_tokens_total - before
        llm.chat(asked_about(DOG), GREEDY)
        assert hits > 16 and llm.stats().hit_tokens_total - before - hits < 16
        assert first.outputs[0].token_ids == again.outputs[0].token_ids


@pytest.mark.parametrize("name", PREPARED)
def test_families_answer(tmp_path: Path, name: str) -> None:
    with LLM(write_image_model(tmp_path, name), kv_memory="8MiB", num_threads=2) as llm:
        cat, dog = llm.chat([asked_about(CAT), asked_about(DOG)], GREEDY)
        assert cat.outputs[0].token_ids != dog.outputs[0].token_ids


def test_a_model_whose_processor_and_encoder_differ_is_refused(tmp_path: Path) -> None:
    write_image_model(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 5}')
    with pytest.raises(CheckpointError, match="56 x 56 pixels is 5; allowed: 4, as many as its image"):
        LLM(tmp_path, kv_memory="8MiB")


def test_a_prompt_that_is_too_long_with_its_images_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="images of"):
        llm.chat(asked_about(*[CAT] * 40), GREEDY)


def test_an_engine_that_reads_images_is_freed_at_once(folder: Path) -> None:
    """Without a reference cycle: an engine's process never looks for those, and complained of leaks at its end."""
    llm = LLM(folder, kv_memory="8MiB", num_threads=1)
    llm.chat(asked_about(CAT), GREEDY)
    engine = weakref.ref(llm.engine)
    gc.disable()
    try:
        llm.close()
        del llm
        assert engine() is None
    finally:
        gc.enable()


def test_an_event_loop_can_ask_too(folder: Path, llm: LLM) -> None:
    async def last() -> list[int]:
        async with AsyncLLM(folder, kv_memory="8MiB", num_threads=2) as opened:
            outputs = [output async for output in opened.generate(asked_about(CAT), GREEDY)]
        return list(outputs[-1].outputs[0].token_ids)

    assert asyncio.run(last()) == list(llm.chat(asked_about(CAT), GREEDY)[0].outputs[0].token_ids)


# --- through a server ----------------------------------------------------------------------------

URL, DATA = data_url(CAT), base64.b64encode(CAT).decode()
SAMPLING = {"temperature": 0, "ignore_eos": True}


def ask(server: RunningServer, path: str, fields: dict[str, Any]) -> Any:
    answer = server.post(path, fields)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_every_api_gives_the_answer_of_a_program(server: RunningServer, llm: LLM) -> None:
    output = llm.chat(asked_about(CAT), GREEDY)[0]
    text, num_tokens = output.outputs[0].text, len(output.prompt_token_ids)
    parts = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": TEXT}]
    chat = ask(server, "/v1/chat/completions", {"messages": said(*parts), "max_tokens": 6, **SAMPLING})
    assert (chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]) == (text, num_tokens)
    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": TEXT}]
    answer = ask(server, "/v1/responses", {"input": said(*parts), "max_output_tokens": 6, **SAMPLING})
    assert (answer["output"][0]["content"][0]["text"], answer["usage"]["input_tokens"]) == (text, num_tokens)
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    blocks = {"messages": said({"type": "image", "source": source}, {"type": "text", "text": TEXT})}
    message = ask(server, "/v1/messages", {**blocks, "max_tokens": 6, **SAMPLING})
    assert message["content"][0]["text"] == text
    assert ask(server, "/v1/messages/count_tokens", blocks)["input_tokens"] == num_tokens
    options = {"options": {"temperature": 0, "num_predict": 6}, "stream": False}
    shown = ask(server, "/api/chat", {"messages": [{"role": "user", "content": TEXT, "images": [DATA]}], **options})
    assert shown["prompt_eval_count"] == num_tokens
    written = ask(server, "/api/generate", {"prompt": TEXT, "images": [DATA], **options})
    assert text.startswith(written["response"]) and shown["message"]["content"] == written["response"]
    tokens = ask(
        server, "/tokenize", {"messages": said(*[{"type": "image", "image": URL}, {"type": "text", "text": TEXT}])}
    )
    assert tokens["tokens"] == list(output.prompt_token_ids)
    assert "vision" in ask(server, "/api/show", {"model": server.services.name})["capabilities"]


def test_live_says_that_messages_may_have_images(server: RunningServer) -> None:
    with LiveLines(server.port) as lines, running_server() as of_texts, LiveLines(of_texts.port) as others:
        lines.until(lambda _: True)
        others.until(lambda _: True)
        assert (lines.hello["reads_images"], others.hello["reads_images"]) == (True, False)


def test_a_stream_has_the_same_text(server: RunningServer, llm: LLM) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": TEXT}]
    with server.client() as client:
        stream = client.chat.completions.create(
            model=server.services.name,
            messages=said(*parts),
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == llm.chat(asked_about(CAT), GREEDY)[0].outputs[0].text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1/cat.png", "nothing is fetched from other places"),
        ("file:///etc/passwd", "nothing is fetched from other places"),
        ("/etc/passwd", "a data URL such as data:image/png;base64,"),
        ("data:image/png;base64,AAAA", "a PNG, JPEG, WebP or GIF image"),
        (URL[:200], "that is complete"),
    ],
)
def test_what_is_no_image_is_refused(server: RunningServer, url: str, words: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    answer = server.post("/v1/chat/completions", {"messages": said(part)})
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["param"]) == (400, "messages[0].content[0].image_url.url")
    assert words in error["message"] and "\n" not in error["message"]


def test_a_large_photo_fits_into_a_body(server: RunningServer) -> None:
    data = file_of(picture(2000, 1500), compress_level=0)
    assert len(data) > 8 << 20
    part = {"type": "image_url", "image_url": {"url": data_url(data)}}
    ask(server, "/v1/chat/completions", {"messages": said(part), "max_tokens": 1})
    text = {"type": "text", "text": "a" * (33 << 20)}
    answer = server.post("/v1/chat/completions", {"messages": said(text)})
    assert answer.status == 413 and b"max_image_body" in answer.body


def test_many_clients_send_images_at_once(server: RunningServer, llm: LLM) -> None:
    expected = [each.outputs[0].text for each in llm.chat([asked_about(CAT), asked_about(DOG)], GREEDY)]

    def answer(index: int) -> str:
        part = {"type": "image_url", "image_url": {"url": data_url((CAT, DOG)[index % 2])}}
        fields = {"messages": said(part, {"type": "text", "text": TEXT}), "max_tokens": 6, **SAMPLING}
        return str(ask(server, "/v1/chat/completions", fields)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answer, range(16))) == expected * 8
    server.wait_until_idle()
    assert server.services.images.held_bytes == 0


def test_an_image_encoder_that_makes_too_few_rows_is_refused(tmp_path: Path) -> None:
    write_image_model(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 1}')
    with pytest.raises(CheckpointError, match="a usual image is '128 x 96 pixels'; allowed: an image of at least 4"):
        LLM(tmp_path, kv_memory="8MiB")


def test_settings_that_make_each_image_huge_are_refused_before_any_is_resized(tmp_path: Path) -> None:
    write_image_model(tmp_path, "gemma4")
    (tmp_path / "processor_config.json").write_text('{"patch_size": 4096, "pooling_kernel_size": 16}')
    with pytest.raises(CheckpointError, match="patch_size is 4096; allowed: images of at most 33,554,432 pixels"):
        LLM(tmp_path, kv_memory="8MiB")


@pytest.mark.parametrize(
    ("name", "patch", "expected"), [("qwen2-vl", 7, 2500), ("mistral3", 7, 2500), ("gemma4", 4, 2304)]
)
def test_a_large_image_is_resized_to_the_limit_of_patches(tmp_path: Path, name: str, patch: int, expected: int) -> None:
    """The time of a layer grows with the square of the patches, and all texts wait for it."""
    write_image_model(tmp_path, name, context=1024)
    for file, changes in (
        ("config.json", {"vision_config": {"image_size": 7 * 50}}),
        (
            "preprocessor_config.json",
            {"max_pixels": (7 * 50) ** 2, "size": {"longest_edge": 7 * 50}, "max_soft_tokens": 256},
        ),
    ):
        settings = json.loads((tmp_path / file).read_text())
        for key, value in changes.items():
            settings[key] = {**settings[key], **value} if key == "vision_config" else value
        (tmp_path / file).write_text(json.dumps(settings))
    found = []
    for most in (4096, 1024):
        blueprint = plan_engine(EngineConfig(model=str(tmp_path), kv_memory="8MiB", max_image_patches=most))
        assert blueprint.images is not None
        (read,) = blueprint.images.read([SentImage("image", file_of(picture(600, 600)))])
        num_patches = sum(tile.height * tile.width for tile in read.tiles) // patch**2
        found.append((num_patches, blueprint.report.plan.total_bytes))
    (whole, needed), (resized, needed_less) = found
    assert whole == expected and 900 <= resized <= 1024
    assert needed_less < needed


def test_a_folder_can_be_read_without_its_image_encoder(folder: Path) -> None:
    with LLM(folder, kv_memory="8MiB", num_threads=2, mmproj="none") as llm:
        assert "reads images" not in str(llm.report)
        assert llm.chat(asked_about(), GREEDY)[0].outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="image"):
            llm.chat(asked_about(CAT), GREEDY)
