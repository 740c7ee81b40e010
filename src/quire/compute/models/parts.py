"""The parts of a model: the pieces that have weights, their shapes, and their tensors in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class NormKind(Enum):
    """Root mean square, or mean and variance."""

    RMS = "rms"
    LAYER = "layer"


class NormScope(Enum):
    """The vectors and weights of a norm on queries and keys."""

    HEAD = "head"  # each head, with shared weights
    EACH_HEAD = "each_head"  # each head, with its own weights
    ALL_HEADS = "all_heads"  # all heads of a token together


class Part(Enum):
    """A piece of the model that has weights."""

    EMBEDDING = "embedding"
    TOKEN_NORM = "token_norm"
    STATE_NORM = "state_norm"
    EMBEDDING_IN = "embedding_in"
    POSITIONS = "positions"
    TOKEN_TYPES = "token_types"
    EMBEDDING_NORM = "embedding_norm"
    DISTANCE_BIAS = "distance_bias"
    LAYER_EMBEDDING = "layer_embedding"
    LAYER_INPUTS = "layer_inputs"
    LAYER_INPUTS_NORM = "layer_inputs_norm"
    STREAM_IN_1 = "stream_in_1"
    STREAM_IN_2 = "stream_in_2"
    STREAM_IN_3 = "stream_in_3"
    STREAM_NORM = "stream_norm"
    STREAM_ROUTER = "stream_router"
    STREAM_PREDICT = "stream_predict"
    ATTENTION_NORM = "attention_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_NORM = "query_norm"
    KEY_NORM = "key_norm"
    ATTENTION_GATE = "attention_gate"
    OUTPUT = "output"
    SINKS = "sinks"
    LAUREL_IN = "laurel_in"
    LAUREL_OUT = "laurel_out"
    LAUREL_NORM = "laurel_norm"
    QUERY_DOWN = "query_down"
    QUERY_DOWN_NORM = "query_down_norm"
    LATENT = "latent"
    LATENT_NORM = "latent_norm"
    KEY_UP = "key_up"
    VALUE_UP = "value_up"
    DELTA_QUERY = "delta_query"
    DELTA_KEY = "delta_key"
    DELTA_VALUE = "delta_value"
    DELTA_GATE = "delta_gate"
    DELTA_RATE = "delta_rate"
    DELTA_DECAY = "delta_decay"
    DELTA_FILTER = "delta_filter"
    DELTA_LOG_DECAY = "delta_log_decay"
    DELTA_DECAY_OFFSET = "delta_decay_offset"
    DELTA_NORM = "delta_norm"
    DELTA_OUTPUT = "delta_output"
    MAMBA_GATE = "mamba_gate"
    MAMBA_VALUE = "mamba_value"
    MAMBA_KEY = "mamba_key"
    MAMBA_QUERY = "mamba_query"
    MAMBA_STEP = "mamba_step"
    MAMBA_FILTER = "mamba_filter"
    MAMBA_LOG_DECAY = "mamba_log_decay"
    MAMBA_STEP_OFFSET = "mamba_step_offset"
    MAMBA_SKIP = "mamba_skip"
    MAMBA_NORM = "mamba_norm"
    MAMBA_OUTPUT = "mamba_output"
    CONVOLUTION_GATE = "convolution_gate"
    CONVOLUTION_VALUE = "convolution_value"
    CONVOLUTION_OUTPUT_GATE = "convolution_output_gate"
    CONVOLUTION_FILTER = "convolution_filter"
    CONVOLUTION_OUTPUT = "convolution_output"
    AFTER_ATTENTION_NORM = "after_attention_norm"
    JOINED_ATTENTION_NORM = "joined_attention_norm"
    MLP_NORM = "mlp_norm"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    XIELU = "xielu"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    SHARED_ROUTER = "shared_router"
    ROUTER = "router"
    ROUTER_OFFSET = "router_offset"
    ROUTER_NORM = "router_norm"
    EXPERTS_NORM = "experts_norm"
    EXPERT_FACTORS = "expert_factors"
    AFTER_EXPERTS_NORM = "after_experts_norm"
    AFTER_SHARED_NORM = "after_shared_norm"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    AFTER_MLP_NORM = "after_mlp_norm"
    JOINED_MLP_NORM = "joined_mlp_norm"
    STREAM_CORRECT = "stream_correct"
    STREAM_SCALE = "stream_scale"
    INPUT_GATE = "input_gate"
    INPUT_OUTPUT = "input_output"
    AFTER_INPUT_NORM = "after_input_norm"
    LAYER_SCALE = "layer_scale"
    STREAM_OUT_1 = "stream_out_1"
    STREAM_OUT_2 = "stream_out_2"
    STREAM_OUT_3 = "stream_out_3"
    FINAL_NORM = "final_norm"
    EMBEDDING_OUT = "embedding_out"
    HEAD = "head"


STREAM_INS: Final = (Part.STREAM_IN_1, Part.STREAM_IN_2, Part.STREAM_IN_3)
STREAM_OUTS: Final = (Part.STREAM_OUT_1, Part.STREAM_OUT_2, Part.STREAM_OUT_3)
"""The matrices of the streams after the first one (`StreamsSpec`)."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """The shape of a part's weight, and whether it has a bias (of the weight's first dimension)."""

    weight: tuple[int, ...]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The tensors of a part in a checkpoint: `stem`.weight and, with a bias, `stem`.bias.

    The stem is a template with `{layer}` and, for experts, `{expert}`; with `{head}`, a norm has a tensor for
    each head; `{pair}` is the number that two layers share. Parts with the same stem are fused: each has the rows
    from `first_row` on, and together they must fill the tensor. With a `run` their rows alternate: each has `run` of
    every `period` rows. `repeats`: each row of the tensor is this many rows of the part, one after another.
    `transposed`: the file has `[in, out]`; `first_row` still counts along `out`.

    `adjacent`: the dimensions of a head, and how many of them rotate, if the file has the two dimensions of each
    pair next to each other. Engines need the first dimensions of all pairs, then the second ones. The rotating
    dimensions begin at `adjacent_from`. `halves`: the dimensions of a head, if the pairs of each half of them are in
    that half: engines need the first dimensions of all pairs here too.

    `bounds`: the beginning of the names of four numbers, to which the inputs and outputs of the matrix are limited;
    empty: none. `factor` multiplies the numbers of the file, and `factors` names a vector with one more for each row.

    Without a stem, a part has no tensor, and its weights are 1; or `numbers` has the names of tensors with one number
    each, which are the weights; or `values` has the weights of each layer, because the file has them elsewhere.
    """

    stem: str
    first_row: int = 0
    transposed: bool = False
    run: int = 0
    period: int = 0
    adjacent: tuple[int, int] | None = None
    adjacent_from: int = 0
    halves: int = 0
    bounds: str = ""
    factor: float = 1.0
    factors: str = ""
    numbers: tuple[str, ...] = ()
    values: tuple[tuple[float, ...], ...] = ()
    repeats: int = 1

    def stem_of(self, layer: int = 0, expert: int = 0) -> str:
        """Return the name without `.weight` or `.bias`; `{head}` stays.

        >>> WeightSource("layers.{layer}.experts.{expert}.up").stem_of(3, 1)
        'layers.3.experts.1.up'
        """
        return self.stem.format(layer=layer, pair=layer // 2, expert=expert, head="{head}")

    def bounds_of(self, layer: int = 0) -> list[str]:
        """Return the names of the least and the highest input, then output; none without bounds."""
        stem = self.bounds.format(layer=layer)
        return [f"{stem}.{end}" for end in ("input_min", "input_max", "output_min", "output_max")] if stem else []

    def factors_of(self, layer: int = 0) -> str:
        """Return the name of the vector of factors, empty if there is none."""
        return self.factors.format(layer=layer)

    def rows_of(self, count: int) -> slice | list[int]:
        """Return the tensor's rows that form a part of `count` rows, in the part's order.

        >>> WeightSource("qkv", first_row=2).rows_of(4)
        slice(2, 6, None)
        >>> WeightSource("qkv", first_row=2, run=2, period=5).rows_of(4)
        [2, 3, 7, 8]
        >>> WeightSource("query", adjacent=(5, 4)).rows_of(5)
        [0, 2, 1, 3, 4]
        >>> WeightSource("query", halves=8).rows_of(8)
        [0, 1, 4, 5, 2, 3, 6, 7]
        >>> WeightSource("gate", repeats=3).rows_of(6)
        [0, 0, 0, 1, 1, 1]
        """
        if self.repeats > 1:
            return [self.first_row + row // self.repeats for row in range(count)]
        first, run = self.first_row, self.run or count
        if run == count and self.adjacent is None and not self.halves:
            return slice(first, first + count)
        rows = [first + turn * self.period + place for turn in range(count // run) for place in range(run)]
        if self.halves:
            quarter, places = self.halves // 4, range(self.halves)
            order = [place for parity in (0, 1) for place in places if place // quarter % 2 == parity]
            return [rows[head + place] for head in range(0, count, self.halves) for place in order]
        if self.adjacent is None:
            return rows
        (head_dim, rotary_dim), start = self.adjacent, self.adjacent_from
        end = start + rotary_dim
        order = [*range(start), *range(start, end, 2), *range(start + 1, end, 2), *range(end, head_dim)]
        return [rows[head + place] for head in range(0, count, head_dim) for place in order]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm. With `unit_offset` the scale is 1 + weight (Gemma). `bias`: whether a layer norm has one."""

    kind: NormKind
    epsilon: float
    unit_offset: bool = False
    bias: bool = True

    def shape(self, size: int) -> PartShape:
        """Return the shape of the norm's weights for vectors of `size`."""
        return PartShape((size,), bias=self.kind is NormKind.LAYER and self.bias)
