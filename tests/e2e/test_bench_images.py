"""`quire bench images` with tiny sizes: every part is measured. No time is looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire import cli
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.instruments.bench.images import operations_of
from quire.instruments.bench.shapes import write_random_checkpoint
from support.vision_models import SETTINGS, vision_of, write_vision_model

SIZES = ["--repeat", "2", "--tokens", "24", "--chats", "2", "--images", "2"]
SIZES += ["--kv-memory", "8MiB", "--read-size", "1MiB"]


def test_encoding_and_texts_meanwhile_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_vision_model(tmp_path / "model", SETTINGS["smolvlm"]), tmp_path / "images.json"
    assert cli.main(["bench", "images", str(folder), *SIZES, "--json", str(out)]) in (cli.DONE, 1)
    samples = json.loads(out.read_text())["samples"]
    assert len(samples["Encoding an image"]["s"]) == len(samples["Encoding an image"]["%"]) == 2
    pauses = samples["Texts while images are encoded"]["s"]
    assert len(pauses["images"]) == len(pauses["no image"]) > 2 * 2 * 12
    assert "56 × 56, 4 tokens" in capsys.readouterr().out


def test_a_model_of_texts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "images", "guide", *SIZES]) == 2
    assert "one that reads images" in capsys.readouterr().err


def test_an_interpreter_without_the_peer_is_named_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_vision_model(tmp_path / "model", SETTINGS["smolvlm"])
    options = ["--only", "peer", "--peer-python", sys.executable]
    assert cli.main(["bench", "images", str(folder), *SIZES, *options]) == cli.FAILED
    assert "No module named" in capsys.readouterr().err


def test_the_operations_of_a_published_encoder(tmp_path: Path) -> None:
    """SmolVLM-256M: 12 layers of 768 and 3,072 numbers, 1,024 patches of 768 numbers, 64 rows of 12,288 to 576."""
    write_random_checkpoint(tmp_path / "model", "smolvlm-256m")
    vision = vision_of(read_model(ModelFolder(tmp_path / "model")))
    of_layers = 12 * (1024 * (4 * 768**2 + 2 * 768 * 3072) + 2 * 1024**2 * 768)
    assert operations_of(vision, 512, 512) == 2 * (of_layers + 1024 * 768 * 768 + 64 * 12_288 * 576)
