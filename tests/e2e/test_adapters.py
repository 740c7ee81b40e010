"""Adapters in whole engines: against merged weights, and the same bits whatever else the engine does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.core.errors import InvalidConfigError, InvalidRequestError
from quire.core.request import CacheScope
from quire.engine.door import Ticket
from quire.engine.records.step_log import replay
from support.adapters import Tensors, adapter_tensors, merged, write_adapter
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

PROMPTS = [
    [random.Random(seed).randrange(1, 120) for _ in range(length)] for seed, length in enumerate((50, 3, 90, 33))
]
CASES = Path(__file__).parents[1] / "golden" / "data" / "families" / "cases.json"
NAMES = ("tune", None, "other", "tune")
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=4, logprobs=2, ignore_eos=True)
Adapters = Mapping[str, Path]


class Models:
    """A model, two adapters for it, and the model that the first is merged into."""

    def __init__(self, folder: Path) -> None:
        self.base = write_tiny_qwen3(folder / "base")
        self.spec: DecoderSpec = read_model(ModelFolder(self.base)).spec
        self.tensors: Tensors = adapter_tensors(self.spec, rank=8)
        other = adapter_tensors(self.spec, rank=3, seed=2)
        self.adapters = {
            "tune": write_adapter(folder / "tune", self.tensors, {"lora_alpha": 16}),
            "other": write_adapter(folder / "other", other),
        }
        self.merged = write_tiny_qwen3(folder / "merged")
        weights = tiny_qwen3_tensors(tiny_qwen3_config(), 0)
        write_model_weights(self.merged, merged(weights, self.spec, self.tensors, 16 / 8))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"kv_memory": "1MiB", "skip_tokenizer_init": True, "num_threads": 1} | settings)


def answers(
    llm: LLM, names: Sequence[str | None], sampling: SamplingParams, prompts: Sequence[list[int]] = PROMPTS
) -> list[RequestOutput]:
    """Answer all prompts at once, each with the adapter of its place."""
    prepared = [
        llm._door.prepare_all(
            [{"prompt_token_ids": prompt}], llm._client.limits, sampling, ticket=Ticket(adapter=name)
        )[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return llm._run(prepared, False)


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_text_is_that_of_the_merged_model(models: Models, backend: str) -> None:
    with opened(models.merged, backend="native") as llm:
        expected = [
            each.outputs[0].token_ids for each in llm.generate(PROMPTS, temperature=0, max_tokens=16, use_tqdm=False)
        ]
    with opened(models.base, adapter=models.adapters, backend=backend) as llm:
        plain = llm.generate(PROMPTS, temperature=0, max_tokens=16, use_tqdm=False)
        tuned = llm.generate(PROMPTS, temperature=0, max_tokens=16, use_tqdm=False, adapter="tune")
    assert [each.outputs[0].token_ids for each in tuned] == expected
    assert [each.outputs[0].token_ids for each in plain] != expected


def test_a_chat_takes_an_adapter_as_a_prompt_does(tmp_path: Path) -> None:
    settings = {"vocab_size": 384, "eos_token_id": 383}
    base = write_chatml(write_tiny_qwen3(tmp_path / "base", settings=settings))
    spec = read_model(ModelFolder(base)).spec
    tune = write_adapter(tmp_path / "tune", adapter_tensors(spec, rank=8), {"lora_alpha": 16})
    messages = [{"role": "user", "content": "hi"}]
    with LLM(base, kv_memory="1MiB", num_threads=1, adapter={"tune": tune}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
        expected = bits(llm.generate([messages], greedy, use_tqdm=False, adapter="tune"))
        assert bits(llm.chat(messages, greedy, use_tqdm=False, adapter="tune")) == expected
        assert bits(llm.chat(messages, greedy, use_tqdm=False)) != expected
        with pytest.raises(InvalidRequestError, match="adapter is 'other'"):
            llm.chat(messages, greedy, use_tqdm=False, adapter="other")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"kv_memory": "312KiB", "preemption": "recompute"},
        {"kv_memory": "312KiB", "swap_space": "1MiB", "preemption": "swap"},
        {"block_size": 64, "num_threads": 2},
        {"speculation": "auto"},
        {"enable_prefix_caching": False},
    ],
)
@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParams(n=3, max_tokens=16, seed=2, temperature=1.0)])
def test_bits_are_the_same_alone_and_among_others(
    models: Models, settings: Mapping[str, Any], sampling: SamplingParams
) -> None:
    with opened(models.base) as llm:
        plain = bits(answers(llm, [None] * 4, sampling))
    with opened(models.base, adapter=models.adapters, kv_memory="8MiB") as llm:
        alone = [
            bits(answers(llm, [name if i == place else None for i in range(4)], sampling))[place]
            for place, name in enumerate(NAMES)
        ]
    with opened(models.base, adapter=models.adapters, **settings) as llm:
        together = bits(answers(llm, NAMES, sampling))
        again = bits(answers(llm, NAMES, sampling))
    assert together == again == alone
    assert together[1] == plain[1]
    assert together[0] != plain[0]


@pytest.fixture(scope="module", params=["deepseek-v2-lite", "deepseek-v3", "gpt-oss", "qwen3-moe"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    """A model with experts, and two adapters for all of its matrices."""
    folder, form = tmp_path_factory.mktemp(request.param), json.loads(CASES.read_text())["forms"][request.param]
    (folder / "config.json").write_text(json.dumps(form["config"]))
    (folder / "model.safetensors").write_bytes((CASES.parent / form["weights"]).read_bytes())
    spec = read_model(ModelFolder(folder)).spec
    tensors = [adapter_tensors(spec, rank=rank, seed=rank) for rank in (6, 20)]
    return folder, {
        name: write_adapter(folder / name, each, {"lora_alpha": 24})
        for name, each in zip(("tune", "other"), tensors, strict=True)
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"kv_memory": "100KiB", "preemption": "recompute"},
        {"block_size": 64, "num_threads": 2, "kv_dtype": "bfloat16"},
    ],
)
def test_bits_of_experts_and_latents_are_the_same_alone_and_among_others(
    sparse: tuple[Path, dict[str, Path]], settings: Mapping[str, Any]
) -> None:
    folder, adapters = sparse
    prompts = [[token % 60 for token in prompt] for prompt in PROMPTS]
    common = {"adapter": adapters, "kv_memory": "1MiB", "dtype": "float32"} | (
        {"kv_dtype": settings["kv_dtype"]} if "kv_dtype" in settings else {}
    )

    def found(names: Sequence[str | None], **changes: Any) -> list[Any]:
        with opened(folder, **common | changes) as llm:
            return [bits(answers(llm, names, SAMPLED, prompts)) for _ in range(2)]

    (alone, _), (plain, _) = found(["tune"] * 4), found([None] * 4)
    together, again = found(NAMES, **settings)
    assert together == again
    assert [together[0], together[3], together[1]] == [alone[0], alone[3], plain[1]]
    assert together[0] != plain[0] and together[2] not in (alone[2], plain[2])


def test_keys_and_values_are_hit_by_the_same_adapter_only(models: Models, tmp_path: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for file in models.adapters["tune"].iterdir():
        (again / file.name).write_bytes(file.read_bytes())
    prompt, found = [PROMPTS[2]], []
    with opened(models.base, adapter={**models.adapters, "same": again}) as llm:
        for name in (None, "tune", "other", None, "tune", "same"):
            found.append(llm.generate(prompt, max_tokens=1, use_tqdm=False, adapter=name)[0].num_cached_tokens)
        assert llm.adapters["same"].digest == llm.adapters["tune"].digest != llm.adapters["other"].digest
    assert found == [0, 0, 0, 80, 80, 80], "what counts is what is in the files, not the name"


def test_a_cache_on_disk_keeps_them_apart_too(models: Models, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"disk_cache": tmp_path, "disk_cache_size": "8MiB", "disk_write": "always"}
    with opened(models.base, adapter=models.adapters, **settings) as llm:
        expected = bits(answers(llm, NAMES, SAMPLED))
    with opened(models.base, adapter=models.adapters, **settings) as llm:
        found = answers(llm, NAMES, SAMPLED)
        assert [each.num_disk_tokens for each in found] == [48, 0, 80, 32]
        assert bits(found) == expected
    with opened(models.base, adapter=models.adapters, **settings) as llm:
        assert answers(llm, ("other", None, None, None), SAMPLED)[0].num_cached_tokens == 0


def test_one_that_is_not_loaded_fails_alone(models: Models) -> None:
    with opened(models.base, adapter=models.adapters) as llm:
        with pytest.raises(InvalidRequestError, match="adapter is 'none'; allowed: one of tune, other"):
            llm.generate(PROMPTS[0], adapter="none")
        tickets = [Ticket(scope=CacheScope(adapter="0" * 32)), Ticket(adapter="tune")]
        prepared = [
            llm._door.prepare_all([{"prompt_token_ids": PROMPTS[0]}], llm._client.limits, SAMPLED, ticket=ticket)[0]
            for ticket in tickets
        ]
        lost, good = llm._run(prepared, False)
        assert lost.outputs[0].finish_reason == "error" and "one that is loaded" in lost.error
        assert bits([good]) == bits(answers(llm, NAMES, SAMPLED)[:1])
    with opened(models.base) as llm, pytest.raises(InvalidRequestError, match="no adapter is loaded"):
        llm.generate(PROMPTS[0], adapter="tune")


@pytest.mark.parametrize(
    "settings", [{"weights": "int8"}, {"weights": "int4"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}]
)
def test_a_base_of_any_number_type_has_them(models: Models, settings: Mapping[str, Any]) -> None:
    with opened(models.base, **settings) as llm:
        plain = bits(answers(llm, NAMES[1:2] * 4, SAMPLED))
    with opened(models.base, adapter=models.adapters, **settings) as llm:
        found = bits(answers(llm, NAMES, SAMPLED))
    assert found[1] == plain[1] and found[0] != plain[0]


def test_settings_that_cannot_be_are_refused(models: Models, tmp_path: Path) -> None:
    folder = models.adapters["tune"]
    for given in (["=x"], ["tune="], [f"a={folder}", f"a={folder}"], ["white space=x"], [3], 7):
        with pytest.raises(InvalidConfigError, match="NAME=FOLDER, each name once"):
            opened(models.base, adapter=given)
    with pytest.raises(InvalidConfigError, match="a folder for each name"):
        opened(models.base, adapter={"tune": None})
    with pytest.raises(
        InvalidConfigError, match=r"adapter_memory is '64.0 KiB'; allowed: at least .*, for the largest"
    ):
        opened(models.base, adapter={"tune": folder}, adapter_memory="64KiB")
    with pytest.raises(InvalidConfigError, match="max_adapter_rank"):
        opened(models.base, adapter={"tune": folder}, max_adapter_rank=0)
    with opened(models.base, adapter=[str(folder)]) as llm:
        assert list(llm.adapters) == ["tune"], "a folder alone has its own name"


def test_a_log_with_adapters_is_replayed(models: Models, tmp_path: Path) -> None:
    log = tmp_path / "run.steplog"
    with opened(models.base, adapter=models.adapters, step_log=log, adapter_memory="700KiB") as llm:
        answers(llm, NAMES, SAMPLED)
        llm.load_adapter("again", models.adapters["other"])
        llm.unload_adapter("tune")
        answers(llm, (None, "again", None, "other"), SAMPLED)
    with log.open("rb") as file:
        assert replay(file) > 40
