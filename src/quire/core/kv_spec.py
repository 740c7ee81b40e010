"""The content of one block of KV memory: from a model's layers to bytes per block.

A model may mix layers with full attention and layers with a sliding window (4 and 22 layers in Gemma 3 1B). A window
layer can free its old blocks and a full layer cannot, so they need separate block tables. The layers are split
into **groups of equal size**, each with one kind of attention and its own block table. Because all groups have the same
number of layers, a block has the same number of bytes in any group, and **one** pool serves all groups: no memory is
reserved for a kind of layer that does not need it.

    26 layers: F = full, w = window                 3 of the 7 groups, 4 layers each
    w w w w w F w w w w w F …   ──────►   group 0: F F F F    group 1: w w w w    group 2: w w w w …

A **recurrent** layer (linear attention) has one state per sequence instead of a key and a value per token: the last
state is all that it reads. Its group has block tables too: a block holds the state after the tokens that its positions
cover, and the next token reads the block of the token before it, like a layer whose window is 2. So a state is shared,
copied, moved and evicted as keys and values are.

Layers can also differ in their **heads**. Those with the most numbers per token fill a *place* of a block; of a group
with half as many, a place holds two layers:

    keys in a block   group 0, full: 1 head of 512     group 1, window: 1 head of 256
    place 0           layer 4                          layer 0, layer 1
    place 1           layer 9                          layer 2, layer 3

A layer can read the keys and values of an earlier one instead of storing its own (`SHARED`); then it takes no memory.

With latent attention a token has one vector per layer for all heads. This vector is the key and contains the value, so
a block has no second half for values (`latent_dim`).

If the counts do not divide, the last group of a kind is padded; `padding_fraction` is the wasted share, and
`from_layers` keeps it at 10 % or less if it can.

A block may also hold the layers of a **draft model**, which guesses tokens for the model: its keys and values are in
the same blocks, at the same slots. So prefix hits, copies, forks, swaps and evictions concern both models at once. The
same is true of a layer with which a model guesses its own tokens. Either uses the block tables of the first group,
whose layers have full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.core.setting_checks import require_int

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
INT4_GROUP: Final = 32
"""How many numbers of a 4-bit key share a scale and a minimum."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How the numbers of a head of a key or a value are stored.

    The scales of a head take 4 bytes, or 4 for each `group` of its numbers.

    >>> HeadForm(16).num_bytes(64), HeadForm(8, scaled=True).num_bytes(64), HeadForm(4, True, 32).num_bytes(80)
    (128, 68, 52)
    """

    bits: int
    scaled: bool = False
    group: int | None = None

    def num_bytes(self, head_dim: int) -> int:
        """Return the bytes of a head, with its scales."""
        num_scales = -(-head_dim // (self.group or head_dim)) if self.scaled else 0
        return -(-head_dim * self.bits // 8) + 4 * num_scales


_INT4_VALUES = HeadForm(4, scaled=True)
_PLAIN = {name: HeadForm(8 * size, scaled=size == 1) for name, size in DTYPE_BYTES.items()}
KV_FORMS: Final[Mapping[str, tuple[HeadForm, HeadForm]]] = MappingProxyType(
    {name: (form, form) for name, form in _PLAIN.items()}
    | {"k8v4": (_PLAIN["int8"], _INT4_VALUES), "int4": (HeadForm(4, True, INT4_GROUP), _INT4_VALUES)}
)
"""The forms of keys and of values, by the name of their dtype."""
INT4_VALUES: Final = frozenset({"k8v4", "int4"})
"""The dtypes with values of 4 bits."""
USUAL_BLOCK_SIZE: Final = 16
MAX_BLOCK_SIZE: Final = 4096
MAX_PADDING_FRACTION = 0.10
RECURRENT: Final = 0
"""The window of a recurrent layer for `from_layers`: it reads no keys."""
SHARED: Final = -1
"""The window of a layer for `from_mixed_layers` that stores nothing: it reads the keys of another layer, or none."""
RECURRENT_WINDOW: Final = 2
"""A token of a recurrent layer reads the state of the token before it, and writes its own."""


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The key-value heads of a layer: how many, and the numbers of each."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_int("num_kv_heads", self.num_kv_heads, 1, 1 << 16)
        require_int("head_dim", self.head_dim, 1, 1 << 16)

    @property
    def size(self) -> int:
        """The numbers of the key of a token, which are as many as those of its value."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table. `window`: how many tokens a query sees, its own included; None: all.

    A query at position p of a window group attends to positions p - window + 1 … p. `recurrent`: the layers have
    states; the window is `RECURRENT_WINDOW`. `heads`: those of the layers, None: those of the spec.
    """

    layers: tuple[int, ...]
    window: int | None = None
    recurrent: bool = False
    heads: KVHeads | None = None

    def first_needed(self, position: int) -> int:
        """Return the first position that a query at `position` still reads.

        >>> KVGroup((0,), window=4).first_needed(10), KVGroup((0,)).first_needed(10)
        (7, 0)
        """
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of the KV cache of one model.

    `latent_dim`: how many first numbers of a key are its value; 0: keys and values are stored separately.
    `recurrent_bytes`: half the state of a recurrent layer. Where a block has keys, or values, it has room for one half.

    >>> spec = KVCacheSpec.from_layers([None] * 28, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    >>> spec.bytes_per_token, spec.bytes_per_block
    (114688, 1835008)
    >>> narrow = KVCacheSpec(16, num_kv_heads=8, head_dim=128, dtype="k8v4", groups=spec.groups)
    >>> narrow.key_head_bytes, narrow.value_head_bytes
    (132, 68)
    >>> spec.with_draft(KVCacheSpec.from_layers([None] * 4, block_size=16, num_kv_heads=2, head_dim=64,
    ...                                         dtype="bfloat16")).bytes_per_token
    116736
    >>> KVCacheSpec(16, 1, head_dim=576, dtype="bfloat16", groups=spec.groups, latent_dim=512).bytes_per_token // 28
    1152
    >>> layers = ([(512, None)] * 4 + [(None, KVHeads(1, 512))]) * 3  # Gemma 4 E2B: 20 more layers store nothing
    >>> mixed = KVCacheSpec.from_mixed_layers(layers, KVHeads(1, 256), block_size=16, dtype="bfloat16")
    >>> [(len(group.layers), mixed.layers_per_place(group)) for group in mixed.groups], mixed.bytes_per_token
    ([(3, 1), (6, 2), (6, 2)], 18432)
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    groups: tuple[KVGroup, ...]
    draft: KVCacheSpec | None = None
    latent_dim: int = 0
    recurrent_bytes: int = 0

    def __post_init__(self) -> None:
        require_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        require_int("num_kv_heads", self.num_kv_heads, 1, 1 << 16)
        require_int("head_dim", self.head_dim, 1, 1 << 16)
        require_int("latent_dim", self.latent_dim, 0, self.head_dim)
        if not isinstance(self.dtype, str) or self.dtype not in KV_FORMS:
            raise InvalidConfigError("dtype", self.dtype, f"one of {', '.join(KV_FORMS)}")
        if not self.groups or not any(group.layers for group in self.groups):
            raise InvalidConfigError("groups", self.groups, "at least one group with at least one layer")
        for group in self.groups:
            if group.window is not None:
                require_int("window", group.window, 1, 1 << 31)
        require_int("recurrent_bytes", self.recurrent_bytes, 0, 1 << 40)
        if self.draft is not None:
            self._check_draft(self.draft)

    def _check_draft(self, draft: KVCacheSpec) -> None:
        if draft.draft is not None or draft.block_size != self.block_size:
            raise InvalidConfigError("draft", draft.block_size, f"one model with blocks of {self.block_size} tokens")
        if len(draft.groups) > 1 or draft.groups[0].window is not None or self.groups[0].window is not None:
            raise InvalidConfigError("draft", draft.groups, "full attention, and a model that has such layers too")

    @classmethod
    def from_layers(
        cls,
        windows: Sequence[int | None],
        *,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        latent_dim: int = 0,
    ) -> KVCacheSpec:
        """Group the layers of a model. `windows[i]` is the window of layer i, None for full attention, or RECURRENT.

        With recurrent layers, `with_states` says how large their states are.
        """
        layers = [(window, None) for window in windows]
        usual = KVHeads(num_kv_heads, head_dim)
        return cls.from_mixed_layers(layers, usual, block_size=block_size, dtype=dtype, latent_dim=latent_dim)

    @classmethod
    def from_mixed_layers(
        cls,
        layers: Sequence[tuple[int | None, KVHeads | None]],
        usual: KVHeads,
        *,
        block_size: int,
        dtype: str,
        latent_dim: int = 0,
    ) -> KVCacheSpec:
        """Group layers with different heads: the window of each, as in `from_layers`, and its heads, None: the usual.

        A layer whose window is SHARED is in no group.
        """
        kinds: dict[tuple[int | None, KVHeads | None], list[int]] = {}
        for index, (window, heads) in enumerate(layers):
            if window != SHARED:
                kinds.setdefault((window, heads), []).append(index)
        if not kinds:
            raise InvalidConfigError("windows", [], "one entry for each layer, at least one")
        sizes = {kind: usual.size if kind[1] is None else kind[1].size for kind in kinds}
        each = {kind: _fit(kind[0], size, max(sizes.values())) for kind, size in sizes.items()}
        num_places = _group_places([(len(alike), each[kind]) for kind, alike in kinds.items()])
        groups = [
            _group(tuple(alike[first : first + num_places * each[kind]]), *kind)
            for kind, alike in sorted(kinds.items(), key=_rank)
            for first in range(0, len(alike), num_places * each[kind])
        ]
        return cls(block_size, usual.num_kv_heads, usual.head_dim, dtype, tuple(groups), latent_dim=latent_dim)

    def with_padded_heads(self, step: int) -> KVCacheSpec:
        """Return the spec with each head padded to a multiple of `step` numbers."""
        groups = [group if group.heads is None else _padded(group, group.heads, step) for group in self.groups]
        return replace(self, head_dim=-(-self.head_dim // step) * step, groups=tuple(groups))

    def with_states(self, half_bytes: int) -> KVCacheSpec:
        """Return the spec of blocks that have room for states of recurrent layers, each in two halves."""
        return replace(self, recurrent_bytes=half_bytes)

    def with_draft(self, draft: KVCacheSpec) -> KVCacheSpec:
        """Return the spec of blocks that hold the layers of a draft model too.

        Raises `InvalidConfigError` if a layer of the draft model has a window, or all of the other model.
        """
        return replace(self, draft=draft)

    def with_block_size(self, block_size: int) -> KVCacheSpec:
        """Return the spec of blocks with this many tokens."""
        draft = None if self.draft is None else self.draft.with_block_size(block_size)
        return replace(self, block_size=block_size, draft=draft)

    @property
    def num_places(self) -> int:
        """The number of layers with the most numbers that a block has room for."""
        return max(map(self.places_of, self.groups))

    def places_of(self, group: KVGroup) -> int:
        """Return the number of places that the layers of a group take."""
        return -(-len(group.layers) // self.layers_per_place(group))

    def layers_per_place(self, group: KVGroup) -> int:
        """Return the number of layers of a group that share a place."""
        window = RECURRENT if group.recurrent else group.window
        return _fit(window, self.heads_of(group).size, max(self.heads_of(each).size for each in self.groups))

    def heads_of(self, group: KVGroup) -> KVHeads:
        """Return the heads of the layers of a group."""
        return group.heads or KVHeads(self.num_kv_heads, self.head_dim)

    def layer_bytes(self, group: KVGroup) -> tuple[int, int]:
        """Return the bytes of the keys, and of the values, of one layer of a group in a block."""
        heads, (of_key, of_value) = self.heads_of(group), KV_FORMS[self.dtype]
        tokens = self.block_size * heads.num_kv_heads
        values = 0 if self.latent_dim else tokens * of_value.num_bytes(heads.head_dim)
        return tokens * of_key.num_bytes(heads.head_dim), values

    def used_bytes(self, group: KVGroup) -> list[int]:
        """Return the bytes that the layers of a group use in each place of a block: of keys, then of values."""
        if group.recurrent:
            return [self.recurrent_bytes] * 2 * len(group.layers)
        count, each = len(group.layers), self.layers_per_place(group)
        return [min(each, count - first) * size for first in range(0, count, each) for size in self.layer_bytes(group)]

    @property
    def key_head_bytes(self) -> int:
        """Bytes of a head of the key of a token, with its scales."""
        return KV_FORMS[self.dtype][0].num_bytes(self.head_dim)

    @property
    def value_head_bytes(self) -> int:
        """Bytes of a head of the value of a token, with its scales; 0 if it is in the key."""
        return 0 if self.latent_dim else KV_FORMS[self.dtype][1].num_bytes(self.head_dim)

    @property
    def bytes_per_layer_token(self) -> int:
        """Bytes of the key and the value of one token in one layer, unless its group has heads of its own."""
        return self.num_kv_heads * (self.key_head_bytes + self.value_head_bytes)

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether a sequence has states, which hold all its tokens."""
        return any(group.recurrent for group in self.groups)

    @property
    def key_block_bytes(self) -> int:
        """Bytes of the keys in one place of a block, or of half a state."""
        return max(self._place_bytes(0), self.recurrent_bytes)

    @property
    def value_block_bytes(self) -> int:
        """Bytes of the values in one place of a block, or of half a state."""
        return max(self._place_bytes(1), self.recurrent_bytes)

    def _place_bytes(self, half: int) -> int:
        return max(self.layers_per_place(group) * self.layer_bytes(group)[half] for group in self.groups)

    @property
    def usual_block_size(self) -> int:
        """The tokens in a block unless the settings name a number: 16, or as many as take the memory of a state.

        >>> layers, heads = [RECURRENT, None], {"num_kv_heads": 2, "head_dim": 256, "dtype": "bfloat16"}
        >>> KVCacheSpec.from_layers(layers, block_size=16, **heads).with_states(530_000).usual_block_size
        528
        """
        token = self.num_kv_heads * max(self.key_head_bytes, self.value_head_bytes)
        size = -(-self.recurrent_bytes // (token * USUAL_BLOCK_SIZE)) * USUAL_BLOCK_SIZE
        return min(max(size, USUAL_BLOCK_SIZE), MAX_BLOCK_SIZE)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, including those of a draft model; the same for every group."""
        own = self.num_places * (self.key_block_bytes + self.value_block_bytes)
        return own if self.draft is None else own + self.draft.bytes_per_block

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in every layer of both models, without padding and states."""
        paged = [group for group in self.groups if not group.recurrent]
        own = sum(len(group.layers) * sum(self.layer_bytes(group)) for group in paged) // self.block_size
        return own if self.draft is None else own + self.draft.bytes_per_token

    @property
    def padding_fraction(self) -> float:
        """The share of block memory that padded groups waste."""
        room = self.num_places * len(self.groups)
        return 1.0 - sum(len(group.layers) / self.layers_per_place(group) for group in self.groups) / room

    def num_blocks_for(self, num_tokens: int, *, longest_chunk: int = 1) -> int:
        """Return the most blocks of a sequence of `num_tokens` computed tokens, over all groups.

        A window group holds the window of the first token of the step plus the step's own tokens, at most
        `longest_chunk`.

        >>> groups = (KVGroup((0,)), KVGroup((1,), window=32))
        >>> spec = KVCacheSpec(16, 1, 8, "float32", groups)
        >>> spec.num_blocks_for(160), spec.num_blocks_for(16)
        (13, 2)
        """
        return sum(self.most_blocks(group, num_tokens, longest_chunk=longest_chunk) for group in self.groups)

    def most_blocks(self, group: KVGroup, num_tokens: int, *, longest_chunk: int = 1) -> int:
        """Return the most blocks of one group of such a sequence."""
        blocks = -(-num_tokens // self.block_size)
        if group.window is None:
            return blocks
        span = group.window - 1 + longest_chunk
        return min(blocks, (span + self.block_size - 2) // self.block_size + 1)


def _group(layers: tuple[int, ...], window: int | None, heads: KVHeads | None) -> KVGroup:
    if window == RECURRENT:
        return KVGroup(layers, RECURRENT_WINDOW, recurrent=True)
    return KVGroup(layers, window, heads=heads)


def _rank(kind: tuple[tuple[int | None, KVHeads | None], list[int]]) -> tuple[bool, int, int]:
    """Return a key that sorts kinds of layers: full attention first, then by window."""
    (window, heads), _ = kind
    return window is not None, window or 0, 0 if heads is None else heads.size


def _padded(group: KVGroup, heads: KVHeads, step: int) -> KVGroup:
    return replace(group, heads=replace(heads, head_dim=-(-heads.head_dim // step) * step))


def _fit(window: int | None, size: int, largest: int) -> int:
    """Return the number of layers that share a place: keys of `size` numbers, where one has room for `largest`."""
    return 1 if window == RECURRENT else largest // size


def _group_places(counts: Sequence[tuple[int, int]]) -> int:
    """Return the most places of a group whose padding is small enough, or else those with the least padding.

    `counts`: for each kind the number of layers, and how many share a place.
    """
    total = sum(count / each for count, each in counts)
    places = [-(-count // each) for count, each in counts]

    def padding(size: int) -> float:
        return 1.0 - total / sum(-(-count // size) * size for count in places)

    sizes = range(max(places), 0, -1)
    return next((size for size in sizes if padding(size) <= MAX_PADDING_FRACTION), min(sizes, key=padding))
