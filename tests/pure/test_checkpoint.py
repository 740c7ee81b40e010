"""Weights as parts: bfloat16 without torch, fused and transposed tensors, and folders that hold something else."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.model_shapes import find_settings
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.hub import HubName, fetch_model, resolve_model, resolve_settings
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.reference.operations import linear
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.codes import coded, coded_row_bytes
from quire.compute.weights.decoder_weights import ROUTERS, DecoderWeights, Parts, PartWeights, weight_bytes
from quire.compute.weights.quantize import quantized
from quire.compute.weights.stacked import unstacked
from quire.core.errors import CheckpointError, InvalidConfigError, ModelError
from quire.serve.loading.folder import models_in
from support.spec_models import PLAIN, SPECS, write_spec_model
from support.tiny_bert import write_tiny_bert
from support.tiny_checkpoint import write_model_weights, write_tiny_llama

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4949453792\n"


# --- bfloat16 ----------------------------------------------------------------------------------


@given(st.floats(width=32, allow_nan=False))
def test_narrowing_goes_to_the_nearest_and_then_to_the_even(number: float) -> None:
    bits = int(narrowed(np.array([number], np.float32))[0])
    below = struct.unpack("<I", struct.pack("<f", number))[0] >> 16
    if abs(number) >= 3e38:  # here the next one may be infinite
        assert bits in (below, below + 1)
        return
    near = [(at, float(widened(np.array([at], np.uint16))[0])) for at in (below, below + 1)]
    assert bits == min((abs(number - value), at % 2, at) for at, value in near)[2]


def test_every_bfloat16_survives_a_round_trip_and_nan_stays_nan() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = widened(bits)
    again = narrowed(numbers)
    whole = ~np.isnan(numbers)
    assert np.array_equal(again[whole], bits[whole])
    assert np.isnan(widened(again[~whole])).all()
    tricky = np.array([0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32).view(np.float32)
    assert [np.isnan(number) for number in widened(narrowed(tricky))] == [True, True, False]
    assert widened(narrowed(tricky))[2] == np.inf


def test_every_number_of_a_long_tensor_is_rounded_as_a_single_one_is() -> None:
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 150_000, np.uint32)
    patterns[::7] |= 0x7F800000  # infinite, or no number
    numbers = patterns.view(np.float32)
    before = numbers.tobytes()
    expected = [(bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in patterns.tolist()]
    is_nan = np.isnan(numbers)
    found = narrowed(numbers)
    assert np.array_equal(found[~is_nan], np.array(expected, np.uint32)[~is_nan])
    assert np.array_equal(found[is_nan], patterns[is_nan] >> 16 | 0x40)
    assert numbers.tobytes() == before


def test_a_long_tensor_of_float16_is_rounded_as_its_numbers_in_float32_are() -> None:
    every = np.tile(np.arange(1 << 16, dtype=np.uint16), 3)
    numbers = np.random.default_rng(4).permutation(every).view(np.float16)
    assert np.array_equal(narrowed(numbers), narrowed(numbers.astype(np.float32)))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_bits_are_those_of_the_numbers(dtype: str, tmp_path: Path) -> None:
    tensor = np.random.default_rng(0).standard_normal((7, 5), dtype=np.float32)
    write_model_weights(tmp_path, {"a": tensor}, dtype=dtype)
    checkpoint = Checkpoint.open(tmp_path)
    bits = checkpoint.bfloat16_bits("a")
    assert (bits.dtype, bits.shape, bits.flags.writeable) == (np.uint16, (7, 5), False)
    assert np.array_equal(bits.ravel(), narrowed(checkpoint.tensor("a").ravel()))
    assert np.array_equal(checkpoint.bfloat16_bits("a", slice(2, 4)), bits[2:4])
    assert np.array_equal(checkpoint.tensor("a", slice(2, 4)), checkpoint.tensor("a")[2:4])


# --- parts -------------------------------------------------------------------------------------


def test_parts_come_out_of_the_tensors_that_hold_them(tmp_path: Path) -> None:
    tensors = write_spec_model(tmp_path, SPECS["transposed"])
    layer = DecoderWeights.load(SPECS["transposed"], Checkpoint.open(tmp_path)).layers[1]
    fused, bias = tensors["model.qkv.1.weight"], tensors["model.qkv.1.bias"]
    for index, part in enumerate((Part.QUERY, Part.KEY, Part.VALUE)):
        rows = slice(64 * index, 64 * index + 64)
        weights = layer[part]
        assert np.array_equal(weights.weight, fused[:, rows].T)
        assert weights.weight.flags.c_contiguous
        assert weights.bias is not None
        assert np.array_equal(weights.bias, bias[rows])


def pairs_of(one: DecoderWeights, other: DecoderWeights) -> list[tuple[Parts, Parts]]:
    pairs = list(zip([one.parts, *one.layers], [other.parts, *other.layers], strict=True))
    for ours, theirs in zip(one.experts, other.experts, strict=True):
        pairs += zip(ours, theirs, strict=True)
    return pairs


@pytest.mark.parametrize("name", SPECS)
def test_bfloat16_parts_are_the_rounded_float32_parts(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    write_spec_model(tmp_path, spec)
    exact = DecoderWeights.load(spec, Checkpoint.open(tmp_path))
    half = DecoderWeights.load(spec, Checkpoint.open(tmp_path), "bfloat16")
    num_bytes = 0
    for wide, narrow in pairs_of(exact, half):
        for part, weights in wide.items():
            rounded = narrow[part].weight
            num_bytes += rounded.nbytes + (0 if weights.bias is None else weights.bias.nbytes)
            assert np.array_equal(weights.bias, narrow[part].bias)  # type: ignore[arg-type]
            is_exact = weights.weight.ndim == 1 or part in FLOATS
            expected = weights.weight if is_exact else narrowed(weights.weight.ravel())
            assert rounded.tobytes() == expected.tobytes()
    assert num_bytes == weight_bytes(spec, "bfloat16")


FLOATS = (*ROUTERS, Part.DELTA_FILTER, Part.MAMBA_FILTER, Part.CONVOLUTION_FILTER)


@pytest.mark.parametrize(
    ("name", "stored"), [(name, ("F32", "F16", "BF16")[number % 3]) for number, name in enumerate(SPECS)]
)
def test_codes_are_within_half_a_scale_of_what_the_file_holds(name: str, stored: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    write_model_weights(tmp_path, write_spec_model(tmp_path, spec), dtype=stored)
    exact = DecoderWeights.load(spec, Checkpoint.open(tmp_path))
    as_they_are = {*ROUTERS, Part.POSITIONS, Part.KEY_UP, Part.VALUE_UP}
    as_they_are |= {Part.DELTA_RATE, Part.DELTA_DECAY, Part.DELTA_FILTER, Part.LAYER_EMBEDDING, Part.CONVOLUTION_FILTER}
    as_they_are |= {Part.MAMBA_STEP, Part.MAMBA_FILTER}
    as_they_are |= set() if spec.tied_head else {Part.EMBEDDING}
    for weights in ("int8_groups", "int4"):
        made = DecoderWeights.load(spec, Checkpoint.open(tmp_path), "bfloat16", weights)
        num_bytes = 0
        for wide, narrow in pairs_of(exact, made):
            for part, right in wide.items():
                found = narrow[part]
                assert np.array_equal(right.bias, found.bias)  # type: ignore[arg-type]
                assert (found.codes is None) == (right.weight.ndim == 1 or part in as_they_are)
                num_bytes += 0 if found.bias is None else found.bias.nbytes
                if found.codes is None:
                    num_bytes += found.weight.nbytes
                    continue
                kind = "int8_groups" if part in (Part.EMBEDDING, Part.HEAD) else weights
                assert (found.codes.minimums is not None) == (kind == "int4")
                num_bytes += len(right.weight) * coded_row_bytes(kind, right.weight.shape[1])
                steps = np.repeat(found.codes.scales, 32, axis=1)[:, : right.weight.shape[1]]
                # A minimum in float16 may be off by a little; the rest is half a step.
                slack = 0.5001 * steps + (2**-10 * np.abs(right.weight).max() if kind == "int4" else 0)
                assert (np.abs(found.codes.rows() - right.weight) <= slack).all()
        assert num_bytes == weight_bytes(spec, "bfloat16", weights)


def test_numbers_become_int8_by_a_scale_of_their_row() -> None:
    halves = [127, 0.5, 1.5, -2.5, -0.5]  # a factor of 1: ties go to the even
    rows = np.array([halves, [0] * 5, [1e-42, 0, 0, 0, 0], [-2e38, 1e38, 0, 0, 1]], np.float32)
    numbers, scales = quantized(rows)
    assert numbers.tolist() == [[127, 0, 2, -2, 0], [0] * 5, [0] * 5, [-127, 64, 0, 0, 0]]
    assert scales.tolist() == [1, 0, 0, pytest.approx(2e38 / 127)]
    with np.errstate(invalid="raise"):
        _, scales = quantized(np.array([[1, np.inf], [np.nan, 1], [-np.inf, np.nan], [1, 1]], np.float32))
    assert np.isnan(scales).tolist() == [True, True, True, False]


@pytest.mark.parametrize("kind", ["int8_groups", "int4"])
def test_a_row_times_codes_is_the_sum_of_its_groups(kind: str) -> None:
    random = np.random.default_rng(0)
    rows, weight = random.normal(size=(3, 300)).astype(np.float32), random.normal(size=(5, 300)).astype(np.float32)
    rows[0, :32] *= 1000  # of one group only: the others keep their precision
    codes = coded(weight, kind)
    found = linear(rows, PartWeights(codes.codes, np.ones(5, np.float32), codes=codes))
    exact = codes.rows().astype(np.float64)
    for row in range(3):
        for output in range(5):
            total = 1.0
            for start in range(0, 300, 32):
                group, step = quantized(rows[row, start : start + 32])
                total += float(step) * float(group.astype(np.float64) @ exact[output, start : start + 32])
            assert found[row, output] == pytest.approx(total, rel=1e-5, abs=1e-4)
    rows[1, 200] = np.nan
    broken = linear(rows, PartWeights(codes.codes, codes=codes))
    assert np.isnan(broken[1]).all()
    assert np.isfinite(broken[[0, 2]]).all()


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_what_the_file_holds_is_not_copied_even_where_it_is_fused(dtype: str, stored: str, tmp_path: Path) -> None:
    write_model_weights(tmp_path, write_spec_model(tmp_path, SPECS["fused"]), dtype=stored)
    checkpoint = Checkpoint.open(tmp_path)
    weights = DecoderWeights.load(SPECS["fused"], checkpoint, dtype)
    get = checkpoint.tensor if dtype == "float32" else checkpoint.bfloat16_bits
    for part, stem in {Part.KEY: "qkv", Part.UP: "gate_up", Part.OUTPUT: "output"}.items():
        assert np.shares_memory(weights.layers[0][part].weight, get(f"model.{stem}.0.weight"))


def test_a_checkpoint_of_the_bare_decoder_lacks_the_prefix(tmp_path: Path) -> None:
    spec = SPECS["transposed"]
    tensors = write_spec_model(tmp_path, spec)
    whole = DecoderWeights.load(spec, Checkpoint.open(tmp_path))
    write_model_weights(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    bare = DecoderWeights.load(spec, Checkpoint.open(tmp_path))
    assert np.array_equal(whole.layers[1][Part.UP].weight, bare.layers[1][Part.UP].weight)
    with pytest.raises(CheckpointError, match=r"missing: model\."):
        DecoderWeights.load(replace(spec, optional_prefix=""), Checkpoint.open(tmp_path))


def test_the_names_of_the_first_checkpoints_of_bert_are_known(tmp_path: Path) -> None:
    """They come from TensorFlow: bert-base-uncased is one of them."""
    folder = write_tiny_bert(tmp_path)
    expected = Checkpoint.open(folder)
    tensors = {name: np.array(expected.tensor(name)) for name in expected.entries}

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    assert sum(old(name) != name for name in tensors) == 14
    write_model_weights(folder, {old(name): tensor for name, tensor in tensors.items()})
    found = Checkpoint.open(folder)
    assert set(found.entries) == set(tensors)
    assert all(np.array_equal(found.tensor(name), tensor) for name, tensor in tensors.items())


def test_experts_are_named_one_by_one(tmp_path: Path) -> None:
    tensors = write_spec_model(tmp_path, SPECS["experts"])
    weights = DecoderWeights.load(SPECS["experts"], Checkpoint.open(tmp_path))
    assert [len(experts) for experts in weights.experts] == [8, 0, 8]
    assert Part.UP in weights.layers[1]
    assert Part.UP not in weights.layers[0]
    assert np.array_equal(weights.experts[2][5][Part.EXPERT_UP].weight, tensors["model.expert_up.2.5.weight"])
    del tensors["model.expert_up.2.5.weight"]
    write_model_weights(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"tensors \(missing: model\.expert_up\.2\.5\.weight\)"):
        DecoderWeights.load(SPECS["experts"], Checkpoint.open(tmp_path))


def test_only_dtypes_that_run_are_loaded(tmp_path: Path) -> None:
    write_spec_model(tmp_path, PLAIN)
    for load in (
        lambda: DecoderWeights.load(PLAIN, Checkpoint.open(tmp_path), "float16"),
        lambda: weight_bytes(PLAIN, "int8"),
    ):
        with pytest.raises(CheckpointError, match="allowed: one of float32, bfloat16"):
            load()
    with pytest.raises(CheckpointError, match="weights is 'int3'; allowed: one of auto, widened, int8, int8_gr"):
        DecoderWeights.load(PLAIN, Checkpoint.open(tmp_path), weights="int3")


def test_the_first_llamas_may_bring_frequencies(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, num_shards=2)
    checkpoint = Checkpoint.open(tmp_path)
    tensors = {name: checkpoint.tensor(name).copy() for name in checkpoint.entries}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    write_model_weights(tmp_path, tensors)
    DecoderWeights.load(read_model(ModelFolder(tmp_path)).spec, Checkpoint.open(tmp_path))


# --- folders that hold something else ----------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no model.safetensors or model.safetensors.index.json: it is empty"),
        (["pytorch_model.bin"], "but pytorch_model.bin, a pickle, which could run code and is never read. Convert it"),
        (["consolidated.00.pth", "params.json"], "but consolidated.00.pth, a pickle"),
        (["weights.safetensors"], "but weights.safetensors. Save the model again with save_pretrained"),
        (["adapter_config.json", "adapter_model.safetensors"], "it is an adapter. Merge it into its base model"),
        (["config.json"], "give the folder that has config.json and the weights in it"),
    ],
)
def test_a_folder_without_weights_that_we_read(files: list[str], message: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path)
    assert message in str(refused.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No folder named"):
        Checkpoint.open(tmp_path / "missing")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, num_shards=2)
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.open(tmp_path)
    assert (
        str(refused.value)
        == f"{tmp_path / name} is 'a git-lfs pointer'; allowed: the file itself; fetch it with `git lfs pull`"
    )


# --- names of models ---------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(str(tmp_path)) == ModelFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == ModelFolder(Path("org/name"))


@pytest.mark.parametrize(
    "name",
    ["", "no-such-folder", "./org/name", "/a/b", "a/b/c", "-a/b", "org/na me", "org/", "org/name@../x", "org/name:"],
)
def test_a_name_that_is_no_folder_and_no_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^No folder named .*\. Give a folder, a GGUF file, a name that "):
        resolve_model(name)


def test_a_gguf_file_is_a_model_by_itself_or_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model-00001-of-00002.gguf"
    for name in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert resolve_model(str(file)) == resolve_model(str(tmp_path)) == GgufFile(file)
    assert find_settings(str(file)) == GgufFile(file)
    (tmp_path / "other.GGUF").touch()
    with pytest.raises(CheckpointError, match=r"several models\. Name one of its files: .*, other\.GGUF$"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == ModelFolder(tmp_path)


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin is a file\. Give the folder"):
        resolve_model(str(tmp_path / "model.bin"))


def test_the_home_of_nobody_is_no_traceback() -> None:
    for name in ("~quire-no-such-user", "~quire-no-such-user/m", "~quire-no-such-user/m.gguf"):
        with pytest.raises(ModelError, match=r"No (folder|file) named"):
            resolve_model(name)
    with pytest.raises(InvalidConfigError, match=r"a folder that can be read \(No such file"):
        models_in("~quire-no-such-user/models")


NO_ROUTE = ConnectionError("no route to host\nand many more lines")


class FakeHub:
    """Stands in for huggingface_hub."""

    def __init__(self, folder: Path | None, error: Exception = NO_ROUTE) -> None:
        self.folder, self.error = folder, error
        self.asked: list[tuple[str, str | None, object]] = []

    def model_info(self, *_: object, **__: object) -> object:
        raise ConnectionError("no list of files")

    def snapshot_download(
        self, name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append((name, revision, allow_patterns))
        assert not any("*.bin" in pattern or "*.py" in pattern for pattern in allow_patterns)
        assert ignore_patterns
        if self.folder is None:
            raise self.error
        return str(self.folder)


def named_error(name: str) -> FakeHub:
    """Return a hub that refuses with an error of its library."""
    return FakeHub(None, type(name, (Exception,), {})())


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(
        ModelError, match=r"no config\.json\. If it has GGUF files, name the type of one: .*model:Q4_K_M$"
    ):
        resolve_model("quire-no-such/model@main")
    (tmp_path / "config.json").touch()
    assert resolve_model("quire-no-such/model") == ModelFolder(tmp_path)
    (tmp_path / "model-q8_0.gguf").touch()
    assert resolve_model("quire-no-such/model:Q8_0@refs/pr/1") == GgufFile(tmp_path / "model-q8_0.gguf")
    with pytest.raises(ModelError, match="model has no GGUF file with Q4_0 in its name"):
        resolve_model("quire-no-such/model:Q4_0")
    assert [(name, revision) for name, revision, _ in hub.asked] == [
        *(("quire-no-such/model", revision) for revision in ("main", None, "refs/pr/1", None))
    ]
    assert hub.asked[2][2] == ["*Q8_0*.gguf", "*q8_0*.gguf"]


COMMIT = "0123456789" * 4
WHOLE = ("config.json", "tokenizer.json", "model.safetensors.index.json", "a-1.safetensors", "a-2.safetensors")


def write_cache(cache: Path, *, without: str = "", blobs: tuple[str, ...] = (), commit: str = COMMIT) -> Path:
    """Write a repository into the hub's cache, without one of its files, and return its snapshot."""
    folder = cache / "models--quire-no-such--model"
    snapshot = folder / "snapshots" / COMMIT
    for place in (snapshot, folder / "refs", folder / "blobs"):
        place.mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for name in WHOLE:
        if name != without:
            (folder / "blobs" / name).write_text(json.dumps({"weight_map": {"x": WHOLE[3], "y": WHOLE[4]}}))
        (snapshot / name).symlink_to(folder / "blobs" / name)
    for name in blobs:
        (folder / "blobs" / name).touch()
    return snapshot


@pytest.mark.parametrize("resolve", [resolve_model, resolve_settings])
def test_a_model_that_the_cache_has_all_of_needs_no_hub(
    resolve: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # type: ignore[arg-type]
    snapshot = write_cache(tmp_path)
    assert resolve("quire-no-such/model") == ModelFolder(snapshot)
    with pytest.raises(ModelError, match="huggingface_hub is not installed"):
        resolve("quire-no-such/model@main")
    (snapshot / "m-q8_0-00001-of-00002.gguf").touch()
    with pytest.raises(ModelError, match="huggingface_hub is not installed"):
        resolve("quire-no-such/model:Q8_0")
    (snapshot / "m-q8_0-00002-of-00002.gguf").touch()
    assert resolve("quire-no-such/model:Q8_0") == GgufFile(snapshot / "m-q8_0-00001-of-00002.gguf")
    (snapshot / "model.safetensors").touch()
    (snapshot / "model.safetensors.index.json").unlink()
    assert resolve("quire-no-such/model") == ModelFolder(snapshot)


@pytest.mark.parametrize(
    "changes",
    [
        *({"without": name} for name in WHOLE),
        {"blobs": ("0f.incomplete",)},
        {"commit": "main"},
        {"commit": "../../elsewhere"},
        {"commit": "f" * 40},
        {"commit": COMMIT * 10},
    ],
)
def test_what_the_cache_has_in_part_is_asked_for(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    (tmp_path / "config.json").touch()
    write_cache(tmp_path / "cache", **changes)
    assert resolve_model("quire-no-such/model") == ModelFolder(tmp_path)
    assert [name for name, *_ in hub.asked] == ["quire-no-such/model"]


def test_to_fetch_a_model_asks_the_hub_whatever_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub = FakeHub(write_cache(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    fetch_model(HubName("quire-no-such/model"))
    assert [name for name, *_ in hub.asked] == ["quire-no-such/model"]


def test_for_a_plan_only_the_settings_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    assert find_settings("quire-no-such/model") == ModelFolder(tmp_path)
    assert resolve_settings(str(tmp_path)) == ModelFolder(tmp_path)
    assert hub.asked == [("quire-no-such/model", None, ["config.json", "generation_config.json"])]


@pytest.mark.parametrize(
    ("hub", "found"),
    [
        (None, "is a hub id, but huggingface_hub is not installed: pip install huggingface_hub"),
        (
            FakeHub(None),
            "is not in the local cache, and the hub cannot be reached (ConnectionError). Give a model folder or a "
            "name that quire models lists, or fetch it on a machine "
            "with network access: hf download quire-no-such/model --revision v1",
        ),
        (
            named_error("GatedRepoError"),
            "is gated. Request access at https://huggingface.co/quire-no-such/model, then: hf auth login",
        ),
        (
            named_error("RevisionNotFoundError"),
            "has no such revision. Name a branch, a tag or a full commit id",
        ),
    ],
)
def test_without_a_hub_the_error_says_how_to_pass_a_folder(
    hub: FakeHub | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as refused:
        resolve_model("quire-no-such/model@v1")
    assert str(refused.value) == f"quire-no-such/model@v1 {found}"


def test_filters_of_queries_keys_and_values_are_read_as_one(tmp_path: Path) -> None:
    """As in OLMo Hybrid, with its names for norms."""
    stem, random = "model.layers.0.linear_attn.", np.random.default_rng(0)
    parts = {f"{stem}{name}_conv1d.weight": rows for name, rows in {"q": 2, "k": 2, "v": 6}.items()}
    tensors = {name: random.normal(size=(rows, 1, 4)).astype(np.float32) for name, rows in parts.items()}
    norms = {
        f"model.layers.0.{name}_layer_norm.weight": np.ones(2, np.float32) for name in ("attention", "feedforward")
    }
    write_model_weights(tmp_path, tensors | norms)
    checkpoint = unstacked(Checkpoint.open(tmp_path))
    whole = f"{stem}conv1d.weight"
    names = {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    assert (checkpoint.entries.keys(), checkpoint.entries[whole].shape) == ({whole, *names}, (10, 1, 4))
    assert np.array_equal(checkpoint.tensor(whole, slice(1, 9)), np.concatenate([*tensors.values()])[1:9])
    assert checkpoint.stored_name("model.layers.0.input_layernorm.weight").endswith("attention_layer_norm.weight")
    assert np.array_equal(checkpoint.tensor("model.layers.0.input_layernorm.weight"), np.ones(2))
    write_model_weights(tmp_path, {name: each for name, each in tensors.items() if ".v_" not in name})
    assert unstacked(Checkpoint.open(tmp_path)).entries.keys() == {name for name in tensors if ".v_" not in name}
