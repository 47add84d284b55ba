"""A tier below the disk: lookups, reads, writes, removals and metrics include it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root
from mlx_lm_kvpersist.errors import BlockCorrupt
from mlx_lm_kvpersist.request.outcome import Metrics
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.files import Arrays
from mlx_lm_kvpersist.store.records import KVBlock, Leaf, Saved
from mlx_lm_kvpersist.store.verify import find_problems
from tests.support import writer_held

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
        children = {key: {child.key for child in self.children(key)} for key in path}
        return {key for key, child in path.items() if children[key] - {child}}

    def checkpoints(self, blocks: Sequence[bytes]) -> Iterable[Checkpoint]:
        checkpoints = (record for record, _ in self.held.values() if isinstance(record, Checkpoint))
        return [checkpoint for checkpoint in checkpoints if checkpoint.block in blocks]

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
    ) -> Sequence[Saved | None]:
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


def add_blocks(shared: Shared, nodes: Sequence[Block]) -> None:
    shared.held.update((node.key, (node, arrays_of(node))) for node in nodes)


def test_records_only_in_the_third_tier_are_found_and_read(
    store: BlockStore, shared: Shared
) -> None:
    save_turn(store, NODES[:1], "s")
    store.pool.clear()
    shared.held.clear()
    add_blocks(shared, NODES[1:])
    shared.held[state(NODES[2]).key] = state(NODES[2]), arrays_of_checkpoint(state(NODES[2]))
    assert store.children(NODES[0].key) == [NODES[1]] and NODES[2].key in store
    assert store.checkpoints([NODES[2].key]) == {NODES[2].key: [state(NODES[2])]}
    assert [store.tier_of(node.key) for node in NODES] == ["disk", "shared", "shared"]
    loaded = list(store.reader.load_all(NODES, ROOT))
    assert [entry and entry.tier for entry in loaded] == ["disk", "shared", "shared"]
    for node, entry in zip(NODES[1:], loaded[1:], strict=True):
        expected = shared.held[node.key][1]
        assert entry is not None
        assert all(mx.array_equal(entry.arrays[name], array) for name, array in expected.items())
    assert [store.tier_of(node.key) for node in NODES] == ["ram"] * 3


def test_branch_in_the_third_tier_is_found_beside_a_branch_in_ram(
    store: BlockStore, shared: Shared
) -> None:
    save_turn(store, NODES, "s")
    (other,) = chain([7, 8], parent=NODES[0].key)
    add_blocks(shared, [other])
    source = store.ram_first(ROOT.key, "".join(node.text for node in NODES))
    assert {block.key for block in source.children(NODES[0].key)} == {NODES[1].key, other.key}


def test_commit_is_written_to_every_tier(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES, "s", [state(NODES[2])])
    keys = {*(node.key for node in NODES), state(NODES[2]).key}
    assert shared.held.keys() == keys and store.index.keys() | {state(NODES[2]).key} == keys


def test_turns_are_saved_on_disk_if_another_tier_fails(
    store: BlockStore, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = chain([1]), chain([2])
    with monkeypatch.context() as patch, writer_held(store):
        patch.setattr(shared, "store", mock.Mock(side_effect=OSError("offline")))
        for (node,) in turns:
            turn = Commit(ROOT, (node,), Leaf("s", node.key, node.stop))
            store.commit(turn, [(node, arrays_of(node))])
    assert (store.turns_saved, store.turns_not_saved) == (2, 0)
    for (node,) in turns:
        entry = store.pool.get(node.key)
        assert entry is not None and entry.is_stored and not entry.pins


def test_damaged_block_is_read_from_the_next_tier(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES[:1], "s")
    store.pool.clear()
    path = next((store.folder / "blocks").glob("*/*"))
    path.write_bytes(path.read_bytes()[:-1])
    loaded = store.reader.load(NODES[0], ROOT)
    assert loaded is not None and loaded.tier == "shared"
    store.drain()
    assert NODES[0].key not in store.index and NODES[0].key in shared


def test_damaged_block_is_removed_from_its_tier(store: BlockStore, shared: Shared) -> None:
    add_blocks(shared, NODES[:1])
    shared.is_damaged = True
    assert store.reader.load(NODES[0], ROOT) is None
    assert not shared.held and store.blocks_quarantined == 1


def test_lost_block_is_removed_from_all_tiers(store: BlockStore, shared: Shared) -> None:
    save_turn(store, NODES, "s")
    store.lose(NODES[2], "does not fit")
    store.drain()
    assert NODES[2].key not in store and NODES[1].key in store
    assert NODES[2].key not in store.index and NODES[2].key not in shared


class ReadOnly(Shared):
    """A tier that stores nothing."""

    name = "read-only"

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> Sequence[Saved | None]:
        return [None for _ in commits]


@pytest.mark.parametrize("n_on_disk", [0, 1])
@pytest.mark.parametrize("n_in_ram", [0, 1, 2])
def test_turn_is_saved_with_its_earlier_blocks_of_a_read_only_tier(
    tmp_path: Path,
    limits: StoreLimits,
    n_in_ram: int,
    n_on_disk: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A commit contains only its new blocks; RAM may have evicted the restored blocks."""
    tier = ReadOnly()
    add_blocks(tier, NODES[:2])
    folder = tmp_path / "store"
    with closing(BlockStore(folder, limits)) as store:
        store.add(tier)
        if n_on_disk:
            save_turn(store, NODES[:n_on_disk], "s")
            store.pool.clear()
        for node in NODES[2 - n_in_ram : 2]:
            assert store.reader.load(node, ROOT) is not None
        leaf = Leaf("s", NODES[2].key, NODES[2].stop)
        new = [(NODES[2], arrays_of(NODES[2]))]
        store.commit(Commit(ROOT, (NODES[2],), leaf), new, chain=NODES)
        store.drain()
        assert store.turns_not_saved == 0 and "is not saved" not in caplog.text
    with closing(BlockStore(folder, limits)) as again:  # without the tier
        again.drain()
        (session,) = again.index.sessions_named("s")
        assert [block for block, _ in again.index.chain(session.leaf)] == NODES
        for node, entry in zip(NODES, again.reader.load_all(NODES, ROOT), strict=True):
            assert entry is not None
            scales, expected = entry.arrays["0.k.scales"], arrays_of(node)["0.k.scales"]
            assert mx.array_equal(scales, expected)
        assert not find_problems(folder, again.index)


def test_metrics_have_a_label_for_every_tier(store: BlockStore) -> None:
    save_turn(store, NODES, "s")
    text = Metrics(store.stats).exposed().decode()
    for tier in ("ram", "disk", "shared"):
        assert f'kvpersist_blocks{{tier="{tier}"}} 3.0' in text
