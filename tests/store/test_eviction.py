"""The order of eviction, in RAM and on disk, and blocks that are never evicted."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Root
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore, rebuild_index
from mlx_lm_kvpersist.store.folder import INDEX_FILES, OwnFiles
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.pool import BlockPool
from mlx_lm_kvpersist.store.records import KVBlock, Leaf
from tests.support import writer_held

from .conftest import ROOT, arrays_of, chain, leaves, save_turn, state

OTHER = Root("another", "4b64")


def evicted(store: BlockStore) -> list[bytes]:
    """Have a store evict all of its disk; return the keys in the order in which they went."""
    gone: list[bytes] = []
    disk = store.disk
    disk.forgotten = gone.extend
    disk.limits = replace(disk.limits, max_disk_bytes=1)
    assert not disk.make_room(0)  # the index takes more
    return gone


def keys_of(*chains: list[Block]) -> list[bytes]:
    return [node.key for nodes in chains for node in nodes]


def test_a_chain_that_was_used_at_one_moment_is_evicted_from_its_end(store: BlockStore) -> None:
    """All of an older conversation is evicted before any block of a newer one, in both tiers."""
    old, new = chain([1], [2], [3], [4]), chain([5], [6], [7])
    save_turn(store, old, "old")
    save_turn(store, new, "new")
    store.touch([node.key for node in old])
    store.drain()
    expected = keys_of(new[::-1], old[::-1])
    in_ram = []
    while len(store.pool):
        before = [key for key in expected if key in store.pool]
        assert store.pool.release(1)
        in_ram += [key for key in before if key not in store.pool]
    assert in_ram == expected
    assert evicted(store) == expected


def test_a_beginning_that_several_use_stays_for_as_long_as_one_of_them(store: BlockStore) -> None:
    first, second = chain([1], [2], [3]), chain([1], [2], [4])
    save_turn(store, first, "first")
    save_turn(store, chain([9]), "between")
    save_turn(store, second, "second")
    expected = keys_of(first[2:], chain([9]), second[::-1])
    assert evicted(store) == expected


@pytest.mark.parametrize("root", [ROOT, OTHER], ids=["one model", "two models"])
def test_of_blocks_used_at_one_moment_the_deepest_goes_first(tmp_path: Path, root: Root) -> None:
    deep = chain([1], [2], [3])
    flat = [chain([n], parent=root.key)[0] for n in range(10, 18)]
    with closing(Index(tmp_path / "index.sqlite")) as index:
        index.add_blocks(ROOT, [(node, 1) for node in deep], 5.0)
        index.add_blocks(root, [(node, 1) for node in flat], 5.0)
        gone = []
        for _ in deep[1:]:
            gone.append(leaves(index)[0][1])
            index.forget(gone[-1])
        assert gone == [deep[2].key, deep[1].key]


def test_a_checkpoint_goes_before_the_blocks_that_were_used_with_it(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    save_turn(store, chain([3]), "t")
    store.touch([node.key for node in nodes], [state(nodes[1])])
    store.drain()
    assert store.pool.release(1) and chain([3])[0].key not in store.pool
    assert store.pool.release(1) and state(nodes[1]).key not in store.pool
    assert all(node.key in store.pool for node in nodes)


def test_the_order_survives_a_restart_and_a_rebuild(store: BlockStore) -> None:
    for n in range(4):
        save_turn(store, chain([n]), f"{n}")
    store.touch([chain([1])[0].key])
    store.drain()
    expected = [chain([n])[0].key for n in (0, 2, 3, 1)]
    assert [key for _, key in leaves(store.index)] == expected
    store.close()
    rebuild_index(OwnFiles(store.folder))
    with closing(Index(store.folder / "index.sqlite")) as index:
        assert [key for _, key in leaves(index)] == expected


def test_pinned_sessions_are_never_evicted(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "pinned")
    save_turn(store, chain([3], [4]), "s")
    (session,) = store.index.sessions_named("pinned")
    store.disk.set_pinned(session, True)
    with closing(DiskStore(store.folder, StoreLimits(0, 1))) as disk:
        assert not disk.make_room(0)
        assert disk.index.keys() == {node.key for node in chain([1], [2])}


# Evicted blocks that come back.


def serve(pool: BlockPool, nodes: list[Block]) -> None:
    for node in nodes:
        pool.put(KVBlock(node, None, 10, is_stored=True))
    pool.touch(node.key for node in nodes)


def test_remembered_replies_keep_to_the_budget(store: BlockStore) -> None:
    fill(store)
    replies = {bytes([n]) * 16: bytes(30 << 10) for n in range(24)}
    store.commit(Commit(ROOT, (), replies=replies), [])
    store.drain()
    assert store.disk.used_bytes() <= store.limits.max_disk_bytes and store.disk.n_evicted
    assert store.replies(ROOT.key, list(replies)) == replies
    too_many = {bytes([n]) * 16: bytes(30 << 10) for n in range(100, 200)}
    store.commit(Commit(ROOT, (), replies=too_many), [])
    store.drain()
    assert store.disk.used_bytes() <= store.limits.max_disk_bytes
    assert store.replies(ROOT.key, list(too_many)) == {}


def test_rows_of_turns_that_are_saved_together_keep_to_the_budget(store: BlockStore) -> None:
    fill(store)
    empty = {"0.k": mx.zeros((1, 1))}
    mx.eval(empty)
    with writer_held(store):
        for number in range(12):
            nodes = chain(*([number, n] + [1] * 250 for n in range(12)))
            leaf = Leaf(f"s{number}", nodes[-1].key, nodes[-1].stop)
            store.commit(Commit(ROOT, tuple(nodes), leaf), [(node, empty) for node in nodes])
    assert store.disk.used_bytes() <= store.limits.max_disk_bytes


def fill(store: BlockStore) -> None:
    """Save sessions until one is evicted."""
    for number in range(1000):
        save_turn(store, chain([1000 + number]), f"s{number}")
        if store.disk.n_evicted:
            return


def test_what_was_evicted_and_asked_for_again_is_counted() -> None:
    pool = BlockPool(20)
    serve(pool, chain([1, 2], [3]))
    serve(pool, chain([4], [5]))
    assert pool.stats()["asked_again_tokens"] == 0
    serve(pool, chain([1, 2], [3]))
    serve(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3
    pool.remove(chain([6])[0].key)  # not to make room
    serve(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3


def test_what_the_disk_evicted_and_gets_again_is_counted(store: BlockStore) -> None:
    save_turn(store, chain([1], [2, 3]), "s")
    disk = store.disk
    limits = disk.limits
    disk.limits = replace(limits, max_disk_bytes=disk.used_bytes() - 150_000)
    assert disk.make_room(0) and store.index.totals().n_blocks == 1
    disk.limits = limits
    save_turn(store, chain([1], [2, 3]), "s")
    assert store.stats()["tiers"]["disk"]["asked_again_tokens"] == 2


# A share for each model.


def save_for(store: BlockStore, root: Root, *ids: int) -> list[Block]:
    nodes = chain(*([n] for n in ids), parent=root.key)
    new = [(node, arrays_of(node)) for node in nodes]
    leaf = Leaf(None, nodes[-1].key, nodes[-1].stop)
    store.commit(Commit(root, tuple(nodes), leaf), new)
    store.drain()
    return nodes


def test_a_model_that_has_more_than_its_share_makes_room_itself(store: BlockStore) -> None:
    first = save_for(store, ROOT, *range(3))  # used for longest
    for n in range(10):
        save_for(store, OTHER, *range(100 * n, 100 * n + 8))
    used = store.disk.used_bytes()
    store.close()
    tight = StoreLimits(0, used - 1, model_share=0.5)
    with closing(DiskStore(store.folder, tight)) as disk:
        sizes = {root.fingerprint: totals.n_bytes for root, totals in disk.index.roots()}
        assert sizes["another"] > 0.5 * used > sizes[ROOT.fingerprint] > 0
        assert disk.make_room(0)
        assert {node.key for node in first} <= disk.index.keys()
    alone = StoreLimits(0, used // 2, model_share=1.0)
    with closing(DiskStore(store.folder, alone)) as disk:
        assert disk.make_room(0)
        assert not {node.key for node in first} & disk.index.keys()


def test_a_share_is_one_of_what_a_full_volume_leaves(
    tmp_path: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of the store is far away, and the least free space is not."""
    limits = replace(limits, max_disk_bytes=1 << 40, min_free_bytes=1 << 20)
    with closing(BlockStore(tmp_path / "store", replace(limits, model_share=0.5))) as store:
        disk = store.disk
        monkeypatch.setattr(disk, "free_bytes", lambda *_: (5 << 20) - disk.used_bytes())
        first = save_for(store, ROOT, *range(8))
        for n in range(20):
            save_for(store, OTHER, *range(100 * n, 100 * n + 4))
        assert {node.key for node in first} <= store.index.keys()
        assert disk.n_evicted > 20 and not store.turns_not_saved


def test_a_model_that_is_alone_may_have_all(tmp_path: Path, limits: StoreLimits) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, model_share=0.01))
    save_for(store, ROOT, *range(8))
    with closing(store):
        assert store.turns_saved == 1 and store.index.totals().n_blocks == 8
        assert store.disk._over_share(0, ROOT, 0) == ("", 0)


def test_remembered_replies_leave_room_for_blocks(tmp_path: Path) -> None:
    """Otherwise a small store fills with replies, and saves nothing any more."""
    limits = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=4 << 20)
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(160):
            replies = {n.to_bytes(16, "big"): bytes(30 << 10)}
            store.commit(Commit(ROOT, (), replies=replies), [])
            store.drain()
        save_turn(store, chain([77], [78], [79]), "new")
        assert not store.turns_not_saved and store.index.totals().n_blocks == 3


def test_space_that_a_dead_process_announced_evicts_nothing(tmp_path: Path) -> None:
    """`sessions import` was killed beside a server that goes on."""
    limits = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=8 << 20)
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(12):
            save_turn(store, chain([n], [n + 50, 2]))
        writing = store.folder / "writing"
        writing.mkdir(mode=0o700, exist_ok=True)
        (writing / "01234567.lock").write_text(f"{6 << 20:020d}")  # nobody holds its lock
        store.disk.quarantine(chain([0])[-1].key, "a test")
        save_turn(store, chain([99]))
        assert list(store.disk.files.paths("quarantine"))
        assert store.disk.n_evicted == 0 and not store.turns_not_saved


def test_files_that_cannot_be_removed_count_towards_the_budget(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as files with the flag uchg on macOS. New files can be made."""
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if str(path).endswith(".safetensors") and "-" not in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refused)
    for n in range(60):
        save_turn(store, chain([n], [n + 1000, 2]))
    n_bytes = store.disk.files.n_bytes("blocks", *INDEX_FILES)
    assert n_bytes <= store.limits.max_disk_bytes


def test_a_file_that_cannot_be_removed_stops_no_later_turn(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        save_turn(store, chain([n], [n + 100]))
    disk, unlink = store.disk, os.unlink
    _, key = leaves(store.index)[0]
    stubborn = disk.files.path_of(key, Block.folder)

    def refused(path: Any, **options: Any) -> None:
        if Path(path).name == stubborn.name:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refused)
    disk.limits = replace(disk.limits, max_disk_bytes=disk.used_bytes() + disk.reserve_bytes)
    n_before = store.turns_saved
    for n in range(200, 210):
        save_turn(store, chain([n], [n + 1000]))
    assert (store.turns_saved - n_before, store.turns_not_saved) == (10, 0)
    assert stubborn.exists() and disk.has(key)


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_volume_that_other_files_fill_costs_no_stored_turn(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, is_reachable: bool
) -> None:
    for n in range(3):
        save_turn(store, chain([n], [n + 100]))
    disk, volume_bytes = store.disk, 1 << 30

    def free_bytes() -> int:
        return volume_bytes - disk.index.totals().n_bytes

    monkeypatch.setattr(disk, "free_bytes", free_bytes)
    floor = free_bytes() + 4096 if is_reachable else volume_bytes + 4096
    disk.limits = replace(disk.limits, min_free_bytes=floor)
    assert disk.make_room(0) == is_reachable
    assert bool(disk.n_evicted) == is_reachable
