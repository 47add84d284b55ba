from __future__ import annotations

import sqlite3
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.errors import StoreError, StoreFormatError
from mlx_lm_kvpersist.tiers.files import FORMAT, block_path
from mlx_lm_kvpersist.tiers.index import Index
from mlx_lm_kvpersist.tiers.store import BlockStore, StoreLimits, Turn

from .conftest import ROOT, arrays_of, chain, save_turn


def reopened(store: BlockStore) -> BlockStore:
    store.close()
    return BlockStore(store.folder, store.limits)


def test_blocks_outlive_the_process(store: BlockStore) -> None:
    nodes = chain([1, 2], [3])
    content = save_turn(store, nodes, name="s")
    again = reopened(store)
    assert again.children(ROOT) == [nodes[0]]
    assert again.children(nodes[0].key) == [nodes[1]]
    assert again.index.session_leaves(ROOT, "s") == [nodes[1].key]
    for node in nodes:
        loaded = again.load(node, ROOT)
        assert loaded is not None and loaded.from_disk
        assert loaded.arrays.keys() == content[node.key].keys()
        for name, array in content[node.key].items():
            assert mx.array_equal(loaded.arrays[name], array)
        hot = again.load(node, ROOT)
        assert hot is not None and not hot.from_disk
    again.close()


def test_unwritten_blocks_are_found_in_ram(store: BlockStore) -> None:
    (node,) = chain([1, 2, 3])
    store.keep([(node, arrays_of(node))], pinned=False)
    assert store.children(ROOT) == [node]
    assert node.key in store and node.key not in store.index


def test_a_turn_writes_only_what_is_new(store: BlockStore) -> None:
    first = chain([1], [2])
    save_turn(store, first, "s")
    stamps = {node.key: block_path(store.folder, node.key).stat().st_mtime_ns for node in first}
    save_turn(store, chain([1], [2], [3]), "s")
    assert store.index.n_blocks() == 3
    for key, stamp in stamps.items():
        assert block_path(store.folder, key).stat().st_mtime_ns == stamp


def test_a_session_moves_with_its_conversation(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    longer = chain([1], [2], [3])
    save_turn(store, longer, "s")
    assert store.index.session_leaves(ROOT, "s") == [longer[-1].key]
    # A branch is a second leaf; the first stays.
    branch = chain([1], [9])
    save_turn(store, branch, "s")
    assert set(store.index.session_leaves(ROOT, "s")) == {longer[-1].key, branch[-1].key}


def test_a_tail_gives_way_to_the_block_that_contains_it(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s")
    save_turn(store, [head, tail], "other")
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", replaced=((tail.key, longer[1].key),))
    assert tail.key not in store
    assert not block_path(store.folder, tail.key).exists()
    for name in ("s", "other"):
        assert store.index.session_leaves(ROOT, name) == [longer[1].key]


def test_least_recently_used_conversations_go_first(tmp_path: Path) -> None:
    probe = BlockStore(tmp_path / "probe", StoreLimits(1 << 20, 1 << 20))
    save_turn(probe, chain([0]))
    size = probe.index.n_bytes()
    probe.close()
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 20, size * 6))
    save_turn(store, chain([1], [2], [3]), "old")
    save_turn(store, chain([4], [5], [6]), "used")
    store.touch(chain([1], [2], [3])[-1].key)
    save_turn(store, chain([7], [8]), "new")
    assert store.index.n_bytes() <= size * 6
    assert [n.key in store.index for n in chain([1], [2], [3])] == [True] * 3
    assert [n.key in store.index for n in chain([4], [5], [6])] == [True, False, False]
    assert store.index.session_leaves(ROOT, "used") == []
    files = {path.stem for path in (store.folder / "blocks").rglob("*.safetensors")}
    assert len(files) == store.index.n_blocks()
    store.close()


def test_a_block_that_cannot_be_trusted_is_dropped(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes)
    store.pool.clear()
    path = block_path(store.folder, nodes[1].key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert store.load(nodes[1], ROOT) is None
    block_path(store.folder, nodes[0].key).unlink()
    assert store.load(nodes[0], ROOT) is None
    store.drain()
    assert nodes[0].key not in store.index and nodes[1].key not in store.index


def test_blocks_of_an_unended_turn_move_no_session(store: BlockStore) -> None:
    nodes = chain([1], [2])
    store.keep([(node, arrays_of(node)) for node in nodes], pinned=True)
    store.submit(Turn(ROOT, tuple(nodes)))
    store.drain()
    assert store.index.n_blocks() == 2
    assert store.index.session_leaves(ROOT, "s") == []


def test_a_failed_write_commits_nothing(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = chain([1], [2])
    (store.folder / "blocks").write_text("in the way")
    save_turn(store, nodes, "s")
    assert store.index.n_blocks() == 0
    assert store.index.session_leaves(ROOT, "s") == []
    assert "could not be changed" in caplog.text
    # What could not be written is still served from RAM, and may go when RAM is needed.
    block = store.pool.get(nodes[0].key)
    assert block is not None and not block.pinned


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {FORMAT + 1}")
    db.close()
    with pytest.raises(StoreFormatError, match=f"format {FORMAT + 1}"):
        Index(path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, limits: StoreLimits) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--kvpersist-dir"):
        BlockStore(tmp_path / "file" / "store", limits)
