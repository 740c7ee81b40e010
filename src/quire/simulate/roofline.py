"""Roofline: the least time of a step, from the limits of a machine and the bytes and operations of the step.

    products of the layers   max(weights / bandwidth, operations / rate)
    the head                 max(its matrix / bandwidth, operations / rate)       only if tokens are sampled
    attention                max(keys and values / bandwidth, operations / rate)
    recurrent layers         max(states, read and written / bandwidth, operations / rate)
    exchanges of ranks       bytes from other ranks / link, plus latency: four per layer, or two sums; and the logits
    the step                 their sum, and the overhead

Each byte counts once for all its uses, and the parts run one after another: an engine can only be faster if the
attention of some rows reads while others compute. Norms, rotations and sampling are not counted. The share of this
bound that an engine reaches is measured, not assumed: docs/how-to/plan.md has it for quire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.config import TENSOR_PARALLEL_SUMS
from quire.core.kv_spec import DTYPE_BYTES, INT4_VALUES, KV_FORMS
from quire.core.setting_checks import require_one_of
from quire.simulate.hardware import Hardware
from quire.simulate.model_shape import CODES, ModelShape


@dataclass(frozen=True, slots=True)
class Numbers:
    """The number formats of a model's computation, as in `EngineConfig`; auto: the same as `dtype`.

    `sums`: its `tensor_parallel_sums`.
    """

    dtype: str = "bfloat16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    sums: str = "gather"

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        require_one_of("weights", self.weights, ("auto", "widened", *CODES))
        require_one_of("kv_dtype", self.kv_dtype, ("auto", *KV_FORMS))
        require_one_of("tensor_parallel_sums", self.sums, TENSOR_PARALLEL_SUMS)

    @property
    def stored_kv_dtype(self) -> str:
        """The format of stored keys and values."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def multiplied_kv(self) -> str:
        """The format in which keys and values are multiplied; int8 for those of 4 bits."""
        return "int8" if self.stored_kv_dtype in INT4_VALUES else self.stored_kv_dtype

    @property
    def multiplied(self) -> str:
        """The format in which rows are multiplied."""
        return "int8" if self.weights in CODES else self.dtype


class Roofline:
    """Bounds of the steps of one model on one machine. Immutable."""

    def __init__(self, hardware: Hardware, shape: ModelShape, numbers: Numbers) -> None:
        self.hardware = hardware
        self.shape = shape = shape if hardware.device == "cpu" else shape.without_readers()  # as torch computes them
        self.numbers = numbers
        self.kinds = shape.kinds
        packed = shape.is_packed and numbers.weights == "auto"  # rows are rounded to int8 for packed weights
        self._product_rate = hardware.rate("int8" if packed else numbers.multiplied)
        self._pair_s = shape.operations_per_pair / hardware.rate(numbers.multiplied_kv)
        self._read_s = shape.kv_bytes_per_layer_token(numbers.stored_kv_dtype) / hardware.read_bandwidth
        self._states_s = 2 * shape.state_bytes / hardware.read_bandwidth
        self._added_s = shape.state_operations / hardware.rate("float32")
        self._logits_s, self._exchanged_s = self._exchange_times()
        self._head_s = shape.head.read_bytes(numbers.dtype, numbers.weights) / hardware.read_bandwidth

    def step_s(self, starts: Sequence[int], counts: Sequence[int], num_logits: int) -> float:
        """Return the seconds of a step that computes `counts[i]` tokens from position `starts[i]` on.

        `num_logits`: the number of tokens whose successor is sampled. O(rows × kinds of layers).
        """
        computed_s = self.products_s(sum(counts), num_logits) + self.attention_s(starts, counts)
        return computed_s + self.exchanges_s(sum(counts), num_logits) + self.hardware.step_overhead_s

    def decode_s(self, num_sequences: int, context: int) -> float:
        """Return the seconds of a step of decodes that each attend to `context` tokens, including themselves."""
        return self.step_s([context - 1] * num_sequences, [1] * num_sequences, num_sequences)

    def products_s(self, num_tokens: int, num_logits: int) -> float:
        """Return the seconds of the products with weights."""
        shape, numbers = self.shape, self.numbers
        read = shape.layer_read_bytes(numbers.dtype, numbers.weights, num_tokens) / self.hardware.read_bandwidth
        seconds = max(read, num_tokens * shape.operations_per_token / self._product_rate)
        if num_logits:
            seconds += max(self._head_s, num_logits * shape.operations_per_logits / self._product_rate)
        return seconds

    def exchanges_s(self, num_tokens: int, num_logits: int) -> float:
        """Return the seconds of exchanges between ranks; 0 with one rank. They do not overlap with computing."""
        hardware, per_layer = self.hardware, 2 if self.numbers.sums == "reduce" else 4
        if hardware.num_ranks == 1:
            return 0.0
        seconds = per_layer * self.shape.num_layers * hardware.exchange_s + num_tokens * self._exchanged_s
        return seconds + (hardware.exchange_s + num_logits * self._logits_s if num_logits else 0.0)

    def _exchange_times(self) -> tuple[float, float]:
        """Return the seconds of the exchanges of a token's logits, and of its layers.

        A rank receives the parts of the others: heads, the outputs of attention, of gate and up, and of down. With
        sums, parts of the outputs of attention and of down go to the rank that adds them up, which returns the sums.
        """
        shape, hardware = self.shape, self.hardware
        num_ranks = hardware.num_ranks
        number_s = DTYPE_BYTES[self.numbers.dtype] * (num_ranks - 1) / num_ranks / hardware.link_bandwidth
        width = 4 * shape.hidden_size
        if self.numbers.sums == "gather":
            width = shape.num_heads * shape.head_dim + 2 * shape.hidden_size + shape.intermediate_size
        return shape.vocab_size * number_s, shape.num_layers * width * number_s

    def attention_s(self, starts: Sequence[int], counts: Sequence[int]) -> float:
        """Return the seconds of attention, and of the states of recurrent layers."""
        read, pairs = 0.0, 0.0
        for kind in self.kinds:
            for start, count in zip(starts, counts, strict=True):
                read += kind.read(start, count)
                pairs += kind.pairs(start, count)
        return self.seconds_of(read, pairs) + max(len(starts) * self._states_s, sum(counts) * self._added_s)

    def seconds_of(self, read: float, pairs: float) -> float:
        """Return the seconds of attention that reads this many tokens and has this many pairs, each of one layer.

        The layer has the usual heads.
        """
        return max(read * self._read_s, pairs * self._pair_s)
