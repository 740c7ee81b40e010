"""What a step of a model must read and compute at the least: the bounds that measurements are held to.

    a step of decodes   reads every weight once, and the keys and values of its sequences; multiplies as a prompt does
    a prompt            multiplies every weight with every token, and queries with the keys and values before them

Experts are not counted: which of them a step reads depends on its tokens. There is no bound then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.compute.models.base import DecoderSpec
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.kv_spec import DTYPE_BYTES, KVCacheSpec
from quire.engine.factory import Backend


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Bytes that every step reads, and the numbers that multiply each token, without those of the head."""

    step_bytes: int
    numbers_per_token: int
    numbers_of_head: int
    attention_size: int  # heads × head_dim
    kv_spec: KVCacheSpec

    def kv_bytes(self, lengths: Iterable[int]) -> int:
        """Return the bytes of the keys and values that one new token of each sequence attends to."""
        known = list(lengths)
        return self.kv_spec.bytes_per_layer_token * sum(
            len(group.layers) * sum(_seen(length, group.window) for length in known) for group in self.kv_spec.groups
        )

    def prompt_operations(self, num_tokens: int) -> int:
        """Return the multiplications and additions of a prompt, with the logits of its last token."""
        return self._operations(range(1, num_tokens + 1), num_logits=1)

    def decode_operations(self, lengths: Sequence[int]) -> int:
        """Return those of one new token of each sequence; `lengths` count it."""
        return self._operations(lengths, num_logits=len(lengths))

    def _operations(self, lengths: Sequence[int], *, num_logits: int) -> int:
        """Return those of tokens that each attend to so many, themselves counted."""
        attended = sum(
            len(group.layers) * sum(_seen(length, group.window) for length in lengths) for group in self.kv_spec.groups
        )
        products = self.numbers_per_token * len(lengths) + self.numbers_of_head * num_logits
        return 2 * (products + 2 * self.attention_size * attended)


def model_costs(spec: DecoderSpec, backend: Backend) -> ModelCosts | None:
    """Return the costs of a model; None where they depend on the tokens."""
    if spec.experts is not None:
        return None
    embedding = spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    positions = 0
    if spec.learned_positions is not None:
        positions = (spec.context_length + spec.learned_positions) * spec.hidden_size
    # Rows of an embedding and of positions are looked up, but the head is read whole; norms are too small to matter.
    looked_up = (0 if spec.tied_head else embedding) + positions
    # How many numbers there are is asked of the spec: weights may be stored in fewer bytes than activations.
    num_numbers = weight_bytes(spec, "float32") // DTYPE_BYTES["float32"]
    return ModelCosts(
        step_bytes=backend.weight_bytes - looked_up * DTYPE_BYTES[backend.dtype],
        numbers_per_token=num_numbers - looked_up - embedding,
        numbers_of_head=embedding,
        attention_size=spec.attention.num_heads * spec.attention.head_dim,
        kv_spec=backend.kv_spec,
    )


def _seen(length: int, window: int | None) -> int:
    return length if window is None else min(length, window)
