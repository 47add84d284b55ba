"""Checkpoints in a store: saved, found, replaced, evicted, and lost together with their block."""

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
    found = store.checkpoints([node.key for node in nodes])
    assert all(
        checkpoint.block == block
        for block, checkpoints in found.items()
        for checkpoint in checkpoints
    )
    return {checkpoint for checkpoints in found.values() for checkpoint in checkpoints}


def check_holds(store: BlockStore, checkpoint: Checkpoint, tier: str) -> None:
    """Assert that a checkpoint has the arrays that `arrays_of_checkpoint` made for it."""
    loaded = store.reader.load(checkpoint, ROOT)
    assert loaded is not None and loaded.tier == tier
    expected = arrays_of_checkpoint(checkpoint)
    assert loaded.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert mx.array_equal(loaded.arrays[name], array)


def test_checkpoints_outlive_the_process(store: BlockStore) -> None:
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


def test_blocks_without_checkpoints_have_none(store: BlockStore) -> None:
    nodes = chain(*([n] for n in range(1, 1200)))
    save_turn(store, nodes[:3], "s", [state(nodes[2])])
    found = store.checkpoints([node.key for node in nodes])
    assert found == {nodes[2].key: [state(nodes[2])]}
    assert store.checkpoints([]) == {}


def test_blocks_of_more_than_one_statement(store: BlockStore) -> None:
    nodes = chain(*([n] for n in range(1, 1200)))
    store.drain()  # the sweep would take rows without files for leftovers
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
def test_a_row_that_lies_is_not_believed(store: BlockStore, statement: str) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.pool.clear()
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute(statement)
    assert store.checkpoints([node.key]) == {}
    # It is found again when a turn has saved it again.
    save_turn(store, [node], "s", [state(node)])
    again = reopened(store)
    assert checkpoints_of(again, node) == {state(node)}
    check_holds(again, state(node), "disk")
    again.close()


# Blocks without arrays.


def test_blocks_without_arrays(store: BlockStore) -> None:
    """If every layer is recurrent, blocks are only ids and text; the state has all of the cache."""
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


def test_blocks_without_arrays_have_a_budget(tmp_path: Path, limits: StoreLimits) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, max_ram_bytes=2000))
    nodes = chain(*(list(range(n, n + 30)) for n in range(100)))
    store.commit(Commit(ROOT, tuple(nodes)), [(node, {}) for node in nodes])
    store.drain()
    assert 1000 < store.pool.n_bytes <= 2000 and store.index.totals().n_blocks == 100
    store.close()


# Turns.


def test_a_turn_writes_only_checkpoints_that_are_new(store: BlockStore) -> None:
    nodes = chain([1], [2])
    checkpoint = state(nodes[1])
    save_turn(store, nodes, "s", [checkpoint])
    stamp = checkpoint_path(store.folder, checkpoint.key).stat().st_mtime_ns
    store.pool.clear()
    longer = chain([1], [2], [3])
    save_turn(store, longer, "s", [checkpoint, state(longer[2])])
    assert checkpoint_path(store.folder, checkpoint.key).stat().st_mtime_ns == stamp
    assert checkpoints_of(store, *longer) == {checkpoint, state(longer[2])}


def test_a_checkpoint_for_a_block_that_is_on_disk(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s")
    checkpoint = window(nodes[0])
    store.commit(
        Commit(ROOT, (), checkpoints=(checkpoint,)),
        [*[], *[(checkpoint, arrays_of_checkpoint(checkpoint))]],
    )
    again = reopened(store)
    assert checkpoints_of(again, *nodes) == {checkpoint}
    again.close()


def test_a_checkpoint_for_a_block_that_is_nowhere_is_left_out(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[0])])
    (elsewhere,) = chain([9])
    save_turn(store, nodes, "s", [window(nodes[1]), state(elsewhere)], [state(nodes[0])])
    assert checkpoint_files(store.folder) == names(state(nodes[0]), window(nodes[1]))
    assert checkpoints_of(store, nodes[0]) == {state(nodes[0])}, "superseded by nothing stored"
    again = reopened(store)
    assert checkpoints_of(again, elsewhere) == set()
    again.close()


def test_what_is_superseded_goes_with_the_commit(store: BlockStore) -> None:
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


@pytest.mark.parametrize("failing", ["commit", "put_session", "folder"])
def test_a_failed_turn_supersedes_nothing(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    before = {path: path.read_bytes() for path in store.folder.glob("*/*/*")}
    longer = chain([1], [2], [3])

    def fail(*args: object, **kwargs: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    new = checkpoint_path(store.folder, state(longer[2]).key)
    with monkeypatch.context() as patch:
        if failing == "folder":
            new.parent.mkdir(exist_ok=True)
            real = os.replace

            def replace(source: Path, target: Path) -> None:
                if target == new:
                    raise OSError("no space left on device")
                real(source, target)

            patch.setattr(os, "replace", replace)
        else:
            patch.setattr(Index, failing, fail)
        save_turn(store, longer, "s", [state(longer[2])], [state(nodes[1])])
    assert store.turns_not_saved == 1
    assert {path: path.read_bytes() for path in store.folder.glob("*/*/*")} == before
    assert store.index.keys("checkpoints") == {state(nodes[1]).key}
    # Unwritten checkpoints, and checkpoints that they supersede, are served from RAM.
    check_holds(store, state(longer[2]), "ram")
    check_holds(store, state(nodes[1]), "ram")
    save_turn(store, longer, "s", [state(longer[2])], [state(nodes[1])])
    assert checkpoint_files(store.folder) == names(state(longer[2]))


def test_a_waiting_turn_keeps_what_another_supersedes(store: BlockStore) -> None:
    """Two branches: the second continues from the state that the first supersedes."""
    nodes = chain([1], [2])
    old = state(nodes[1])
    save_turn(store, nodes, "s", [old])
    one, two = chain([1], [2], [3]), chain([1], [2], [4])
    with writer_held(store):
        for branch, checkpoints, superseded in (
            (one, (state(one[2]),), (old,)),
            (two, (old, state(two[2])), ()),
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
    assert checkpoints_of(again, *one, *two) == {old, state(one[2]), state(two[2])}
    check_holds(again, old, "disk")
    again.close()


def test_a_replaced_tail_takes_its_checkpoints_along(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s", [state(head), state(tail), window(tail)])
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", [state(longer[1])], replaced=((tail.key, longer[1].key),))
    assert checkpoint_files(store.folder) == names(state(head), state(longer[1]))
    assert store.index.keys("checkpoints") == {state(head).key, state(longer[1]).key}
    assert checkpoints_of(store, head, tail, *longer) == {state(head), state(longer[1])}


def test_what_a_turn_takes_the_place_of_goes_in_its_transaction(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed right after it leaves files without rows, which are swept."""
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


def test_too_much_that_waits_counts_checkpoints(store: BlockStore) -> None:
    one, two = chain([1]), chain([2])
    content = arrays_of_checkpoint(state(one[0]))
    store.writer.max_bytes = sum(array.nbytes for array in content.values()) * 3 // 2
    with writer_held(store):
        for nodes in (one, two):
            checkpoint = state(nodes[0])
            leaf = Leaf(None, nodes[-1].key, nodes[-1].stop)
            turn = Commit(ROOT, tuple(nodes), leaf, checkpoints=(checkpoint,))
            store.commit(
                turn, [*[(nodes[0], {})], *[(checkpoint, arrays_of_checkpoint(checkpoint))]]
            )
    assert store.turns_not_saved == 1
    assert checkpoint_files(store.folder) == names(state(two[0]))
    # It is in RAM, and may be evicted.
    entry = store.pool.get(state(one[0]).key)
    assert entry is not None and not entry.pins and not entry.is_stored


# Room.


def tight(store: BlockStore, n_bytes: int) -> DiskStore:
    """Close a store and open its folder with a budget of `n_bytes` less than it has."""
    store.close()
    disk = DiskStore(store.folder, store.limits)
    max_disk_bytes = disk.used_bytes() - n_bytes
    disk.limits = disk.limits = replace(disk.limits, max_disk_bytes=max_disk_bytes)
    return disk


def test_the_least_recently_used_goes_first_checkpoint_or_leaf(store: BlockStore) -> None:
    old, new = chain([1], [2]), chain([3], [4])
    save_turn(store, old, "old", [window(old[0])])
    save_turn(store, new, "new", [state(new[1])])
    store.touch([old[1].key])  # as a chain without its checkpoint, which is now older than all else
    store.drain()
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert disk.index.keys("checkpoints") == {state(new[1]).key}
    assert disk.index.totals().n_blocks == 4
    assert disk.gone.get(window(old[0]).key) is Gone.EVICTED
    assert not checkpoint_path(disk.folder, window(old[0]).key).exists()
    # Then a leaf, which takes its checkpoints along.
    disk.limits = replace(disk.limits, max_disk_bytes=disk.used_bytes() - 1)
    assert disk.make_room(0)
    assert new[1].key not in disk.index and disk.index.keys("checkpoints") == set()
    assert checkpoint_files(disk.folder) == set()
    assert disk.gone.get(state(new[1]).key) is Gone.EVICTED
    disk.close()


def test_at_one_age_the_end_of_a_conversation_goes_before_checkpoints(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes, "s", [state(nodes[0]), window(nodes[2])])
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert nodes[2].key not in disk.index
    assert disk.index.keys("checkpoints") == {state(nodes[0]).key}
    disk.close()


def test_checkpoints_that_are_used_stay(store: BlockStore) -> None:
    one, two = chain([1], [2]), chain([3], [4])
    save_turn(store, one, "one", [state(one[0])])
    save_turn(store, two, "two", [state(two[0])])
    store.touch([one[1].key], [state(one[0])])
    store.touch([two[1].key])
    store.drain()
    disk = tight(store, 1)
    assert disk.make_room(0)
    assert disk.index.keys("checkpoints") == {state(one[0]).key}
    disk.close()


def test_checkpoints_that_are_used_stay_in_ram(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(node) for node in nodes])
    store.touch([nodes[0].key], [state(nodes[0])])
    used = [store.pool.get(key) for key in (nodes[0].key, state(nodes[0]).key)]
    store.pool.max_bytes = sum(entry.n_bytes for entry in used if entry is not None)
    store.pool.unpin([])
    assert parts_in_ram(store, *nodes) == {state(nodes[0])}


def parts_in_ram(store: BlockStore, *nodes: Block) -> set[Checkpoint]:
    return set(store.pool.checkpoints(node.key for node in nodes))


def test_checkpoints_of_pinned_sessions_stay(store: BlockStore) -> None:
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


def test_checkpoints_of_waiting_turns_stay(store: BlockStore) -> None:
    one, two = chain([1], [2]), chain([3])
    save_turn(store, one, "one", [state(one[0]), state(one[1])])
    save_turn(store, two, "two", [state(two[0])])
    with writer_held(store):
        # Checkpoints of blocks of the turn, and of a block that is not in it.
        store.commit(Commit(ROOT, tuple(one[:1]), checkpoints=(state(one[0]),)), [])
        store.commit(Commit(ROOT, (), checkpoints=(window(one[1]),)), [])
        keep = {key for commit in store.writer.commits() for key in commit.keys()}
    assert keep == {*(node.key for node in one), state(one[0]).key, window(one[1]).key}
    disk = tight(store, 1)
    disk.limits = replace(disk.limits, max_disk_bytes=0)
    assert not disk.make_room(0, keep=keep)
    assert disk.index.keys() == {node.key for node in one}
    assert disk.index.keys("checkpoints") == {state(one[0]).key}
    disk.close()


def test_checkpoints_fit_into_the_budget_or_are_not_written(tmp_path: Path) -> None:
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


def test_a_checkpoint_that_cannot_be_trusted_goes_to_quarantine(
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
        assert checkpoints_of(store, node) == {other}, "it is offered again"
    assert f"checkpoint {checkpoint.key.hex()} goes to quarantine" in caplog.text
    assert store.blocks_quarantined == 1
    assert not path.exists() and store.disk.gone.get(checkpoint.key) is Gone.QUARANTINED
    assert sorted(p.suffix for p in (store.folder / "quarantine").iterdir()) == [
        ".json",
        ".safetensors",
    ]
    # The block and its other checkpoint are as they were; the checkpoint can be saved again.
    check_holds(store, other, "disk")
    assert store.reader.load(node, ROOT) is not None
    save_turn(store, [node], "s", [checkpoint])
    store.pool.clear()
    check_holds(store, checkpoint, "disk")


def test_what_goes_to_quarantine_is_gone_while_it_goes(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer removes its row after a lookup has read it, and before the lookup's answer."""
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    asked: list[tuple[Callable[[], set[Any]], Record]] = [
        (lambda: checkpoints_of(store, node), state(node)),
        (lambda: set(store.children(ROOT.key)), node),
    ]
    read = store.view.ask
    for ask, block in asked:
        may_go = hold(store.writer)
        store.lose(block, "canary")

        def read_and_let_go(*args: Any, may_go: Any = may_go, **types: Any) -> Any:
            found = read(*args, **types)
            may_go.set()
            store.drain()
            return found

        monkeypatch.setattr(store.view, "ask", read_and_let_go)
        assert ask() == set()
        assert may_go.is_set()


def test_a_checkpoint_in_ram_that_fails_a_canary_goes_to_quarantine(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    store.lose(state(node), "canary")
    assert checkpoints_of(store, node) == set()
    store.drain()
    assert checkpoint_files(store.folder) == set() and node.key in store
    assert f"checkpoint {state(node).key.hex()} goes to quarantine: canary" in caplog.text


def test_a_block_in_quarantine_takes_its_checkpoints_along(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[0]), state(nodes[1])])
    store.lose(nodes[1], "canary")
    assert checkpoints_of(store, nodes[0]) == {state(nodes[0])}
    assert state(nodes[1]).key not in store.pool
    store.drain()
    assert checkpoints_of(store, *nodes) == {state(nodes[0])}
    assert checkpoint_files(store.folder) == names(state(nodes[0]))


def test_a_checkpoint_whose_file_is_gone(
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


def test_swapped_checkpoints(store: BlockStore) -> None:
    """Whole files, right checksums, wrong names."""
    nodes = chain([1], [2])
    checkpoints = [state(node) for node in nodes]
    save_turn(store, nodes, "s", checkpoints)
    store.pool.clear()
    one, two = (checkpoint_path(store.folder, checkpoint.key) for checkpoint in checkpoints)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    for checkpoint in checkpoints:
        assert store.reader.load(checkpoint, ROOT) is None
    store.drain()
    assert checkpoint_files(store.folder) == set()


def test_a_checkpoint_of_another_model(store: BlockStore) -> None:
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


def test_a_checkpoint_that_another_process_removes(
    store: BlockStore, limits: StoreLimits, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stores on one folder: the other store loads None; then it can be written again."""
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    store.pool.clear()
    (offered,) = checkpoints_of(store, nodes[1])
    other = BlockStore(store.folder, limits)
    longer = chain([1], [2], [3])
    save_turn(other, longer, "s", [state(longer[2])], [offered])
    with caplog.at_level(logging.WARNING):
        assert store.reader.load(offered, ROOT) is None
    store.drain()
    assert store.blocks_quarantined == 0 and not store._failures
    assert checkpoints_of(store, *longer) == {state(longer[2])}
    check_holds(store, state(longer[2]), "disk")
    # A turn that continues from it is still saved, without it.
    branch = chain([1], [2], [4])
    turn = Commit(ROOT, tuple(branch), checkpoints=(offered, state(branch[2])))
    new = [(branch[2], arrays_of(branch[2]))]
    store.commit(turn, [*new, *[(state(branch[2]), arrays_of_checkpoint(state(branch[2])))]])
    store.drain()
    assert store.index.keys("checkpoints") == {state(longer[2]).key, state(branch[2]).key}
    other.close()


def test_a_checkpoint_that_goes_while_it_is_read(
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


def test_an_index_that_cannot_be_read(
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
