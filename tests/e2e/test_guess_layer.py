"""A model's own layer that guesses, over whole engines: the same texts to the bit, and the same guesses.

A model whose next token depends on the last one only, with a layer that computes the same function, must guess every
token. With random weights, its guesses depend on every entry of the layer: so a hole in them, or one of another text,
shows as another guess than in an engine that has nothing else to do.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, CheckpointError, Grammar, InvalidConfigError, SamplingParams, _native
from quire.cli import main
from quire.compute.grammar import MaskService
from quire.compute.models import read_model
from quire.compute.models.guess_layer import guess_layer
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.native.decoder import NativeDecoder
from quire.compute.weights.decoder_weights import expected_tensors, weight_bytes
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.core.config import EngineConfig
from quire.engine.factory import plan_engine
from quire.engine.records.step_log import replay
from support.adapters import adapter_tensors, write_adapter
from support.gguf_models import write_gguf
from support.guess_layers import CONFIGS, DEEPSEEK_V3, GLM, QWEN3_5, write_guessing_model
from support.guess_runs import WORKLOAD, Known, compare, counts_of, make, noted_guesses, run, said, workload
from support.image_models import write_image_model
from support.native_runs import FLOAT32, NativeRun
from support.spec_models import random_tensors
from support.swaps import noted_swaps
from support.tiny_checkpoint import write_model_weights
from support.tiny_images import asked_about, file_of, picture
from support.tiny_recurrent import write_tiny_qwen3_5
from support.tiny_tokenizer import write_chatml

SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5},
    "small_chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "steps_ahead": {"max_steps_under_way": 3, "max_num_batched_tokens": 40, "block_size": 32},
    "radix_tree": {"prefix_index": "radix_tree", "num_threads": 1},
}
MODELS: Mapping[str, Mapping[str, object]] = {"qwen3_5": QWEN3_5, "deepseek_v3": DEEPSEEK_V3}
LONGER = workload(90)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name: with random weights, and as `-right` those that are always right."""
    base, found = tmp_path_factory.mktemp("guessing"), {}
    for name, config in MODELS.items():
        for ending, is_right in (("", False), ("-right", True)):
            found[name + ending] = base / (name + ending)
            write_guessing_model(found[name + ending], config, is_always_right=is_right)
    return found


ALONE: dict[Path, tuple[list[object], Known]] = {}


def alone(folder: Path) -> tuple[list[object], Known]:
    """Return the texts of requests that run alone, without guesses, and the guesses that the layer then makes."""
    if folder not in ALONE:
        settings: dict[str, Any] = {"dtype": "bfloat16", "num_threads": 1, "enable_prefix_caching": False}
        with make(folder, **settings) as llm:
            texts = [text for each in WORKLOAD for text in run(llm, [each])]
        with make(folder, **settings, speculation="mtp") as llm:
            known = noted_guesses(llm)
            assert [text for each in WORKLOAD for text in run(llm, [each])] == texts
        ALONE[folder] = texts, known
    return ALONE[folder]


TEXTS: dict[Path, list[object]] = {}


def texts_of(folder: Path) -> list[object]:
    """Return the texts of requests without guesses, of a model in float32."""
    if folder not in TEXTS:
        with make(folder, dtype="float32") as llm:
            TEXTS[folder] = run(llm, WORKLOAD)
    return TEXTS[folder]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*(("qwen3_5", each) for each in SCHEDULES), ("deepseek_v3", "small_chunks"), ("deepseek_v3", "steps_ahead")],
)
def test_texts_and_guesses_are_the_same_in_any_schedule(folders: dict[str, Path], name: str, schedule: str) -> None:
    """The second time, from cached prompts."""
    folder = folders[name]
    texts, guesses = alone(folder)
    with make(folder, dtype="bfloat16", speculation="mtp", enable_prefix_caching=False, **SCHEDULES[schedule]) as llm:
        known = noted_guesses(llm)
        assert run(llm, WORKLOAD) == texts
        compare(known, guesses, 10)
    folder = folders[f"{name}-right"]
    texts = texts_of(folder)
    with make(folder, dtype="float32", speculation="mtp", **SCHEDULES[schedule]) as llm:
        for _ in range(2):
            assert run(llm, WORKLOAD) == texts
        num_verified, num_right = counts_of(llm, "mtp")
        assert num_verified == num_right > 50
        assert llm.engine.scheduler.memory.num_looked_up[1] > 0


def test_a_layer_of_random_weights_is_rarely_right(folders: dict[str, Path]) -> None:
    with make(folders["qwen3_5"], dtype="bfloat16", speculation="mtp") as llm:
        assert run(llm, WORKLOAD) == alone(folders["qwen3_5"])[0]
        num_verified, num_right = counts_of(llm, "mtp")
        assert num_verified > 100
        assert num_right < num_verified / 10


@pytest.fixture(scope="module")
def longer(folders: dict[str, Path]) -> tuple[list[object], Known]:
    """The texts of longer requests with enough memory, and the guesses."""
    with make(folders["qwen3_5"], dtype="bfloat16", speculation="mtp", enable_prefix_caching=False) as llm:
        known = noted_guesses(llm)
        return run(llm, LONGER), known


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_or_swapped_it_goes_on_guessing_the_same(
    folders: dict[str, Path],
    longer: tuple[list[object], Known],
    preemption: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swapped = noted_swaps(monkeypatch)
    settings: dict[str, Any] = {"kv_memory": "500KiB", "swap_space": "4MiB" if preemption == "swap" else 0}
    settings |= {"dtype": "bfloat16", "enable_prefix_caching": False}
    with make(folders["qwen3_5"], speculation="mtp", **settings) as llm:
        known = noted_guesses(llm)
        assert run(llm, LONGER) == longer[0]
        assert llm.engine.scheduler.num_preemptions > 0
    assert any(swapped) == (preemption == "swap")
    compare(known, longer[1], 200)


def test_n_sequences_of_one_request_are_guessed_each_by_its_own_noise(folders: dict[str, Path]) -> None:
    """The layer reads the first token of one of them for all; that may cost the others a guess."""
    prompt, sampling = WORKLOAD[5][0], replace(WORKLOAD[5][1], temperature=1.2, n=4, ignore_eos=True)
    texts = []
    for speculation in ("off", "mtp"):
        with make(folders["qwen3_5-right"], dtype="float32", speculation=speculation) as llm:
            texts.append(run(llm, [(prompt, sampling), WORKLOAD[3]]))
            num_verified, num_right = counts_of(llm, "mtp")
    assert texts[0] == texts[1]
    assert num_verified == num_right > 50


def test_beams_and_vectors_next_to_it(folders: dict[str, Path]) -> None:
    """Rows whose next token is unknown after a step, or is that of another row."""
    beams = SamplingParams(temperature=0.0, max_tokens=12, beam_search=True, best_of=3, ignore_eos=True)
    found = []
    for speculation in ("off", "mtp"):
        with make(folders["qwen3_5"], dtype="bfloat16", speculation=speculation, max_num_batched_tokens=24) as llm:
            vectors = llm.embed([{"prompt_token_ids": WORKLOAD[6][0]}] * 2, pooling="last")
            texts = run(llm, [(WORKLOAD[4][0], beams), *WORKLOAD[2:7]])
            found.append((texts, [each.embedding for each in vectors]))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_from_disk_have_the_entries_of_the_layer(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    """Also of a model with recurrent layers, whose states are in blocks that the layer does not use."""
    long = [(list(range(100)), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))]
    texts, known = [], list[Known]()
    for _ in range(2):
        settings: dict[str, Any] = {"disk_cache": tmp_path, "disk_write": "always", "kv_memory": "2MiB"}
        settings["block_size"] = 16
        with make(folders[name], dtype="bfloat16", speculation="mtp", **settings) as llm:
            known.append(noted_guesses(llm))
            texts.append(run(llm, long))
            hits = llm.stats().hit_tokens_total
    assert hits >= 64
    assert texts[0] == texts[1]
    compare(*known, 5)


@pytest.mark.parametrize(("weights", "kv_dtype"), [("int8", "int8"), ("int4", "k8v4"), ("int8", "int4")])
def test_every_form_of_keys_and_weights(tmp_path: Path, weights: str, kv_dtype: str) -> None:
    """Of a checkpoint in bfloat16, as published; the layer takes the same forms as the model."""
    write_guessing_model(tmp_path, QWEN3_5, is_always_right=True, dtype="BF16")
    texts = []
    for speculation in ("off", "mtp"):
        with make(tmp_path, kv_dtype=kv_dtype, weights=weights, speculation=speculation) as llm:
            texts.append(run(llm, WORKLOAD))
            num_verified, num_right = counts_of(llm, "mtp")
    assert texts[0] == texts[1]
    assert num_right > num_verified / 2 > 50


def test_rows_with_adapters_are_guessed_by_the_layer_of_the_model(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["deepseek_v3"]
    spec = read_model(ModelFolder(folder)).spec
    tuned = write_adapter(tmp_path / "tuned", adapter_tensors(spec))
    sampling = replace(WORKLOAD[3][1], max_tokens=30)
    texts = []
    for speculation in ("off", "mtp"):
        with make(folder, dtype="bfloat16", adapter={"tuned": tuned}, speculation=speculation) as llm:
            texts.append(list[object]())
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in WORKLOAD[:6]]
            for name in ("tuned", None):
                texts[-1] += said(llm.generate(prompts, sampling, adapter=name, use_tqdm=False))
            num_verified, _ = counts_of(llm, "mtp")
    assert texts[0] == texts[1]
    assert num_verified > 20


@pytest.mark.parametrize("are_late", [False, True])
def test_grammars_and_the_log_replays(are_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are drawn under the masks, so that none is one that the grammar refuses; also if every other is late."""
    wait, chance = MaskService.wait, random.Random(7)

    def some_late(masks: MaskService, texts: Any, seconds: float, enough: Any = all) -> None:
        wait(masks, texts, 60.0)
        for text in texts:
            if are_late and text.masks is not None and chance.random() < 0.5:
                text.masks, text.asked = None, None  # as if it had not come
                masks.ask(text, text.drafts)

    monkeypatch.setattr(MaskService, "wait", some_late)
    monkeypatch.setattr(MaskService, "is_cheap", lambda masks, text: True)
    config = {**QWEN3_5, "vocab_size": 384, "eos_token_id": 2, "max_position_embeddings": 600}
    folder = tmp_path / "model"
    write_guessing_model(folder, config, is_always_right=True)
    write_chatml(folder)
    letters = Grammar.regex("([b-df-hj-np-tv-z]{3,9} ){5,30}")
    sampling = [SamplingParams(temperature=each, seed=1, max_tokens=24, grammar=letters) for each in (0.0, 1.0)]
    texts, log = [], tmp_path / "run.steplog"
    for settings in ({}, {"speculation": "mtp", "step_log": log}):
        with LLM(folder, kv_memory="8MiB", dtype="float32", **settings) as llm:
            texts.append(said(llm.generate(["What is a block?", "What is a prefix?"], sampling, use_tqdm=False)))
            num_verified, num_right = counts_of(llm, "mtp")
    assert texts[0] == texts[1]
    assert are_late or num_verified == num_right > 0
    assert replay(io.BytesIO(log.read_bytes())) > 4


def test_images_are_read_by_the_layer_too(tmp_path: Path) -> None:
    """Its rows of placeholders are those of the image, and its positions count an image by height and width."""
    folder = write_image_model(tmp_path, "qwen3-5")
    model = read_model(ModelFolder(folder))
    tensors = ModelFolder(folder).tensors()
    own = {name: np.array(tensors.tensor(name)) for name in tensors.entries}
    write_model_weights(folder, own | random_tensors(expected_tensors(guess_layer(model.spec))))
    cat, dog = (file_of(picture(90, 60, seed=seed)) for seed in (1, 2))
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    texts, known = [], list[Known]()
    for settings in ({"speculation": "off"}, {"speculation": "mtp"}, {"speculation": "mtp", "backend": "reference"}):
        with make(folder, skip_tokenizer_init=False, dtype="float32", max_model_len=None, **settings) as llm:
            known.append(noted_guesses(llm) if settings["speculation"] == "mtp" else {})
            texts.append(said(llm.chat([asked_about(cat), asked_about(dog, dog)], sampling, use_tqdm=False)))
    assert texts[0] == texts[1]
    compare(known[1], known[2], 10)  # by two engines that place rows and coordinates on their own


PUBLISHED = {  # of the 27B, as its maker lists them
    **{"fc": (5120, 10240), "norm": (5120,), "pre_fc_norm_embedding": (5120,), "pre_fc_norm_hidden": (5120,)},
    **{"layers.0.input_layernorm": (5120,), "layers.0.post_attention_layernorm": (5120,)},
    **{f"layers.0.mlp.{name}_proj": (17408, 5120) for name in ("gate", "up")},
    **{f"layers.0.self_attn.{name}_proj": (1024, 5120) for name in "kv"},
    **{f"layers.0.self_attn.{name}_norm": (256,) for name in "qk"},
    **{"layers.0.mlp.down_proj": (5120, 17408), "layers.0.self_attn.q_proj": (12288, 5120)},
    "layers.0.self_attn.o_proj": (5120, 6144),
}


def test_the_tensors_are_those_of_the_published_qwen3_5(tmp_path: Path) -> None:
    text = {"vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64}
    text |= {"num_attention_heads": 24, "linear_num_value_heads": 48, "max_position_embeddings": 262_144}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text | {"mtp_num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = guess_layer(read_model(ModelFolder(tmp_path)).spec)
    assert expected_tensors(layer) == {f"mtp.{name}.weight": shape for name, shape in PUBLISHED.items()}
    assert round(weight_bytes(layer) / 4e9, 3) == 0.425
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not read_model(ModelFolder(tmp_path)).spec.guess_sources


def test_experts_in_one_tensor_and_copies_of_the_ends(tmp_path: Path) -> None:
    """As Qwen3.5-MoE and DeepSeek-V3 are published."""
    moe, deepseek = tmp_path / "qwen3_5_moe", tmp_path / "deepseek_v3"
    tensors = {folder: write_guessing_model(folder, CONFIGS[folder.name]) for folder in (moe, deepseek)}
    texts = {folder: _texts_and_guesses(folder) for folder in tensors}
    stacked: dict[str, Any] = {}
    for name, tensor in tensors[moe].items():
        stem, found, rest = name.partition(".experts.")
        expert, _, matrix = rest.partition(".")
        stacked.setdefault(f"{stem}.experts.{matrix.removesuffix('.weight')}" if found else name, {})[expert] = tensor
    whole = {name: each[""] if "" in each else np.stack(list(each.values())) for name, each in stacked.items()}
    for name in [name for name in whole if name.endswith(".experts.gate_proj")]:
        up = whole.pop(name.replace("gate_proj", "up_proj"))
        whole[name.replace("gate_proj", "gate_up_proj")] = np.concatenate((whole.pop(name), up), axis=1)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in whole
    bare = {name: name.removesuffix(".weight") for name in whole if "A_log" in name or "dt_bias" in name}
    write_model_weights(moe, {bare.get(name, name): tensor for name, tensor in whole.items()})
    ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    copies = {f"model.layers.2.{copy}.weight": tensors[deepseek][f"{end}.weight"] for copy, end in ends.items()}
    write_model_weights(deepseek, tensors[deepseek] | copies)
    assert {folder: _texts_and_guesses(folder) for folder in tensors} == texts


def _texts_and_guesses(folder: Path) -> tuple[list[object], Known]:
    with make(folder, dtype="float32", speculation="mtp") as llm:
        known = noted_guesses(llm)
        return run(llm, WORKLOAD[:4]), known


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "glm4_moe"])
def test_a_gguf_file_has_the_same_layer(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    tensors = write_guessing_model(tmp_path / "folder", config)
    count = config["num_hidden_layers"]
    names = {"mtp.fc": "eh_proj", "mtp.norm": "shared_head.norm", "mtp.layers.0.": ""}
    names |= {"mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm"}
    renamed = {}
    for key, tensor in tensors.items():
        old = next((old for old in names if key.startswith(old)), None)
        renamed[key if old is None else f"model.layers.{count}.{names[old]}{key.removeprefix(old)}"] = tensor
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(dict(config)))
    write_model_weights(tmp_path / "other", renamed)
    path = write_gguf(tmp_path / "other", tmp_path / "model.gguf")
    texts, known = [], list[Known]()
    for folder in (tmp_path / "folder", path):
        with make(folder, dtype="float32", speculation="mtp") as llm:
            known.append(noted_guesses(llm))
            prompts = [{"prompt_token_ids": prompt} for prompt, _ in WORKLOAD[:4]]
            outputs = llm.generate(prompts, [sampling for _, sampling in WORKLOAD[:4]], use_tqdm=False)
            texts.append([each.outputs[0].token_ids for each in outputs])
    assert texts[0] == texts[1]
    compare(*known, 30)


def refusal(model: Path, **settings: Any) -> str:
    """Return the one line that refuses settings before any weight is read."""
    with pytest.raises(InvalidConfigError) as caught:
        plan_engine(EngineConfig(model=str(model), speculation="mtp", skip_tokenizer_init=True, **settings))
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_what_cannot_guess_for_itself_is_refused_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    allowed = "speculation is 'mtp'; allowed: off, auto, ngram, or a draft model: "
    assert refusal(Path("guide")) == f"{allowed}quire knows no guessing layer of Qwen3ForCausalLM"
    linear = write_tiny_qwen3_5(tmp_path / "linear", num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    assert refusal(linear) == f"{allowed}quire knows no guessing layer of Qwen3_5ForCausalLM"
    tensors = write_guessing_model(tmp_path / "glm", GLM)
    without = {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}
    write_model_weights(tmp_path / "glm", without)
    lacks = "this checkpoint lacks the guessing layer (model.layers.2.eh_proj.weight)"
    assert refusal(tmp_path / "glm") == allowed + lacks
    with make(tmp_path / "glm") as llm:
        assert run(llm, WORKLOAD[:1])
    tensors.pop("model.layers.2.enorm.weight")
    write_model_weights(tmp_path / "glm", tensors)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.enorm\.weight"):
        LLM(tmp_path / "glm", skip_tokenizer_init=True, speculation="mtp", kv_memory="4MiB")


def test_auto_takes_the_layer_if_that_should_pay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a small part of a deep model, but not of a flat one; and a pool without room for it is used without it."""

    def chosen(folder: Path, **settings: Any) -> str:
        usual: dict[str, Any] = {"speculation": "auto", "skip_tokenizer_init": True, "max_model_len": 300}
        return plan_engine(EngineConfig(model=str(folder), **{**usual, **settings})).config.speculation

    deep = {**QWEN3_5, "num_hidden_layers": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8}
    tensors = write_guessing_model(tmp_path / "deep", deep, is_always_right=True)
    write_guessing_model(tmp_path / "flat", QWEN3_5)
    names = "off", "ngram", "auto", "mtp"
    assert [chosen(tmp_path / "deep", speculation=name) for name in names] == ["off", "ngram", "mtp", "mtp"]
    assert chosen(tmp_path / "flat") == "auto"
    assert [chosen(tmp_path / "deep", kv_memory=memory) for memory in ("3MiB", "2.5MiB")] == ["mtp", "auto"]
    texts = []
    for speculation in ("ngram", "auto"):
        with make(tmp_path / "deep", dtype="float32", speculation=speculation) as llm:
            texts.append(run(llm, WORKLOAD[:2]))
            counts = counts_of(llm, "mtp")
    assert texts[0] == texts[1]
    assert counts[0] == counts[1] > 20
    fixed = ("--hardware", "zen5-2-cores", "--max-num-seqs", "64", "--max-num-batched-tokens", "512")
    assert main(["plan", str(tmp_path / "deep"), "--speculation", "auto", *fixed]) == 0
    assert "guesses     mtp: the model's own layer" in capsys.readouterr().out
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    write_model_weights(tmp_path / "deep", without)
    assert chosen(tmp_path / "deep") == "auto"


def test_the_layer_takes_memory_but_has_no_ends_of_its_own(folders: dict[str, Path]) -> None:
    folder = folders["qwen3_5"]
    plans = [
        plan_engine(EngineConfig(model=str(folder), speculation=each, skip_tokenizer_init=True)).report.plan
        for each in ("auto", "mtp")
    ]
    spec = read_model(ModelFolder(folder)).spec
    layer = guess_layer(spec)
    assert {Part.EMBEDDING, Part.HEAD}.isdisjoint(layer.model_parts())
    assert plans[1].needs.weight_bytes - plans[0].needs.weight_bytes == weight_bytes(layer, "float32")
    assert plans[1].needs.activation_bytes > plans[0].needs.activation_bytes
    assert plans[1].bytes_per_block == 2 * plans[0].bytes_per_block, "as many layers as each of its groups"
    with make(folder, speculation="mtp") as llm:
        runner = llm.engine._executor._layer._layer.runner
        assert isinstance(runner, NativeDecoder)
        assert runner.weight_bytes >= weight_bytes(layer, "float32")
        assert runner.weight_bytes < 1.1 * weight_bytes(layer, "float32")


def test_plans_and_simulations_know_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of settings alone, as those of Qwen3.5-4B: with 80 % right guesses, a token takes about half as long."""
    sizes = {"vocab_size": 248_320, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
    settings = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096, "dtype": "bfloat16"}))
    machine = ["--hardware", "zen5-2-cores", "--memory", "24GiB"]
    assert main(["plan", str(tmp_path), "--speculation", "mtp", *machine]) == 0
    plan = capsys.readouterr().out
    assert "guesses     mtp: the model's own layer" in plan
    assert "a block of 768 tokens" in plan, "the memory of a state with room for guesses; without them, of 560 tokens"
    load = ["--users", "1", "--duration", "20", "--prompt-tokens", "60", "--output-tokens", "60", "--acceptance", "0.8"]
    means = []
    for speculation in ("off", "mtp"):
        assert main(["simulate", str(tmp_path), "--speculation", speculation, *load, *machine, "--json", "-"]) == 0
        results = json.loads(capsys.readouterr().out)["results"]["quire"]
        means.append(float(results["latencies"]["tpot_s"]["mean"]))
    assert 0.4 * means[0] < means[1] < 0.6 * means[0]


@pytest.mark.parametrize("instruction_set", _native.kernel_names())
@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_head_alone_computes_the_bits_of_a_step(
    is_tied: bool, weights: str, instruction_set: str, tmp_path: Path
) -> None:
    """And the embedding alone gives the row that a step begins with."""
    tensors = write_guessing_model(tmp_path, {**QWEN3_5, "tie_word_embeddings": is_tied})
    settings = replace(FLOAT32, weights=weights, instruction_set=instruction_set, num_threads=2)
    run = NativeRun(tmp_path, settings=settings)
    runner = run.runner._runner  # type: ignore[attr-defined]
    step, seen = runner.run, list[Any]()

    def noted(inputs: StepInputs, cache: Any) -> StepOutputs:
        outputs = step(replace(inputs, state_indices=inputs.logit_indices), cache)
        seen.append((outputs.logits.copy(), outputs.states.copy()))
        return outputs

    runner.run = noted
    run.prefill(0, list(range(30)))
    ((logits, states),) = seen
    alone, finite = runner.logits_of(states)
    assert finite.all()
    assert alone.tobytes() == logits.tobytes()
    rows = runner.embed(np.arange(30))
    if not (is_tied and weights == "int8"):
        assert np.array_equal(rows, tensors["model.embed_tokens.weight"][:30])
