"""Prefix hashes: what must differ differs, and what is equal everywhere is equal."""

from __future__ import annotations

import hashlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.request import CacheScope, token_array
from quire.memory.block_hash import BlockHasher, root_key

ROOT = root_key(CacheScope())
TEXTS = st.text(st.sampled_from("ab\0\ud800é"), max_size=3)
SCOPES = st.builds(CacheScope, tenant=TEXTS, salt=TEXTS, extra_keys=st.lists(TEXTS, max_size=3).map(tuple))


def pack(*tokens: int) -> bytes:
    return token_array(tokens).tobytes()


def chain(hasher: BlockHasher, root: bytes, *blocks: bytes) -> bytes:
    digest = hasher.root(root)
    for block in blocks:
        digest = hasher.child(digest, block)
    return digest


def test_digits_that_read_the_same_hash_differently() -> None:
    hasher = BlockHasher()
    assert chain(hasher, ROOT, pack(1, 23)) != chain(hasher, ROOT, pack(12, 3))


def test_the_same_tokens_cut_differently_hash_differently() -> None:
    hasher = BlockHasher()
    assert chain(hasher, ROOT, pack(1), pack(2)) != chain(hasher, ROOT, pack(1, 2))


def test_the_same_block_after_another_beginning_has_another_hash() -> None:
    hasher = BlockHasher()
    blocks = pack(1), pack(2)
    hashes = {chain(hasher, ROOT), chain(hasher, ROOT, blocks[0]), chain(hasher, ROOT, blocks[1])}
    hashes |= {chain(hasher, ROOT, *blocks), chain(hasher, ROOT, *reversed(blocks))}
    assert len(hashes) == 5


def test_a_salt_at_the_root_reaches_every_block_of_the_chain() -> None:
    hasher = BlockHasher()
    blocks = [pack(number) for number in range(20)]
    salted = root_key(CacheScope(salt="s"))
    assert all(chain(hasher, ROOT, *blocks[:end]) != chain(hasher, salted, *blocks[:end]) for end in range(20))


@given(SCOPES, SCOPES)
def test_roots_are_equal_exactly_for_equal_salts_and_extra_keys(first: CacheScope, second: CacheScope) -> None:
    same = (first.salt, first.extra_keys) == (second.salt, second.extra_keys)
    assert (root_key(first) == root_key(second)) == same


def test_the_tenant_is_no_part_of_the_root() -> None:
    assert root_key(CacheScope(tenant="a")) == root_key(CacheScope(tenant="b"))


def test_another_key_gives_other_hashes() -> None:
    assert chain(BlockHasher(b"a"), ROOT, pack(1)) != chain(BlockHasher(b"b"), ROOT, pack(1))


def test_a_hash_is_keyed_blake2b_of_the_parent_and_the_packed_tokens() -> None:
    """So it is the same in every process, on every machine."""
    hasher = BlockHasher(b"key")
    parent = hashlib.blake2b(ROOT, digest_size=16, key=b"key").digest()
    tokens = bytes([1, 0, 0, 0, 23, 0, 0, 0])
    assert chain(hasher, ROOT, tokens) == hashlib.blake2b(parent + tokens, digest_size=16, key=b"key").digest()
    assert pack(1, 23) == tokens


@pytest.mark.parametrize("num_bits", [1, 4, 7, 8, 9, 12, 64, 128, 512])
def test_a_hash_has_as_many_bits_as_asked_for(num_bits: int) -> None:
    hasher = BlockHasher(b"key", num_bits)
    hashes = [hasher.child(b"", pack(number)) for number in range(200)]
    seen = 0
    for digest in hashes:
        assert len(digest) == -(-num_bits // 8)
        seen |= int.from_bytes(digest)
    assert seen == (1 << num_bits) - 1, "every bit is used, and none beyond"


def test_a_narrow_hash_collides() -> None:
    hasher = BlockHasher(b"key", 4)
    assert len({hasher.child(b"", pack(number)) for number in range(200)}) == 16


def test_hashing_leaves_the_hasher_as_it_was() -> None:
    hasher = BlockHasher(b"key")
    assert hasher.child(b"p", b"tokens") == hasher.child(b"p", b"tokens")
