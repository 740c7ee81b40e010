"""GGUF files of models with linear attention compute what the folders compute that they were made from.

To the bit, except where the file has value heads in turns: then the output matrix adds them up in that order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.compute.adapters.folder import read_adapter
from quire.compute.adapters.gguf import GgufAdapter
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import WeightReader, expected_tensors
from quire.core.errors import CheckpointError
from support.adapters import adapter_tensors, write_adapter
from support.gguf_errors import require_named
from support.gguf_models import write_gguf
from support.random_blocks import blocks_of
from support.recurrent_models import CONFIGS, FULL, LINEAR, write_folder

PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]
THREE = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
EQUAL = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 16}
FILES: dict[str, tuple[str, dict[str, Any], bool]] = {
    **{form: (form, {}, True) for form in CONFIGS},
    "qwen3-next, its first files": ("qwen3-next", {}, False),
    "qwen3-next, three values a key": ("qwen3-next", THREE, True),
    "qwen3-next, its first files, three values a key": ("qwen3-next", THREE, False),
    "qwen3-5, three values a key": ("qwen3-5", THREE, True),
    "qwen3-5, one value a key": ("qwen3-5", EQUAL, True),
    "qwen3-5, another filter": ("qwen3-5", {"linear_conv_kernel_dim": 3, "num_key_value_heads": 1}, True),
    "qwen3-5-moe, as by default": ("qwen3-5-moe", {"num_hidden_layers": 4, "layer_types": [LINEAR] * 3 + [FULL]}, True),
}


def answer_of(model: Path, backend: str = "reference") -> tuple[Sequence[int], list[float]]:
    """Return the tokens that a model writes, and their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "4MiB"}
    with LLM(str(model), backend=backend, skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    choices = output.outputs[0].logprobs or ()
    return output.outputs[0].token_ids, [one.logprob for each in choices for _, one in sorted((each or {}).items())]


def spec_of(header: GgufHeader, folder: Path) -> DecoderSpec:
    """Return the spec of the model in a file that has a changed header; writes into a new folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(header, lambda name: None)))
    return read_model(ModelFolder(folder)).spec


@pytest.fixture
def qwen35(tmp_path: Path) -> GgufHeader:
    return GgufHeader.read(write_gguf(write_folder("qwen3-5", tmp_path / "model"), tmp_path / "m.gguf"))


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_architecture_and_the_weights_of_its_folder(name: str, backend: str, tmp_path: Path) -> None:
    form, changes, splits = FILES[name]
    folder = write_folder(form, tmp_path / "model", changes)
    path = write_gguf(folder, tmp_path / "m.gguf", splits=splits)
    ours, theirs = read_model(GgufFile(path)).spec, read_model(ModelFolder(folder)).spec
    for part in ("layers", "experts", "tied_head", "context_length", "vocab_size"):
        assert getattr(ours, part) == getattr(theirs, part)
    assert ours.delta is not None and theirs.delta is not None
    has_turns = form != "qwen3-next" and theirs.delta.heads_per_key > 1
    assert ours.delta == replace(theirs.delta, outputs_in_turns=has_turns)
    assert replace(ours.attention, qk_norm=None) == replace(theirs.attention, qk_norm=None)
    assert ("blk.0.ssm_in.weight" in GgufHeader.read(path).tensors) == (form == "qwen3-next" and not splits)
    (tokens, found), (expected_tokens, expected) = answer_of(path, backend), answer_of(folder, backend)
    assert tokens == expected_tokens
    assert found == (pytest.approx(expected, abs=1e-4) if has_turns else expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("changes", [{}, THREE, EQUAL | {"linear_value_head_dim": 32}])
def test_blocks_of_reordered_heads_are_those_that_the_folder_makes(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_folder("qwen3-5", tmp_path / "model", changes)
    whole, file = load_file(folder / "model.safetensors"), GgufFile(write_gguf(folder, tmp_path / "m.gguf", kind))
    tensors, made = file.tensors(), gguf.GGMLQuantizationType[kind]
    for part in ("in_proj_z", "out_proj"):  # these keep their turns
        name = f"model.layers.0.linear_attn.{part}.weight"
        rows = np.asarray(whole[name] if part == "in_proj_z" else whole[name].T)
        turned = rows if changes == EQUAL | {"linear_value_head_dim": 32} else all_in_turns(rows, changes)
        blocks = gguf.quants.quantize(turned if part == "in_proj_z" else np.ascontiguousarray(turned.T), made)
        assert np.array_equal(tensors.block_rows(name), blocks)
    parts = ("in_proj_qkv", "in_proj_a", "in_proj_b")
    for name in (f"model.layers.{layer}.linear_attn.{part}.weight" for layer in range(3) for part in parts):
        blocks = gguf.quants.quantize(whole[name], made)
        assert file.block_types()[name] == kind
        assert np.array_equal(tensors.block_rows(name), blocks)
        assert np.array_equal(tensors.block_rows(name, slice(1, 4)), blocks[1:4])
        assert np.array_equal(tensors.tensor(name), gguf.quants.dequantize(blocks, made))
        assert np.array_equal(tensors.tensor(name, slice(1, 4)), tensors.tensor(name)[1:4])


def all_in_turns(rows: NDArray[Any], changes: dict[str, Any]) -> NDArray[Any]:
    """Return the rows of value heads in turns: the first of each key, then the second of each key."""
    keys, heads = changes.get("linear_num_key_heads", 2), changes.get("linear_num_value_heads", 4)
    return rows.reshape(keys, heads // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def in_turns(rows: NDArray[Any], head_size: int, first: int = 0) -> NDArray[Any]:
    """Return the rows of four value heads, two for each key, as a file of Qwen3.5 has them."""
    heads = [rows[first + head * head_size :][:head_size] for head in (0, 2, 1, 3)]
    return np.concatenate([rows[:first], *heads])


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_blocks_of_256_columns_stay_blocks_though_each_has_parts_of_two_heads(backend: str, tmp_path: Path) -> None:
    """Two heads of 128 are in one block of Q4_K, and no order of such blocks is that of the heads."""
    folder = write_folder("qwen3-5", tmp_path / "model", {"hidden_size": 256, "linear_value_head_dim": 128})
    prefix, first, values = "model.layers.0.linear_attn.", 2 * 2 * 16, 4 * 128
    qkv, _ = blocks_of("Q4_K", first + values, 256)
    output, numbers = blocks_of("Q4_K", 256, values)
    given = {
        f"{prefix}in_proj_qkv.weight": ("Q4_K", in_turns(qkv, 128, first)),
        f"{prefix}out_proj.weight": ("Q4_K", output),
    }
    path = write_gguf(folder, tmp_path / "m.gguf", blocks=given)
    file = GgufFile(path)
    tensors, block_types = file.tensors(), file.block_types()
    assert np.array_equal(tensors.block_rows(f"{prefix}in_proj_qkv.weight"), qkv)
    assert np.array_equal(tensors.tensor(f"{prefix}out_proj.weight"), numbers)
    assert block_types == {name: "Q4_K" for name in given}
    parts = WeightReader(read_model(file).spec, tensors, "float32", block_types=block_types).layer(0)
    assert parts[Part.DELTA_VALUE].blocks == parts[Part.DELTA_OUTPUT].blocks == "Q4_K"
    assert np.array_equal(parts[Part.DELTA_VALUE].weight, qkv[first:])
    assert answer_of(path, backend)[0]


@pytest.mark.parametrize("form", CONFIGS)
def test_layers_that_predict_further_tokens_are_left_out(form: str, tmp_path: Path) -> None:
    folder = write_folder(form, tmp_path / "model")
    plain = answer_of(folder)
    tensors = {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}
    count, layer = int(CONFIGS[form]["num_hidden_layers"]), CONFIGS[form]["layer_types"].index(FULL)
    last, further = f"model.layers.{layer}.", f"model.layers.{count}."
    more = {name.replace(last, further): each for name, each in tensors.items() if name.startswith(last)}
    shapes = {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,)}
    more |= {f"{further}{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors | more, folder / "model.safetensors")
    path = write_gguf(folder, tmp_path / "m.gguf")
    header = GgufHeader.read(path)
    assert {f"blk.{count}.nextn.eh_proj.weight", f"blk.{count}.attn_q.weight"} < header.tensors.keys()
    assert len(read_model(GgufFile(path)).spec.layers) == count
    tokens, found = answer_of(path)
    assert (tokens, found) == (plain[0], pytest.approx(plain[1], abs=1e-4))


@pytest.mark.parametrize("form", CONFIGS)
@pytest.mark.parametrize("splits", [True, False])
def test_errors_name_the_tensors_of_the_file(form: str, splits: bool, tmp_path: Path) -> None:
    path = write_gguf(write_folder(form, tmp_path / "model"), tmp_path / "m.gguf", splits=splits)
    header, spec = GgufHeader.read(path), read_model(GgufFile(path)).spec
    stored = GgufTensors(header).stored_name
    names = {stored(name) for name in expected_tensors(spec)}
    assert names == header.tensors.keys()
    assert {"blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.0.ssm_conv1d.weight"} < names
    require_named(header, spec, names, lambda tensor: 7)


def test_files_of_ollama_have_other_names_and_the_tensors_for_images(qwen35: GgufHeader, tmp_path: Path) -> None:
    renamed = {
        name.replace("ssm_dt.bias", "ssm_dt") if ".ssm_dt." in name else name: each
        for name, each in qwen35.tensors.items()
    }
    plain = qwen35.tensors["output_norm.weight"]
    renamed |= dict.fromkeys(("v.blk.0.attn_qkv.weight", "mm.0.weight", "mtp.layers.0.attn_q.weight"), plain)
    settings = {
        **qwen35.settings,
        **{"qwen35.attention.head_count_kv": [0, 0, 0, 2], "qwen35.rope.dimension_sections": [11, 11, 10]},
        **{"qwen35.ssm.v_head_reordered": True, "qwen35.rope.mrope_interleaved": True},
    }
    of_ollama = replace(qwen35, tensors=renamed, settings=settings)
    spec, other = spec_of(of_ollama, tmp_path / "ollama"), spec_of(qwen35, tmp_path / "plain")
    assert spec == other
    found, expected = (WeightReader(spec, GgufTensors(header), "float32").layer(0) for header in (of_ollama, qwen35))
    assert {part: each.weight.tobytes() for part, each in found.items()} == {
        part: each.weight.tobytes() for part, each in expected.items()
    }
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensors \(extra: w\.blk\) is "):
        WeightReader(spec, GgufTensors(replace(of_ollama, tensors={**renamed, "w.blk": plain})), "float32")
    both = {**renamed, "blk.0.ssm_dt.bias": qwen35.tensors["blk.0.ssm_dt.bias"]}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_dt\.bias' is 'given twice'"):
        GgufTensors(replace(of_ollama, tensors=both))


def test_adapters_for_value_heads_in_turns_are_refused(qwen35: GgufHeader, tmp_path: Path) -> None:
    """Their rows and columns have another order than those of the file, or an unknown one."""
    spec = read_model(ModelFolder(tmp_path / "model")).spec
    tensors = adapter_tensors(spec, parts=[Part.QUERY, Part.ATTENTION_GATE, Part.DELTA_VALUE, Part.DELTA_OUTPUT])
    adapter = write_adapter(tmp_path / "adapter", tensors)
    assert len(read_adapter(adapter, spec, 64).matrices) > 4
    of_file = read_model(GgufFile(tmp_path / "m.gguf")).spec
    with pytest.raises(
        CheckpointError, match=r"is 'model\.layers\.0\.linear_attn\.out_proj'; allowed: a matrix of the 4"
    ):
        read_adapter(adapter, of_file, 64)
    others = {name: each for name, each in tensors.items() if "out_proj" not in name}
    assert read_adapter(write_adapter(tmp_path / "others", others), of_file, 64).rank == 4
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'qwen35'; allowed: the folder of PEFT"):
        GgufAdapter(replace(qwen35, tensors={}), spec)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "values": ("ssm.inner_size", 130, r"qwen35\.ssm\.inner_size is 130; allowed: a multiple of the 4 value heads"),
    "too few kinds": ("attention.recurrent_layers", [True], r"is \[True\]; allowed: a list of booleans, one for each"),
    "numbers": ("attention.recurrent_layers", [1, 1, 1, 0], r"allowed: a list of booleans, one for each of the 4"),
    "other heads": ("attention.head_count_kv", [0, 0, 2, 2], r"allowed: a number, or a list with 0 for exactly the"),
    "two numbers of heads": ("attention.head_count_kv", [0, 0, 0, 2, 1], r"head_count_kv is \[2, 1\]; allowed: an int"),
    "no heads": ("attention.head_count_kv", [0, 0, 0, 0], r"head_count_kv is \[\]; allowed: an int"),
    "order": (
        "ssm.v_head_reordered",
        False,
        r"v_head_reordered is False; allowed: true, as in other files of",
    ),
    "sections": ("rope.dimension_sections", [9, 9, 9, 5], r"allowed: a list with 0 as its fourth number"),
    "further": ("nextn_predict_layers", 4, r"block_count is 4; allowed: an integer from 5"),
    "filter": ("ssm.conv_kernel", None, r"ssm\.conv_kernel is None; allowed: an integer from 1"),
    "keys": ("ssm.group_count", None, r"ssm\.group_count is None; allowed: an integer from 1"),
    "key size": ("ssm.state_size", 0, r"ssm\.state_size is 0; allowed: an integer from 1"),
    "value heads": ("ssm.time_step_rank", "four", r"ssm\.time_step_rank is 'four'; allowed: an integer from 1"),
    "interval": ("full_attention_interval", 0, r"full_attention_interval is 0; allowed: an integer from 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_their_names(name: str, qwen35: GgufHeader) -> None:
    key, value, said = REFUSED[name]
    header = replace(qwen35, settings={**qwen35.settings, f"qwen35.{key}": value})
    GgufTensors(header)
    with pytest.raises(CheckpointError, match=said):
        config_of(header, lambda name: None)


def test_value_heads_that_no_key_shares_are_refused(qwen35: GgufHeader, tmp_path: Path) -> None:
    header = replace(qwen35, settings={**qwen35.settings, "qwen35.ssm.group_count": 3})
    GgufTensors(header)
    with pytest.raises(CheckpointError, match="recurrent heads is '4 of values, 3 of keys'"):
        spec_of(header, tmp_path / "changed")


def test_an_output_matrix_with_other_dimensions_has_a_wrong_shape(qwen35: GgufHeader, tmp_path: Path) -> None:
    spec, stored = spec_of(qwen35, tmp_path / "spec"), qwen35.tensors["blk.0.ssm_out.weight"]
    for shape in ((128,), (32, 4, 32)):
        changed = {**qwen35.tensors, "blk.0.ssm_out.weight": replace(stored, shape=shape)}
        with pytest.raises(CheckpointError, match=r"wrong shape: blk\.0\.ssm_out\.weight \[.*\] for \[32, 128\]"):
            WeightReader(spec, GgufTensors(replace(qwen35, tensors=changed)), "float32")


def test_a_file_of_qwen3_next_with_value_heads_in_turns_is_refused(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(write_folder("qwen3-next", tmp_path / "model"), tmp_path / "m.gguf"))
    settings = {**header.settings, "qwen3next.ssm.v_head_reordered": True}
    with pytest.raises(CheckpointError, match=r"v_head_reordered is True; allowed: false, as in other files of Qwen3-"):
        config_of(replace(header, settings=settings), lambda name: None)
    settings = {**header.settings, "qwen3next.feed_forward_length": None}
    with pytest.raises(CheckpointError, match=r"feed_forward_length is None; allowed: an integer from 0"):
        config_of(replace(header, settings=settings), lambda name: None)
