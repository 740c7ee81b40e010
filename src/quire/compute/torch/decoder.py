"""TorchDecoder: interprets a `DecoderSpec` on a device, one layer after another, as the reference decoder does.

    embed ─┬─ norm ─ attention ─ norm ─ + ─ norm ─┬─ norm ─ MLP ─ norm ─ + ─ norm ─► norm ─► head
           └────────────────────────────┘         └──────────────────────┘
           └─────────────────────────── × layers ───────────────────────────┘

A sublayer's output is not added to the residual stream separately: it waits for the next norm, in the same layer or the
next one, so that one pass over memory adds and normalises (`Operations.add_norm`). In some models, a layer then adds
what it makes of its own input, and multiplies the sum by a number. Attention, operations, products and experts are
chosen when a decoder is made. On a GPU the host never waits during the walk. So steps of the same number of tokens have
the same launches and differ only in the plan of attention. If that plan can stay in one place, `rows` can be recorded
once and replayed (`quire.compute.torch.graphs`):

    plan ─► rows ─► logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part
from quire.compute.models.sublayers import RopeSpec
from quire.compute.torch.adapters import Add, LowRankSums, part_sizes
from quire.compute.torch.attention.base import (
    AttentionBackend,
    AttentionRule,
    GivenRows,
    KVPair,
    StandingPlan,
    StepBatch,
)
from quire.compute.torch.experts import ExpertOperations, MLPs, SparseInputs
from quire.compute.torch.layer_inputs import LayerInputs
from quire.compute.torch.operations import Angles, Frequencies, Norm, Operations, are_finite
from quire.compute.torch.products import Product
from quire.compute.torch.weights import Experts, LayerWeights, TorchWeights


@dataclass(frozen=True, slots=True)
class Implementations:
    """The implementations that a decoder uses."""

    attention: AttentionBackend[Any]
    operations: Operations
    product: Product
    experts: ExpertOperations[Any]


@dataclass(frozen=True, slots=True)
class DecoderOutputs:
    """The results of a step before the head, on the device."""

    rows: torch.Tensor  # [num_logits, hidden_size], the input of `TorchDecoder.logits`
    finite: torch.Tensor  # bool [num_tokens]: the hidden state of the token
    states: torch.Tensor | None = None  # [num_states, hidden_size], after the final norm


class Rows(NamedTuple):
    """The rows of a step before the head."""

    numbers: torch.Tensor  # [num_tokens, hidden_size]
    finite: torch.Tensor  # bool [num_tokens]

    def first(self, count: int) -> Rows:
        """Return the first rows, as views."""
        return Rows(self.numbers[:count], self.finite[:count])


class Waiting(NamedTuple):
    """The residual stream, an update that is not added yet, and the norm to apply after that."""

    hidden: torch.Tensor
    update: torch.Tensor | None
    joined: Norm | None


@dataclass(frozen=True, slots=True)
class LayersOf:
    """What the layers of a step read. `slots`: per KV group. `add`: adds the parts of adapters."""

    angles: Mapping[RopeSpec, Angles]
    pairs: Mapping[int, KVPair]
    planned: object
    slots: tuple[torch.Tensor, ...]
    add: Add


class TorchDecoder:
    """A decoder over tensors. Immutable; it mutates only the KV memory passed to it."""

    def __init__(self, spec: DecoderSpec, weights: TorchWeights, implementations: Implementations) -> None:
        self.spec = spec
        self._weights = weights
        self._attention, self._operations, self._product = (
            implementations.attention,
            implementations.operations,
            implementations.product,
        )
        chosen = implementations.operations, implementations.product, implementations.experts
        self._mlps = MLPs(*chosen, spec.mlp.activation, gated=spec.mlp.gated)
        self._low_rank = LowRankSums(implementations.experts, part_sizes(spec))
        shape = spec.attention
        self._inputs = LayerInputs.of(spec, weights.layer_inputs, implementations.operations, implementations.product)
        self._rules = [
            AttentionRule(shape.scale, layer.window, shape.score_soft_cap, own.sinks, shape.chunked)
            for layer, own in zip(spec.layers, weights.layers, strict=True)
        ]
        ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._frequencies = {rope: Frequencies.of(rope, self.device) for rope in ropes}

    def run(self, batch: StepBatch, pairs: Mapping[int, KVPair]) -> DecoderOutputs:
        """Compute one step over the KV memory of the layers. Mutates the slots of its tokens there."""
        with torch.inference_mode():
            rows = self.rows(batch, pairs, self._attention.plan(batch))
            states = None if batch.state_indices is None else rows.numbers[batch.state_indices].to(torch.float32)
            return DecoderOutputs(rows.numbers[batch.logit_indices], rows.finite, states)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._weights.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of rows."""
        return self._weights.dtype

    @property
    def without_adapters(self) -> Add:
        """The products of a step without adapters."""
        return Add(self._low_rank)

    @property
    def has_axes(self) -> bool:
        """Whether rotary positions have coordinates."""
        return any(table.axes is not None for table in self._frequencies.values())

    def reserve(self, batch: StepBatch) -> StandingPlan | None:
        """Return fixed places for the plans of steps of up to as many tokens; None: attention supports none."""
        return self._attention.reserve(batch, self._weights.dtype)

    def rows(self, batch: StepBatch, pairs: Mapping[int, KVPair], planned: object) -> Rows:
        """Return the rows before the head. Mutates the slots of the tokens in memory."""
        ids = batch.token_ids if batch.last_tokens is None else batch.last_tokens.known(batch.token_ids)
        waiting = self.entered(self._embed(ids, batch))
        inputs = None if self._inputs is None else self._inputs.all(waiting.hidden, ids, batch.given)
        step = LayersOf(
            self.angles(batch.positions, batch.coordinates),
            pairs,
            planned,
            batch.slots,
            Add.to(batch.adapted, self._low_rank),
        )
        for index, weights in enumerate(self._weights.layers):
            waiting = self.layer(index, waiting, step)
            waiting = self._finished(waiting, weights, None if inputs is None else inputs[:, index])
            waiting = self._with_deep_rows(waiting, index, batch.given)
        rows = self.left(waiting)
        return Rows(rows, are_finite(rows))

    def angles(self, positions: torch.Tensor, coordinates: Sequence[torch.Tensor] | None) -> dict[RopeSpec, Angles]:
        """Return the angles of tokens for each kind of rotary positions in the model, once for all layers."""
        return {rope: Angles.at(positions, rope, table, coordinates) for rope, table in self._frequencies.items()}

    def entered(self, rows: torch.Tensor) -> Waiting:
        """Return the state before the first layer, of embedded or given rows."""
        return Waiting(self._normed(rows, self._weights.embedding_norm), None, None)

    def layer(self, index: int, waiting: Waiting, step: LayersOf) -> Waiting:
        """Return the state after the attention and the MLP of a layer. Mutates the slots of the tokens in memory."""
        weights, layer, rule = self._weights.layers[index], self.spec.layers[index], self._rules[index]
        add, pair = step.add.of(index), step.pairs[index if layer.keys_of is None else layer.keys_of]
        hidden, rows = self._enter(waiting, weights.norms.get(Part.ATTENTION_NORM))
        queries = self._operations.rotate_and_write(
            add(self._product(rows, weights.projection), rows, (Part.QUERY, Part.KEY, Part.VALUE)),
            weights.form,
            None if layer.rope is None else step.angles[layer.rope],
            pair,
            step.slots[pair.group],
        )
        attended = self._attention.run(queries, pair, step.planned, rule).flatten(1)
        return self._leave_layer(weights, (hidden, rows), attended, step.slots[pair.group], add)

    def left(self, waiting: Waiting, *, is_last: bool = True) -> torch.Tensor:
        """Return the rows of a state, normalised if it is that after the last layer."""
        return self._enter(waiting, self._weights.final_norm if is_last else None)[1]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows: `[num_rows, vocab_size]`, float32 if scaled or capped, else the rows' dtype."""
        with torch.inference_mode():
            if self._weights.embedding_out is not None:
                rows = self._product(rows, self._weights.embedding_out)
            logits = self._product(rows, self._weights.head)
            if self.spec.logit_scale != 1:
                logits = logits.to(torch.float32) * self.spec.logit_scale
            cap = self.spec.logit_soft_cap
            return logits if cap is None else torch.tanh(logits.to(torch.float32) / cap) * cap

    def _leave_layer(
        self,
        weights: LayerWeights,
        entered: tuple[torch.Tensor, torch.Tensor],
        attended: torch.Tensor,
        slots: torch.Tensor,
        add: Add,
    ) -> Waiting:
        """Return the state after a layer, from its attention on; its output is not added yet.

        `entered`: the residual stream before the layer, and the rows that attention read. `add`: adds adapters' parts.
        """
        norms, (hidden, rows) = weights.norms, entered
        output = add(self._product(attended, weights.output), attended, (Part.OUTPUT,))
        update = self._update(output, norms.get(Part.AFTER_ATTENTION_NORM))
        if self.spec.parallel:
            rows = rows if self.spec.shared_norm else self._normed(hidden, norms.get(Part.MLP_NORM))
            other = self._update(self._transform((hidden, rows), weights, slots, add), norms.get(Part.AFTER_MLP_NORM))
            return Waiting(hidden, update + other, None)
        waiting = Waiting(hidden, update, norms.get(Part.JOINED_ATTENTION_NORM))
        hidden, rows = self._enter(waiting, norms.get(Part.MLP_NORM))
        update = self._update(self._transform((hidden, rows), weights, slots, add), norms.get(Part.AFTER_MLP_NORM))
        return Waiting(hidden, update, norms.get(Part.JOINED_MLP_NORM))

    def _finished(self, waiting: Waiting, weights: LayerWeights, own: torch.Tensor | None) -> Waiting:
        """Return the state with what the layer makes of its own input, scaled; the same if the model has neither."""
        if own is None and weights.scale == 1:
            return waiting
        hidden = self._enter(waiting, None)[0]
        if self._inputs is not None and own is not None:
            update = self._inputs.update(hidden, own, weights)
            hidden = hidden + self._normed(update, weights.norms.get(Part.AFTER_INPUT_NORM))
        return Waiting(hidden if weights.scale == 1 else hidden * weights.scale, None, None)

    def _with_deep_rows(self, waiting: Waiting, index: int, given: GivenRows | None) -> Waiting:
        """Return the state after a layer with the part of given rows that is for it."""
        if given is None or index >= self.spec.deep_rows:
            return waiting
        hidden, size = self._enter(waiting, None)[0], self.spec.hidden_size
        part = given.numbers[:, (index + 1) * size : (index + 2) * size]
        return Waiting(hidden.index_add(0, given.tokens, part.to(hidden.dtype)), None, None)

    def embedded(self, ids: torch.Tensor, given: GivenRows | None) -> torch.Tensor:
        """Return the rows of the embedding for some tokens, or the rows that they have instead."""
        hidden = self._weights.embedding.looked_up(ids).to(torch.float32) * self.spec.embedding_scale
        hidden = hidden.to(self.dtype)
        if given is not None:
            hidden[given.tokens] = given.numbers[:, : hidden.shape[1]].to(hidden.dtype)
        return hidden

    def _embed(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        weights, positions = self._weights, batch.positions
        hidden = self.embedded(ids, batch.given) if batch.halves is None else self._joined(*batch.halves)
        if weights.embedding_in is not None:
            hidden = self._product(hidden, weights.embedding_in)
        if weights.positions is not None and self.spec.learned_positions is not None:
            hidden = hidden + weights.positions[positions + self.spec.learned_positions]
        return hidden

    def _joined(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the rows of embedded tokens and hidden states, each half normalised."""
        norms = self._weights.token_norm, self._weights.state_norm
        return torch.cat([self._normed(*half) for half in zip((tokens, states), norms, strict=True)], dim=-1)

    def _enter(self, waiting: Waiting, before: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the waiting update to the residual stream; return the stream, and the input of the next sublayer."""
        hidden, update, joined = waiting
        if update is not None and joined is not None:
            hidden = self._operations.add_norm(hidden, update, joined)[1]
        elif update is not None and before is not None:
            return self._operations.add_norm(hidden, update, before)
        elif update is not None:
            hidden = hidden + update
        return hidden, self._normed(hidden, before)

    def _transform(
        self, entered: tuple[torch.Tensor, torch.Tensor], weights: LayerWeights, slots: torch.Tensor, add: Add
    ) -> torch.Tensor:
        """Return the output of the MLP or the experts; `entered`: the residual stream, and its normalised rows."""
        (hidden, rows), norms = entered, weights.norms
        spec, mlp, router, experts = self.spec.experts, weights.mlp, weights.router, weights.experts
        if spec is None or router is None or experts is None:
            assert mlp is not None  # a layer without experts has an MLP
            return self._mlps.dense(rows, mlp, add)
        inputs = SparseInputs(rows, rows, rows)
        if spec.own_norms:
            own = (self._normed(hidden, norms[part]) for part in (Part.ROUTER_NORM, Part.EXPERTS_NORM))
            inputs = SparseInputs(rows, *own)
        parts = Experts(router, experts, mlp, weights.router_offset, weights.factors, norms)
        return self._mlps.sparse(inputs, slots, parts, spec, add)

    def _update(self, output: torch.Tensor, after: Norm | None) -> torch.Tensor:
        """Return a sublayer's update of the residual stream."""
        update, scale = self._normed(output, after), self.spec.residual_scale
        return update if scale == 1 else update * scale

    def _normed(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Return the normalised rows, or the rows themselves if the model has no norm here."""
        return rows if norm is None else self._operations.norm(rows, norm)
