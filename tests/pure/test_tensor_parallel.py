"""Which models and settings several ranks may compute: refused in one line, before any process is started."""

from __future__ import annotations

from typing import Any

import pytest

from quire.compute.choice import choose_backend
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.parallel.split import Rank, shard_of
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.guide import GUIDE_FOLDER
from support.spec_models import SPECS


def guide() -> ModelDescription:
    return read_model(ModelFolder(GUIDE_FOLDER))


def test_a_shard_has_its_heads_and_outputs_and_the_whole_hidden_state() -> None:
    spec, whole = shard_of(guide().spec, 2), guide().spec
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.mlp.intermediate_size) == (3, 1, 256)
    assert (spec.hidden_size, spec.vocab_size, spec.layers) == (whole.hidden_size, whole.vocab_size, whole.layers)
    shares = [Rank(number, 4).share_of(12) for number in range(4)]
    assert [index for share in shares for index in range(12)[share]] == list(range(12))


@pytest.mark.parametrize(
    ("name", "num_ranks", "words"),
    [
        ("plain", 64, "a number that divides the model's 4 query heads"),
        ("partial", 2, "a number that divides the model's 1 key-value heads"),
        ("experts", 2, "1: models with experts are not split yet"),
        ("whole-norms", 2, "1: norms of more than a head of queries are not split yet"),
    ],
)
def test_models_that_cannot_be_split_are_refused(name: str, num_ranks: int, words: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        shard_of(SPECS[name], num_ranks)
    assert str(caught.value) == f"tensor_parallel is {num_ranks}; allowed: {words}"


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
