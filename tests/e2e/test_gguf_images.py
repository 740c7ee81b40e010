"""GGUF models that read images: two files that answer as the folder from which they were made."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import CheckpointError
from support.gguf_projectors import write_pair
from support.image_models import write_image_model
from support.server import running_server
from support.tiny_images import asked_about, data_url, file_of, picture

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CAT, DOG = (file_of(picture(90, 60, seed=seed)) for seed in (1, 2))
SQUARE = file_of(picture(60, 60, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="module")
def pair(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(folder, tmp_path_factory.mktemp("gguf"))


def opened(model: Path, **settings: Any) -> LLM:
    return LLM(model, kv_memory="8MiB", num_threads=2, **settings)


def answers(llm: LLM, *images: bytes) -> list[tuple[list[int], list[int]]]:
    outputs = llm.chat([asked_about(image) for image in images], GREEDY, use_tqdm=False)
    return [(list(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]


def test_a_pair_answers_as_its_folder(folder: Path, pair: tuple[Path, Path]) -> None:
    with opened(folder) as llm:
        expected = answers(llm, CAT, DOG)
    with opened(pair[0]) as llm:
        assert answers(llm, CAT, DOG) == expected and expected[0] != expected[1]
        assert "reads images" in str(llm.report)
        assert f"image encoder: {pair[1]}" in str(llm.report)


def test_a_pair_of_llava_answers_as_its_folder(tmp_path: Path) -> None:
    folder = write_image_model(tmp_path / "folder", "llava-clip")
    text, _ = write_pair(folder, tmp_path / "gguf")
    with opened(folder) as llm:
        expected = answers(llm, SQUARE)
    with opened(text) as llm:
        assert answers(llm, SQUARE) == expected
        assert len(answers(llm, CAT)[0][0]) == len(expected[0][0])  # padded to a square


def test_without_the_image_encoder_a_model_reads_text_only(pair: tuple[Path, Path]) -> None:
    with opened(pair[0], mmproj="none") as llm:
        assert "reads images" not in str(llm.report)
        with pytest.raises(Exception, match="image"):
            answers(llm, CAT)


def test_an_image_encoder_can_be_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other, text = tmp_path / "other.gguf", tmp_path / "text.gguf"
    other.write_bytes(pair[1].read_bytes())
    text.write_bytes(pair[0].read_bytes())
    with opened(text) as llm:
        assert "reads images" not in str(llm.report)
    with opened(text, mmproj=other) as llm, opened(pair[0]) as same:
        assert answers(llm, CAT) == answers(same, CAT)
    with pytest.raises(CheckpointError, match=r"No file named .*nowhere.*mmproj takes a GGUF file, auto or none"):
        opened(text, mmproj=tmp_path / "nowhere.gguf")


def test_the_memory_plan_counts_the_image_encoder(folder: Path, pair: tuple[Path, Path]) -> None:
    with opened(folder) as llm:
        expected = llm.report.plan.needs
    with opened(pair[0]) as llm, opened(pair[0], mmproj="none") as text:
        assert llm.report.plan.needs.weight_bytes == expected.weight_bytes > text.report.plan.needs.weight_bytes
        assert llm.report.plan.needs.activation_bytes == expected.activation_bytes


def test_a_server_answers_about_images(pair: tuple[Path, Path]) -> None:
    with running_server(model=str(pair[0])) as server:
        parts = [{"type": "image_url", "image_url": {"url": data_url(CAT)}}, {"type": "text", "text": "What?"}]
        answer = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        )
        assert answer.status == 200
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "What?", "images": [base64.b64encode(CAT).decode()]}],
        }
        assert server.post("/api/chat", body | {"stream": False}).status in (200, 404)
