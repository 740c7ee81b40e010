"""Adapters in the compiled core: against merged weights, and beside rows that have none or others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.compute.adapters.folder import read_adapter
from quire.compute.native import NativeSettings
from support.adapted_model import SETTINGS, AdaptedModel
from support.adapters import adapter_tensors, merged, write_adapter
from support.dense_oracle import DenseOracle
from support.spec_models import SPECS, write_spec_model
from support.tiny_checkpoint import write_model_weights

PROMPTS = [[random % 64 for random in range(seed, seed + 7 * count, 7)] for seed, count in ((3, 21), (5, 1), (11, 40))]


@pytest.mark.parametrize("name", SPECS)
def test_a_row_has_what_merged_weights_give_and_others_have_their_bits(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    weights = write_spec_model(tmp_path, spec)
    base = AdaptedModel(tmp_path, spec, replace(SETTINGS, adapter_rank=0)).logits(PROMPTS, ["", "", ""])
    model, digests = AdaptedModel(tmp_path, spec), []
    oracles = []
    for seed, rank, alpha in ((1, 4, 8.0), (2, 20, 5.0)):
        tensors = adapter_tensors(spec, rank=rank, seed=seed)
        adapter = read_adapter(write_adapter(tmp_path / f"a{seed}", tensors, {"lora_alpha": alpha}), spec, 32)
        model.load(adapter)
        digests.append(adapter.digest)
        folder = tmp_path / f"merged{seed}"
        folder.mkdir()
        write_model_weights(folder, merged(weights, spec, tensors, alpha / rank))
        oracles.append(AdaptedModel(folder, spec).logits(PROMPTS, ["", "", ""]))
    one, other = digests
    together = model.logits(PROMPTS, [one, "", other])
    for found, expected in ((together[0], oracles[0][0]), (together[2], oracles[1][2])):
        assert np.allclose(found, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
        assert not np.allclose(found, base[0][: len(found)] if found is together[0] else base[2], atol=1e-2)
    assert np.array_equal(together[1], base[1])
    again = model.logits(PROMPTS, [one, other, ""])
    assert np.array_equal(again[0], together[0]), "what is beside a row changes no bit of it"
    assert np.array_equal(again[2], base[2])


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_has_what_the_formula_gives_and_others_have_their_bits(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    weights = write_spec_model(tmp_path, spec)
    model = AdaptedModel.of_reference(tmp_path, spec)
    base = model.logits(PROMPTS, ["", "", ""])
    digests, oracles = [], []
    for seed, rank, alpha in ((1, 4, 8.0), (2, 20, 5.0)):
        tensors = adapter_tensors(spec, rank=rank, seed=seed)
        adapter = read_adapter(write_adapter(tmp_path / f"a{seed}", tensors, {"lora_alpha": alpha}), spec, 32)
        model.load(adapter)
        digests.append(adapter.digest)
        oracles.append(DenseOracle(spec, merged(weights, spec, tensors, alpha / rank)))
    one, other = digests
    together = model.logits(PROMPTS, [one, "", other])
    for found, expected in ((together[0], oracles[0].logits(PROMPTS[0])), (together[2], oracles[1].logits(PROMPTS[2]))):
        assert np.abs(found - expected).max() <= 1e-3 * max(1.0, np.abs(expected).max())
    assert np.array_equal(together[1], base[1])
    again = model.logits(PROMPTS, [one, other, ""])
    assert np.array_equal(again[0], together[0]) and np.array_equal(again[2], base[2])
    assert not np.array_equal(again[1], base[1])


def test_an_int8_base_with_an_adapter_is_that_of_the_reference(tmp_path: Path) -> None:
    spec = SPECS["plain"]
    write_spec_model(tmp_path, spec)
    adapter = read_adapter(write_adapter(tmp_path / "a", adapter_tensors(spec)), spec, 32)
    native = AdaptedModel(tmp_path, spec, replace(SETTINGS, weights="int8"))
    reference = AdaptedModel.of_reference(tmp_path, spec, "int8_groups")
    found = []
    for model in (native, reference):
        model.load(adapter)
        found.append(model.logits(PROMPTS, [adapter.digest, "", adapter.digest]))
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-2 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["plain", "experts", "latent", "latent-queries"])
@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, dtype="bfloat16"), replace(SETTINGS, weights="int8")])
def test_bits_do_not_depend_on_cuts_threads_or_neighbours(name: str, settings: NativeSettings, tmp_path: Path) -> None:
    spec = SPECS[name]
    write_spec_model(tmp_path, spec)
    adapters = [
        read_adapter(write_adapter(tmp_path / f"a{seed}", adapter_tensors(spec, seed=seed)), spec, 32)
        for seed in (1, 2)
    ]
    first, second = (adapter.digest for adapter in adapters)
    texts = [[(seed * n) % 64 for n in range(90)] for seed in (3, 5, 7, 11)]
    names = [first, second, "", first]
    model, alone = (
        AdaptedModel(tmp_path, spec, settings),
        AdaptedModel(tmp_path, spec, replace(settings, num_threads=1)),
    )
    for each in (model, alone):
        each.load(*adapters)
    expected = [alone.logits([text], [name])[0] for text, name in zip(texts, names, strict=True)]
    for found, one in zip(model.logits(texts, names), expected, strict=True):
        assert np.array_equal(found, one)
    for cut in (1, 17, 64, 70):
        model.logits([text[:cut] for text in texts], names)
        for found, one in zip(model.logits(texts, names, [cut] * 4), expected, strict=True):
            assert np.array_equal(found, one[cut:])


def test_an_adapter_that_is_dropped_or_unknown_is_not_computed(tmp_path: Path) -> None:
    spec = SPECS["plain"]
    write_spec_model(tmp_path, spec)
    adapter = read_adapter(write_adapter(tmp_path / "a", adapter_tensors(spec)), spec, 32)
    model = AdaptedModel(tmp_path, spec)
    model.load(adapter, adapter)
    assert model.parts.adapters is not None
    assert model.parts.adapters.has_adapter(adapter.digest)
    model.parts.adapters.drop_adapter(adapter.digest)
    assert not model.parts.adapters.has_adapter(adapter.digest)
    with pytest.raises(KeyError):
        model.logits([[1, 2]], [adapter.digest])
