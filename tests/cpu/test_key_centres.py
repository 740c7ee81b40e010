"""The centre of the keys: it changes no softmax, fits what keys have in common, and is the same for every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.models.sublayers import RopeSpec
from quire.compute.native import NativeSettings, kv_cache_spec
from quire.compute.reference.operations import rope_angles, rotate
from quire.compute.worker import key_centres
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import NO_COORDINATES
from support.native_runs import NativeRun
from support.reference_runs import ReferenceRun
from support.spec_models import SPECS, write_spec_model
from support.tiny_checkpoint import write_tiny_qwen3

LENGTH = 100
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(model, settings=WINDOWS)
    return model


def logits_of(run: Any) -> NDArray[np.float32]:
    run.prefill(0, TOKENS, chunks=[30, 41])
    return np.stack([run.logits[0, position] for position in range(LENGTH)])


@pytest.mark.parametrize("instruction_set", _native.kernel_names())
def test_a_vector_taken_off_every_key_changes_no_logit(folder: Path, instruction_set: str) -> None:
    settings = NativeSettings(dtype="float32", instruction_set=instruction_set)
    plain, moved = (NativeRun(folder, settings=settings) for _ in range(2))
    spec = plain.runner._runner.spec
    size = spec.attention.num_kv_heads * spec.attention.head_dim
    for layer in range(len(spec.layers)):
        centre = np.random.default_rng(layer).normal(size=size).astype(np.float32)
        moved.runner._runner._decoder.set_key_centre(layer, centre)
    ours, theirs = logits_of(moved), logits_of(plain)
    assert 0 < np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    with pytest.raises(ValueError, match="centre"):
        moved.runner._runner._decoder.set_key_centre(0, np.zeros(size + 1, np.float32))


def native_centres(folder: Path, settings: NativeSettings) -> list[NDArray[np.float32]]:
    run = NativeRun(folder, settings=settings)
    decoder = run.runner._runner
    kv_spec = kv_cache_spec(decoder.spec, 16, "float32")
    memory = CacheEngine(kv_spec, num_blocks=key_centres.num_blocks(decoder.spec, kv_spec))
    found = key_centres.key_centres(decoder.spec, memory, decoder, decoder._read_keys)
    assert list(found) == list(range(len(decoder.spec.layers)))
    return list(found.values())


def test_engines_find_the_same_centres_with_any_threads_and_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = NativeSettings(dtype="float32")
    centres = native_centres(folder, settings)
    decoder = ReferenceRun(folder, kv_dtype="int4").runner._decoder
    for ours, theirs in zip(centres, decoder._centres.values(), strict=True):
        assert np.allclose(ours, theirs, atol=1e-4)
    monkeypatch.setattr(key_centres, "CHUNK", 17)
    for ours, others in zip(centres, native_centres(folder, replace(settings, num_threads=2)), strict=True):
        assert ours.tobytes() == others.tobytes()


def test_equal_keys_that_turn_have_a_centre_where_they_turn_slowly() -> None:
    rope = RopeSpec(rotary_dim=6, inverse_frequencies=(1.0, 1e-3, 1e-6))
    key = np.array([1.0, 2.0, 3.0, -1.0, 0.5, 2.0, 7.0, 8.0], np.float32)
    positions = np.arange(key_centres.NUM_POSITIONS)
    turned = rotate(np.tile(key, (len(positions), 1, 1)), rope_angles(positions, rope, NO_COORDINATES))
    centre = key_centres._mean(turned[: key_centres.NUM_TOKENS], rope)
    assert np.allclose(centre, turned.mean(axis=0), atol=1e-3)
    assert np.allclose(centre[0, [2, 5, 6, 7]], key[[2, 5, 6, 7]], atol=0.02), (
        "a slow pair, and numbers that do not turn"
    )
    assert np.abs(centre[0, [0, 3]]).max() < 0.01, "a fast pair"


@pytest.mark.parametrize("name", ["caps", "sinks"])
def test_what_a_score_counts_for_keeps_the_keys_as_they_are(name: str, tmp_path: Path) -> None:
    write_spec_model(tmp_path, SPECS[name])
    reference = ReferenceRun(tmp_path, spec=SPECS[name], kv_dtype="int4")
    assert not reference.runner._decoder._centres
