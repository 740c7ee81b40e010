"""ModelShape: the sizes of a model, and the weights that its steps read and multiply, as a plain value.

    head     the output matrix, used for the last token of a prompt and for every decode
    layers   all other weights except experts: matrices, lookup tables, norms and biases
    expert   one expert of each sparse layer, together; a token takes `experts_per_token` of `num_experts`

Weights are counted by how narrowing treats them, so that one value gives the exact bytes for every dtype. The counts
come from the spec of the model, in a module that can import it (`quire.cli.model_shapes`): the simulator knows no model
families.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from quire.core.kv_spec import DTYPE_BYTES, RECURRENT, SHARED, KVCacheSpec, KVHeads
from quire.core.setting_checks import require_int, require_one_of

MODELS_FOLDER = Path(__file__).parent / "models"
SCALE_BYTES = 4
GROUP_BYTES = MappingProxyType({"int8_groups": 34, "int4": 20})
"""Bytes of 32 weights as codes, with their scales."""
CODES = ("int8", *GROUP_BYTES)
FLOAT_BYTES = 4


def known_models() -> tuple[str, ...]:
    """Return the names of the models whose settings are kept here, sorted."""
    return tuple(sorted(path.stem for path in MODELS_FOLDER.glob("*.json")))


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Counts of weights, by how they are stored.

    `matrices`: in the dtype of the weights, or int8 with a scale for each of their `rows`, or codes in `groups` of 32;
    the `head_groups` have at least 8 bits; `plain` matrices always have the dtype; `tables`: in the dtype, looked up
    and never multiplied; `floats`: always in float32 (norms, biases, routers). With weights "auto", `kept` of the
    matrices and `kept_in_tables` of the tables keep the format of their file, and take `kept_bytes` and
    `kept_table_bytes`. `compact` of the matrices take `compact_bytes` unless they become codes.

    >>> count = WeightCount(matrices=640, rows=10, tables=50, floats=5, groups=20, kept=320, kept_bytes=180)
    >>> [count.num_bytes("bfloat16", weights) for weights in ("auto", "widened", "int8", "int8_groups")]
    [940, 1400, 800, 800]
    """

    matrices: int = 0
    rows: int = 0
    tables: int = 0
    floats: int = 0
    groups: int = 0
    head_groups: int = 0
    kept: int = 0
    kept_bytes: int = 0
    kept_in_tables: int = 0
    kept_table_bytes: int = 0
    plain: int = 0
    compact: int = 0
    compact_bytes: int = 0

    def __add__(self, other: WeightCount) -> WeightCount:
        return WeightCount(*(getattr(self, name) + getattr(other, name) for name in WeightCount.__slots__))

    @property
    def numbers(self) -> int:
        """The number of weights, without scales."""
        return self.multiplied + self.tables + self.floats

    @property
    def multiplied(self) -> int:
        """The number of weights by which each token is multiplied."""
        return self.matrices + self.plain

    def num_bytes(self, dtype: str, weights: str = "auto") -> int:
        """Return the bytes of the weights in memory."""
        tables = self.tables * DTYPE_BYTES[dtype]
        if weights == "auto":
            tables += self.kept_table_bytes - self.kept_in_tables * DTYPE_BYTES[dtype]
        return tables + self.read_bytes(dtype, weights)

    def read_bytes(self, dtype: str, weights: str = "auto") -> int:
        """Return the bytes that a step reads: everything except the tables, of which it reads a few rows."""
        if weights in GROUP_BYTES:
            matrices = self.groups * GROUP_BYTES[weights] + self.head_groups * GROUP_BYTES["int8_groups"]
        elif weights == "int8":
            matrices = self.matrices + self.rows * SCALE_BYTES
        else:
            matrices = (self.matrices - self.compact) * DTYPE_BYTES[dtype] + self.compact_bytes
        if weights == "auto":
            matrices += self.kept_bytes - self.kept * DTYPE_BYTES[dtype]
        return matrices + self.plain * DTYPE_BYTES[dtype] + self.floats * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike in attention: their window, how many there are, and their costs in layers as usual.

    `bytes_share`: the size of the key of a token, `pair_share`: the numbers of a head, both divided by the usual one.
    `readers`: nobody reads their keys, so of a chunk they compute the last token only.
    """

    window: int | None
    count: int
    bytes_share: float = 1.0
    pair_share: float = 1.0
    readers: bool = False

    def read(self, start: int, count: int) -> float:
        """Return how many tokens' keys and values these layers read for the tokens from `start`; see `num_read`."""
        return self.count * self.bytes_share * num_read(*self._computed(start, count), self.window)

    def pairs(self, start: int, count: int) -> float:
        """Return the number of pairs of these layers for the tokens from `start`; see `num_pairs`."""
        return self.count * self.pair_share * num_pairs(*self._computed(start, count), self.window)

    def _computed(self, start: int, count: int) -> tuple[int, int]:
        return (start + count - 1, 1) if self.readers else (start, count)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model. `windows[i]` is that of layer i, None for full attention, RECURRENT or SHARED.

    `dtype` is the checkpoint's. `kv_head_dim` is the number of stored values per head: an engine can round `head_dim`
    up. `latent_dim`: if not 0, this many of them are also the value. `intermediate_size`: the outputs of gate for a
    token in a layer. `recurrent_bytes`: half a state of a recurrent layer; `recurrent_operations`: of such a layer for
    each token. `heads`: of the layers whose key-value heads differ from the others'; `shared`: the layers that attend
    to the keys and values of others; `readers`: the weights of the last `num_readers` layers, which all do.

    >>> shape = ModelShape("m", "bfloat16", hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=10,
    ...     context_length=64, windows=(None, 16), layers=WeightCount(matrices=600, rows=60), head=WeightCount(80, 10))
    >>> shape.weight_bytes("bfloat16"), shape.kv_bytes_per_token("bfloat16"), shape.operations_per_token
    (1360, 32, 1200)
    """

    name: str
    dtype: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    windows: tuple[int | None, ...]
    layers: WeightCount
    head: WeightCount
    kv_head_dim: int = 0
    expert: WeightCount = WeightCount()
    num_experts: int = 0
    experts_per_token: int = 0
    latent_dim: int = 0
    intermediate_size: int = 0
    recurrent_bytes: int = 0
    recurrent_operations: int = 0
    heads: Mapping[int, KVHeads] = field(default_factory=dict)
    shared: frozenset[int] = frozenset()
    readers: WeightCount = WeightCount()
    num_readers: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_length"):
            require_int(name, getattr(self, name), 1, 1 << 31)
        require_one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        require_int("number of layers", len(self.windows), 1, 1 << 16)
        require_int("experts_per_token", self.experts_per_token, min(self.num_experts, 1), self.num_experts)
        object.__setattr__(self, "kv_head_dim", self.kv_head_dim or self.head_dim)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.windows)

    @property
    def num_parameters(self) -> int:
        """The number of weights."""
        return self.layers.numbers + self.head.numbers + self.num_experts * self.expert.numbers

    @property
    def is_packed(self) -> bool:
        """Whether most multiplied weights keep the format of their file, with weights "auto"."""
        parts = ((self.layers, 1), (self.expert, self.num_experts))
        return 2 * sum(count.kept * n for count, n in parts) > sum(count.matrices * n for count, n in parts)

    @property
    def operations_per_token(self) -> int:
        """Additions and multiplications of the products for each token, without the head."""
        layers = self.layers.multiplied - self.readers.multiplied
        return 2 * (layers + self.experts_per_token * self.expert.multiplied)

    @property
    def operations_per_logits(self) -> int:
        """Additions and multiplications of the head, for each token whose successor is sampled, and of the readers."""
        return 2 * (self.head.matrices + self.readers.multiplied)

    @property
    def operations_per_pair(self) -> int:
        """Additions and multiplications of one layer for each pair of a token and one that it attends to.

        For a layer with the usual heads.
        """
        return 2 * self.num_heads * (self.head_dim + (self.latent_dim or self.head_dim))

    def without_readers(self) -> ModelShape:
        """Return the shape for an engine that computes every row in every layer."""
        return replace(self, readers=WeightCount(), num_readers=0)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers."""
        usual = KVHeads(self.num_kv_heads, self.head_dim)
        first_reader = self.num_layers - self.num_readers
        counts = Counter(
            (window, self.heads.get(layer, usual), layer >= first_reader)
            for layer, window in enumerate(self.windows)
            if window != SHARED
        )
        return tuple(
            LayerKind(window, count, heads.size / usual.size, heads.head_dim / usual.head_dim, readers)
            for (window, heads, readers), count in counts.items()
        )

    @property
    def num_recurrent(self) -> int:
        """The number of recurrent layers."""
        return self.windows.count(RECURRENT)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence, over all recurrent layers."""
        return self.num_recurrent * 2 * self.recurrent_bytes

    @property
    def state_operations(self) -> int:
        """Additions and multiplications of a token, over all recurrent layers."""
        return self.num_recurrent * self.recurrent_operations

    def weight_bytes(self, dtype: str, weights: str = "auto") -> int:
        """Return the bytes of the weights in memory."""
        stored = self.layers.num_bytes(dtype, weights) + self.head.num_bytes(dtype, weights)
        return stored + self.num_experts * self.expert.num_bytes(dtype, weights)

    def layer_read_bytes(self, dtype: str, weights: str, num_tokens: int) -> float:
        """Return the bytes of weights that a step of this many tokens reads, without the head.

        For experts, it is the expected number that at least one token takes, if all are equally likely.
        """
        taken = 0.0
        if self.num_experts:
            taken = self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)
        return self.layers.read_bytes(dtype, weights) + taken * self.expert.read_bytes(dtype, weights)

    def kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """Return the spec of the KV cache with blocks of this size."""
        return KVCacheSpec.from_mixed_layers(
            [
                (SHARED if layer in self.shared else window, self.heads.get(layer))
                for layer, window in enumerate(self.windows)
            ],
            KVHeads(self.num_kv_heads, self.kv_head_dim),
            block_size=block_size,
            dtype=dtype,
            latent_dim=self.latent_dim,
        ).with_states(self.recurrent_bytes)

    def kv_bytes_per_layer_token(self, dtype: str) -> int:
        """Return the bytes of the key and the value of one token in one layer with the usual heads."""
        return self.kv_cache_spec(1, dtype).bytes_per_layer_token

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of the keys and values of one token."""
        return self.kv_cache_spec(1, dtype).bytes_per_token


def num_pairs(start: int, count: int, window: int | None = None) -> int:
    """Return the number of pairs of a token and one that it attends to, including itself, for the tokens from `start`.

    >>> num_pairs(0, 3), num_pairs(10, 1), num_pairs(0, 5, window=2)
    (6, 11, 9)
    """
    growing = count if window is None else min(count, max(0, window - start))
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * (window or 0)


def num_read(start: int, count: int, window: int | None = None) -> int:
    """Return the number of tokens whose keys and values are read, each once, for the tokens from `start`.

    A recurrent layer reads none.

    >>> num_read(0, 3), num_read(10, 1), num_read(10, 4, window=4)
    (3, 11, 7)
    """
    if window == RECURRENT:
        return 0
    return start + count if window is None else min(start + count, window - 1 + count)
