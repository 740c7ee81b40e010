"""Steps with images, in the reference and the compiled core: given rows, coordinates, tokens that see later ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire import _native
from quire.compute.arrays import FloatArray, IntArray
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import RopeSpec
from quire.compute.worker.model_runner import NO_COORDINATES, NO_INDICES, ModelRunner, StepInputs, StepOutputs
from quire.core.errors import ExecutionError
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_gemma4 import write_tiny_gemma4

TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]


class Changed:
    """A model runner whose steps get given rows or coordinates first. `last`: the logits of the last step."""

    def __init__(self, runner: ModelRunner, rows: FloatArray, coordinates: IntArray, ends: IntArray) -> None:
        self.vocab_size = runner.vocab_size
        self.last = NONE
        self._runner, self._rows, self._coordinates, self._ends = runner, rows, coordinates, ends

    def run(self, inputs: StepInputs, cache: object) -> StepOutputs:
        if len(self._rows):
            inputs = replace(inputs, given=np.where(inputs.positions % 3, inputs.token_ids, -1), given_rows=self._rows)
        if len(self._coordinates):
            inputs = replace(inputs, coordinates=np.ascontiguousarray(self._coordinates[:, inputs.positions]))
        if len(self._ends):
            inputs = replace(inputs, ends_seen=self._ends[inputs.positions])
        outputs = self._runner.run(inputs, cache)
        self.last = outputs.logits[:, : self.vocab_size].copy()
        return outputs


NONE = np.zeros((0, 0), np.float32)


def logits_of(
    run: ReferenceRun,
    rows: FloatArray = NONE,
    coordinates: IntArray = NO_COORDINATES,
    ends: IntArray = NO_INDICES,
    chunks: tuple[int, ...] = (),
) -> FloatArray:
    every = run.runner
    inner = "_runner" if isinstance(run, NativeRun) else "_decoder"
    setattr(every, inner, Changed(getattr(every, inner), rows, coordinates, ends))
    run.prefill(0, TOKENS, chunks)
    return np.stack([run.logits[0, position] for position in range(len(TOKENS))])


def with_axes(spec: DecoderSpec) -> DecoderSpec:
    rope = spec.layers[0].rope
    assert rope is not None
    axes = tuple(index % 3 for index in range(len(rope.inverse_frequencies)))
    turned = RopeSpec(rope.rotary_dim, rope.inverse_frequencies, rope.scale, axes=axes)
    return replace(spec, layers=tuple(replace(layer, rope=turned) for layer in spec.layers))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "model")


@pytest.mark.parametrize("name", _native.kernel_names())
def test_given_rows_replace_embedded_tokens(folder: Path, name: str) -> None:
    settings = replace(FLOAT32, num_threads=2, instruction_set=name)
    spec = read_model(ModelFolder(folder)).spec
    other = np.random.default_rng(1).normal(size=(spec.vocab_size, spec.hidden_size)).astype(np.float32)
    plain = logits_of(NativeRun(folder, settings=settings))
    changed = logits_of(NativeRun(folder, settings=settings), other)
    assert changed.tobytes() == logits_of(NativeRun(folder, settings=settings), other, chunks=(3, 20)).tobytes()
    assert not np.allclose(plain[1:], changed[1:])
    assert plain[0].tobytes() == changed[0].tobytes()
    np.testing.assert_allclose(changed, logits_of(ReferenceRun(folder), other), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", _native.kernel_names())
def test_the_first_layers_get_rows_of_their_own(folder: Path, name: str) -> None:
    settings = replace(FLOAT32, num_threads=2, instruction_set=name)
    spec = replace(read_model(ModelFolder(folder)).spec, deep_rows=2)
    wide = np.random.default_rng(1).normal(size=(spec.vocab_size, 3 * spec.hidden_size)).astype(np.float32)
    changed = logits_of(NativeRun(folder, settings=settings, spec=spec), wide)
    again = logits_of(NativeRun(folder, settings=settings, spec=spec), wide, chunks=(3, 20))
    assert changed.tobytes() == again.tobytes()
    np.testing.assert_allclose(changed, logits_of(ReferenceRun(folder, spec=spec), wide), rtol=2e-4, atol=2e-4)
    nothing = wide.copy()
    nothing[:, spec.hidden_size :] = 0
    plain = logits_of(NativeRun(folder, settings=settings), np.ascontiguousarray(wide[:, : spec.hidden_size]))
    assert np.array_equal(logits_of(NativeRun(folder, settings=settings, spec=spec), nothing), plain)
    assert not np.allclose(changed[1:], plain[1:])
    with pytest.raises(ExecutionError, match="given rows"):
        logits_of(NativeRun(folder, spec=spec), np.ascontiguousarray(wide[:, : spec.hidden_size]))


@pytest.mark.parametrize("name", _native.kernel_names())
def test_coordinates_turn_the_frequencies_of_their_axes(folder: Path, name: str) -> None:
    settings = replace(FLOAT32, num_threads=2, instruction_set=name)
    spec = with_axes(read_model(ModelFolder(folder)).spec)
    positions = np.arange(len(TOKENS))
    same, other = np.stack([positions] * 3), np.stack([positions, positions // 5, positions % 5])
    plain = logits_of(NativeRun(folder, settings=settings))
    assert plain.tobytes() == logits_of(NativeRun(folder, settings=settings, spec=spec)).tobytes()
    assert plain.tobytes() == logits_of(NativeRun(folder, settings=settings, spec=spec), coordinates=same).tobytes()
    turned = logits_of(NativeRun(folder, settings=settings, spec=spec), coordinates=other, chunks=(7, 16))
    assert not np.allclose(plain, turned)
    np.testing.assert_allclose(
        turned, logits_of(ReferenceRun(folder, spec=spec), coordinates=other), rtol=2e-4, atol=2e-4
    )


def test_rows_and_coordinates_of_another_shape_are_refused(folder: Path) -> None:
    with pytest.raises(ExecutionError, match="given rows"):
        logits_of(NativeRun(folder), np.zeros((64, 3), np.float32))
    spec = with_axes(read_model(ModelFolder(folder)).spec)
    with pytest.raises(ExecutionError, match="coordinates"):
        logits_of(NativeRun(folder, spec=spec), coordinates=np.stack([np.arange(len(TOKENS))] * 2))


@pytest.mark.parametrize("name", _native.kernel_names())
@pytest.mark.parametrize("window", [None, 12])
def test_tokens_of_an_image_see_its_later_tokens(folder: Path, name: str, window: int | None) -> None:
    settings = replace(FLOAT32, num_threads=2, instruction_set=name)
    spec = read_model(ModelFolder(folder)).spec
    spec = replace(spec, layers=tuple(replace(layer, window=window) for layer in spec.layers))
    ends = np.zeros(len(TOKENS), np.int64)
    ends[3:26], ends[26:29] = 26, 29
    seeing = logits_of(NativeRun(folder, settings=settings, spec=spec), ends=ends)
    again = logits_of(NativeRun(folder, settings=settings, spec=spec), ends=ends, chunks=(1, 25, 3, 1))
    assert seeing.tobytes() == again.tobytes()
    np.testing.assert_allclose(seeing, logits_of(ReferenceRun(folder, spec=spec), ends=ends), rtol=2e-4, atol=2e-4)
    plain = logits_of(NativeRun(folder, settings=settings, spec=spec))
    assert plain[:3].tobytes() == seeing[:3].tobytes()
    assert not np.allclose(plain[3], seeing[3])


@pytest.mark.parametrize("name", _native.kernel_names())
def test_rows_that_nobody_wants_change_no_row_next_to_an_image(tmp_path: Path, name: str) -> None:
    """Layers with the keys of others compute only the rows that are wanted, which are then others of the step."""
    folder = write_tiny_gemma4(tmp_path / "gemma4")
    settings = replace(FLOAT32, num_threads=2, instruction_set=name)
    ends = np.zeros(len(TOKENS), np.int64)
    ends[:12] = 12
    expected = logits_of(NativeRun(folder, settings=settings), ends=ends)
    run = NativeRun(folder, settings=settings)
    changed = Changed(run.runner._runner, NONE, NO_COORDINATES, ends)
    run.worker._runner = changed
    run.prefill(0, TOKENS)
    assert changed.last.tobytes() == expected[-1:].tobytes()
