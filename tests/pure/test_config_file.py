"""Settings of a stranger's model: each kind of field against a plain definition of what it may be, and whole models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.compute.models import FAMILIES, SAVED_AS, read_model
from quire.compute.models.config_file import MAX_LENGTH, MAX_NUMBER, MAX_SIZE, ConfigFile
from quire.core.errors import CheckpointError, ModelError
from support.tiny_checkpoint import tiny_qwen3_config

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
MISSING = object()


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return is_integer(value) or isinstance(value, float)


def above_0(value: Any) -> bool:
    return is_number(value) and 0 < value <= MAX_NUMBER


Read = Callable[[ConfigFile], object]
Rule = Callable[[Any], bool]
# What reads a field, which values it may have, what comes of them, and what stands for nothing; None: it is needed.
KINDS: dict[str, tuple[Read, Rule, Callable[[Any], object], object]] = {
    "size": (lambda file: file.size("f", 7, low=2, high=9), lambda v: is_integer(v) and 2 <= v <= 9, int, 7),
    "needed size": (lambda file: file.size("f"), lambda v: is_integer(v) and 1 <= v <= MAX_SIZE, int, None),
    "number": (lambda file: file.number("f", 0.5), above_0, float, 0.5),
    "needed number": (lambda file: file.number("f"), above_0, float, None),
    "numbers": (
        lambda file: file.numbers("f"),
        lambda v: isinstance(v, list) and len(v) > 0 and all(map(above_0, v)),
        lambda v: tuple(map(float, v)),
        None,
    ),
    "optional number": (
        lambda file: ("read", file.optional_number("f", low=-1, high=2)),
        lambda v: is_number(v) and -1 <= v <= 2,
        lambda v: ("read", float(v)),
        ("read", None),
    ),
    "flag": (
        lambda file: ("read", file.flag("f", True)),
        lambda v: isinstance(v, bool),
        lambda v: ("read", v),
        ("read", True),
    ),
    "texts": (
        lambda file: file.texts("f"),
        lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        tuple,
        None,
    ),
    "section": (lambda file: file.section("f").fields, lambda v: isinstance(v, dict), dict, {}),
    "token ids": (
        lambda file: file.token_ids("f", 4),
        lambda v: all(is_integer(item) and 0 <= item < 4 for item in (v if isinstance(v, list) else [v])),
        lambda v: tuple(v) if isinstance(v, list) else (v,),
        (),
    ),
    "indices": (
        lambda file: file.indices("f", 4),
        lambda v: isinstance(v, list) and all(is_integer(item) and 0 <= item < 4 for item in v),
        frozenset,
        frozenset(),
    ),
}
edges = [
    False,
    True,
    0,
    -0.0,
    1,
    2,
    9,
    10,
    3,
    4,
    -1,
    1.0,
    2.0,
    2.5,
    MAX_SIZE,
    MAX_SIZE + 1,
    10**400,
    1e30,
    1.1e30,
    1e-300,
]
leaves = st.one_of(st.sampled_from([*edges, "", "x", "1"]), st.integers(), st.floats(), st.text(max_size=3))
values = st.one_of(leaves, st.lists(leaves, max_size=3), st.dictionaries(st.text(max_size=2), leaves, max_size=2))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80)
@given(value=values)
def test_a_field_is_read_if_it_is_what_it_should_be_and_refused_otherwise(kind: str, value: Any) -> None:
    read, is_allowed, result, _ = KINDS[kind]
    file = ConfigFile("m/config.json", {"f": value, "g": 1})
    if is_allowed(value):
        assert read(file) == result(value)
        return
    with pytest.raises(CheckpointError, match=r"^m/config\.json: f is ") as caught:
        read(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, MISSING], ids=["null", "missing"])
def test_a_field_that_is_null_or_missing_has_its_default_or_is_needed(kind: str, value: object) -> None:
    read, _, _, default = KINDS[kind]
    file = ConfigFile("m/config.json", {} if value is MISSING else {"f": value})
    if default is None:
        with pytest.raises(CheckpointError, match=r"^m/config\.json: f is None; allowed: "):
            read(file)
    else:
        assert read(file) == default


@pytest.mark.parametrize(
    ("read", "value", "allowed"),
    [
        (lambda file: file.size("f"), 0, "an integer from 1 to 16777215"),
        (lambda file: file.size("f", low=0, high=MAX_LENGTH), -1, "an integer from 0 to 2147483647"),
        (lambda file: file.number("f"), True, "a number"),
        (lambda file: file.number("f"), 0, "a number above 0, at most 1e+30"),
        (lambda file: file.numbers("f"), [], "a list of numbers above 0, at most 1e+30"),
        (lambda file: file.optional_number("f", low=0, high=2), 3, "a number from 0 to 2"),
        (lambda file: file.flag("f", False), 1, "true or false"),
        (lambda file: file.refuse("e", "f"), True, "false"),
        (lambda file: file.texts("f"), "ab", "a list of strings"),
        (lambda file: file.section("f"), [], "an object"),
        (lambda file: file.token_ids("f", 8), 8, "one token id or several, from 0 to 7"),
        (lambda file: file.indices("f", 8), [8], "a list of integers from 0 to 7"),
        (lambda file: file.require("f", None, "a"), "b", "null or 'a'"),
    ],
)
def test_a_refusal_says_what_is_allowed(read: Callable[[ConfigFile], object], value: object, allowed: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(ConfigFile("config.json", {"f": value}))
    assert str(caught.value) == f"config.json: f is {value!r}; allowed: {allowed}"


def test_lists_reach_their_bounds() -> None:
    file = ConfigFile("c", {"numbers": [1e-300, MAX_NUMBER], "indices": [0, 3, 3], "ids": [3, 0]})
    assert file.numbers("numbers") == (1e-300, 1e30)
    assert (file.indices("indices", 4), file.token_ids("ids", 4)) == ({0, 3}, (3, 0))


def test_a_field_of_a_section_is_named_with_its_section() -> None:
    file = ConfigFile("config.json", {"text_config": {"rope": {"factor": 0}}})
    with pytest.raises(CheckpointError, match=r"^config\.json: text_config: rope: factor is 0; "):
        file.section("text_config").section("rope").number("factor")


def test_what_is_required_may_be_one_of_its_values_or_missing_where_null_is() -> None:
    for fields in ({"f": "a"}, {"f": None}, {}):
        ConfigFile("c", fields).require("f", None, "a")
    with pytest.raises(CheckpointError, match=r"^c: f is None; allowed: 'a'$"):
        ConfigFile("c", {}).require("f", "a")
    for harmless in ({}, {"f": None}, {"f": False}):
        ConfigFile("c", harmless).refuse("f")


# ---- whole models ---------------------------------------------------------------------------------------------------


class Settings:
    """The settings of a model that are in no file."""

    name = "m"

    def __init__(self, **files: dict[str, object]) -> None:
        self._files = {f"{name}.json": content for name, content in files.items()}

    def where(self, file: str) -> str:
        return f"m/{file}"

    def has(self, file: str) -> bool:
        return file in self._files

    def json_object(self, file: str, max_bytes: int = 0) -> dict[str, object]:
        return self._files[file]


FORMS = {
    name: case
    for kind in ("families", "encoders")
    for name, case in json.loads((GOLDEN / kind / "cases.json").read_text())["forms"].items()
}
MODELS: dict[str, Any] = {name: case["config"] for name, case in FORMS.items()} | {"qwen3": tiny_qwen3_config()}
FIELDS = sorted({field for config in MODELS.values() for field in config} | {"layer_types", "partial_rotary_factor"})
NESTED = {  # a model with images, and its text model
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4-unified",
    "Glm4vForConditionalGeneration": "glm4",
    "Glm4vMoeForConditionalGeneration": "glm4-moe",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "ministral3",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen3-5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3-5-moe",
    "Qwen3VLMoeForConditionalGeneration": "qwen3-moe",
    "SmolVLMForConditionalGeneration": "llama",
}
MODELS["roberta"] = MODELS["xlm-roberta"] | {"architectures": ["RobertaModel"]}
MODELS["phimoe-published"] = MODELS["phimoe"] | {"architectures": ["PhiMoEForCausalLM"]}
MODELS |= {name: {"architectures": [name], "text_config": MODELS[text]} for name, text in NESTED.items()}
for name in ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"):  # a kind of its own
    MODELS[name]["text_config"] = MODELS[name]["text_config"] | {"model_type": None}
ROPE = {
    "factor": 2.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
ROPE_KINDS = ("default", "linear", "divided", "proportional", "dynamic", "longrope", "su", "yarn", "llama3")
ropes = st.builds(
    lambda kind, field, value: {"rope_type": kind, **ROPE, field: value},
    st.sampled_from(ROPE_KINDS),
    st.sampled_from([*ROPE, "rope_theta", "beta_fast", "beta_slow", "mscale", "attention_factor", "type", "truncate"]),
    st.one_of(values, st.just(1.5)),
)


def family_of(config: dict[str, Any]) -> str:
    """Return the name of a model's family: that of its architecture, unless transformers saves it as another one."""
    name: str = config["architectures"][0]
    return SAVED_AS.get((name, str(config.get("model_type"))), name)


def test_every_family_is_among_the_models_here() -> None:
    assert {family_of(config) for config in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=2),
    rope=st.one_of(st.none(), ropes),
    generation=st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "do_sample", "eos_token_id"]), values),
    max_length=st.one_of(st.none(), st.integers(1, 1 << 31)),
)
def test_whatever_its_settings_say_a_model_is_described_or_refused_in_one_line(
    model: str, changes: dict[str, object], rope: object, generation: dict[str, object], max_length: int | None
) -> None:
    changes = ({} if rope is None else {"rope_scaling": rope, "rope_parameters": None}) | changes
    config = MODELS[model]
    config = config | ({"text_config": config["text_config"] | changes} if model in NESTED else changes)
    source: Any = Settings(config=config, generation_config=generation)
    try:
        spec = read_model(source, max_length).spec
    except (CheckpointError, ModelError) as error:
        assert "\n" not in str(error)
        assert str(error).startswith("m/")
        return
    assert spec.context_length >= 1
    for layer in spec.layers:
        assert layer.window is None or layer.window >= 1
        if layer.rope is not None:
            assert all(map(math.isfinite, (*layer.rope.inverse_frequencies, layer.rope.scale)))
            grows_only = layer.rope.rotary_dim == 0 and layer.rope.query_growth > 0
            assert grows_only or 2 <= layer.rope.rotary_dim <= spec.attention_of(layer).head_dim
            assert len(layer.rope.inverse_frequencies) == layer.rope.rotary_dim // 2
        assert spec.attention.num_heads % spec.attention_of(layer).num_kv_heads == 0


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama", {"num_key_value_heads": 3}),
        ("qwen3-moe", {"num_attention_heads": 1, "head_dim": 16}),
        ("qwen3-moe", {"num_experts_per_tok": 7}),
        ("qwen3-moe", {"num_local_experts": 1 << 16}),
    ],
)
def test_settings_that_contradict_each_other_are_named_with_their_file(model: str, changes: dict[str, object]) -> None:
    source: Any = Settings(config=MODELS[model] | changes)
    with pytest.raises(CheckpointError, match=r"^m/config\.json: num_"):
        read_model(source)


@pytest.mark.parametrize("model", MODELS)
def test_the_models_here_are_described(model: str) -> None:
    source: Any = Settings(config=MODELS[model])
    assert read_model(source).architecture == family_of(MODELS[model])
