"""Requests with images: how each API has them, what they may hold, and how many tokens they count as."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.request import Request
from quire.core.validate import validate_length
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import IMAGE_TOKENS, Encoded, encode_prompt, estimated_tokens
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.context import RequestContext
from quire.serve.errors import ApiError
from quire.serve.read.body import BodyLimits
from quire.serve.render.llama_server import llama_props
from quire.serve.render.ollama_models import shown_model
from quire.serve.run.prompts import encoded_conversation, ready_prompt
from quire.serve.run.request import GenerationRequest, Truncation
from quire.serve.schemas.messages import MessagesRequest
from quire.serve.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.services import Services
from quire.serve.tenants import ANYBODY
from quire.serve.translate import message_blocks, ollama, ollama_messages, response_input
from quire.serve.translate.messages import messages_request
from quire.serve.translate.responses import response_request
from support.idle_services import DEFAULTS, LIMITS, services
from support.tiny_images import asked_about, data_url, file_of, open_tokenizer, picture, write_folder

SMALL = file_of(picture(40, 30))
URL = data_url(SMALL)
DATA = URL.partition(",")[2]


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("smolvlm")
    write_folder(folder, "SmolVLM")
    return open_tokenizer(folder)


def serving(tokenizer: Tokenizer, **config: Any) -> Services:
    """Services whose model reads images."""
    found = services(tokenizer, **config)
    model: Any = found.model
    model.report = replace(model.report, reads_images=True)
    model.text_pool = TenantPool("text", num_threads=1)
    return found


def context_of(where: Services, tenant: str = "") -> RequestContext:
    return RequestContext("req", "", replace(ANYBODY, name=tenant), 0.0, "", where.bodies.open(tenant))


def said(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def encoded(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> Encoded:
    return encode_prompt(messages, tokenizer)


# --- the doors -----------------------------------------------------------------------------------


def test_each_api_asks_the_model_the_same(smolvlm: Tokenizer) -> None:
    where, text = serving(smolvlm), "What is this?"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    anthropic = MessagesRequest(messages=said(block, {"type": "text", "text": text}), max_tokens=1)
    parts = [{"type": "input_image", "image_url": URL, "detail": "auto"}, {"type": "input_text", "text": text}]
    found = [
        messages_request(anthropic, where).prompts[0],
        response_request(ResponseRequest(input=said(*parts)), where).prompts[0],
        ollama.ollama_chat_request(
            OllamaChatRequest(messages=[{"role": "user", "content": text, "images": [DATA]}]), where
        ).prompts[0],
        ollama.ollama_generate_request(OllamaGenerateRequest(prompt=text, images=[DATA]), where).prompts[0],
        said({"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": text}),
    ]
    expected = encoded(smolvlm, asked_about(SMALL, text=text))
    assert [encode_prompt(each, smolvlm) for each in found] == [expected] * 5


def test_a_tool_can_show_an_image(smolvlm: Tokenizer) -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    shown = [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "data": DATA}}]
    results = said({"type": "tool_result", "tool_use_id": "c", "content": shown})
    fields = MessagesRequest(messages=[*said(), {"role": "assistant", "content": [call]}, *results], max_tokens=1)
    place = "messages[2].content[0].content[1].source.data"
    [told] = [each for each in message_blocks.messages_of(fields, images=True) if each["role"] == "tool"]
    assert told["content"] == [{"type": "text", "text": "a"}, {"type": "image", "image": DATA, "where": place}]
    items: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    told = response_input.messages_of(ResponseRequest(input=items), images=True)[1]
    assert told["content"] == [{"type": "image", "image": URL, "where": "input[1].output[0].image_url"}]


def test_texts_between_images_stay_between_them() -> None:
    image = {"type": "input_image", "image_url": URL}
    items = [*said(image, {"type": "input_text", "text": "a"}), {"role": "user", "content": "b"}, *said(image)]
    [message] = response_input.messages_of(ResponseRequest(input=items), images=True)
    assert [part.get("text", part["type"]) for part in message["content"]] == ["image", "a", "\n", "b", "\n", "image"]
    block = {"type": "image", "source": {"type": "base64", "data": DATA}}
    texts = [{"type": "text", "text": letter} for letter in "ab"]
    [message] = message_blocks.messages_of(
        MessagesRequest(messages=said(*texts, block, *texts), max_tokens=1), images=True
    )
    assert [part.get("text", part["type"]) for part in message["content"]] == ["a\nb", "image", "a\nb"]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"type": "url", "url": "https://example.org/cat.png"}, "messages[0].content[0].source.type"),
        ({"type": "file", "file_id": "f"}, "messages[0].content[0].source.type"),
        ({"type": "base64"}, "messages[0].content[0].source.data"),
        ({"type": "base64", "data": 7}, "messages[0].content[0].source.data"),
        (None, "messages[0].content[0].source.type"),
        ("x", "messages[0].content[0].source.type"),
    ],
)
def test_a_block_has_the_image_itself(source: Any, field: str) -> None:
    fields = MessagesRequest(messages=said({"type": "image", "source": source}), max_tokens=1)
    with pytest.raises(InvalidRequestError) as caught:
        message_blocks.messages_of(fields, images=True)
    assert caught.value.field == field


def test_errors_name_the_place_in_the_request(smolvlm: Tokenizer) -> None:
    where = serving(smolvlm)
    block = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    asked = {
        "messages[1].content[0].source.data": messages_request(
            MessagesRequest(messages=[*said(), *said(block)], max_tokens=1), where
        ),
        "input[0].content[0].image_url": response_request(
            ResponseRequest(input=said({"type": "input_image", "image_url": "http://a/b"})), where
        ),
        "messages[0].images[1]": ollama.ollama_chat_request(
            OllamaChatRequest(messages=[{"role": "user", "images": [DATA, "%"]}]), where
        ),
        "images[0]": ollama.ollama_generate_request(OllamaGenerateRequest(images=["AAAA"]), where),
    }
    for place, request in asked.items():
        with pytest.raises(InvalidRequestError) as caught:
            encode_prompt(request.prompts[0], smolvlm)
        assert caught.value.field == place


@pytest.mark.parametrize("images", ["AAAA", [7], [""], {"a": 1}, [None]])
def test_images_of_ollama_are_texts(images: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].images"):
        ollama_messages.messages_of([{"role": "user", "content": "a", "images": images}], images=True)


def test_a_raw_prompt_has_no_images(smolvlm: Tokenizer) -> None:
    fields = OllamaGenerateRequest(prompt="a", raw=True, images=[DATA])
    with pytest.raises(ApiError, match="images is not supported: a raw prompt"):
        ollama.ollama_generate_request(fields, serving(smolvlm))
    assert not ollama.asks_nothing(OllamaGenerateRequest(images=[DATA]))


def test_clients_are_told_that_the_model_reads_images(smolvlm: Tokenizer) -> None:
    for where, reads in ((serving(smolvlm), True), (services(smolvlm), False)):
        assert ("vision" in shown_model(where, where.model, None).capabilities) is reads
        assert llama_props(where, "m").modalities == {"vision": reads, "audio": False}


# --- limits --------------------------------------------------------------------------------------


def test_an_image_counts_as_many_tokens_before_it_is_read() -> None:
    messages = said(
        {"type": "image_url", "image_url": {"url": "data:," + "A" * 100_000}}, {"type": "text", "text": "a"}
    )
    assert estimated_tokens(messages, 1 << 30) == IMAGE_TOKENS + 10
    hidden = {"type": "image", "image": "x" * 40_000, "description": "y"}
    assert estimated_tokens([hidden], 1 << 30) > 10_000, "no part of a message has such keys"
    request = GenerationRequest(
        [said()], DEFAULTS, {}, chat=ChatOptions(tools=[{"type": "image", "image": "x" * 40_000}])
    )
    assert request.num_tokens(1 << 30) > 10_000, "a tool is no image"


def test_a_body_has_room_for_images_if_the_model_reads_them(smolvlm: Tokenizer) -> None:
    assert BodyLimits.of(services(smolvlm)).max_bytes < 2 << 20
    limits = BodyLimits.of(serving(smolvlm))
    assert (limits.max_bytes, limits.why) == (
        32 << 20,
        "this server accepts no larger body (max_image_body); send less",
    )
    assert BodyLimits.of(serving(smolvlm), has_text=False).max_bytes < 2 << 20
    small = serving(smolvlm, max_body="1MiB", max_image_body="2MiB", max_bodies="4MiB")
    assert BodyLimits.of(small).max_bytes == 2 << 20
    shared = serving(smolvlm, max_bodies="64MiB", api_key=("a", "b"))
    assert BodyLimits.of(shared).max_bytes == 16 << 20, "one key's share"


def test_pixels_are_held_until_the_request_ends(smolvlm: Tokenizer) -> None:
    where = serving(smolvlm, max_image_memory=400_000)
    messages, num_bytes = asked_about(DATA), 13 * 64 * 64 * 3

    async def ask(context: RequestContext) -> Encoded:
        return await encoded_conversation(where, context, messages, ChatOptions())

    first, second, third = (context_of(where) for _ in range(3))
    assert sum(len(each.pixels) for each in asyncio.run(ask(first)).images) == num_bytes
    asyncio.run(ask(second))
    assert where.images.held_bytes == 2 * (num_bytes - (16 << 10))
    with pytest.raises(ApiError, match="request images already hold 400000 bytes") as caught:
        asyncio.run(ask(third))
    assert caught.value.status == 503
    assert first.images is not None and second.images is not None
    first.images.release()
    asyncio.run(ask(third))
    where.images.check()
    messages = asked_about(DATA, DATA, DATA)
    with pytest.raises(InvalidRequestError, match=r"at most 400,000 bytes \(max_image_memory\)"):
        asyncio.run(ask(context_of(where)))


def test_images_are_read_in_the_threads_for_texts(smolvlm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    where, asked = serving(smolvlm), list[str]()
    run = where.model.text_pool.run

    async def noted(tenant: str, work: Any) -> Any:
        asked.append(tenant)
        return await run(tenant, work)

    monkeypatch.setattr(where.model.text_pool, "run", noted)
    asyncio.run(encoded_conversation(where, context_of(where, "ada"), asked_about(DATA), ChatOptions()))
    asyncio.run(encoded_conversation(where, context_of(where, "ada"), asked_about(), ChatOptions()))
    assert asked == ["ada"]


def test_a_prompt_with_images_is_never_cut(smolvlm: Tokenizer, tmp_path: Path) -> None:
    where = serving(smolvlm)

    def ready(length: int) -> Any:
        request = GenerationRequest(
            [asked_about(DATA)], DEFAULTS, {}, chat=ChatOptions(), truncation=Truncation(length, keeps_start=False)
        )
        return asyncio.run(ready_prompt(where, context_of(where), request, request.prompts[0]))

    prompt = ready(1000).prompt
    assert isinstance(prompt, Encoded) and len(prompt.images) == 13
    assert encode_prompt(prompt, None) is prompt
    with pytest.raises(InvalidRequestError, match="no image can be cut"):
        ready(50)


def test_a_prompt_that_is_too_long_names_the_tokens_of_its_images(smolvlm: Tokenizer) -> None:
    prompt = encode_prompt(asked_about(DATA, DATA), smolvlm)
    request = Request("r", prompt.token_ids, DEFAULTS)
    request.images = prompt.images
    with pytest.raises(RequestTooLargeError) as caught:
        validate_length(request, LIMITS)
    num_tokens = len(prompt.token_ids)
    assert str(caught.value).startswith(
        f"the prompt has {num_tokens} tokens, 130 of them for images; this model's maximum"
    )
