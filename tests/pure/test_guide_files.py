"""The folder of the guide is a whole model: complete, small, and of one mind about its vocabulary."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.safetensors import read_header
from quire.engine.text.chat_template import ChatTemplate, validate_messages
from quire.guide import GUIDE_FOLDER

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def read(name: str) -> Any:
    return json.loads((GUIDE_FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, int]:
    """Every token with its id."""
    vocabulary: dict[str, int] = read("tokenizer.json")["model"]["vocab"]
    return vocabulary


def test_the_folder_is_complete() -> None:
    names = {file.name for file in GUIDE_FOLDER.iterdir() if file.is_file() and file.suffix != ".pyc"}
    assert names == {
        "__init__.py",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_model_can_be_read_and_ends_its_texts(vocabulary: dict[str, int]) -> None:
    model = read_model(ModelFolder(GUIDE_FOLDER))
    assert model.spec.tied_head
    assert model.spec.context_length == 2048
    assert model.eos_token_ids == (vocabulary["<|im_end|>"],)
    assert read("config.json")["eos_token_id"] == vocabulary["<|im_end|>"]


def test_it_decodes_greedily_if_nobody_says_otherwise() -> None:
    assert read("generation_config.json")["do_sample"] is False


def test_it_is_small() -> None:
    header = read_header(GUIDE_FOLDER / "model.safetensors")
    num_parameters = sum(math.prod(entry.shape) for entry in header.values())
    assert 1_000_000 < num_parameters < 4_000_000
    assert {entry.dtype for entry in header.values()} == {"BF16"}


def test_all_files_agree_on_the_vocabulary(vocabulary: dict[str, int]) -> None:
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert read("config.json")["vocab_size"] == len(vocabulary)
    assert read_header(GUIDE_FOLDER / "model.safetensors")["model.embed_tokens.weight"].shape[0] == len(vocabulary)


def test_the_special_tokens_are_those_of_the_template(vocabulary: dict[str, int]) -> None:
    added = {token["content"]: token["id"] for token in read("tokenizer.json")["added_tokens"] if token["special"]}
    assert added == {token: vocabulary[token] for token in SPECIAL_TOKENS}
    settings = read("tokenizer_config.json")
    assert settings["eos_token"] == "<|im_end|>"
    assert {token["content"] for token in settings["added_tokens_decoder"].values()} == set(SPECIAL_TOKENS)


def test_the_template_knows_the_roles_and_the_prompt_for_an_answer() -> None:
    template = (GUIDE_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    for word in ("system", "user", "assistant", "<|im_start|>", "<|im_end|>", "add_generation_prompt"):
        assert word in template


def test_the_template_shows_tools_and_their_calls() -> None:
    source = (GUIDE_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {})
    tool = {"type": "function", "function": {"name": "now"}}
    call: Any = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "12:00"},
    ]
    text = template.render(validate_messages(messages), tools=[tool])
    head, *turns = text.split("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert json.dumps(tool) in head
    written = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert turns == [
        "<|im_start|>user\nWhen?",
        f"<|im_start|>assistant\n{written}\n{written}",
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>",
        "<|im_start|>assistant\n",
    ]
    plain = template.render(validate_messages(messages[:2]))
    assert plain == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
    )
