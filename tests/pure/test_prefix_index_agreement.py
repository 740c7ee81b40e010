"""Two ways to find a prefix, and a tree of plain paths: the three always agree, however narrow the hash is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from quire.core.config import MemoryConfig
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import CacheScope, Request, token_array
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher, root_key
from quire.memory.manager import KVCacheManager
from quire.memory.prefix import PrefixEntry, PrefixIndex, create_prefix_index
from quire.memory.prefix.hash_chain import HashChainIndex

NUM_GROUPS = 2
ROOTS = [root_key(scope) for scope in (CacheScope(), CacheScope(salt="s"), CacheScope(extra_keys=("s",)))]
Path = tuple[bytes, ...]  # a root, then the tokens of block after block


def block(*tokens: int) -> bytes:
    return token_array(tokens).tobytes()


BLOCKS = [block(first, second) for first, second in itertools.product(range(3), range(2))]


def make_hash_chain(num_bits: int, block_bytes: int = 8) -> HashChainIndex:
    index = create_prefix_index(
        "hash_chain", block_bytes=block_bytes, num_groups=NUM_GROUPS, hasher=BlockHasher(b"key", num_bits)
    )
    assert isinstance(index, HashChainIndex)
    return index


@dataclass
class Node:
    """One entry, as each of the two indexes knows it."""

    path: Path
    by_hash: PrefixEntry
    by_tree: PrefixEntry


class AgreementMachine(RuleBasedStateMachine):
    """Feeds both indexes the same operations, and keeps a plain dictionary of paths as the oracle."""

    num_bits = 4

    def __init__(self) -> None:
        super().__init__()
        hasher = BlockHasher(b"key", self.num_bits)
        self.by_hash, self.by_tree = (
            create_prefix_index(name, block_bytes=8, num_groups=NUM_GROUPS, hasher=hasher)
            for name in ("hash_chain", "radix_tree")
        )
        self.nodes: list[Node] = []  # every entry ever made, those included that were dropped
        self.known: dict[Path, list[int]] = {}  # the entries that live: their blocks
        self.num_blocks = 0

    def node(self, number: int) -> Node | None:
        return self.nodes[number % len(self.nodes)] if self.nodes else None

    def add(self, path: Path, by_hash: PrefixEntry | None, by_tree: PrefixEntry | None) -> None:
        assert by_hash is not None and by_tree is not None
        if path not in self.known:
            self.known[path] = [NO_BLOCK] * NUM_GROUPS
            self.nodes.append(Node(path, by_hash, by_tree))
        assert by_hash.block_ids == by_tree.block_ids == self.known[path]

    @rule(root=st.sampled_from(ROOTS), tokens=st.sampled_from(BLOCKS))
    def begin(self, root: bytes, tokens: bytes) -> None:
        parents = self.by_hash.root(root), self.by_tree.root(root)
        self.add((root, tokens), self.by_hash.extend(parents[0], tokens), self.by_tree.extend(parents[1], tokens))

    @rule(number=st.integers(0, 99), tokens=st.sampled_from(BLOCKS))
    def grow(self, number: int, tokens: bytes) -> None:
        node = self.node(number)
        if node is None:
            return
        extended = self.by_hash.extend(node.by_hash, tokens), self.by_tree.extend(node.by_tree, tokens)
        if node.by_hash.attached:
            self.add((*node.path, tokens), *extended)
        else:
            assert extended == (None, None), "nothing is hung from an entry that was dropped"

    @rule(root=st.sampled_from(ROOTS), path=st.lists(st.sampled_from(BLOCKS), min_size=2, max_size=6))
    def publish_path(self, root: bytes, path: list[bytes]) -> None:
        self.begin(root, path[0])
        parents = [self.by_hash.match(root, path[0])[0], self.by_tree.match(root, path[0])[0]]
        for end in range(2, len(path) + 1):
            parents = [self.by_hash.extend(parents[0], path[end - 1]), self.by_tree.extend(parents[1], path[end - 1])]
            self.add((root, *path[:end]), *parents)
            self.put(parents, (root, *path[:end]), end % NUM_GROUPS)

    @rule(number=st.integers(0, 99), group=st.integers(0, NUM_GROUPS - 1))
    def give_block(self, number: int, group: int) -> None:
        node = self.node(number)
        if node is not None and node.path in self.known and node.by_hash.attached:
            self.put([node.by_hash, node.by_tree], node.path, group)

    def put(self, entries: Iterable[PrefixEntry], path: Path, group: int) -> None:
        self.num_blocks += 1
        self.known[path][group] = self.num_blocks
        for entry in entries:
            entry.block_ids[group] = self.num_blocks

    @rule(number=st.integers(0, 99), groups=st.sets(st.integers(0, NUM_GROUPS - 1)))
    def evict(self, number: int, groups: set[int]) -> None:
        """Take blocks away (or none) and discard, as the pool does for an eviction."""
        node = self.node(number)
        if node is None:
            return
        for group in groups:
            node.by_hash.block_ids[group] = node.by_tree.block_ids[group] = NO_BLOCK
            if node.by_hash.attached:
                self.known[node.path][group] = NO_BLOCK
        is_known = node.by_hash.attached
        self.by_hash.discard(node.by_hash)
        self.by_tree.discard(node.by_tree)
        if is_known:
            self.forget(node.path)

    def forget(self, path: Path) -> None:
        while path in self.known and max(self.known[path]) < 0 and not self.has_children(path):
            del self.known[path]
            path = path[:-1]

    def has_children(self, path: Path) -> bool:
        return any(other[:-1] == path for other in self.known)

    @rule()
    def clear(self) -> None:
        self.by_hash.clear()
        self.by_tree.clear()
        self.known.clear()

    @rule(root=st.sampled_from(ROOTS), path=st.lists(st.sampled_from(BLOCKS), max_size=6), rest=st.binary(max_size=7))
    def look_up(self, root: bytes, path: list[bytes], rest: bytes) -> None:
        self.expect(root, path, rest)

    @rule(number=st.integers(0, 99), more=st.lists(st.sampled_from(BLOCKS), max_size=2))
    def look_up_known(self, number: int, more: list[bytes]) -> None:
        node = self.node(number)
        if node is not None:
            self.expect(node.path[0], [*node.path[1:], *more], b"")

    def expect(self, root: bytes, path: list[bytes], rest: bytes) -> None:
        length = next((end for end in range(len(path)) if (root, *path[: end + 1]) not in self.known), len(path))
        expected = [self.known[(root, *path[: end + 1])] for end in range(length)]
        for index in (self.by_hash, self.by_tree):
            assert [entry.block_ids for entry in index.match(root, b"".join(path) + rest)] == expected

    @invariant()
    def both_hold_the_same(self) -> None:
        assert len(self.by_hash) == len(self.by_tree) == len(self.known)
        assert sorted(paths_of(self.by_hash)) == sorted(paths_of(self.by_tree)) == sorted(self.known)
        for tokens in BLOCKS:
            roots = sorted({path[0] for path in self.known if path[1] == tokens})
            assert sorted(self.by_hash.roots_beginning_with(tokens)) == roots
            assert sorted(self.by_tree.roots_beginning_with(tokens)) == roots
        assert all(node.by_hash.attached == node.by_tree.attached for node in self.nodes)
        self.by_hash.check()
        self.by_tree.check()


def paths_of(index: PrefixIndex) -> Iterator[Path]:
    for entry in index:
        path: list[bytes] = []
        step: PrefixEntry | None = entry
        while step is not None:
            path.append(step.key)
            step = step.parent
        yield tuple(reversed(path))


def run_agreement(num_bits: int, *, num_examples: int, first_seed: int | None = None) -> None:
    machine = type("Agreement", (AgreementMachine,), {"num_bits": num_bits})
    if first_seed is not None:
        machine = seed(first_seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=num_examples, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.parametrize("num_bits", [1, 4, 128])
def test_hash_chain_and_radix_tree_agree(num_bits: int) -> None:
    run_agreement(num_bits, num_examples=30, first_seed=num_bits)


@pytest.mark.long
@pytest.mark.parametrize("num_bits", [1, 2, 4, 8, 128])
def test_hash_chain_and_radix_tree_agree_for_long(num_bits: int) -> None:
    run_agreement(num_bits, num_examples=1500)


# ---- forged collisions: a hash of 4 bits, and blocks chosen so that their hashes are equal ---------------------------

HASHER = BlockHasher(b"key", 4)


def colliding(parent: bytes, wanted: bytes, *, not_these: Iterable[bytes] = ()) -> bytes:
    """Return a block whose hash after `parent` is `wanted`."""
    taken = set(not_these)
    candidates = (block(first, second) for first in range(64) for second in range(64))
    return next(tokens for tokens in candidates if HASHER.child(parent, tokens) == wanted and tokens not in taken)


def test_two_blocks_of_one_hash_after_the_same_parent_are_two_entries() -> None:
    index = make_hash_chain(4)
    root = index.root(ROOTS[0])
    first = block(1, 2)
    second = colliding(root.digest, HASHER.child(root.digest, first), not_these=[first])
    entry = index.extend(root, first)
    assert index.match(ROOTS[0], second) == []
    other = index.extend(root, second)
    assert index.match(ROOTS[0], first) == [entry]
    assert index.match(ROOTS[0], second) == [other]
    assert entry is not other


def test_equal_tokens_after_parents_of_one_hash_are_two_entries() -> None:
    index = make_hash_chain(4)
    root = index.root(ROOTS[0])
    first = block(1, 2)
    second = colliding(root.digest, HASHER.child(root.digest, first), not_these=[first])
    parent, tokens = index.extend(root, first), block(5, 5)
    twin = index.extend(root, second)
    assert parent is not None and twin is not None and parent.digest == twin.digest
    child = index.extend(parent, tokens)
    assert index.match(ROOTS[0], first + tokens) == [parent, child]
    assert index.match(ROOTS[0], second + tokens) == [twin]


@pytest.mark.parametrize("other", ROOTS[1:], ids=["salt", "extra key"])
def test_a_block_of_another_scope_with_the_same_hash_is_not_hit(other: bytes) -> None:
    index = make_hash_chain(4)
    mine, theirs = index.root(ROOTS[0]), index.root(other)
    tokens = block(1, 2)
    forged = colliding(theirs.digest, HASHER.child(mine.digest, tokens))
    entry = index.extend(mine, tokens)
    assert entry is not None and entry.digest == HASHER.child(theirs.digest, forged)
    assert index.match(other, forged) == []
    assert index.match(other, tokens) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_chain_of_one_hash_loses_any_of_its_entries(order: tuple[int, ...]) -> None:
    index = make_hash_chain(4)
    root = index.root(ROOTS[0])
    blocks = [block(1, 2)]
    while len(blocks) < 3:
        blocks.append(colliding(root.digest, HASHER.child(root.digest, blocks[0]), not_these=blocks))
    entries = [index.extend(root, tokens) for tokens in blocks]
    left = dict(zip(blocks, entries, strict=True))
    for place in order:
        index.discard(left.pop(blocks[place]))  # type: ignore[arg-type]
        index.check()
        for tokens in blocks:
            assert index.match(ROOTS[0], tokens) == ([left[tokens]] if tokens in left else [])


@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
@pytest.mark.parametrize("other", [CacheScope(), CacheScope(salt="s"), CacheScope(extra_keys=("k",))], ids=str)
def test_no_prompt_hits_the_blocks_of_another_prompt(prefix_index: str, other: CacheScope) -> None:
    """24 blocks under a hash of 4 bits: many collide, none is taken for another."""
    spec = KVCacheSpec.from_layers([None], block_size=2, num_kv_heads=1, head_dim=8, dtype="float32")
    manager = KVCacheManager(spec, MemoryConfig(num_blocks=64, prefix_index=prefix_index, hash_bits=4))
    prompts = [[first, second, 7] for first in range(8) for second in range(3)]
    for prompt in prompts:
        compute(manager, Request(str(prompt), prompt, scope=other))
    for prompt in prompts:
        for first, second in ((prompt[1], prompt[0]), (prompt[0] + 8, prompt[1]), (prompt[0], prompt[1])):
            match = manager.match_prefix(Request("again", [first, second, 7]))
            known = [first, second, 7] in prompts and other == CacheScope()
            assert match.num_tokens == (2 if known else 0)


def compute(manager: KVCacheManager, request: Request) -> None:
    """Compute all tokens of a request, and let it go."""
    assert manager.allocate_slots(request, len(request.tokens))
    request.num_computed = request.num_planned = len(request.tokens)
    manager.commit(request, request.num_computed)
    manager.free(request)


def test_in_a_crowd_of_collisions_every_path_is_found_and_no_other() -> None:
    index = make_hash_chain(4, block_bytes=4)
    paths = [token_array(path) for path in itertools.product(range(30), repeat=2)]
    held = {path.tobytes() for path in paths[::2]}
    for path in held:
        first = index.extend(index.root(ROOTS[0]), path[:4])
        assert first is not None
        index.extend(first, path[4:])
    assert len({entry.digest for entry in index}) <= 16 < len(index)
    for path in (path.tobytes() for path in paths):
        found = index.match(ROOTS[0], path)
        assert b"".join(entry.key for entry in found) == path[: 4 * len(found)]
        assert (len(found) == 2) == (path in held)
