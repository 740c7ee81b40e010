"""GGUF models that read images: two files that answer as the folder from which they were made."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as pillow

from quire import LLM, SamplingParams
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from quire.engine.factory import plan_engine
from support.gguf_projectors import write_pair, write_single
from support.image_models import PREPARED, write_image_model
from support.model_stores import VARIABLES, add_to_hub
from support.server import running_server
from support.tiny_images import asked_about, data_url, file_of, picture
from support.vision_models import SETTINGS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CAT, DOG = (file_of(picture(90, 60, seed=seed)) for seed in (1, 2))
COMPLETE = [name for name in PREPARED if name not in ("gemma4-unified", "glm4v", "lfm2-vl", "qwen3-vl-moe")]
"""Models whose files have all settings: not sizes of tiles, nor a part that quire does not read."""
SQUARE = file_of(picture(60, 60, seed=3))


def as_in_files(folder: Path, name: str) -> Path:
    """Return the folder of a model with the number of tokens for an image that readers of its files know."""
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    if name.startswith("gemma4"):
        del pixels["max_soft_tokens"]
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


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


def test_a_model_of_the_hub_without_its_encoder_says_how_to_fetch_it(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    snapshot = add_to_hub(tmp_path, "quire-no-such/model")
    (snapshot / "model-F32.gguf").symlink_to(pair[0])

    def notices(**settings: Any) -> str:
        return str(plan_engine(EngineConfig(model="quire-no-such/model:F32", kv_memory="8MiB", **settings)).report)

    advice = "text only: the image encoder is not here. If the hub has it: quire models pull quire-no-such/model:F32"
    assert advice in notices()
    assert "text only" not in notices(mmproj="none")
    (snapshot / "mmproj-model-F32.gguf").symlink_to(pair[1])
    assert "text only" not in notices() and "image encoder: " in notices()


@pytest.mark.parametrize("name", COMPLETE)
def test_pairs_of_all_kinds_answer_as_their_folders(tmp_path: Path, name: str) -> None:
    folder = as_in_files(write_image_model(tmp_path / "folder", name), name)
    config = json.loads((folder / "config.json").read_text())
    config["projector_hidden_act"] = "gelu"  # files have no other
    if name == "gemma3":
        config["text_config"] |= {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3}  # as in files
    (folder / "config.json").write_text(json.dumps(config))
    text, _ = write_pair(folder, tmp_path / "gguf")
    image = SQUARE if name.startswith("llava") else CAT
    with opened(folder) as llm:
        expected = answers(llm, image)
    with opened(text) as llm:
        assert answers(llm, image) == expected


def test_a_pair_of_lfm2_answers_as_a_folder_with_the_usual_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files have no sizes of tiles, which are those of all published models."""
    usual = {
        "encoder_patch_size": 8,
        "tile_size": 512,
        "min_image_tokens": 64,
        "max_image_tokens": 256,
        "max_tiles": 10,
    }
    monkeypatch.setitem(PREPARED, "lfm2-vl", ("LFM2-VL", usual, {}))
    vision = SETTINGS["lfm2-vl"]["vision_config"] | {"patch_size": 8}
    monkeypatch.setitem(SETTINGS, "lfm2-vl", SETTINGS["lfm2-vl"] | {"vision_config": vision})
    folder = write_image_model(tmp_path / "folder", "lfm2-vl")
    text, _ = write_pair(folder, tmp_path / "gguf")
    with opened(folder) as llm:
        expected = answers(llm, CAT)
    with opened(text) as llm:
        assert answers(llm, CAT) == expected


def test_images_for_llava_are_padded_to_a_square(tmp_path: Path) -> None:
    text, _ = write_pair(write_image_model(tmp_path / "folder", "llava-clip"), tmp_path / "gguf")
    wide = picture(120, 40, seed=4)
    square = pillow.new("RGB", (120, 120), (122, 116, 104))
    square.paste(wide, (0, 40))
    with opened(text) as llm:
        assert answers(llm, file_of(wide)) == answers(llm, file_of(square)) != answers(llm, SQUARE)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "qwen2-5-vl", "qwen3-vl"])
def test_a_single_file_answers_as_its_folder(tmp_path: Path, name: str) -> None:
    """As Ollama has the image encoder: in the file of the text model, without what Ollama's code has."""
    folder = as_in_files(write_image_model(tmp_path / "folder", name), name)
    config = json.loads((folder / "config.json").read_text())
    if name == "gemma3":
        config["text_config"] |= {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3}
        config["text_config"] |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
    if name == "mistral3":
        config["vision_config"]["hidden_act"] = "silu"
    (folder / "config.json").write_text(json.dumps(config))
    if name == "qwen2-5-vl":
        pixels = json.loads((folder / "preprocessor_config.json").read_text()) | {"min_pixels": 56 * 56}
        (folder / "preprocessor_config.json").write_text(json.dumps(pixels | {"max_pixels": 12_845_056}))
    edges = {"vision.shortest_edge": 784, "vision.longest_edge": 56 * 56} if name == "qwen3-vl" else {}
    single = write_single(folder, tmp_path / "gguf", **edges)
    with opened(folder) as llm:
        expected, needs = answers(llm, CAT, DOG), llm.report.plan.needs
    with opened(single) as llm:
        assert answers(llm, CAT, DOG) == expected and expected[0] != expected[1]
        assert "reads images" in str(llm.report) and "image encoder:" not in str(llm.report)
        assert llm.report.plan.needs.weight_bytes == needs.weight_bytes
        assert llm.report.plan.needs.activation_bytes == needs.activation_bytes
    with opened(single, mmproj="none") as llm:
        assert "reads images" not in str(llm.report)
        assert llm.report.plan.needs.weight_bytes < needs.weight_bytes


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
