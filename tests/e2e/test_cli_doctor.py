"""`quire doctor FOLDER`: approves what can be loaded, and nothing else; says what to do about the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, cli
from quire.core.errors import CheckpointError
from support.image_models import write_image_model
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

SETTINGS = {"vocab_size": 384, "eos_token_id": 299}
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_chatml(write_tiny_qwen3(tmp_path / "model", settings=SETTINGS, num_shards=2))


def doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(["doctor", str(folder), "--kv-memory", "1MiB", "--num-threads", "1"])
    out, err = capsys.readouterr()
    return status, " ".join(out.split()), err


def without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def only_a_pickle(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def truncated(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 100)


def of_another_shape(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def with_a_layer_more(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))


def of_integers(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data.replace(b'"dtype": "F32"', b'"dtype": "I32"'))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (without_weights, "has no model.safetensors or model.safetensors.index.json"),
    "a pickle": (only_a_pickle, "pytorch_model.bin, a pickle, which could run code and is never read. Convert it"),
    "a missing shard": (lambda folder: (folder / SHARD).unlink(), "No such file or directory"),
    "a truncated shard": (truncated, f"{SHARD} is incomplete: it has "),
    "other shapes": (of_another_shape, "wrong shape: model.layers.0.mlp."),
    "missing tensors": (with_a_layer_more, "missing: model.layers.3."),
    "integers": (of_integers, "dtype is 'I32'; allowed: one of F32, F16, BF16"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "skip_tokenizer_init=True"),
    "a broken template": (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "that compiles"),
}  # fmt: skip


def test_a_folder_that_can_be_loaded_is_approved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = doctor(folder, capsys)
    assert (status, err) == (0, "")
    assert "weights 35 tensors, all with the shapes that the model's settings imply" in out
    assert "301 tokens, with a chat template" in out


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_cannot_be_loaded_is_not(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = DAMAGES[name]
    damage(folder)
    status, out, err = doctor(folder, capsys)
    assert (status, err) == (1, "")
    assert said in out and "×" in out
    with pytest.raises(CheckpointError) as refused:
        LLM(str(folder), kv_memory="1MiB", num_threads=1).close()
    assert " ".join(str(refused.value).split()) in out


def test_all_that_is_wrong_is_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truncated(folder)
    (folder / "tokenizer.json").unlink()
    status, out, _ = doctor(folder, capsys)
    assert status == 1
    assert "is incomplete" in out and "has no tokenizer.json" in out


def test_images_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image_model(tmp_path)
    status, out, _ = doctor(tmp_path, capsys)
    assert status == 0 and "reads images" in out and "with a chat template; images become <image>" in out
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 5}')
    status, out, _ = doctor(tmp_path, capsys)
    assert status == 1 and "allowed: 4, as many as its image encoder makes" in out


def test_weights_are_looked_at_and_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("weights were mapped")

    monkeypatch.setattr("quire.compute.weights.mapped_files.MappedFiles.bytes_of", fail)
    assert doctor(folder, capsys)[0] == 0


def test_a_folder_whose_settings_cannot_be_read_is_misused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").unlink()
    status, _, err = doctor(folder, capsys)
    assert status == cli.MISUSED
    assert "has no config.json: but model-00001-of-00002.safetensors. Save the model again" in err
    assert err.count("\n") == 1
