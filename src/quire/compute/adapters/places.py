"""The matrices of a model that can have an adapter, by PEFT's names of their modules.

    layers.3.mlp.down_proj             one matrix
    layers.3.self_attn.qkv_proj        several that share A, each with its rows of B
    layers.3.self_attn.kv_b_proj       the same: the matrices from latents to keys and to values
    layers.3.mlp.experts.5.up_proj     a matrix of an expert
    layers.3.mlp.experts               a parameter with the matrices of all experts (`target_parameters`)
    layers.3.mlp.experts.base_layer    another parameter of the same module, which PEFT wraps twice

With n experts in a parameter, A is [n × rank, in], expert by expert, and B is [out, rank × n], in which the experts
alternate. The shapes determine the parameter: one reads hidden states, the other writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.sublayers import Activation

OF_EXPERTS: Final = frozenset({Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN})
ADAPTED: Final = OF_EXPERTS | frozenset(
    {Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN}
    | {Part.QUERY_DOWN, Part.LATENT, Part.KEY_UP, Part.VALUE_UP}
    | {Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN}
    | {Part.ATTENTION_GATE, Part.DELTA_QUERY, Part.DELTA_KEY, Part.DELTA_VALUE, Part.DELTA_GATE}
    | {Part.DELTA_RATE, Part.DELTA_DECAY, Part.DELTA_OUTPUT}
    | {Part.MAMBA_GATE, Part.MAMBA_VALUE, Part.MAMBA_KEY, Part.MAMBA_QUERY, Part.MAMBA_STEP, Part.MAMBA_OUTPUT}
    | {Part.CONVOLUTION_GATE, Part.CONVOLUTION_VALUE, Part.CONVOLUTION_OUTPUT_GATE, Part.CONVOLUTION_OUTPUT}
)
IN_TURNS: Final = frozenset({Part.DELTA_GATE, Part.DELTA_OUTPUT})
"""Matrices whose value heads a GGUF file can have in another order than adapters."""

BY_HEAD: Final = frozenset({Part.KEY_UP, Part.VALUE_UP})
PREFIXES: Final = (
    *("model.language_model.", "model.text_model.", "language_model.model.", "language_model.", "text_model."),
    *("model.", "transformer.", "backbone."),
)
"""Prefixes of the layers' names, which depend on the release and on how a model was opened for training."""

OTHER_NAMES: Final = ((".block_sparse_moe.", ".mlp."), (".self_attn.g_proj", ".self_attn.gate_proj"))
"""Names of modules that checkpoints and transformers, from release 5 on, do not share in some families."""

INNER: Final = ".base_layer"
FUSED: Final = ".kv_b_proj"
SPLIT_KEY: Final = ".k_b_proj"


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix of the model, `[num_outputs, num_inputs]`: the rows `rows` of the outputs of its module, × `factor`.

    `repeats`: how many rows in turn are the same row of the module.
    """

    layer: int
    part: Part
    expert: int
    num_outputs: int
    num_inputs: int
    rows: slice | list[int]
    factor: float = 1.0
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Module:
    """The matrices that one A and one B change, and their total number of outputs.

    `parameter`: the name of a parameter with the matrices of `count` experts; empty and 0 for other modules.
    """

    places: Sequence[Place]
    num_outputs: int
    parameter: str = ""
    count: int = 0

    @property
    def num_inputs(self) -> int:
        """The columns of A."""
        return self.places[0].num_inputs

    def full_name(self, module: str) -> str:
        """Return the name to match with rank patterns, given a module's name in its tensors. Does not mutate."""
        return f"{module.removesuffix(INNER)}.{self.parameter}" if self.parameter else module

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of A and B for a rank. Does not mutate."""
        ranks = rank * max(self.count, 1)
        return {"A": (ranks, self.num_inputs), "B": (self.num_outputs, ranks)}

    def cuts(self, place: Place, rank: int) -> tuple[slice, slice]:
        """Return the rows of A and the columns of B that belong to a matrix. Does not mutate."""
        if not self.count:
            return slice(None), slice(None)
        return slice(place.expert * rank, (place.expert + 1) * rank), slice(place.expert, None, self.count)


def bare_name(module: str) -> str:
    """Return the name of a module from its layer on.

    >>> bare_name("model.language_model.layers.0.mlp.up_proj"), bare_name("transformer.h.0.attn.c_attn")
    ('layers.0.mlp.up_proj', 'h.0.attn.c_attn')
    """
    for other, name in OTHER_NAMES:
        module = module.replace(other, name)
    return next((module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)), module)


def modules_of(spec: DecoderSpec) -> Mapping[str, Sequence[Module]]:
    """Return the modules that can have an adapter, by bare name; two parameters can share a name."""
    places: dict[str, list[Place]] = {}
    for stem, place in places_of(spec):
        places.setdefault(bare_name(stem), []).append(place)
    modules = {
        name: [Module(found, sum(place.num_outputs // place.repeats for place in found))]
        for name, found in places.items()
    }
    for name, each in _parameters(spec):
        modules.setdefault(name, []).append(each)
        modules.setdefault(name + INNER, []).append(each)
    return modules


def places_of(spec: DecoderSpec) -> Iterator[tuple[str, Place]]:
    """Yield each matrix that can have an adapter, with the name of its tensor."""
    sources = {**spec.sources, **_fused_by_head(spec)}
    has_turns = spec.delta is not None and spec.delta.outputs_in_turns
    adapted = ADAPTED - IN_TURNS if has_turns else ADAPTED
    for index, layer in enumerate(spec.layers):
        count = spec.experts.num_experts if spec.experts is not None and layer.sparse else 0
        parts = [(part, shape, 0) for part, shape in spec.layer_parts(layer).items()]
        parts += [(part, shape, expert) for expert in range(count) for part, shape in spec.expert_parts().items()]
        for part, shape, expert in parts:
            if part in adapted:
                source, (outputs, inputs) = sources[part], shape.weight
                rows = source.rows_of(outputs)
                place = Place(index, part, expert, outputs, inputs, rows, source.factor, source.repeats)
                yield source.stem_of(index, expert), place


def _fused_by_head(spec: DecoderSpec) -> dict[Part, WeightSource]:
    """Return an adapter's sources of KEY_UP and VALUE_UP, if the model's GGUF file has them in two tensors."""
    latent, key = spec.attention.latent, spec.sources.get(Part.KEY_UP)
    if latent is None or key is None or not key.stem.endswith(SPLIT_KEY):
        return {}
    stem, period = key.stem.removesuffix(SPLIT_KEY) + FUSED, latent.plain_dim + latent.value_dim
    return {
        Part.KEY_UP: WeightSource(stem, run=latent.plain_dim, period=period),
        Part.VALUE_UP: WeightSource(stem, first_row=latent.plain_dim, run=latent.value_dim, period=period),
    }


def _parameters(spec: DecoderSpec) -> Iterator[tuple[str, Module]]:
    """Yield the parameters with the matrices of all experts of a layer: gate and up, then down."""
    if spec.experts is None or not spec.mlp.gated:
        return
    stacks = {spec.sources[part].stem.partition(".{expert}")[0] for part in spec.expert_parts()}
    if len(stacks) != 1:
        return
    (stack,) = stacks
    hidden, size, count = spec.hidden_size, spec.experts.intermediate_size, spec.experts.num_experts
    # gpt-oss, the family with a clamped gate, alternates the outputs of gate and up; others have gate first.
    takes_turns = spec.mlp.activation is Activation.CLAMPED_SWIGLU
    first, second = (slice(0, None, 2), slice(1, None, 2)) if takes_turns else (slice(size), slice(size, None))
    rows = {Part.EXPERT_GATE: first, Part.EXPERT_UP: second}
    for index in (index for index, layer in enumerate(spec.layers) if layer.sparse):
        name = bare_name(stack.format(layer=index))
        ups = [Place(index, part, each, size, hidden, rows[part]) for each in range(count) for part in rows]
        downs = [Place(index, Part.EXPERT_DOWN, each, hidden, size, slice(None)) for each in range(count)]
        yield name, Module(ups, 2 * size, "gate_up_proj", count)
        yield name, Module(downs, hidden, "down_proj", count)
