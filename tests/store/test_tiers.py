"""Another tier below the disk: found, read, stored, removed and counted like the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root
from mlx_lm_kvpersist.errors import BlockCorrupt
from mlx_lm_kvpersist.request_log import Metrics
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.files import Arrays
from mlx_lm_kvpersist.store.records import KVBlock, Saved

from .conftest import ROOT, arrays_of, arrays_of_checkpoint, chain, save_turn, state


class Shared:
    """A tier in a dictionary."""

    name = "shared"

    def __init__(self) -> None:
        self.held: dict[bytes, tuple[Record, Arrays]] = {}
        self.is_damaged = False

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        blocks = (block for block, _ in self.held.values() if isinstance(block, Block))
        return [block for block in blocks if block.parent == parent][:limit]

    def branches(self, path: Mapping[bytes, bytes]) -> set[bytes]:
        children = {key: {one.key for one in self.children(key)} for key in path}
        return {key for key, child in path.items() if children[key] - {child}}

    def checkpoints(self, blocks: Sequence[bytes]) -> Iterable[Checkpoint]:
        found = (block for block, _ in self.held.values() if isinstance(block, Checkpoint))
        return [one for one in found if one.block in blocks]

    def __contains__(self, key: bytes) -> bool:
        return key in self.held

    def load(self, block: Record, root: Root) -> Arrays:
        if self.is_damaged:
            raise BlockCorrupt("damaged")
        if block.key not in self.held:
            raise FileNotFoundError(block.key.hex())
        return self.held[block.key][1]

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> list[Saved]:
        for commit in commits:
            for block in commit.records:
                if (entry := entry_of(block.key)) is not None:
                    self.held[block.key] = block, entry.arrays
        return [Saved(commit) for commit in commits]

    def remove(self, key: bytes, reason: str | None = None) -> None:
        self.held.pop(key, None)

    def stats(self) -> dict[str, Any]:
        named = ("checkpoints", "bytes", "checkpoint_bytes", "evicted", "max_bytes")
        return {"blocks": len(self.held), **dict.fromkeys(named, 0)}


NODES = chain([1, 2], [3, 4], [5])


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def store(tmp_path: Path, limits: StoreLimits, shared: Shared) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path / "store", limits)
    store.add(shared)
    yield store
    store.close()


def hold(shared: Shared, nodes: Sequence[Block]) -> None:
    shared.held.update((node.key, (node, arrays_of(node))) for node in nodes)


def test_what_only_a_third_tier_has_is_found_and_read(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES[:1], "s")
    store.pool.clear()
    shared.held.clear()
    hold(shared, NODES[1:])
    shared.held[state(NODES[2]).key] = state(NODES[2]), arrays_of_checkpoint(state(NODES[2]))
    assert store.children(NODES[0].key) == [NODES[1]] and NODES[2].key in store
    assert store.checkpoints([NODES[2].key]) == {NODES[2].key: [state(NODES[2])]}
    assert [store.tier_of(node.key) for node in NODES] == ["disk", "shared", "shared"]
    loaded = list(store.reader.load_all(NODES, ROOT))
    assert [one and one.tier for one in loaded] == ["disk", "shared", "shared"]
    for node, one in zip(NODES[1:], loaded[1:], strict=True):
        expected = shared.held[node.key][1]
        assert one is not None
        assert all(mx.array_equal(one.arrays[name], array) for name, array in expected.items())
    assert [store.tier_of(node.key) for node in NODES] == ["ram"] * 3


def test_a_branch_of_a_third_tier_is_found_beside_one_in_ram(
    store: BlockStore, shared: Shared
) -> None:
    save_turn(store, NODES, "s")
    (other,) = chain([7, 8], parent=NODES[0].key)
    hold(shared, [other])
    source = store.ram_first(ROOT.key, "".join(node.text for node in NODES))
    assert {one.key for one in source.children(NODES[0].key)} == {NODES[1].key, other.key}


def test_a_commit_is_written_to_every_tier(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES, "s", [state(NODES[2])])
    keys = {*(node.key for node in NODES), state(NODES[2]).key}
    assert shared.held.keys() == keys and store.index.keys() | {state(NODES[2]).key} == keys


def test_a_damaged_block_is_taken_from_the_next_tier(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES[:1], "s")
    store.pool.clear()
    path = next((store.folder / "blocks").glob("*/*"))
    path.write_bytes(path.read_bytes()[:-1])
    loaded = store.reader.load(NODES[0], ROOT)
    assert loaded is not None and loaded.tier == "shared"
    store.drain()
    assert NODES[0].key not in store.index and NODES[0].key in shared


def test_what_a_tier_has_damaged_is_forgotten_there(store: BlockStore, shared: Shared) -> None:
    hold(shared, NODES[:1])
    shared.is_damaged = True
    assert store.reader.load(NODES[0], ROOT) is None
    assert not shared.held and store.blocks_quarantined == 1


def test_a_block_that_does_not_fit_goes_from_all_tiers(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES, "s")
    store.lose(NODES[2], "does not fit")
    store.drain()
    assert NODES[2].key not in store and NODES[1].key in store
    assert NODES[2].key not in store.index and NODES[2].key not in shared


def test_metrics_have_a_label_for_every_tier(store: BlockStore) -> None:
    save_turn(store, NODES, "s")
    text = Metrics(store.stats).exposed().decode()
    for tier in ("ram", "disk", "shared"):
        assert f'kvpersist_blocks{{tier="{tier}"}} 3.0' in text
