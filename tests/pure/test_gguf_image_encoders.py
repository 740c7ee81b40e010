"""Which file with an image encoder a GGUF model gets, wherever it is stored, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from quire.cli.models import list_models
from quire.compute.adapters.places import modules_of
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.projector import Projector
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.hub import place_notices, resolve_model
from quire.compute.models.image_encoders import MAX_TRIED, chosen, with_images
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.stores import IMAGES_LAYER, MODEL_LAYER, PARAMS_LAYER
from quire.compute.vision.weights import fitted
from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, InvalidConfigError, ModelError
from quire.engine.images.reader import ImageReader
from quire.engine.near_names import keyword_meant_by, meant_by
from support.gguf_projectors import write_pair, write_projector, write_single
from support.image_models import write_image_model
from support.vision_models import SETTINGS, vision_of, write_vision_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each kind, as a folder and as files."""
    top = tmp_path_factory.mktemp("made")
    for name in ("idefics3", "llava-clip"):
        write_vision_model(top / name, SETTINGS[name])
        write_pair(top / name, top / f"{name}-gguf")
    return top


def put(made: Path, folder: Path, name: str = "model.gguf", encoder: str = "", kind: str = "idefics3") -> Path:
    """Copy a text model, and an image encoder by its name, into a folder; return the path of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(made / f"{kind}-gguf/model.gguf", folder / name)
    if encoder:
        shutil.copy(made / f"{kind}-gguf/mmproj-model.gguf", folder / encoder)
    return folder / name


def encoder_of(source: ModelSource) -> str:
    assert isinstance(source, GgufFile)
    return "" if source.image_encoder is None else source.image_encoder.name


def reads_images(source: ModelSource) -> bool:
    return read_model(source).vision is not None


@pytest.mark.parametrize(
    ("model", "names", "expected"),
    [
        ("a.gguf", ["a.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"], "F32 BF16 F16"),
        ("a.gguf", ["a.gguf", "mmproj-Q8_0.gguf", "mmproj-model-f16.gguf"], "model-f16 Q8_0"),
        ("a-q8_0.gguf", ["a-q8_0.gguf", "b.gguf", "mmproj-a.gguf", "mmproj-b.gguf"], "a"),
        ("A_b-Q4_K_M.gguf", ["A_b-Q4_K_M.gguf", "c.gguf", "a-B-mmproj-f16.GGUF"], "a-B f16.GGUF"),
        ("a.gguf", ["a.gguf", "b.gguf", "mmproj-F16.gguf"], ""),
        ("a.gguf", ["a.gguf", "mmproj-a.json", "mmproj"], ""),
        ("a-00001-of-00002.gguf", ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "mmproj-a-f16.gguf"], "a-f16"),
    ],
)
def test_the_most_precise_file_with_the_models_name_is_first(model: str, names: list[str], expected: str) -> None:
    found = [
        name.replace("mmproj-", "").replace("-mmproj-", " ").removesuffix(".gguf") for name in chosen(model, names)
    ]
    assert " ".join(found).replace("a-B-f16", "a-B f16") == expected


def test_few_files_are_tried() -> None:
    assert len(chosen("a.gguf", ["a.gguf", *(f"mmproj-{number}.gguf" for number in range(99))])) == MAX_TRIED


def test_a_file_next_to_the_model_is_used_if_it_fits(made: Path, tmp_path: Path) -> None:
    model = put(made, tmp_path, encoder="mmproj-F16.gguf")
    write_projector(made / "idefics3", tmp_path / "mmproj-F32.gguf", changes=7)
    source = resolve_model(str(model))
    assert encoder_of(source) == "mmproj-F32.gguf" and reads_images(source)
    assert resolve_model(str(tmp_path)) == source
    (tmp_path / "mmproj-F32.gguf").write_bytes(b"GGUF")
    assert encoder_of(resolve_model(str(model))) == "mmproj-F16.gguf"


def test_a_file_that_does_not_fit_is_named_in_a_notice(made: Path, tmp_path: Path) -> None:
    model = put(made, tmp_path)
    write_projector(made / "idefics3", tmp_path / "mmproj-f16.gguf", patch_size=0)
    source = resolve_model(str(model))
    assert encoder_of(source) == "" and not reads_images(source)
    (notice,) = place_notices(str(model), source)
    assert notice.startswith(f"text only: the image encoder {tmp_path}/mmproj-f16.gguf is not used: ")
    assert "patch_size is 0" in notice


def refusal(path: Path, model: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        with_images(GgufFile(model), str(path))
    assert str(raised.value).isprintable()
    return str(raised.value)


def test_a_file_that_is_named_has_to_fit(made: Path, tmp_path: Path) -> None:
    model = put(made, tmp_path)
    assert "general.architecture is 'llama'; allowed: clip" in refusal(model, model)
    wide = write_vision_model(
        tmp_path / "wide",
        SETTINGS["idefics3"] | {"text_config": SETTINGS["idefics3"]["text_config"] | {"hidden_size": 64}},
    )
    path = write_projector(wide, tmp_path / "wide.gguf")
    assert "wide.gguf for model.gguf is 'a text model with rows of 32 numbers'; allowed: 64" in refusal(path, model)
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "clip")
    writer.add_string("clip.projector_type", "resampler")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert (
        "clip.projector_type is 'resampler'; allowed: one of gemma3, gemma4v, idefics3, internvl, lfm2, mlp, pixtral"
        in refusal(other, model)
    )
    gemma = write_vision_model(tmp_path / "gemma", SETTINGS["gemma3"])
    path = write_projector(gemma, tmp_path / "gemma.gguf")
    assert "a text model of the architecture 'llama'\"; allowed: one of gemma3" in refusal(path, model)
    with pytest.raises(ModelError, match="mmproj is for models in GGUF files"):
        with_images(ModelFolder(wide), str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mm_patch_merge_type": "spatial_unpad"},
            "mm_patch_merge_type is 'spatial_unpad'; allowed: none, as in LLaVA 1.5",
        ),
        ({"image_grid_pinpoints": [336, 672]}, "in a file without a tensor model.image_newline"),
        ({"feature_layer": [1, 2]}, "a list of one layer"),
        ({"feature_layer": [9]}, "vision_feature_layer is 9"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"patch_size": 0}, "patch_size is 0"),
    ],
)
def test_other_kinds_of_llava_are_refused(made: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = put(made, tmp_path, kind="llava-clip")
    path = write_projector(made / "llava-clip", tmp_path / "x.gguf", **changes)
    assert words in refusal(path, model)


def test_other_tiles_of_llava_next_are_refused(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "folder", SETTINGS["llava-next"])
    text, _ = write_pair(folder, tmp_path / "gguf")
    for changes, words in (
        (
            {"image_grid_pinpoints": [56, 112, 56]},
            "image_grid_pinpoints is [[56, 112], [56]]; allowed: a list",
        ),
        ({"image_grid_pinpoints": [56, 100]}, "image_grid_pinpoints is [[56, 100]]; allowed: multiples of 56"),
        ({"mm_patch_merge_type": "flat"}, "mm_patch_merge_type is 'flat'; allowed: 'spatial_unpad'"),
    ):
        assert words in refusal(write_projector(folder, tmp_path / "x.gguf", **changes), text)


def test_llava_takes_another_token_for_images_if_it_has_none_of_its_own(tmp_path: Path) -> None:
    """The first files of LLaVA 1.5 have the vocabulary of Llama 2, with <unk> but without <image>."""
    folder = write_image_model(tmp_path / "folder", "llava-clip")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace('"<image>"', '"<unk>"'))
    text, encoder = write_pair(folder, tmp_path / "gguf")
    source = GgufFile(text, image_encoder=encoder)
    reader = ImageReader.open(source, max_tokens=4096)
    assert reader.marker == reader.placeholder == "<unk>"
    vocabulary = json.loads(source.text("tokenizer.json"))["added_tokens"]
    assert [each["id"] for each in vocabulary if each["content"] == "<unk>"] == [
        vision_of(read_model(source)).placeholder
    ]
    (folder / "tokenizer.json").write_text(tokenizer.replace('"<image>"', '"<picture>"'))
    text, encoder = write_pair(folder, tmp_path / "none")
    assert "tokenizer.ggml.tokens is 'without <image>'; allowed: a token that stands for images" in refusal(
        encoder, text
    )


@pytest.mark.parametrize("kind", ["idefics3", "llava-clip"])
def test_adapters_fit_a_model_with_and_without_its_image_encoder(made: Path, kind: str) -> None:
    folder = made / f"{kind}-gguf"
    alone, pair = (with_images(GgufFile(folder / "model.gguf"), choice) for choice in ("none", "auto"))
    assert reads_images(pair) and not reads_images(alone)
    modules = [list(modules_of(read_model(source).spec)) for source in (alone, pair, ModelFolder(made / kind))]
    assert modules[0] == modules[1] == modules[2] and modules[0][0] == "layers.0.self_attn.q_proj"


def test_an_image_encoder_alone_is_no_model(made: Path) -> None:
    with pytest.raises(ModelError, match=r"has the image encoder of a model only\. Give the file of its model"):
        read_model(GgufFile(made / "idefics3-gguf/mmproj-model.gguf"))


def add_to_ollama(store: Path, layers: dict[str, Path | None], name: str = "eye") -> None:
    """Add a model to Ollama's store: each layer with its file, which can be missing."""
    manifest, listed = store / "manifests/registry.ollama.ai/library" / name / "latest", []
    manifest.parent.mkdir(parents=True)
    (store / "blobs").mkdir(exist_ok=True)
    for number, (kind, file) in enumerate(layers.items()):
        digest = f"{ord(name[0]) + number:064x}"
        listed.append({"mediaType": kind, "digest": f"sha256:{digest}"})
        if file is not None:
            shutil.copy(file, store / "blobs" / f"sha256-{digest}")
    manifest.write_text(json.dumps({"layers": listed}))


def test_ollamas_manifest_names_the_image_encoder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    text, encoder = (made / "llava-clip-gguf" / name for name in ("model.gguf", "mmproj-model.gguf"))
    parameters = tmp_path / "params.json"
    parameters.write_text('{"temperature": 0.25}')
    add_to_ollama(tmp_path / "store", {MODEL_LAYER: text, IMAGES_LAYER: encoder, PARAMS_LAYER: parameters})
    source = resolve_model("eye")
    assert encoder_of(source) == f"sha256-{ord('e') + 1:064x}" and reads_images(source)
    assert read_model(source).generation.temperature == 0.25
    assert encoder_of(resolve_model("eye", "none")) == ""
    add_to_ollama(tmp_path / "store", {MODEL_LAYER: text, IMAGES_LAYER: text}, "odd")
    source = resolve_model("odd")
    assert encoder_of(source) == "" and "is not used" in place_notices("odd", source)[-1]
    row = next(
        each
        for each in list_models(tmp_path, {"OLLAMA_MODELS": str(tmp_path / "store")}, ManualClock())
        if each.name == "eye:latest"
    )
    assert row.reason == "reads images" and row.num_bytes == text.stat().st_size + encoder.stat().st_size


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of Gemma 3 with its image encoder, as Ollama makes it."""
    top = tmp_path_factory.mktemp("single")
    return write_single(write_vision_model(top / "folder", SETTINGS["gemma3"]), top / "gguf")


def test_a_model_of_ollama_has_its_image_encoder_in_its_file(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    add_to_ollama(tmp_path / "store", {MODEL_LAYER: single}, "own")
    source = resolve_model("own")
    blob = tmp_path / "store/blobs" / f"sha256-{ord('o'):064x}"
    assert reads_images(source) and source.weight_paths() == [blob]
    assert source.where("config.json") == source.where("preprocessor_config.json") == str(blob)
    assert place_notices("own:latest", source) == (f"own:latest is {blob}",)
    assert not reads_images(resolve_model("own", "none")) and not reads_images(GgufFile(single))
    environ = {"OLLAMA_MODELS": str(tmp_path / "store")}
    row = next(each for each in list_models(tmp_path, environ, ManualClock()) if each.name == "own:latest")
    assert row.reason == "reads images" and row.num_bytes == single.stat().st_size


def test_a_file_next_to_a_single_file_is_used_if_there_is_one(single: Path, tmp_path: Path) -> None:
    shutil.copy(single, tmp_path / "model.gguf")
    write_projector(single.parents[1] / "folder", tmp_path / "mmproj-F32.gguf")
    assert encoder_of(resolve_model(str(tmp_path / "model.gguf"))) == "mmproj-F32.gguf"
    assert encoder_of(resolve_model(str(tmp_path / "model.gguf"), str(single))) == "model.gguf"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mm.tokens_per_image": 5}, "gemma3.mm.tokens_per_image is 5; allowed: a square, with a root that divides 8"),
        ({"mm.tokens_per_image": 9}, "a square, with a root that divides 8"),
        ({"mm.tokens_per_image": 256}, "a square, with a root that divides 8"),
        ({"mm.tokens_per_image": None}, "gemma3.mm.tokens_per_image is None; allowed: a square"),
        ({"vision.patch_size": 0}, "gemma3.vision.patch_size is 0"),
    ],
)
def test_a_single_file_that_does_not_fit_reads_text_and_says_why(
    single: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    odd = write_single(single.parents[1] / "folder", tmp_path / "odd", **changes)
    source = resolve_model(str(odd))
    assert encoder_of(source) == "" and not reads_images(source)
    (notice,) = place_notices(str(odd), source)
    assert notice.startswith(f"text only: the image encoder {odd} is not used: ") and words in notice


def test_errors_name_the_tensors_of_a_single_file_as_it_does(single: Path, tmp_path: Path) -> None:
    odd = write_single(single.parents[1] / "folder", tmp_path / "odd", **{"vision.embedding_length": 34})
    model = read_model(resolve_model(str(odd)))
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor v\.patch_embedding\.weight is .*--mmproj none"):
        fitted(vision_of(model), model.source.tensors())


def test_files_of_ollama_leave_out_settings_of_gemma_3(single: Path, tmp_path: Path) -> None:
    """Its code has them: the epsilon of norms, the bases of positions, and the scaling of models with long contexts."""

    def text(**changes: Any) -> dict[str, Any]:
        source = GgufFile(write_single(single.parents[1] / "folder", tmp_path / str(len(changes)), **changes))
        return source.json_object("config.json")

    usual = text()
    assert (usual["rms_norm_eps"], usual["rope_theta"], usual["rope_local_base_freq"]) == (1e-6, 1e6, 1e4)
    assert "rope_scaling" not in usual
    named = text(**{"rope.global.freq_base": 5e5, "rope.local.freq_base": 5e3, "context_length": 131_072})
    assert (named["rope_theta"], named["rope_local_base_freq"]) == (5e5, 5e3)
    assert named["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_settings_of_ministral_3_have_other_names_in_files_of_ollama(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "folder", SETTINGS["mistral3"])
    scaling = {"type": "yarn", "factor": 16.0, "original_context_length": 32, "beta_fast": 16.0, "beta_slow": 2.0}
    changes = {f"rope.scaling.{name}": value for name, value in scaling.items()}
    changes |= {"rope.scaling.mscale_all_dim": 0.75, "rope.scaling_beta": 0.25}
    config = GgufFile(write_single(folder, tmp_path / "gguf", **changes)).json_object("config.json")
    assert config["rope_scaling"] == {
        **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
        **{"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.75, "llama_4_scaling_beta": 0.25},
    }
    assert config["architectures"] == ["Ministral3ForCausalLM"]


@pytest.mark.parametrize("layers", [[3, 1], [1, 2, 3], [], [-1, 3], ["1"], [0, 1, 2, 3, 4]])
def test_layers_without_windows_are_at_equal_distances(tmp_path: Path, layers: list[Any]) -> None:
    folder = write_vision_model(tmp_path / "folder", SETTINGS["qwen2-5-vl"])
    odd = write_single(folder, tmp_path / "odd")
    header = GgufHeader.read(odd)
    header = replace(header, settings={**header.settings, "qwen25vl.vision.fullatt_block_indexes": layers})
    with pytest.raises(CheckpointError, match=r"qwen25vl\.vision\.fullatt_block_indexes is .*equal distances"):
        Projector.read(odd, header)
    most = replace(header, settings={**header.settings, "qwen25vl.vision.max_pixels": 10_000})
    most = replace(most, settings={**most.settings, "qwen25vl.vision.fullatt_block_indexes": [1, 3]})
    assert Projector.read(odd, most).processor()["max_pixels"] == 10_000


@pytest.mark.parametrize("name", ["qwen2-5-vl", "qwen3-vl"])
def test_a_huge_number_of_layers_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """Each layer takes a place in a list."""
    path = write_single(write_vision_model(tmp_path / "folder", SETTINGS[name]), tmp_path / "gguf")
    header = GgufHeader.read(path)
    settings = {**header.settings, f"{header.settings['general.architecture']}.vision.block_count": (1 << 31) - 1}
    whole = {"qwen25vl.vision.fullatt_block_indexes": [0]}
    with pytest.raises(CheckpointError, match=r"vision\.block_count is 2147483647; allowed: an integer from 1 to"):
        Projector.read(path, replace(header, settings=settings | whole))
    folder = tmp_path / "folder"
    encoder = write_projector(folder, tmp_path / "mmproj.gguf", block_count=(1 << 31) - 1)
    text, _ = write_pair(folder, tmp_path / "pair")
    with pytest.raises(CheckpointError, match=r"(block_count|depth) is 2147483647"):
        read_model(GgufFile(text, image_encoder=encoder))


@pytest.mark.parametrize("layers", [[2, 0], [0, 0], [4], [-1], [True], "0", [0.0]])
def test_deep_layers_are_listed_in_their_order(tmp_path: Path, layers: Any) -> None:
    path = write_single(write_vision_model(tmp_path / "folder", SETTINGS["qwen3-vl"]), tmp_path / "gguf")
    header = GgufHeader.read(path)
    odd = replace(header, settings={**header.settings, "qwen3vl.vision.deepstack_visual_indexes": layers})
    with pytest.raises(CheckpointError, match=r"qwen3vl\.vision\.deepstack_visual_indexes is .*in their order"):
        Projector.read(path, odd)


def test_sections_of_qwen3_vl_are_those_of_ollamas_code(tmp_path: Path) -> None:
    path = write_single(write_vision_model(tmp_path / "folder", SETTINGS["qwen3-vl"]), tmp_path / "gguf")
    header = GgufHeader.read(path)
    settings = {key: value for key, value in header.settings.items() if key != "qwen3vl.mrope_sections"}
    for found, expected in ((header, [4, 2, 2]), (replace(header, settings=settings), [24, 20, 20])):
        config = Projector.read(path, found).config({"architectures": ["Qwen3ForCausalLM"]})
        text: Any = config["text_config"]
        assert text["rope_scaling"]["mrope_section"] == expected


def test_a_token_without_a_row_stands_for_no_image(single: Path, tmp_path: Path) -> None:
    """Some files of Ollama have more tokens than rows: <image_soft_token> is the first one without a row."""
    header = GgufHeader.read(single)
    tokens = [f"<{number}>" for number in range(64)] + ["<image_soft_token>"]
    for unused, expected in (("<unused0>", 6), ("<7>", None)):
        tokens[6] = unused
        odd = replace(header, settings={**header.settings, "tokenizer.ggml.tokens": tokens})
        if expected is None:
            with pytest.raises(CheckpointError, match="without <image_soft_token>"):
                Projector.read(single, odd)
        else:
            assert Projector.read(single, odd).file.token_id == expected


def test_lm_studio_and_the_hub_have_it_next_to_the_model(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    put(made, tmp_path / ".lmstudio/models/someone/eye-GGUF", "eye-Q8_0.gguf", "mmproj-model-f16.gguf")
    assert encoder_of(resolve_model("someone/eye-GGUF")) == "mmproj-model-f16.gguf"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # type: ignore[arg-type]
    folder = tmp_path / "hub/models--other--eye-GGUF"
    commit = "0123456789" * 4
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    snapshot, blobs = folder / "snapshots" / commit, folder / "blobs"
    snapshot.mkdir(parents=True)
    put(made, blobs, "1", "2")
    (snapshot / "eye-Q8_0.gguf").symlink_to(blobs / "1")
    (snapshot / "mmproj-eye-Q8_0.gguf").symlink_to(blobs / "2")
    assert encoder_of(resolve_model("other/eye-GGUF:Q8_0")) == "mmproj-eye-Q8_0.gguf"
    rows = {row.name: row for row in list_models(tmp_path, {"HF_HUB_CACHE": str(tmp_path / "hub")}, ManualClock())}
    assert rows["other/eye-GGUF"].reason == rows["someone/eye-GGUF"].reason == "reads images"


class FakeHub:
    """Stands in for huggingface_hub: a repository with these files, all of which are fetched already."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wanted = folder, list[str]()
        self.constants = SimpleNamespace(HF_HUB_CACHE=str(folder.parent / "hub"))

    def model_info(self, *_: object, **__: object) -> object:
        names = sorted(path.name for path in self.folder.iterdir())
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, lfs=None) for name in names], sha="0" * 40)

    def hf_hub_url(self, *_: object, **__: object) -> str:
        raise AssertionError("nothing large is there")

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.wanted = options["allow_patterns"]
        return str(self.folder)


def test_a_model_of_the_hub_is_fetched_with_its_image_encoder(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path / "eye")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    put(made, hub.folder, "eye-Q8_0.gguf", "mmproj-BF16.gguf")
    put(made, hub.folder, "eye-Q4_0.gguf", "mmproj-F16.gguf")
    assert encoder_of(resolve_model("quire-no-such/eye:Q8_0@main")) == "mmproj-BF16.gguf"
    assert hub.wanted == ["eye-Q8_0.gguf", "mmproj-BF16.gguf"]
    assert encoder_of(resolve_model("quire-no-such/eye:Q8_0@main", "none")) == ""
    assert hub.wanted == ["eye-Q8_0.gguf"]


def test_a_type_on_the_hub_is_no_other_one_that_begins_or_ends_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    parts = [f"m-F16-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for name in (*parts, "m-BF16.gguf", "m-Q6_K.gguf", "m-Q6_K_L.gguf", "[m]-Q8_0.gguf", "n-Q8_0.gguf"):
        (tmp_path / name).touch()
    for kind, names in (("F16", parts), ("q6_k", ["m-Q6_K.gguf"]), ("Q6_K_L", ["m-Q6_K_L.gguf"])):
        assert resolve_model(f"quire-no-such/m:{kind}@main", "none") == GgufFile(tmp_path / names[0])
        assert hub.wanted == names
    hub.wanted = []
    with pytest.raises(ModelError, match=r"has several files for Q8_0: \[m\]-Q8_0\.gguf, n-Q8_0\.gguf\. Give more"):
        resolve_model("quire-no-such/m:Q8_0@main", "none")
    assert hub.wanted == []  # nothing is fetched in vain


def test_the_setting_has_the_name_that_others_give_it() -> None:
    assert EngineConfig(mmproj=Path("/models/mmproj.gguf")).mmproj == "/models/mmproj.gguf"
    with pytest.raises(InvalidConfigError, match="mmproj is ''; allowed: the path of a file"):
        EngineConfig(mmproj="")
    assert meant_by("--no-mmproj", ["--mmproj"]) == "quire calls it --mmproj none"
    assert meant_by("-mm", ["--mmproj"]) == "quire calls it --mmproj"
    assert keyword_meant_by("clip_model_path", ["mmproj"]) == "quire calls it mmproj"
