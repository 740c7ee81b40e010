"""From a user's name for a model to its `ModelShape`: reads settings only, never weights.

    guide, a folder, a config.json ──┐
    a name kept in simulate/models ──┼──► ModelSource ──► DecoderSpec ──► ModelShape
    a hub id (settings fetched) ─────┘

The simulator must not import the compute plane, so the conversion is here, above both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from quire.compute.backend import BackendFacts
from quire.compute.gguf.header import is_gguf
from quire.compute.models import ENCODER, ModelDescription, read_model
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.hub import GUIDE, HubName, find_kept, resolve_model, resolve_settings
from quire.compute.models.packaged import PACKAGES
from quire.compute.models.parts import Part, PartShape
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.sublayers import ExpertsSpec
from quire.compute.weights.codes import GROUP, coded_row_bytes
from quire.compute.weights.decoder_weights import (
    HEAD_PARTS,
    OF_LATENTS,
    compact_bytes,
    is_matrix,
    is_product,
    kept_type,
)
from quire.core.config import AUTO
from quire.core.errors import ModelError
from quire.core.kv_spec import RECURRENT, SHARED, KVCacheSpec, KVHeads
from quire.core.model_files import path_of
from quire.guide import GUIDE_FOLDER
from quire.simulate.model_shape import MODELS_FOLDER, ModelShape, WeightCount, known_models


def find_settings(model: str, images: str = AUTO) -> ModelSource:
    """Return the source of a model's settings: a folder, a GGUF file, or a settings file alone.

    `images`: the image encoder of a GGUF model, as `EngineConfig.mmproj` names it.
    """
    path = path_of(model)
    if model == GUIDE and not path.is_dir():
        return ModelFolder(GUIDE_FOLDER)
    if model and path.is_file() and not is_gguf(path):
        return ModelFolder(path.parent, path.name)
    if model and path.exists():
        return resolve_model(model, images)
    if model.lower() in known_models():
        return ModelFolder(MODELS_FOLDER, f"{model.lower()}.json")
    if HubName.parse(model) is None and find_kept(model) is None and model not in PACKAGES:
        advice = f"Give a model folder, a config.json, a hub id, or one of {GUIDE}, {', '.join(known_models())}"
        raise ModelError(model, f'No folder named "{model}". {advice}')
    return resolve_settings(model, images)


def require_texts(model: ModelDescription, name: str, command: str) -> None:
    """Raise unless a model continues texts, for which a command is."""
    if model.spec.attention.bidirectional:
        advice = f"{command} is for models that generate text. For memory: quire doctor {name}"
        raise ModelError(name, f"{name} is {ENCODER}; {advice}")


def find_shape(model: str) -> ModelShape:
    """Return the shape of a model. Reads its settings only.

    >>> find_shape("llama-3.1-8b").num_parameters
    8030261248
    """
    return shape_of(model, read_model(find_settings(model)))


def shape_of(name: str, model: ModelDescription, facts: BackendFacts | None = None) -> ModelShape:
    """Return the shape of a model. With `facts`, count heads and weights as that engine stores them."""
    spec = model.spec
    block_types = model.source.block_types() if facts is not None and facts.block_types else {}
    counts = _Counts(spec, block_types, facts is not None and facts.compact)
    once = spec.model_parts()
    head_part = Part.EMBEDDING if spec.tied_head else Part.HEAD
    head = counts.of({head_part: once.pop(head_part)})
    layers = counts.of(once)
    expert, readers, experts = WeightCount(), WeightCount(), spec.experts
    for index, layer in enumerate(spec.layers):
        of_layer = counts.of(spec.layer_parts(layer), index)
        layers += of_layer
        readers += of_layer if index >= spec.first_reader else WeightCount()
        expert += counts.of(spec.expert_parts(), index) if layer.sparse else WeightCount()
    return ModelShape(
        name=name,
        dtype=model.dtype,
        hidden_size=spec.hidden_size,
        num_heads=spec.attention.num_heads,
        num_kv_heads=spec.attention.num_kv_heads,
        head_dim=spec.attention.head_dim,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        windows=tuple(_window(layer) for layer in spec.layers),
        heads=_heads(spec, None if facts is None else facts.kv_spec),
        readers=readers,
        num_readers=len(spec.layers) - spec.first_reader,
        shared=frozenset(index for index, layer in enumerate(spec.layers) if layer.keys_of is not None),
        layers=layers,
        head=head,
        kv_head_dim=0 if facts is None else facts.kv_spec.head_dim,
        latent_dim=0 if spec.attention.latent is None else spec.attention.latent.rank,
        expert=expert,
        intermediate_size=spec.most_intermediate if experts is None else _taken_size(experts),
        num_experts=0 if experts is None else experts.num_experts,
        experts_per_token=0 if experts is None else experts.experts_per_token,
        recurrent_bytes=0 if spec.recurrence is None else spec.recurrence.half_bytes,
        recurrent_operations=0 if spec.recurrence is None else spec.recurrence.operations,
    )


def _window(layer: LayerSpec) -> int | None:
    """Return the window of a layer in a shape: SHARED if it has no attention."""
    return RECURRENT if layer.recurrent else layer.window if layer.attends else SHARED


def _heads(spec: DecoderSpec, stored: KVCacheSpec | None) -> dict[int, KVHeads]:
    """Return the heads of the layers that have their own, as an engine stores them if it does."""
    heads = {index: layer.heads for index, layer in enumerate(spec.layers) if layer.heads is not None}
    for group in () if stored is None else stored.groups:
        heads |= {} if group.heads is None else dict.fromkeys(group.layers, group.heads)
    return heads


def _taken_size(experts: ExpertsSpec) -> int:
    """Return the number of outputs of all experts that compute a token."""
    return experts.experts_per_token * experts.intermediate_size + experts.shared_size


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts the numbers of a model by the form in which `quire.compute.weights` stores them."""

    spec: DecoderSpec
    block_types: Mapping[str, str]
    compact: bool

    def of(self, parts: Mapping[Part, PartShape], layer: int = 0) -> WeightCount:
        """Count the numbers of the parts of a layer, or of one of its experts."""
        return sum((self._part(part, shape, layer) for part, shape in parts.items()), WeightCount())

    def _part(self, part: Part, shape: PartShape, layer: int) -> WeightCount:
        size, outputs, biases = prod(shape.weight), shape.weight[0], shape.weight[0] * shape.bias
        if not is_matrix(part, shape):
            return WeightCount(floats=size + biases)
        kind = kept_type(self.spec, part, shape, self.block_types, layer)
        kept, kept_bytes = (size, outputs * coded_row_bytes(kind, shape.weight[1])) if kind else (0, 0)
        if part in OF_LATENTS:
            return WeightCount(plain=size)
        if not is_product(self.spec, part):
            return WeightCount(tables=size, floats=biases, kept_in_tables=kept, kept_table_bytes=kept_bytes)
        compact = size if self.compact and not kind else 0
        groups = outputs * -(-shape.weight[1] // GROUP)
        in_head = part in HEAD_PARTS
        return WeightCount(
            matrices=size,
            rows=outputs,
            floats=biases,
            groups=0 if in_head else groups,
            head_groups=groups if in_head else 0,
            kept=kept,
            kept_bytes=kept_bytes,
            compact=compact,
            compact_bytes=compact_bytes(outputs, shape.weight[1]) if compact else 0,
        )
