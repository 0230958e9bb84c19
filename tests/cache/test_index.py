"""The prefix index finds cached prefixes, and drops nodes whose blocks are evicted."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.block_manager import BlockManager
from quire.cache.blocks import Block, PoolKey
from quire.cache.index import Node, PrefixIndex
from quire.cache.reuse import Match, common_length
from quire.cache.specs import FullKV, RecurrentState, WindowKV, group_layers
from quire.core.block_keys import chain, chains
from quire.core.kv_format import KVFormat
from tests.support.blocks import kept_blocks, live_blocks

SIZE = 4
PLAIN = KVFormat()
ROOT = b"model"
LAYOUTS = {
    "full": (FullKV(1, 1),),
    "window": (WindowKV(1, 1, 6), FullKV(1, 1)),
    "only windows": (WindowKV(1, 1, 6),),
    "recurrent": (RecurrentState((("s", (1,), ""),)), FullKV(1, 1)),
}


def reason(match: Match) -> str:
    return "" if match.miss is None else str(match.miss)


class World:
    """An index over a manager, and requests that compute all that they do not find."""

    def __init__(self, kind: str, blocks: int = 1000) -> None:
        self.groups = group_layers(LAYOUTS[kind])
        self.manager = BlockManager(blocks, lambda key: 1)
        self.index = PrefixIndex(self.groups, self.manager, SIZE)
        self.contents: dict[Block, tuple[int, ...]] = {}
        """By block, the tokens from the first on that shaped it."""

    def match(self, tokens: Seq[int], *, partial: bool = True, root: bytes = ROOT) -> Match:
        limit = len(tokens) - 1
        keys = list(chains(root, tokens[: limit // SIZE * SIZE], SIZE))
        return self.index.match(root, list(tokens), keys, limit=limit, partial=partial)

    def compute(self, tokens: Seq[int], root: bytes = ROOT) -> list[Block]:
        """Registers all blocks of `tokens`, state at the end included; the blocks, still in use."""
        node: Node | None = self.index.root(root)
        used: list[Block] = []
        for start in range(0, len(tokens), SIZE):
            part = tuple(tokens[start : start + SIZE])
            blocks = {}
            for group in self.groups:
                got = self.manager.allocate(PoolKey(group.index, PLAIN), 1)
                if got is None:
                    return used
                blocks[group.index] = got[0]
                used.append(got[0])
                self.contents[got[0]] = tuple(tokens[: start + len(part)])
            if node is not None:
                vectors = {g: p for g, p in blocks.items() if g not in self._states}
                key = chain(node.key, part)
                node = self.index.insert(node, key, part, vectors)
                if node is not None:
                    for group_index in self._states:
                        self.index.insert_snapshot(node, len(part), blocks[group_index])
        return used

    def serve(self, tokens: Seq[int]) -> None:
        self.manager.release_all(self.compute(tokens))

    @property
    def _states(self) -> set[int]:
        return {g.index for g in self.groups if isinstance(g.spec, RecurrentState)}


def test_a_prompt_that_was_never_seen_finds_nothing() -> None:
    world = World("full")
    assert world.match(range(9)) == Match()
    world.serve(range(9))
    assert world.match(range(50, 60)) == Match()
    assert world.match(range(9), root=b"other") == Match()


def test_all_but_the_last_token_of_the_same_prompt_is_found() -> None:
    world = World("full")
    world.serve(range(10))
    match = world.match(range(10))
    assert (match.length, reason(match)) == (9, "")
    assert [world.contents[block] for block in match.blocks[0] if block] == [
        tuple(range(4)),
        tuple(range(8)),
    ]
    assert world.contents[match.partial[0]] == tuple(range(10))


@pytest.mark.parametrize(("partial", "length"), [(True, 6), (False, 4)])
def test_prompts_that_part_within_a_page(partial: bool, length: int) -> None:
    world = World("full")
    world.serve(range(12))
    match = world.match([*range(6), 99, 98, 97], partial=partial)
    assert (match.length, reason(match)) == (length, "first difference at token 6")
    assert bool(match.partial) == partial


def test_whole_blocks_of_the_same_prompt_are_all_there_is_to_find_in_formats_with_a_tail() -> None:
    world = World("full")
    world.serve(range(10))
    match = world.match(range(10), partial=False)
    assert (match.length, reason(match)) == (8, "")


def test_the_child_that_agrees_longest_is_chosen() -> None:
    world = World("full")
    for last in ([7, 1, 1, 1], [7, 8, 1, 1], [7, 8, 9, 1], [7, 9, 1, 1]):
        world.serve([0, 0, 0, 0, *last])
    assert world.match([0, 0, 0, 0, 7, 8, 9, 3, 3]).length == 7
    assert world.match([0, 0, 0, 0, 7, 7, 9, 3, 3]).length == 5


def test_a_window_needs_only_what_it_shows() -> None:
    world = World("window")
    world.serve(range(20))
    match = world.match([*range(17), 99, 99])
    assert match.length == 17
    assert [block is None for block in match.blocks[0]] == [True, True, True, False]
    assert None not in match.blocks[1]


def test_a_window_page_that_is_gone_moves_the_boundary_before_it() -> None:
    world = World("window")
    blocks = world.compute(range(20))
    gone = next(p for p in blocks if p.pool.group == 0 and world.contents[p] == tuple(range(16)))
    world.manager.release_all(blocks)
    world.index.path(ROOT, list(chains(ROOT, range(16), SIZE)))[3].forget(gone)
    world.manager.drop(gone)
    match = world.match(range(20))
    assert (match.length, reason(match)) == (12, "evicted")


def test_recurrent_layers_start_at_a_snapshot() -> None:
    world = World("recurrent")
    world.serve(range(10))
    match = world.match([*range(10), 99, 99])
    assert (match.length, world.contents[match.snapshots[0]]) == (10, tuple(range(10)))
    match = world.match([*range(7), 99, 99])
    assert (match.length, reason(match)) == (4, "first difference at token 7")


def test_a_missing_snapshot_is_named_where_it_would_save_a_block() -> None:
    world = World("recurrent")
    world.serve(range(12))
    path = world.index.path(ROOT, list(chains(ROOT, range(12), SIZE)))
    for block in list(path[1].snapshots.values()):
        path[1].forget(block)
        world.manager.drop(block)
    assert reason(world.match([*range(8), 99, 99])) == "snapshot missing"
    assert reason(world.match([*range(7), 99, 99])) == "first difference at token 7"


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_a_prompt_that_goes_on_where_an_earlier_one_ended_does_not_differ(kind: str) -> None:
    world = World(kind)
    world.serve(range(10))
    assert reason(world.match([*range(10), 99, 99])) == "cached prefix ends at token 10"
    world.serve([*range(8)])
    assert reason(world.match([*range(9), 99, 99])) == "first difference at token 9"
    other = World(kind)
    other.serve(range(8))
    assert reason(other.match([*range(8), 99, 99])) == "cached prefix ends at token 8"
    other.serve(range(10))
    assert reason(other.match([*range(8), 99, 99])) == "first difference at token 8"


def test_a_snapshot_is_found_beside_a_sibling_that_agrees_longer() -> None:
    world = World("recurrent")
    world.serve([*range(6)])
    world.serve([*range(7), 50])
    match = world.match([*range(7), 99, 99])
    assert (match.length, reason(match)) == (6, "first difference at token 7")
    assert world.contents[match.snapshots[0]] == tuple(range(6))
    assert world.contents[match.partial[1]] == tuple(range(6))


def test_a_partly_filled_page_grows_with_its_sequence() -> None:
    world = World("full")
    (block,) = world.compute([1, 2])
    root = world.index.root(ROOT)
    full = world.index.insert(root, chain(ROOT, [1, 2, 3, 4]), (1, 2, 3, 4), {0: block})
    assert full is not None
    assert block.holder is full
    assert list(root.children.values()) == [full]
    assert world.match([1, 2, 3, 4, 5]).length == 4


def test_what_hangs_on_an_evicted_page_goes_with_it() -> None:
    world = World("full")
    blocks = world.compute(range(12))
    world.manager.release_all(blocks[:1])  # its successors are still in use
    assert kept_blocks(world.manager) == 1
    holder = blocks[0].holder
    assert holder is not None
    holder.forget(blocks[0])
    world.manager.drop(blocks[0])
    assert world.match(range(12)) == Match()
    assert all(block.holder is None for block in blocks)
    world.manager.release_all(blocks[1:])
    assert (live_blocks(world.manager), kept_blocks(world.manager)) == (0, 0)


def test_a_sequence_whose_start_was_evicted_registers_nothing_more() -> None:
    world = World("full")
    world.serve(range(4))
    node = world.index.path(ROOT, [chain(ROOT, range(4))])[0]
    world.index.clear()
    block = (world.manager.allocate(PoolKey(0, PLAIN), 1) or [])[0]
    assert world.index.insert(node, chain(node.key, (4, 5, 6, 7)), (4, 5, 6, 7), {0: block}) is None
    assert block.holder is None


def test_identities_that_are_not_used_any_more_leave_nothing_behind() -> None:
    world = World("full", blocks=8)

    def nodes() -> int:
        gc.collect()
        return sum(type(each) is Node for each in gc.get_objects())

    before = nodes()
    for number in range(100):
        world.manager.release_all(world.compute(range(8), root=b"salt %d" % number))
    assert nodes() - before <= 3 * 8


def test_chains_are_chained_and_common_lengths_common() -> None:
    first, second = chains(ROOT, range(8), SIZE)
    assert (first, second) == (chain(ROOT, range(4)), chain(first, range(4, 8)))
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([], [1]) == 0
    some = list(range(100))
    for length in (0, 1, 2, 3, 7, 8, 63, 64, 99, 100):
        assert common_length(some, [*some[:length], -1, *some]) == length
    assert common_length([1, 2], [1, 2, 3]) == 2
    assert common_length([2], [1]) == 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(prompts, st.booleans()), max_size=25), room=st.integers(8, 40))
def test_random_requests_find_only_what_was_computed_of_them(
    kind: str, requests: list[tuple[list[int], bool]], room: int
) -> None:
    world = World(kind, room)
    for tokens, partial in requests:
        match = world.match(tokens, partial=partial)
        assert match.length < len(tokens)
        assert partial or match.length % SIZE == 0
        for group in world.groups:
            for number, block in enumerate(match.blocks.get(group.index, [])):
                if block is not None:
                    assert world.contents[block] == tuple(tokens[: (number + 1) * SIZE])
        rest = match.length % SIZE
        for block in match.partial.values():
            assert world.contents[block][: match.length] == tuple(tokens[: match.length])
        assert bool(match.partial) == bool(rest and match.length)
        for state in match.snapshots.values():
            assert world.contents[state] == tuple(tokens[: match.length])
        world.serve(tokens)
        assert world.manager.capacity.claimed <= room
        assert live_blocks(world.manager) == 0
    world.index.clear()
    assert kept_blocks(world.manager) == 0


class _Counted(tuple[int, ...]):
    """Tokens that count how often they are compared."""

    compared = 0

    def __lt__(self, other: tuple[int, ...]) -> bool:
        _Counted.compared += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return super().__eq__(other)

    __hash__ = tuple.__hash__


def test_evicting_a_block_does_not_look_at_all_of_its_siblings() -> None:
    world = World("full", blocks=300)
    root = world.index.root(ROOT)
    blocks = []
    for first in range(300):
        tokens = _Counted((first, *range(SIZE - 1)))
        (block,) = world.manager.allocate(PoolKey(0, PLAIN), 1) or ()
        world.index.insert(root, chain(root.key, tokens), tokens, {0: block})
        blocks.append(block)
    world.manager.release_all(blocks)
    _Counted.compared = 0
    for _ in range(10):
        assert world.manager.allocate(PoolKey(0, PLAIN), 1) is not None
    assert kept_blocks(world.manager) == 290
    assert _Counted.compared < 10 * 30
