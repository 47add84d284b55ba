"""Checkpoints in a store: saving, lookup, replacement, eviction, and loss with their block."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.database import Database
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Gone, Leaf
from tests.support import hold, writer_held
from tests.support.store_files import block_path, checkpoint_path, write_block

from .conftest import (
    ROOT,
    arrays_of,
    arrays_of_checkpoint,
    chain,
    checkpoint_files,
    names,
    save_turn,
    state,
    window,
)


def reopened(store: BlockStore) -> BlockStore:
    store.close()
    return BlockStore(store.folder, store.limits)


def checkpoints_of(store: BlockStore, *nodes: Block) -> set[Checkpoint]:
    by_block = store.checkpoints([node.key for node in nodes])
    assert all(
        checkpoint.block == block
        for block, checkpoints in by_block.items()
        for checkpoint in checkpoints
    )
    return {checkpoint for checkpoints in by_block.values() for checkpoint in checkpoints}


def check_holds(store: BlockStore, checkpoint: Checkpoint, tier: str) -> None:
    """Assert that a tier has a checkpoint with the arrays of `arrays_of_checkpoint`."""
    loaded = store.reader.load(checkpoint, ROOT)
    assert loaded is not None and loaded.tier == tier
    expected = arrays_of_checkpoint(checkpoint)
    assert loaded.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert mx.array_equal(loaded.arrays[name], array)


def test_saved_checkpoints_are_found_after_a_restart(store: BlockStore) -> None:
    nodes = chain([1, 2], [3])
    checkpoints = [window(nodes[0]), window(nodes[1]), state(nodes[1])]
    save_turn(store, nodes, "s", checkpoints)
    again = reopened(store)
    assert checkpoints_of(again, *nodes) == set(checkpoints)
    assert checkpoints_of(again, nodes[0]) == {checkpoints[0]}
    assert checkpoint_files(again.folder) == names(*checkpoints)
    for checkpoint in checkpoints:
        check_holds(again, checkpoint, "disk")
        again.pool.touch([checkpoint.key], proven=True)
        check_holds(again, checkpoint, "ram")
    again.close()


def test_unwritten_checkpoints_are_found_in_ram(store: BlockStore) -> None:
    nodes = chain([1, 2], [3])
    with writer_held(store):
        content = [(node, arrays_of(node)) for node in nodes]
        checkpoint = state(nodes[1])
        turn = Commit(ROOT, tuple(nodes), checkpoints=(checkpoint,))
        store.commit(turn, [*content, *[(checkpoint, arrays_of_checkpoint(checkpoint))]])
        assert checkpoints_of(store, *nodes) == {checkpoint}
        check_holds(store, checkpoint, "ram")
        assert checkpoint_files(store.folder) == set()
    assert checkpoint_files(store.folder) == names(checkpoint)


def test_lookup_returns_only_blocks_that_have_checkpoints(store: BlockStore) -> None:
    nodes = chain(*([n] for n in range(1, 1200)))
    save_turn(store, nodes[:3], "s", [state(nodes[2])])
    by_block = store.checkpoints([node.key for node in nodes])
    assert by_block == {nodes[2].key: [state(nodes[2])]}
    assert store.checkpoints([]) == {}


def test_lookup_takes_more_blocks_than_one_sql_statement(store: BlockStore) -> None:
    nodes = chain(*([n] for n in range(1, 1200)))
    store.drain()  # the first sweep would remove rows without files
    checkpoints = [window(node) for node in nodes]
    store.index.add_blocks(ROOT, [(checkpoint, 1) for checkpoint in checkpoints])
    assert checkpoints_of(store, *nodes) == set(checkpoints)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE checkpoints SET kind = 'state2'",
        "UPDATE checkpoints SET n_tokens = 1",
        "UPDATE checkpoints SET n_tokens = 'x'",
        "UPDATE checkpoints SET n_tokens = 1 << 40",
        "UPDATE checkpoints SET kind = x'00ff'",
        "UPDATE checkpoints SET key = x'00'",
    ],
)
def test_invalid_checkpoint_row_is_ignored_until_saved_again(
    store: BlockStore, statement: str
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.pool.clear()
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute(statement)
    assert store.checkpoints([node.key]) == {}
    # The checkpoint is found again after a turn has saved it.
    save_turn(store, [node], "s", [state(node)])
    again = reopened(store)
    assert checkpoints_of(again, node) == {state(node)}
    check_holds(again, state(node), "disk")
    again.close()


# Blocks without arrays.


def test_blocks_without_arrays_are_stored_and_verified(store: BlockStore) -> None:
    """If every layer is recurrent, blocks are only ids and text; checkpoints have the caches."""
    nodes = chain([1, 2], [3])
    checkpoint = state(nodes[1])
    keys = tuple(node.key for node in nodes)
    turn = Commit(ROOT, tuple(nodes), Leaf("s", keys[-1], 3), checkpoints=(checkpoint,))
    store.commit(
        turn, [*[(node, {}) for node in nodes], *[(checkpoint, arrays_of_checkpoint(checkpoint))]]
    )
    store.drain()
    again = reopened(store)
    assert again.children(ROOT.key) == [nodes[0]]
    for tier in ("disk", "ram"):
        for node in nodes:
            loaded = again.reader.load(node, ROOT)
            assert loaded is not None and loaded.arrays == {} and loaded.tier == tier
        check_holds(again, checkpoint, tier)
        again.pool.touch([*keys, checkpoint.key], proven=True)
    assert again.index.totals().n_blocks == 2
    path = block_path(again.folder, nodes[0].key)
    again.pool.clear()
    content = bytearray(path.read_bytes())
    content[content.index(b"<1>")] ^= 1
    path.write_bytes(content)
    assert again.reader.load(nodes[0], ROOT) is None
    again.close()


def test_blocks_without_arrays_count_towards_the_ram_budget(
    tmp_path: Path, limits: StoreLimits
) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, max_ram_bytes=2000))
    nodes = chain(*(list(range(n, n + 30)) for n in range(100)))
    store.commit(Commit(ROOT, tuple(nodes)), [(node, {}) for node in nodes])
    store.drain()
    assert 1000 < store.pool.n_bytes <= 2000 and store.index.totals().n_blocks == 100
    store.close()


# Turns.


def test_turn_writes_only_new_checkpoints(store: BlockStore) -> None:
    nodes = chain([1], [2])
    checkpoint = state(nodes[1])
    save_turn(store, nodes, "s", [checkpoint])
    stamp = checkpoint_path(store.folder, checkpoint.key).stat().st_mtime_ns
    store.pool.clear()
    longer = chain([1], [2], [3])
    save_turn(store, longer, "s", [checkpoint, state(longer[2])])
    assert checkpoint_path(store.folder, checkpoint.key).stat().st_mtime_ns == stamp
    assert checkpoints_of(store, *longer) == {checkpoint, state(longer[2])}


def test_commit_without_blocks_saves_a_checkpoint_of_a_stored_block(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s")
    checkpoint = window(nodes[0])
    new = [(checkpoint, arrays_of_checkpoint(checkpoint))]
    store.commit(Commit(ROOT, (), checkpoints=(checkpoint,)), new)
    again = reopened(store)
    assert checkpoints_of(again, *nodes) == {checkpoint}
    again.close()


def test_checkpoint_of_an_unstored_block_supersedes_nothing(
    store: BlockStore,
) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[0])])
    (unstored,) = chain([9])
    save_turn(store, nodes, "s", [window(nodes[1]), state(unstored)], [state(nodes[0])])
    assert checkpoint_files(store.folder) == names(state(nodes[0]), window(nodes[1]))
    assert checkpoints_of(store, nodes[0]) == {state(nodes[0])}, "superseded"
    again = reopened(store)
    assert checkpoints_of(again, unstored) == set()
    again.close()


def test_commit_deletes_superseded_checkpoints_in_ram_and_on_disk(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1]), window(nodes[1])])
    longer = chain([1], [2], [3])
    save_turn(store, longer, "s", [state(longer[2])], [state(nodes[1])])
    assert checkpoints_of(store, *longer) == {window(nodes[1]), state(longer[2])}
    assert state(nodes[1]).key not in store.pool
    assert checkpoint_files(store.folder) == names(window(nodes[1]), state(longer[2]))
    assert store.reader.load(state(nodes[1]), ROOT) is None
    assert store.disk.gone.get(state(nodes[1]).key) is None


def test_a_checkpoint_does_not_supersede_itself(store: BlockStore) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)], [state(node)])
    assert checkpoint_files(store.folder) == names(state(node))
    check_holds(store, state(node), "ram")


@pytest.mark.parametrize("failing_step", ["commit", "put_session", "folder"])
def test_a_failed_turn_supersedes_nothing(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, failing_step: str
) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    before = {path: path.read_bytes() for path in store.folder.glob("*/*/*")}
    longer = chain([1], [2], [3])

    def fail(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    new = checkpoint_path(store.folder, state(longer[2]).key)
    with monkeypatch.context() as patch:
        if failing_step == "folder":
            new.parent.mkdir(exist_ok=True)
            real = os.replace

            def replace(source: Path, target: Path) -> None:
                if target == new:
                    raise OSError("no space left on device")
                real(source, target)

            patch.setattr(os, "replace", replace)
        else:
            patch.setattr(Index, failing_step, fail)
        save_turn(store, longer, "s", [state(longer[2])], [state(nodes[1])])
    assert store.turns_not_saved == 1
    assert {path: path.read_bytes() for path in store.folder.glob("*/*/*")} == before
    assert store.index.keys("checkpoints") == {state(nodes[1]).key}
    # Unwritten checkpoints, and checkpoints that they supersede, are served from RAM.
    check_holds(store, state(longer[2]), "ram")
    check_holds(store, state(nodes[1]), "ram")
    save_turn(store, longer, "s", [state(longer[2])], [state(nodes[1])])
    assert checkpoint_files(store.folder) == names(state(longer[2]))


def test_waiting_turn_keeps_a_checkpoint_that_another_turn_supersedes(store: BlockStore) -> None:
    """The second branch continues from the checkpoint that the first branch supersedes."""
    nodes = chain([1], [2])
    old = state(nodes[1])
    save_turn(store, nodes, "s", [old])
    first, second = chain([1], [2], [3]), chain([1], [2], [4])
    with writer_held(store):
        for branch, checkpoints, superseded in (
            (first, (state(first[2]),), (old,)),
            (second, (old, state(second[2])), ()),
        ):
            new = [(branch[2], arrays_of(branch[2]))]
            new_checkpoints = [
                (checkpoint, arrays_of_checkpoint(checkpoint))
                for checkpoint in checkpoints
                if checkpoint != old
            ]
            turn = Commit(ROOT, tuple(branch), checkpoints=checkpoints, superseded=superseded)
            store.commit(turn, [*new, *new_checkpoints])
    again = reopened(store)
    assert checkpoints_of(again, *first, *second) == {old, state(first[2]), state(second[2])}
    check_holds(again, old, "disk")
    again.close()


def test_checkpoints_of_a_replaced_last_block_are_deleted(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s", [state(head), state(tail), window(tail)])
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", [state(longer[1])], replaced=((tail.key, longer[1].key),))
    assert checkpoint_files(store.folder) == names(state(head), state(longer[1]))
    assert store.index.keys("checkpoints") == {state(head).key, state(longer[1]).key}
    assert checkpoints_of(store, head, tail, *longer) == {state(head), state(longer[1])}


def test_replaced_rows_are_deleted_in_the_transaction_of_the_turn(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after the transaction leaves files without rows; a restart removes them."""
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s", [state(head), state(tail)])
    longer = chain([1], [2, 3, 4])

    def killed(*args: object, **kwargs: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", killed)
        checkpoints, superseded = [state(longer[1])], [state(head)]
        replaced = ((tail.key, longer[1].key),)
        save_turn(store, longer, "s", checkpoints, superseded, replaced=replaced)
    assert store.index.keys("checkpoints") == {state(longer[1]).key}
    assert len(checkpoint_files(store.folder)) == 3
    again = reopened(store)
    again.drain()
    assert checkpoint_files(again.folder) == names(state(longer[1]))
    again.close()


def test_limit_of_waiting_bytes_counts_checkpoints(store: BlockStore) -> None:
    first, second = chain([1]), chain([2])
    content = arrays_of_checkpoint(state(first[0]))
    store.writer.max_bytes = sum(array.nbytes for array in content.values()) * 3 // 2
    with writer_held(store):
        for nodes in (first, second):
            checkpoint = state(nodes[0])
            leaf = Leaf(None, nodes[-1].key, nodes[-1].stop)
            turn = Commit(ROOT, tuple(nodes), leaf, checkpoints=(checkpoint,))
            store.commit(
                turn, [*[(nodes[0], {})], *[(checkpoint, arrays_of_checkpoint(checkpoint))]]
            )
    assert store.turns_not_saved == 1
    assert checkpoint_files(store.folder) == names(state(second[0]))
    # The checkpoint of the dropped turn is in RAM, but not pinned.
    entry = store.pool.get(state(first[0]).key)
    assert entry is not None and not entry.pins and not entry.is_stored


# Eviction.


def tight(store: BlockStore, n_bytes: int) -> DiskStore:
    """Close a store, and open its folder with a budget `n_bytes` below its size."""
    store.close()
    disk = DiskStore(store.folder, store.limits)
    max_disk_bytes = disk.used_bytes() - n_bytes
    disk.limits = replace(disk.limits, max_disk_bytes=max_disk_bytes)
    return disk


def test_least_recently_used_leaf_or_checkpoint_is_evicted_first(store: BlockStore) -> None:
    old, new = chain([1], [2]), chain([3], [4])
    save_turn(store, old, "old", [window(old[0])])
    save_turn(store, new, "new", [state(new[1])])
    store.touch([old[1].key])  # but not its checkpoint, which is now the oldest
    store.drain()
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert disk.index.keys("checkpoints") == {state(new[1]).key}
    assert disk.index.totals().n_blocks == 4
    assert disk.gone.get(window(old[0]).key) is Gone.EVICTED
    assert not checkpoint_path(disk.folder, window(old[0]).key).exists()
    # Next, a leaf is evicted with its checkpoint.
    disk.limits = replace(disk.limits, max_disk_bytes=disk.used_bytes() - 1)
    assert disk.make_room(0)
    assert new[1].key not in disk.index and disk.index.keys("checkpoints") == set()
    assert checkpoint_files(disk.folder) == set()
    assert disk.gone.get(state(new[1]).key) is Gone.EVICTED
    disk.close()


def test_leaf_is_evicted_before_checkpoints_of_the_same_age(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes, "s", [state(nodes[0]), window(nodes[2])])
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert nodes[2].key not in disk.index
    assert disk.index.keys("checkpoints") == {state(nodes[0]).key}
    disk.close()


def test_recently_used_checkpoint_stays_on_disk(store: BlockStore) -> None:
    first, second = chain([1], [2]), chain([3], [4])
    save_turn(store, first, "one", [state(first[0])])
    save_turn(store, second, "two", [state(second[0])])
    store.touch([first[1].key], [state(first[0])])
    store.touch([second[1].key])
    store.drain()
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert disk.index.keys("checkpoints") == {state(first[0]).key}
    disk.close()


def test_recently_used_checkpoint_stays_in_ram(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(node) for node in nodes])
    store.touch([nodes[0].key], [state(nodes[0])])
    used = [store.pool.get(key) for key in (nodes[0].key, state(nodes[0]).key)]
    store.pool.max_bytes = sum(entry.n_bytes for entry in used if entry is not None)
    store.pool.unpin([])
    assert checkpoints_in_ram(store, *nodes) == {state(nodes[0])}


def checkpoints_in_ram(store: BlockStore, *nodes: Block) -> set[Checkpoint]:
    return set(store.pool.checkpoints(node.key for node in nodes))


def test_checkpoints_of_pinned_sessions_are_not_evicted(store: BlockStore) -> None:
    pinned, other = chain([1], [2]), chain([1], [3], [4])
    save_turn(store, pinned, "pinned", [window(pinned[0]), state(pinned[1])])
    save_turn(store, other, "other", [state(other[1]), state(other[2])])
    (session,) = [s for s in store.index.sessions() if s.name == "pinned"]
    store.disk.set_pinned(session, True)
    disk = tight(store, 1)
    disk.limits = replace(disk.limits, max_disk_bytes=0)
    assert not disk.make_room(0)
    assert disk.index.keys() == {node.key for node in pinned}
    assert disk.index.keys("checkpoints") == {window(pinned[0]).key, state(pinned[1]).key}
    disk.close()


def test_checkpoints_of_waiting_turns_are_not_evicted(store: BlockStore) -> None:
    first, second = chain([1], [2]), chain([3])
    save_turn(store, first, "one", [state(first[0]), state(first[1])])
    save_turn(store, second, "two", [state(second[0])])
    with writer_held(store):
        # The first commit has the block of its checkpoint; the second commit does not.
        store.commit(Commit(ROOT, tuple(first[:1]), checkpoints=(state(first[0]),)), [])
        store.commit(Commit(ROOT, (), checkpoints=(window(first[1]),)), [])
        keep = {key for commit in store.writer.commits() for key in commit.keys()}
    assert keep == {*(node.key for node in first), state(first[0]).key, window(first[1]).key}
    disk = tight(store, 1)
    disk.limits = replace(disk.limits, max_disk_bytes=0)
    assert not disk.make_room(0, keep=keep)
    assert disk.index.keys() == {node.key for node in first}
    assert disk.index.keys("checkpoints") == {state(first[0]).key}
    disk.close()


def test_checkpoints_never_exceed_the_disk_budget(tmp_path: Path) -> None:
    limits = StoreLimits(max_ram_bytes=4 << 20, max_disk_bytes=600 << 10)
    store = BlockStore(tmp_path / "store", limits)
    for n in range(12):
        nodes = chain([n], [n + 100])
        save_turn(store, nodes, f"s{n}", [state(nodes[0]), state(nodes[1])])
        assert store.disk.used_bytes() <= limits.max_disk_bytes
        on_disk = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
        assert on_disk <= limits.max_disk_bytes
        assert store.index.totals().n_bytes == sum(
            path.stat().st_size for path in store.folder.glob("*/*/*.safetensors")
        )
    assert store.turns_saved == 12 and store.index.totals().n_checkpoints >= 2
    (node,) = chain([99])
    big = {"big": mx.zeros((700 << 10,), mx.uint8)}
    mx.eval(big)
    turn = Commit(ROOT, (node,), Leaf("s", node.key, 1), checkpoints=(state(node),))
    store.commit(turn, [(node, {}), (state(node), big)])
    store.drain()
    assert store.turns_not_saved == 1
    assert node.key not in store.index and state(node).key not in store.index.keys("checkpoints")
    store.close()


# Checkpoints that cannot be loaded.


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_checkpoint_is_quarantined_and_can_be_saved_again(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = chain([1])
    checkpoint, other = state(node), window(node)
    save_turn(store, [node], "s", [checkpoint, other])
    store.pool.clear()
    path = checkpoint_path(store.folder, checkpoint.key)
    damage(path)
    with writer_held(store):
        assert store.reader.load(checkpoint, ROOT) is None
        assert checkpoints_of(store, node) == {other}, "the damaged checkpoint is found again"
    assert f"checkpoint {checkpoint.key.hex()} goes to quarantine" in caplog.text
    assert store.blocks_quarantined == 1
    assert not path.exists() and store.disk.gone.get(checkpoint.key) is Gone.QUARANTINED
    assert sorted(p.suffix for p in (store.folder / "quarantine").iterdir()) == [
        ".json",
        ".safetensors",
    ]
    # The block and its other checkpoint are intact; the damaged checkpoint can be saved again.
    check_holds(store, other, "disk")
    assert store.reader.load(node, ROOT) is not None
    save_turn(store, [node], "s", [checkpoint])
    store.pool.clear()
    check_holds(store, checkpoint, "disk")


def test_lookup_omits_records_that_are_being_quarantined(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer removes the row after a lookup has read it, and before the lookup returns."""
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    lookups: list[tuple[Callable[[], set[Any]], Record]] = [
        (lambda: checkpoints_of(store, node), state(node)),
        (lambda: set(store.children(ROOT.key)), node),
    ]
    read = store.view.ask
    for look_up, record in lookups:
        may_remove = hold(store.writer)
        store.lose(record, "canary")

        def read_and_remove(*args: Any, may_remove: Any = may_remove, **types: Any) -> Any:
            rows = read(*args, **types)
            may_remove.set()
            store.drain()
            return rows

        monkeypatch.setattr(store.view, "ask", read_and_remove)
        assert look_up() == set()
        assert may_remove.is_set()


def test_checkpoint_in_ram_that_fails_a_canary_is_quarantined(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.lose(state(node), "canary")
    assert checkpoints_of(store, node) == set()
    store.drain()
    assert checkpoint_files(store.folder) == set() and node.key in store
    assert f"checkpoint {state(node).key.hex()} goes to quarantine: canary" in caplog.text


def test_checkpoints_of_a_quarantined_block_are_removed(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[0]), state(nodes[1])])
    store.lose(nodes[1], "canary")
    assert checkpoints_of(store, nodes[0]) == {state(nodes[0])}
    assert state(nodes[1]).key not in store.pool
    store.drain()
    assert checkpoints_of(store, *nodes) == {state(nodes[0])}
    assert checkpoint_files(store.folder) == names(state(nodes[0]))


def test_checkpoint_with_a_missing_file_is_removed_from_the_index(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.pool.clear()
    checkpoint_path(store.folder, state(node).key).unlink()
    with writer_held(store):
        assert store.reader.load(state(node), ROOT) is None
        assert checkpoints_of(store, node) == set()
    assert "is no longer on disk" in caplog.text
    assert store.index.keys("checkpoints") == set() and node.key in store.index
    assert not (store.folder / "quarantine").exists()


def test_swapped_checkpoint_files_are_not_loaded(store: BlockStore) -> None:
    """The files and their checksums are intact, but each has the other's name."""
    nodes = chain([1], [2])
    checkpoints = [state(node) for node in nodes]
    save_turn(store, nodes, "s", checkpoints)
    store.pool.clear()
    first, second = (checkpoint_path(store.folder, checkpoint.key) for checkpoint in checkpoints)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for checkpoint in checkpoints:
        assert store.reader.load(checkpoint, ROOT) is None
    store.drain()
    assert checkpoint_files(store.folder) == set()


def test_checkpoint_of_another_model_is_not_loaded(store: BlockStore) -> None:
    (node,) = chain([1])
    checkpoint = state(node)
    save_turn(store, [node], "s", [checkpoint])
    store.pool.clear()
    checkpoint_path(store.folder, checkpoint.key).unlink()
    other = Root("another", ROOT.layout)
    write_block(
        checkpoint_path(store.folder, checkpoint.key),
        checkpoint,
        other,
        arrays_of_checkpoint(checkpoint),
    )
    assert store.reader.load(checkpoint, ROOT) is None
    store.drain()
    assert checkpoint_files(store.folder) == set()


def test_checkpoint_removed_by_another_process_is_not_quarantined(
    store: BlockStore, limits: StoreLimits, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stores share a folder. The first store loads None, and still saves later turns."""
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    store.pool.clear()
    (removed,) = checkpoints_of(store, nodes[1])
    other = BlockStore(store.folder, limits)
    longer = chain([1], [2], [3])
    save_turn(other, longer, "s", [state(longer[2])], [removed])
    with caplog.at_level(logging.WARNING):
        assert store.reader.load(removed, ROOT) is None
    store.drain()
    assert store.blocks_quarantined == 0 and not store._failures
    assert checkpoints_of(store, *longer) == {state(longer[2])}
    check_holds(store, state(longer[2]), "disk")
    # A turn that continues from the removed checkpoint is saved without it.
    branch = chain([1], [2], [4])
    turn = Commit(ROOT, tuple(branch), checkpoints=(removed, state(branch[2])))
    new = [(branch[2], arrays_of(branch[2]))]
    store.commit(turn, [*new, *[(state(branch[2]), arrays_of_checkpoint(state(branch[2])))]])
    store.drain()
    assert store.index.keys("checkpoints") == {state(longer[2]).key, state(branch[2]).key}
    other.close()


def test_checkpoint_removed_during_a_read_is_not_quarantined(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.pool.clear()
    real = mx.load

    def load(path: str, **options: Any) -> Any:
        Path(path).unlink()
        return real(path, **options)

    monkeypatch.setattr(mx, "load", load)
    assert store.reader.load(state(node), ROOT) is None
    assert store.blocks_quarantined == 0


def test_only_checkpoints_in_ram_are_found_if_the_index_fails(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])

    def fail(*args: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Database, "connection", property(fail))
    assert checkpoints_of(store, node) == {state(node)}  # checkpoints in RAM
    store.pool.clear()
    assert checkpoints_of(store, node) == set()
    assert "cannot read the index" in caplog.text


def test_stats_count_checkpoints(store: BlockStore) -> None:
    nodes = chain([1], [2])
    content = save_turn(store, nodes, "s", [state(nodes[0]), state(nodes[1])])
    stats = store.stats()
    in_ram = sum(
        array.nbytes
        for checkpoint in map(state, nodes)
        for array in content[checkpoint.key].values()
    )
    sizes = [path.stat().st_size for path in (store.folder / "checkpoints").glob("*/*")]
    assert (stats["tiers"]["ram"]["blocks"], stats["tiers"]["ram"]["checkpoints"]) == (2, 2)
    assert stats["tiers"]["ram"]["checkpoint_bytes"] == in_ram < stats["tiers"]["ram"]["bytes"]
    assert (stats["tiers"]["disk"]["blocks"], stats["tiers"]["disk"]["checkpoints"]) == (2, 2)
    assert (
        stats["tiers"]["disk"]["checkpoint_bytes"] == sum(sizes) < stats["tiers"]["disk"]["bytes"]
    )
