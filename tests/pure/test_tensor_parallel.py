"""Which models and settings several ranks may compute: refused in one line, before any process is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.compute.choice import backend_on, choose_backend
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.parallel.split import Rank, bytes_of_rank, shard_of, stored_by_all
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVHeads
from quire.guide import GUIDE_FOLDER
from support.spec_models import FULL, SPECS


def guide() -> ModelDescription:
    return read_model(ModelFolder(GUIDE_FOLDER))


def test_a_shard_has_its_heads_and_outputs_and_the_whole_hidden_state() -> None:
    spec, whole = shard_of(guide().spec, 2), guide().spec
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.mlp.intermediate_size) == (3, 1, 256)
    assert (spec.hidden_size, spec.vocab_size, spec.layers) == (whole.hidden_size, whole.vocab_size, whole.layers)
    shares = [Rank(number, 4).share_of(12) for number in range(4)]
    assert [index for share in shares for index in range(12)[share]] == list(range(12))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_ranks"), [(8, 2, 4), (6, 1, 3), (8, 8, 4), (12, 3, 6)])
def test_the_queries_of_a_rank_read_the_keys_that_it_has(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    num_shares = min(num_ranks, num_kv_heads)
    for number in range(num_ranks):
        rank = Rank(number, num_ranks)
        queries = range(num_heads)[rank.share_of(num_heads)]
        keys = range(num_kv_heads)[rank.among(num_shares).share_of(num_kv_heads)]
        per_key = len(queries) // len(keys)
        read = [query // (num_heads // num_kv_heads) for query in queries]
        assert read == [keys[place // per_key] for place in range(len(queries))]


def test_a_shard_of_experts_has_a_part_of_each_expert() -> None:
    spec, whole = shard_of(SPECS["experts"], 2), SPECS["experts"]
    assert spec.experts is not None and whole.experts is not None
    assert spec.experts == replace(whole.experts, intermediate_size=whole.experts.intermediate_size // 2)
    shared, of_rank = SPECS["shared-expert"].experts, shard_of(SPECS["shared-expert"], 2).experts
    assert shared is not None and of_rank is not None
    assert of_rank == replace(shared, intermediate_size=8, shared_size=16)


def test_each_layer_of_a_shard_has_its_own_heads_and_mlp() -> None:
    whole = SPECS["mixed-layers"]
    for num_ranks, heads, stored in ((2, [2, 1, 1], [4, 2]), (4, [1, 1, 1], [4, 4])):
        spec = shard_of(whole, num_ranks)
        wide = {layer.heads.num_kv_heads for layer in spec.layers if layer.heads and layer.heads.head_dim == 32}
        own = [spec.attention_of(layer).num_kv_heads for layer in (spec.layers[1], spec.layers[0])]
        assert [*own, *wide] == heads
        assert [layer.intermediate_size for layer in spec.layers] == [None, None, None, 80 // num_ranks, None, None]
        every = stored_by_all(whole, num_ranks)
        assert [every.attention_of(layer).num_kv_heads for layer in (every.layers[1], every.layers[2])] == stored


def test_the_embedding_of_all_layers_is_on_every_rank() -> None:
    whole, stored = SPECS["mixed-layers"], ("float32", "auto", {})
    of_rank = bytes_of_rank(whole, 2, stored)
    num_bytes = 4 * whole.vocab_size * 6 * 16
    assert of_rank - bytes_of_rank(replace(whole, layer_inputs=None), 2, stored) > num_bytes


@pytest.mark.parametrize(
    ("name", "num_ranks", "words"),
    [
        ("plain", 64, "a number that divides the model's 4 query heads"),
        ("three-keys", 4, "a number that divides the model's 3 key-value heads, or a multiple of this number"),
        ("odd-expert", 2, "a number that divides the model's 25 intermediate numbers of an expert"),
        ("odd-shared", 2, "a number that divides the model's 25 intermediate numbers of the MLP next to experts"),
        ("latent", 2, "1: latents (MLA) cannot be split"),
        ("whole-norms", 2, "1: a norm of all heads together cannot be split"),
        ("three-wide-keys", 4, "a number that divides the model's 3 key-value heads, or a multiple of this number"),
        ("odd-layer", 2, "a number that divides the model's 25 intermediate numbers of an MLP"),
    ],
)
def test_models_that_cannot_be_split_are_refused(name: str, num_ranks: int, words: str) -> None:
    plain, experts = SPECS["plain"], SPECS["experts"]
    assert experts.experts is not None
    odd = {
        "three-keys": replace(plain, attention=replace(plain.attention, num_heads=12, num_kv_heads=3)),
        "three-wide-keys": replace(
            plain,
            attention=replace(plain.attention, num_heads=12, num_kv_heads=4),
            layers=(FULL, replace(FULL, heads=KVHeads(3, 32))),
        ),
        "odd-layer": replace(plain, layers=(FULL, replace(FULL, intermediate_size=25))),
        "odd-shared": replace(experts, experts=replace(experts.experts, shared_size=25)),
        "odd-expert": replace(experts, experts=replace(experts.experts, intermediate_size=25)),
    }
    with pytest.raises(InvalidConfigError) as caught:
        shard_of(({**SPECS, **odd})[name], num_ranks)
    assert str(caught.value) == f"tensor_parallel is {num_ranks}; allowed: {words}"


def test_sums_over_ranks_are_refused_where_bits_must_not_depend_on_the_batch() -> None:
    settings = {"backend": "torch", "device": "cuda", "tensor_parallel": 2, "tensor_parallel_sums": "reduce"}
    backend_on("cuda", EngineConfig(**settings).resolved(), guide())
    with pytest.raises(InvalidConfigError) as caught:
        backend_on("cuda", EngineConfig(**settings, batch_invariant=True).resolved(), guide())
    allowed = "gather with batch_invariant: sums over ranks depend on the whole step"
    assert str(caught.value) == f"tensor_parallel_sums is 'reduce'; allowed: {allowed}"


@pytest.mark.parametrize("backend", ["native", "reference", "auto"])
def test_only_torch_has_ranks(backend: str) -> None:
    config = EngineConfig(model="guide", backend=backend, device="cpu", tensor_parallel=2)
    with pytest.raises(InvalidConfigError) as caught:
        choose_backend(config, guide())
    allowed = f"1 with backend {backend}: only torch computes with several ranks"
    assert str(caught.value) == f"tensor_parallel is 2; allowed: {allowed}"


@pytest.mark.parametrize("value", [0, -1, 65, True, 1.5, "2"])
def test_the_number_of_ranks_is_checked(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="tensor_parallel is"):
        EngineConfig(model="guide", tensor_parallel=value)


ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/design/tensor-parallel.md").read_text().splitlines()
    if line.startswith("| `")
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_table_says_what_ranks_do_with_other_features(row: list[str]) -> None:
    settings = eval(f"dict({row[0].strip('`')})")
    config = EngineConfig(**{"backend": "torch", "device": "cuda", "tensor_parallel": 2} | settings)
    if row[1].startswith("works"):
        backend_on("cuda", config.resolved(), guide())
        tests = (ROOT / "tests/gpu/test_tensor_parallel.py").read_text()
        assert f"def {row[2].strip('`')}(" in tests
    else:
        with pytest.raises(InvalidConfigError) as caught:
            backend_on(config.device, config.resolved(), guide())
        assert row[1] == f"refused: `{caught.value.allowed}`"


def test_the_table_is_read() -> None:
    assert len(ROWS) > 10
