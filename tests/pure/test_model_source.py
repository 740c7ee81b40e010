"""A model that is no folder: its settings and its tokenizer are in memory, as one file of all would give them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.compute.choice import backend_on
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.weights.checkpoint import Checkpoint
from quire.core.config import EngineConfig, MemoryConfig
from quire.core.errors import CheckpointError
from quire.core.model_files import MAX_SETTINGS_BYTES
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.factory import create_reference_engine
from quire.engine.text.tokenizer import Tokenizer
from quire.guide import GUIDE_FOLDER

MESSAGES = [{"role": "user", "content": "What is a block?"}]


@dataclass
class ModelInMemory:
    """Implements `ModelSource` with texts by name; it has the tensors of a folder."""

    texts: dict[str, str]
    checkpoint: Path

    @property
    def name(self) -> str:
        return "a model in memory"

    def where(self, file: str) -> str:
        return f"{self.name}: {file}"

    def has(self, file: str) -> bool:
        return file in self.texts

    def text(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
        assert len(self.texts[file]) <= max_bytes
        return self.texts[file]

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.text(file, max_bytes))
        return found

    def tensors(self) -> Checkpoint:
        return Checkpoint.open(self.checkpoint)

    @property
    def type(self) -> str:
        return ""

    def block_types(self) -> dict[str, str]:
        return {}


def guide_in_memory() -> ModelInMemory:
    texts = {path.name: path.read_text(encoding="utf-8") for path in GUIDE_FOLDER.glob("*.j*")}
    assert {"config.json", "tokenizer.json"} <= texts.keys()
    return ModelInMemory(texts, GUIDE_FOLDER)


def tokens_of(source: ModelSource) -> list[int]:
    engine = create_reference_engine(source, memory=MemoryConfig(num_blocks=32))
    request = Request("r", [5, 6, 7, 8], SamplingParams(temperature=0.0, max_tokens=6))
    engine.add_request(request)
    list(engine.run())
    return request.output_token_ids


def test_a_source_is_all_that_readers_of_a_model_know() -> None:
    folder, memory = ModelFolder(GUIDE_FOLDER), guide_in_memory()
    models = [read_model(source) for source in (folder, memory)]
    assert models[0].spec == models[1].spec
    assert models[0].generation == models[1].generation
    texts = [Tokenizer.open(source, vocab_size=models[0].spec.vocab_size) for source in (folder, memory)]
    assert texts[0].encode_chat(MESSAGES) == texts[1].encode_chat(MESSAGES)
    assert tokens_of(folder) == tokens_of(memory)


def test_a_backend_loads_from_the_source_that_its_model_was_read_from() -> None:
    model = read_model(guide_in_memory())
    config = EngineConfig(backend="native", num_threads=1, max_num_seqs=2, max_num_batched_tokens=16).resolved()
    parts = backend_on("cpu", config, model).load(num_blocks=2, num_host_blocks=0)
    assert parts.cache.num_blocks == 2


def test_errors_call_a_model_by_the_name_of_its_source() -> None:
    source = guide_in_memory()
    source.texts["config.json"] = json.dumps(json.loads(source.texts["config.json"]) | {"hidden_size": 0})
    with pytest.raises(CheckpointError, match=r"^a model in memory: config\.json: hidden_size is 0; allowed"):
        read_model(source)
    del source.texts["tokenizer.json"]
    with pytest.raises(CheckpointError, match=r"^a model in memory has no tokenizer\.json\. Make one"):
        Tokenizer.open(source, vocab_size=2048)


def test_a_folder_says_what_it_has_where_a_file_is_asked_for_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for ask in (ModelFolder(tmp_path).text, ModelFolder(tmp_path).json_object):
        with pytest.raises(CheckpointError, match=r"has no merges\.txt: but model\.bin, a pickle"):
            ask("merges.txt")


def test_settings_may_be_kept_under_another_name(tmp_path: Path) -> None:
    config = (GUIDE_FOLDER / "config.json").read_text(encoding="utf-8")
    (tmp_path / "small.json").write_text(config, encoding="utf-8")
    source = ModelFolder(tmp_path, "small.json")
    assert source.where("config.json") == str(tmp_path / "small.json")
    assert read_model(source).spec == read_model(ModelFolder(GUIDE_FOLDER)).spec
    assert not ModelFolder(tmp_path).has("config.json")
