"""The compiled core reads every block type as the definition in numpy does: looked up bit for bit, and in products."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.gguf.blocks import BLOCK_TYPES
from quire.compute.gguf.grid_blocks import GRID_TYPES
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.sublayers import Activation, AttentionSpec, MLPSpec
from quire.compute.native.shape import decoder_shape
from quire.compute.weights.codes import coded
from quire.core.kv_spec import KVCacheSpec, KVGroup
from support.random_blocks import blocks_of

KINDS = [block.name for block in BLOCK_TYPES.values() if block.size > 1]  # NVFP4 in quire's own blocks
WIDTH, TOKENS = 512, 40  # two of the larger blocks; more than two panels of outputs


def stored_blocks(kind: str) -> tuple[NDArray[np.uint8], NDArray[np.float32], str]:
    """Return blocks as the core takes them, the numbers that they stand for, and the core's name for their type."""
    blocks, numbers = blocks_of(kind, TOKENS)
    if kind not in GRID_TYPES:
        return blocks, numbers, kind
    return GRID_TYPES[kind].own_blocks(blocks), numbers, GRID_TYPES[kind].kept


class Lookup:
    """A decoder without layers: the logits are the products of the rows of an embedding with a head."""

    def __init__(self, kernels: str, vocab_size: int) -> None:
        self.team = _native.ThreadTeam(2)
        spec = DecoderSpec(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            context_length=TOKENS,
            norm=NormSpec(NormKind.RMS, 1e-6),
            attention=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, scale=1.0),
            mlp=MLPSpec(16, Activation.SILU),
            layers=(),
            sources={},
        )
        shape = decoder_shape(spec, KVCacheSpec(16, 1, 16, "float32", (KVGroup((0,)),)))
        self.decoder = _native.Decoder(shape, _native.kernels(kernels), self.team)
        self.vocab_size = vocab_size

    def logits(self, num_tokens: int) -> NDArray[np.float32]:
        """Return the logits after each of the first tokens."""
        ids = np.arange(num_tokens)
        found = np.zeros((num_tokens, -(-self.vocab_size // 16) * 16), np.float32)
        finite = np.zeros(num_tokens, np.bool_)
        starts = np.array([0, num_tokens])
        nothing, states = np.zeros(0, np.int64), np.zeros((0, WIDTH), np.float32)
        whole, no_adapters = np.zeros(num_tokens, np.bool_), ([], nothing)
        no_images = nothing, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.int64), nothing
        self.decoder.run(starts, ids, ids, ids, [], [], found, finite, whole, nothing, states, *no_adapters, *no_images)
        return found[:, : self.vocab_size]


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_looked_up_has_the_numbers_of_the_definition(kind: str, kernels: str) -> None:
    blocks, numbers, stored = stored_blocks(kind)
    lookup = Lookup(kernels, WIDTH)
    lookup.decoder.set_embedding(blocks, blocks=stored)
    lookup.decoder.set_matrix("head", -1, -1, np.eye(WIDTH, dtype=np.float32))
    assert np.array_equal(lookup.logits(TOKENS), numbers)  # the sum of a product of the head turns -0 into 0


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_need_no_rounding_have_the_products_of_the_definition(kind: str, kernels: str) -> None:
    blocks, numbers, stored = stored_blocks(kind)
    rows = np.random.default_rng(1).integers(-127, 128, (9, WIDTH)).astype(np.float32)
    rows[:, ::32] = 127  # the scale of each group is 1
    lookup = Lookup(kernels, TOKENS)
    lookup.decoder.set_embedding(rows)
    lookup.decoder.set_matrix("head", -1, -1, blocks, blocks=stored)
    right = rows.astype(np.float64) @ numbers.T.astype(np.float64)
    size = np.abs(rows).astype(np.float64) @ np.abs(numbers.T).astype(np.float64)
    assert (np.abs(lookup.logits(9) - right) <= 1e-5 * size).all()


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("kind", ["int8_groups", "int4"])
def test_codes_are_made_as_the_definition_makes_them(kind: str, kernels: str) -> None:
    random = np.random.default_rng(2)
    weights = random.normal(0, 1, (TOKENS, WIDTH)).astype(np.float32) * random.choice([1e-6, 1, 1e4], (TOKENS, 1))
    weights = weights.astype(np.float32)
    rows = np.eye(WIDTH, dtype=np.float32) * np.float32(127)
    lookup = Lookup(kernels, TOKENS)
    lookup.decoder.set_embedding(rows)
    lookup.decoder.set_matrix("head", -1, -1, weights, codes=kind)
    right = coded(weights, kind).rows().T.astype(np.float64) * 127
    assert np.abs(lookup.logits(WIDTH) - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("kernels", _native.kernel_names())
@pytest.mark.parametrize("kind", ["int8_groups", "int4"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_a_weight_that_codes_cannot_hold_shows_in_its_output_alone(kind: str, broken: float, kernels: str) -> None:
    weights = np.random.default_rng(3).normal(0, 1, (TOKENS, WIDTH)).astype(np.float32)
    weights[7, 100] = broken
    lookup = Lookup(kernels, TOKENS)
    lookup.decoder.set_embedding(np.ones((1, WIDTH), np.float32))
    lookup.decoder.set_matrix("head", -1, -1, weights, codes=kind)
    spoilt = np.isnan(lookup.logits(1)[0])
    assert np.array_equal(spoilt, np.isnan(coded(weights, kind).rows()).any(axis=1))
    assert np.flatnonzero(spoilt).tolist() == [7]


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("Q4_9", (2, 18), "no block type is called Q4_9"),
        ("Q4_0", (2, 19), "rows of Q4_0 are bytes of whole blocks"),
    ],
)
def test_what_is_not_blocks_is_refused(kind: str, shape: tuple[int, int], message: str) -> None:
    decoder = Lookup(_native.kernel_names()[0], 16).decoder
    with pytest.raises(ValueError, match=message):
        decoder.set_matrix("head", -1, -1, np.zeros(shape, np.uint8), blocks=kind)
