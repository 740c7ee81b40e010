"""Images on torch: the rows, logits and texts of the reference, and the same bits whenever an image is encoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM
from quire.compute.arrays import FloatArray
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import MAX_AXES
from quire.compute.reference.images import reference_encoder
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.images import TorchTower, largest_image, load_encoder, rehearse
from quire.compute.torch.settings import TorchSettings, image_bytes, kv_cache_spec
from quire.compute.vision.encoder import TowerEncoder
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.core.errors import InvalidConfigError, OutOfMemoryError
from quire.core.images import Image
from support.image_jobs import Job, run, workload
from support.recorded_ranks import compute_as_on_gpus
from support.recorders import AgainRecorder
from support.reference_runs import ReferenceRun
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32, TorchRun
from support.vision_models import SETTINGS, SIZES, random_image, rows_of, vision_of, write_vision_model

TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(120)]


def of_torch(model: ModelDescription, settings: TorchSettings) -> TowerEncoder:
    return load_encoder(vision_of(model), model.source.tensors(), settings, torch.device(settings.device))


def images(name: str, model: ModelDescription) -> Iterator[Image]:
    for seed, (height, width) in enumerate(SIZES[name]):
        yield random_image(vision_of(model), height, width, seed)


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_those_of_the_reference_and_the_same_each_time(name: str, tmp_path: Path, device: str) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    settings = replace(FLOAT32, device=device)
    plain, encoder = reference_encoder(vision_of(model), model.source.tensors()), of_torch(model, settings)
    found = [rows_of(encoder, image) for image in images(name, model)]
    for image, rows in zip(images(name, model), found, strict=True):
        np.testing.assert_allclose(rows, rows_of(plain, image), rtol=1e-4, atol=1e-4)
    begun = encoder.begin(next(images(name, model)))
    assert begun.advance(0) is None  # another image takes the tower
    for image, rows in zip(images(name, model), found, strict=True):
        assert rows_of(encoder, image).tobytes() == rows.tobytes()
    while (again := begun.advance(0)) is None:
        pass
    assert again.tobytes() == found[0].tobytes()
    half = of_torch(model, replace(settings, dtype="bfloat16"))
    for image, rows in zip(images(name, model), found, strict=True):
        distance = np.linalg.norm(rows_of(half, image) - rows) / np.linalg.norm(rows)
        assert distance < 0.05


@pytest.mark.parametrize("name", SETTINGS)
def test_the_largest_image_has_all_patches_or_nearly_all(name: str, tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS[name])))
    vision = vision_of(model)
    image, most = largest_image(vision), vision.patches.max_patches
    rows, columns = vision.patches.grid(image.height, image.width)
    assert 0.9 * most <= rows * columns <= most
    assert image_bytes(vision, FLOAT32) > 4 * vision.patches.max_rows * vision.tower.hidden_size


def test_scores_are_computed_in_parts_if_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS["idefics3"])))
    [image], encoder = images("idefics3", model), of_torch(model, FLOAT32)
    expected = rows_of(encoder, image)
    monkeypatch.setattr("quire.compute.torch.images.MOST_SCORES", 2 * 64 * 10)  # of 10 rows
    np.testing.assert_allclose(rows_of(encoder, image), expected, rtol=1e-5, atol=1e-5)
    tower = encoder._tower
    assert isinstance(tower, TorchTower)
    assert tower._pair.keys.shape[2] == 64


def test_an_image_that_does_not_fit_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model(ModelFolder(write_vision_model(tmp_path, SETTINGS["idefics3"])))
    [image], encoder = images("idefics3", model), of_torch(model, FLOAT32)
    rehearse(encoder)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(TorchTower, "_run", fail)
    with pytest.raises(OutOfMemoryError, match=r"^an image does not fit into the memory of cpu$"):
        rows_of(encoder, image)
    with pytest.raises(InvalidConfigError, match=r"allowed: none, or a smaller max_image_patches"):
        rehearse(encoder)


# --- the text model --------------------------------------------------------------------------------------------------


class WithImages:
    """A model runner whose steps have rows, coordinates, and tokens that see later ones, by position."""

    def __init__(self, runner: ModelRunner[Any], rows: FloatArray) -> None:
        self.vocab_size = runner.vocab_size
        self._runner, self._rows = runner, rows
        self._ends = np.zeros(len(TOKENS), np.int64)
        self._ends[3:110], self._ends[110:114] = 110, 114

    def run(self, inputs: StepInputs, cache: object) -> StepOutputs:
        places = inputs.positions
        coordinates = np.stack([places, places // 5, places % 5])[:MAX_AXES]
        given = np.where(places % 3, inputs.token_ids, -1)
        changed = replace(inputs, given=given, given_rows=self._rows, coordinates=coordinates)
        return self._runner.run(replace(changed, ends_seen=self._ends[places]), cache)


def logits_of(run: ReferenceRun, rows: FloatArray, chunks: tuple[int, ...] = ()) -> FloatArray:
    every: Any = run.runner
    inner = "_runner" if isinstance(run, TorchRun) else "_decoder"
    setattr(every, inner, WithImages(getattr(every, inner), rows))
    run.prefill(0, TOKENS, chunks)
    return np.stack([run.logits[0, position] for position in range(len(TOKENS))])


def for_images(spec: DecoderSpec, *, ahead_in_windows: bool) -> DecoderSpec:
    """Return the spec with axes, deep rows, and a window in some layers, perhaps those that see later tokens."""
    rope = spec.layers[0].rope
    assert rope is not None
    rope = replace(rope, axes=tuple(index % MAX_AXES for index in range(len(rope.inverse_frequencies))))
    layers = [replace(layer, rope=rope, window=(12, None)[index % 2]) for index, layer in enumerate(spec.layers)]
    attention = replace(spec.attention, ahead_in_windows=ahead_in_windows)
    return replace(spec, attention=attention, layers=tuple(layers), deep_rows=2)


@pytest.mark.parametrize("ahead_in_windows", [False, True])
@pytest.mark.parametrize("kernels", ["plain", "triton", "triton, invariant"])
def test_steps_with_images_have_the_logits_of_the_reference(
    kernels: str, ahead_in_windows: bool, tmp_path: Path, device: str
) -> None:
    folder = write_tiny_qwen3(tmp_path)
    spec = for_images(read_model(ModelFolder(folder)).spec, ahead_in_windows=ahead_in_windows)
    rows = np.random.default_rng(1).normal(size=(128, 3 * spec.hidden_size)).astype(np.float32)
    expected = logits_of(ReferenceRun(folder, spec=spec), rows)
    settings = replace(FLOAT32, device=device)
    for chunks in ((), (1, 109, 4, 1)):
        attention = None
        if kernels != "plain":
            invariant = "invariant" in kernels
            attention = TritonAttention(
                kv_cache_spec(spec, settings),
                torch.device(device),
                num_heads=spec.attention.num_heads,
                num_processors=4,
                batch_invariant=invariant,
            )
        run = TorchRun(folder, spec=spec, settings=settings, attention=attention)
        np.testing.assert_allclose(logits_of(run, rows, chunks), expected, rtol=2e-4, atol=2e-4)


# --- whole engines ---------------------------------------------------------------------------------------------------


def texts(folder: Path, jobs: list[Job], **settings: Any) -> tuple[list[list[int]], int]:
    """Return the texts of requests, and how many steps were replayed."""
    shared = {"max_model_len": 300, "dtype": "float32", "kv_memory": "8MiB", "num_threads": 1}
    with LLM(folder, skip_tokenizer_init=True, **shared, **settings) as llm:
        found = [tokens for tokens, _ in run(llm, jobs)]
        runner: Any = llm.engine._executor._runner  # type: ignore[attr-defined]
        recorder = getattr(getattr(runner, "_graphs", None), "recorder", None)
        return found, recorder.num_replayed if isinstance(recorder, AgainRecorder) else 0


@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "gemma4", "gemma4-31b", "qwen2-vl", "qwen3-vl-moe"])
def test_texts_with_images_are_those_of_the_reference(
    name: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_vision_model(tmp_path, SETTINGS[name])
    jobs = workload(name, read_model(ModelFolder(folder)), are_whole=name in ("gemma3", "gemma4-31b"))
    jobs = [(prompt, shown, replace(sampling, logprobs=None)) for prompt, shown, sampling in jobs]  # steps run ahead
    expected, _ = texts(folder, jobs, backend="reference", device="cpu")
    settings = {"backend": "torch", "device": device, "batch_invariant": True}
    chunks = {"max_num_batched_tokens": 40, "max_num_seqs": 9}
    assert texts(folder, jobs, **settings, **chunks) == (expected, 0)
    if name == "qwen2-vl" and device == "cpu":
        compute_as_on_gpus(monkeypatch.setattr)
        few, num_replayed = texts(folder, jobs[1:3], **settings)
        assert few == expected[1:3]
        assert num_replayed >= 10  # decodes with coordinates, and their draws
