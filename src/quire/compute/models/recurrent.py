"""The recurrent sublayers of a decoder as data: linear attention, state-space layers and short convolutions.

Each has a state per sequence instead of keys and values, which a block of the pool has room for, in two halves
(docs/design/recurrent-layers.md). A half consists of records, which threads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Final

from quire.compute.models.parts import NormSpec, Part, PartShape
from quire.core.errors import CheckpointError

MAX_CHUNK: Final = 128
"""The most channels of a convolution in a record."""
MAX_RECORD_HEADS: Final = 4
"""The most heads of a state-space layer in a record: each record also has the key and query that they share."""


@dataclass(frozen=True, slots=True)
class MatrixStates:
    """The layout of a state that is matrices S, `[key_dim, value_dim]`: a record for some heads that share a key.

    `num_late`: the most of its last tokens that S may lack. See `quire.compute.reference.states`.
    """

    num_records: int
    heads: int
    key_dim: int
    value_dim: int
    filter_width: int
    num_late: int

    @property
    def matrices(self) -> int:
        """The floats of the matrices of a record."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def num_inputs_kept(self) -> int:
        """The last tokens whose inputs of the filter are in a state."""
        return self.filter_width - 1 + self.num_late

    @property
    def inputs(self) -> int:
        """The floats for a token's query, key and values."""
        return -(-(2 * self.key_dim + self.heads * self.value_dim) // 16) * 16

    @property
    def change(self) -> int:
        """The floats for what a token changes in the matrices of a record."""
        return -(-(self.key_dim + self.heads * (self.value_dim + 1)) // 16) * 16

    @property
    def record_floats(self) -> int:
        """The floats of a record."""
        return self.matrices + self.num_inputs_kept * self.inputs + self.num_late * self.change + 16

    @property
    def half_bytes(self) -> int:
        """The bytes of half a layer's state."""
        return self.num_records // 2 * self.record_floats * 4

    def check(self) -> None:
        """Raise unless engines can read the records, 16 numbers at once."""
        for name, size in (("key", self.key_dim), ("value", self.value_dim)):
            if size % 16:
                raise CheckpointError(f"numbers of a recurrent {name} head", size, "a multiple of 16")


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule: a recurrent layer, with a state instead of keys and values.

    Each of `num_heads` value heads has a matrix S, `[key_dim, value_dim]`, which a token changes and reads:

        S = decay × S;  S += k × rate × (v - S k);  output = S q        decay, rate: numbers, by token and head

    Value head h uses the query and key of head h // (num_heads / num_key_heads). Queries, keys and values first go
    through a SiLU of a causal filter over `filter_width` tokens; then queries and keys have length 1, and queries are
    divided by √key_dim. With a = row of DELTA_DECAY and b = row of DELTA_RATE, decay = exp(-exp(DELTA_LOG_DECAY) ×
    softplus(a + DELTA_DECAY_OFFSET)) and rate = `rate_scale` × sigmoid(b). The output is normalised by `norm` for each
    head, and multiplied by SiLU(DELTA_GATE). `outputs_in_turns`: the rows of DELTA_GATE and the columns of DELTA_OUTPUT
    have the first value head of each key, then the second of each key, as in GGUF files of Qwen3.5. `num_late`: how
    many of the last tokens a state can take back: one more than can be guessed in a step.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    filter_width: int
    norm: NormSpec
    outputs_in_turns: bool = False
    num_late: int = 1
    rate_scale: float = 1.0

    @property
    def heads_per_key(self) -> int:
        """How many value heads share a key."""
        return self.num_heads // self.num_key_heads

    @property
    def num_inputs(self) -> int:
        """The numbers of a token that go through the filter: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def states(self) -> MatrixStates:
        """The layout of a layer's state: a record for each key head."""
        sizes = self.key_dim, self.value_dim, self.filter_width, self.num_late
        return MatrixStates(self.num_key_heads, self.heads_per_key, *sizes)

    @property
    def half_bytes(self) -> int:
        """The bytes of half a layer's state."""
        return self.states.half_bytes

    @property
    def operations(self) -> int:
        """Additions and multiplications of a token in S: forgetting, adding, and reading by key and by query."""
        return 7 * self.num_heads * self.key_dim * self.value_dim

    def parts(self, hidden_size: int) -> dict[Part, PartShape]:
        """Return a layer's parts."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return {
            Part.DELTA_QUERY: PartShape((keys, hidden_size)),
            Part.DELTA_KEY: PartShape((keys, hidden_size)),
            Part.DELTA_VALUE: PartShape((values, hidden_size)),
            Part.DELTA_GATE: PartShape((values, hidden_size)),
            Part.DELTA_RATE: PartShape((self.num_heads, hidden_size)),
            Part.DELTA_DECAY: PartShape((self.num_heads, hidden_size)),
            Part.DELTA_FILTER: PartShape((self.num_inputs, 1, self.filter_width)),
            Part.DELTA_LOG_DECAY: PartShape((self.num_heads,)),
            Part.DELTA_DECAY_OFFSET: PartShape((self.num_heads,)),
            Part.DELTA_NORM: self.norm.shape(self.value_dim),
            Part.DELTA_OUTPUT: PartShape((hidden_size, values)),
        }


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A state-space layer (Mamba-2): a recurrent layer, whose state decays and adds.

    Each of `num_heads` heads has a matrix S, `[key_dim, value_dim]`, which a token changes and reads:

        S = decay × S + k × step × v;  output = S q + MAMBA_SKIP × v        decay, step: numbers, by token and head

    (Papers call v, k, q and step: x, B, C and ∆.) Head h uses the query and key of group h // (num_heads / num_groups).
    Values, keys and queries, in this order, first go through a SiLU of a causal filter over `filter_width` tokens, with
    a bias if `filter_bias`. With a = row of MAMBA_STEP, step = softplus(a + MAMBA_STEP_OFFSET) and decay =
    exp(-exp(MAMBA_LOG_DECAY) × step). The output is multiplied by SiLU(MAMBA_GATE), then normalised by `norm` over all
    heads of each group; None: it is not normalised. `num_late`: as in `DeltaSpec`.
    """

    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    filter_width: int
    norm: NormSpec | None
    filter_bias: bool = True
    num_late: int = 1

    @property
    def states(self) -> MatrixStates:
        """The layout of a layer's state: a record for a few heads of a group."""
        heads = gcd(self.num_heads // 2, self.num_heads // self.num_groups, MAX_RECORD_HEADS)
        sizes = self.key_dim, self.value_dim, self.filter_width, self.num_late
        return MatrixStates(self.num_heads // heads, heads, *sizes)

    @property
    def half_bytes(self) -> int:
        """The bytes of half a layer's state."""
        return self.states.half_bytes

    @property
    def operations(self) -> int:
        """Additions and multiplications of a token in S: forgetting, adding, and reading."""
        return 5 * self.num_heads * self.key_dim * self.value_dim

    def parts(self, hidden_size: int) -> dict[Part, PartShape]:
        """Return a layer's parts."""
        keys, values = self.num_groups * self.key_dim, self.num_heads * self.value_dim
        return {
            Part.MAMBA_GATE: PartShape((values, hidden_size)),
            Part.MAMBA_VALUE: PartShape((values, hidden_size)),
            Part.MAMBA_KEY: PartShape((keys, hidden_size)),
            Part.MAMBA_QUERY: PartShape((keys, hidden_size)),
            Part.MAMBA_STEP: PartShape((self.num_heads, hidden_size)),
            Part.MAMBA_FILTER: PartShape((values + 2 * keys, 1, self.filter_width), self.filter_bias),
            Part.MAMBA_LOG_DECAY: PartShape((self.num_heads,)),
            Part.MAMBA_STEP_OFFSET: PartShape((self.num_heads,)),
            Part.MAMBA_SKIP: PartShape((self.num_heads,)),
            **({} if self.norm is None else {Part.MAMBA_NORM: self.norm.shape(values)}),
            Part.MAMBA_OUTPUT: PartShape((hidden_size, values)),
        }


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A short convolution: a recurrent layer, whose state is the inputs of the last tokens.

    Each of `size` channels has a filter over its inputs u, from the oldest to the token's own:

        u = CONVOLUTION_GATE x × CONVOLUTION_VALUE x
        output = CONVOLUTION_OUTPUT (CONVOLUTION_OUTPUT_GATE x × (sum of filter × u over the last tokens))

    `num_late`: as in `DeltaSpec`.
    """

    size: int
    filter_width: int
    num_late: int = 1

    @property
    def chunk(self) -> int:
        """The channels that share a record of the state: a divisor of half of them."""
        return gcd(self.size // 2, MAX_CHUNK)

    @property
    def num_inputs_kept(self) -> int:
        """The last tokens whose inputs are in a state."""
        return self.filter_width - 1 + self.num_late

    @property
    def record_floats(self) -> int:
        """The floats of the state of a chunk; see `quire.compute.reference.convolution`."""
        return self.num_inputs_kept * self.chunk + 16

    @property
    def half_bytes(self) -> int:
        """The bytes of half a layer's state."""
        return self.size // 2 // self.chunk * self.record_floats * 4

    @property
    def operations(self) -> int:
        """Additions and multiplications of a token, besides products with matrices."""
        return 2 * (self.filter_width + 1) * self.size

    def parts(self, hidden_size: int) -> dict[Part, PartShape]:
        """Return a layer's parts."""
        rows = PartShape((self.size, hidden_size))
        return {
            Part.CONVOLUTION_GATE: rows,
            Part.CONVOLUTION_VALUE: rows,
            Part.CONVOLUTION_OUTPUT_GATE: rows,
            Part.CONVOLUTION_FILTER: PartShape((self.size, 1, self.filter_width)),
            Part.CONVOLUTION_OUTPUT: PartShape((hidden_size, self.size)),
        }


def check_recurrence(rule: DeltaSpec | MambaSpec | ConvolutionSpec) -> None:
    """Raise unless engines can share a layer among threads."""
    if isinstance(rule, ConvolutionSpec):
        if rule.size % 32:  # engines read 16 numbers of each half at once
            raise CheckpointError("channels of a convolution", rule.size, "a multiple of 32")
    elif isinstance(rule, DeltaSpec):
        if rule.num_key_heads % 2 or rule.num_heads % rule.num_key_heads:
            heads = f"{rule.num_heads} of values, {rule.num_key_heads} of keys"
            raise CheckpointError("recurrent heads", heads, "an even number of keys, with equally many values for each")
        rule.states.check()
    else:
        if rule.num_heads % 2 or rule.num_heads % rule.num_groups:
            heads = f"{rule.num_heads} in {rule.num_groups} groups"
            raise CheckpointError("recurrent heads", heads, "an even number, equally many in each group")
        rule.states.check()
