"""What a model weighs, reads and multiplies, against the compute plane's own count and against loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.model_shapes import find_settings, find_shape, shape_of
from quire.compute.models import read_model
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.errors import CheckpointError, InvalidConfigError
from quire.simulate.hardware import Hardware, find_hardware, known_hardware, parse_hardware
from quire.simulate.model_shape import ModelShape, WeightCount, known_models, num_pairs, num_read
from quire.simulate.roofline import Numbers, Roofline
from support.spec_models import SPECS

NUMBERS = [(dtype, weights) for dtype in ("float32", "bfloat16") for weights in ("auto", "int8", "int8_groups", "int4")]
CARD = Hardware("card", 1 << 30, 1e9, {"float32": 1e12})


@pytest.mark.parametrize("name", [*known_models(), "guide"])
@pytest.mark.parametrize(("dtype", "weights"), NUMBERS)
def test_known_models_weigh_what_the_compute_plane_says(name: str, dtype: str, weights: str) -> None:
    spec = read_model(find_settings(name)).spec
    shape = find_shape(name)
    assert shape.weight_bytes(dtype, weights) == weight_bytes(spec, dtype, weights)
    assert shape.kv_cache_spec(16, dtype) == spec.kv_cache_spec(16, dtype)
    assert shape.kv_bytes_per_token(dtype) == spec.kv_cache_spec(16, dtype).bytes_per_token


def test_published_numbers_of_parameters() -> None:
    assert {name: find_shape(name).num_parameters for name in known_models()} == {
        "deepseek-v2-lite": 15_706_484_224,
        "gemma-3n-e2b": 4_435_182_688,
        "gemma-3n-e4b": 6_835_235_568,
        "gemma-4-e2b": 4_628_569_379,  # with a scale for each layer, which transformers does not count
        "gemma-4-e4b": 7_463_013_418,
        "llama-3.1-8b": 8_030_261_248,
        "opt-13b": 12_853_473_280,
        "opt-175b": 174_604_468_224,
        "qwen3-0.6b": 596_049_920,
    }


@given(start=st.integers(0, 40), count=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_and_reads_are_those_of_a_loop(start: int, count: int, window: int | None) -> None:
    seen = [set(range(0 if window is None else max(0, p - window + 1), p + 1)) for p in range(start, start + count)]
    assert num_pairs(start, count, window) == sum(map(len, seen))
    assert num_read(start, count, window) == len(set.union(*seen))


def test_a_step_takes_the_greater_time_of_each_part() -> None:
    shape = ModelShape(
        "m",
        "float32",
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=10,
        context_length=64,
        windows=(None, 2),
        layers=WeightCount(matrices=250_000, rows=10),
        head=WeightCount(matrices=500_000, rows=10),
    )
    roofline = Roofline(CARD, shape, Numbers("float32"))
    assert roofline.products_s(1, 0) == 1e6 / 1e9  # reads
    assert roofline.products_s(1, 1) == 1e6 / 1e9 + 2e6 / 1e9
    assert roofline.products_s(10_000, 0) == 10_000 * 500_000 / 1e12  # multiplies
    assert roofline.attention_s([9], [1]) == pytest.approx((10 + 2) * 32 / 1e9)
    assert roofline.step_s([9], [1], 1) == roofline.products_s(1, 1) + roofline.attention_s([9], [1])
    assert roofline.decode_s(3, 10) == roofline.step_s([9, 9, 9], [1, 1, 1], 3)
    narrow = Roofline(CARD, shape, Numbers("float32", weights="int8", kv_dtype="int8"))
    assert narrow.products_s(1, 0) == (250_000 + 40) / 1e9
    assert narrow.attention_s([9], [1]) == pytest.approx((10 + 2) * 16 / 1e9)  # a scale of four for each four


def test_a_step_reads_the_experts_that_its_tokens_take() -> None:
    shape = ModelShape(
        "m", "float32", 8, 2, 1, 4, 10, 64, (None,), WeightCount(), WeightCount(), 0, WeightCount(matrices=100), 8, 2
    )
    assert shape.layer_read_bytes("float32", "auto", 1) == pytest.approx(2 * 400)
    assert 7.9 * 400 < shape.layer_read_bytes("float32", "auto", 20) < 8 * 400 == shape.weight_bytes("float32")
    assert shape.operations_per_token == 2 * 2 * 100


@pytest.mark.parametrize("name", known_hardware())
def test_known_machines_are_read_and_say_where_their_figures_come_from(name: str) -> None:
    machine = find_hardware(name)
    assert machine.name == name
    assert len(machine.notes) > 80
    assert machine.rate("fp8") >= machine.rate("bfloat16") >= machine.rate("float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": "lots"}, "memory_bytes is 'lots'"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"read_bandwidth": "fast"}, "read_bandwidth is 'fast'; allowed: a finite number"),
        ({"read_bandwidth": None}, "read_bandwidth is None"),
        ({"matrix_rate": {"bfloat16": 1e12}}, "with float32"),
        ({"matrix_rate": {"float32": 1e12, "int3": 1e12}}, "matrix_rate is 'int3'"),
        ({"matrix_rate": {"float32": "nan"}}, "matrix_rate of float32 is 'nan'"),
        ({"step_overhead_s": -1}, "step_overhead_s is -1"),
        ({"memory": 1}, "field is 'memory'; allowed: one of name, memory_bytes"),
        ({"notes": 3}, "notes is 3; allowed: a text"),
    ],
)
def test_a_wrong_description_is_refused_by_its_field(change: dict[str, object], message: str) -> None:
    good = {"name": "m", "memory_bytes": "1GiB", "read_bandwidth": "1e9", "matrix_rate": {"float32": "1e12"}}
    assert parse_hardware(good).read_bandwidth == 1e9
    with pytest.raises(InvalidConfigError) as caught:
        parse_hardware(good | change)
    assert message in str(caught.value)


def test_files_of_machines(tmp_path) -> None:
    path = tmp_path / "box.json"
    path.write_text('{"memory_bytes": 1024, "read_bandwidth": 1e9, "matrix_rate": {"float32": 1e12}}')
    assert find_hardware(str(path)) == Hardware("box", 1024, 1e9, {"float32": 1e12})
    path.write_text('{"memory_bytes": 1024, "read_bandwidth": 1e9}')
    with pytest.raises(InvalidConfigError, match=r"box\.json: matrix_rate is None"):
        find_hardware(str(path))
    for content in (b"[", b"[" * 5000, b"\xff", b"when: 2026-13-01"):
        path.write_bytes(content)
        with pytest.raises(InvalidConfigError, match=r"a file of YAML or JSON in UTF-8$"):
            find_hardware(str(path))
    path.write_text("3")
    with pytest.raises(InvalidConfigError, match="fields of a machine"):
        find_hardware(str(path))
    with pytest.raises(InvalidConfigError, match="a file, or one of amd-epyc-9654"):
        find_hardware("h9000")


def test_a_model_may_be_a_name_a_folder_or_its_settings(tmp_path) -> None:
    kept = find_settings("Qwen3-0.6B")
    (tmp_path / "config.json").write_text(kept.text("config.json"))
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert find_shape(name).weight_bytes("bfloat16") == find_shape("qwen3-0.6b").weight_bytes("bfloat16")
    with pytest.raises(CheckpointError, match="No folder named"):
        find_settings("no such model")


@pytest.mark.parametrize("name", SPECS)
def test_every_family_weighs_what_the_compute_plane_says(name: str) -> None:
    model = replace(read_model(find_settings("guide")), spec=SPECS[name])
    shape = shape_of(name, model)
    for dtype, weights in NUMBERS:
        assert shape.weight_bytes(dtype, weights) == weight_bytes(SPECS[name], dtype, weights)


def test_each_multiplication_goes_with_an_addition() -> None:
    layers, head, expert = WeightCount(600, 60), WeightCount(80, 10), WeightCount(50, 5)
    shape = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None, 16), layers, head, 0, expert, 6, 2)
    assert shape.operations_per_token == 2 * (600 + 2 * 50)
    assert shape.operations_per_logits == 2 * 80
    assert shape.operations_per_pair == 2 * 2 * (2 * 4), "a score, and a part of the sum, for each number of each head"
    assert shape.num_parameters == 600 + 80 + 6 * 50
    assert shape.weight_bytes("float32") == 4 * (600 + 80 + 6 * 50)
    assert shape.weight_bytes("bfloat16", "int8") == 600 + 4 * 60 + 80 + 4 * 10 + 6 * (50 + 4 * 5)
    assert (shape.num_layers, shape.kv_head_dim) == (2, 4)
    assert shape.kv_bytes_per_token("bfloat16") == 2 * shape.kv_bytes_per_layer_token("bfloat16") == 2 * 2 * 4 * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 50])
def test_of_experts_those_are_read_that_some_token_is_expected_to_take(num_tokens: int) -> None:
    expert = WeightCount(50, 5)
    shape = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None,), WeightCount(600), WeightCount(80), 0, expert, 4, 1)
    missed = 0.75**num_tokens  # by each token with three of four
    assert shape.layer_read_bytes("float32", "auto", num_tokens) == pytest.approx(4 * (600 + 4 * (1 - missed) * 50))


def test_weights_add_up_part_by_part() -> None:
    found = WeightCount(1, 20, 300, 4000) + WeightCount(5, 60, 700, 8000)
    assert found == WeightCount(6, 80, 1000, 12000)
    assert found.numbers == 6 + 1000 + 12000
    assert found.read_bytes("bfloat16") == 2 * 6 + 4 * 12000
    assert found.read_bytes("bfloat16", "int8") == 6 + 4 * 80 + 4 * 12000
    assert found.num_bytes("bfloat16", "int8") == found.read_bytes("bfloat16", "int8") + 2 * 1000


def test_matrices_that_stay_in_blocks_are_read_as_blocks_and_multiplied_as_int8() -> None:
    layers, head = WeightCount(matrices=640, kept=480, kept_bytes=270, tables=64, kept_in_tables=64), WeightCount(80)
    shape = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None,), layers, head)
    assert shape.layers.read_bytes("bfloat16", "auto") == 2 * 160 + 270
    assert shape.layers.num_bytes("bfloat16", "auto") == 2 * 160 + 270 == shape.layers.read_bytes("bfloat16")
    assert shape.layers.num_bytes("bfloat16", "widened") == 2 * (640 + 64)
    card = Hardware("card", 1 << 30, 1e9, {"float32": 1e3, "bfloat16": 2e3, "int8": 4e3})
    for chosen, rate in (("auto", 4e3), ("widened", 2e3)):
        roofline = Roofline(card, shape, Numbers("bfloat16", chosen))
        assert roofline.products_s(1, 0) == shape.operations_per_token / rate
    dense = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None,), WeightCount(matrices=640, kept=320), head)
    sparse = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None,), layers, head, 0, WeightCount(500), 8, 2)
    assert [found.is_packed for found in (shape, dense, sparse)] == [True, False, False]


@pytest.mark.parametrize(("field", "value"), [("dtype", "float64"), ("weights", "int3"), ("kv_dtype", "int3")])
def test_numbers_are_those_that_an_engine_computes_with(field: str, value: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"^{field} is '{value}'; allowed: one of "):
        Numbers(**{field: value})
    assert Numbers("float32", "auto", "auto").stored_kv_dtype == Numbers("float32").multiplied == "float32"
    assert (Numbers("float32", "int8", "fp8").stored_kv_dtype, Numbers("float32", "int8").multiplied) == ("fp8", "int8")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 4))
def test_a_machine_that_multiplies_slowly_is_bound_by_its_products(rows: list[tuple[int, int]], logits: int) -> None:
    """On such a machine each part takes its operations over the rate; reading costs next to nothing."""
    card = Hardware("slow", 1 << 30, 1e15, {"float32": 1e6})
    shape = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None, 3, 3), WeightCount(600, 60), WeightCount(80, 10))
    roofline = Roofline(card, shape, Numbers("float32"))
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    pairs = sum(
        len(range(0 if window is None else max(0, position - window + 1), position + 1))
        for window in shape.windows
        for start, count in rows
        for position in range(start, start + count)
    )
    products_s = (sum(counts) * 2 * 600 + logits * 2 * 80) / 1e6
    assert roofline.products_s(sum(counts), logits) == pytest.approx(products_s)
    assert roofline.attention_s(starts, counts) == pytest.approx(pairs * 4 * 2 * 4 / 1e6)
    assert roofline.step_s(starts, counts, logits) == pytest.approx(products_s + pairs * 32 / 1e6)
