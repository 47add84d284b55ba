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


def evict_all(store: BlockStore) -> list[bytes]:
    """Evict all records on disk; return their keys in the order of eviction."""
    keys: list[bytes] = []
    disk = store.disk
    disk.forgotten = keys.extend
    disk.limits = replace(disk.limits, max_disk_bytes=1)
    assert not disk.make_room(0)  # the index alone exceeds the budget
    return keys


def keys_of(*chains: list[Block]) -> list[bytes]:
    return [node.key for nodes in chains for node in nodes]


def test_chains_are_evicted_from_the_oldest_and_from_the_leaf(store: BlockStore) -> None:
    """In both tiers, a conversation is evicted completely before a more recently used one."""
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
    assert evict_all(store) == expected


def test_shared_prefix_is_evicted_with_its_last_conversation(store: BlockStore) -> None:
    first, second = chain([1], [2], [3]), chain([1], [2], [4])
    save_turn(store, first, "first")
    save_turn(store, chain([9]), "between")
    save_turn(store, second, "second")
    expected = keys_of(first[2:], chain([9]), second[::-1])
    assert evict_all(store) == expected


@pytest.mark.parametrize("root", [ROOT, OTHER], ids=["one model", "two models"])
def test_among_blocks_of_equal_age_the_deepest_is_evicted_first(tmp_path: Path, root: Root) -> None:
    deep = chain([1], [2], [3])
    flat = [chain([n], parent=root.key)[0] for n in range(10, 18)]
    with closing(Index(tmp_path / "index.sqlite")) as index:
        index.add_blocks(ROOT, [(node, 1) for node in deep], 5.0)
        index.add_blocks(root, [(node, 1) for node in flat], 5.0)
        evicted = []
        for _ in deep[1:]:
            evicted.append(leaves(index)[0][1])
            index.forget(evicted[-1])
        assert evicted == [deep[2].key, deep[1].key]


def test_checkpoint_leaves_ram_before_blocks_of_equal_age(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s", [state(nodes[1])])
    save_turn(store, chain([3]), "t")
    store.touch([node.key for node in nodes], [state(nodes[1])])
    store.drain()
    assert store.pool.release(1) and chain([3])[0].key not in store.pool
    assert store.pool.release(1) and state(nodes[1]).key not in store.pool
    assert all(node.key in store.pool for node in nodes)


def test_order_of_eviction_survives_a_restart_and_a_rebuild(store: BlockStore) -> None:
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


# Replies, index rows, and evicted blocks that come back.


def put_and_touch(pool: BlockPool, nodes: list[Block]) -> None:
    for node in nodes:
        pool.put(KVBlock(node, None, 10, is_stored=True))
    pool.touch(node.key for node in nodes)


def test_remembered_replies_stay_within_the_disk_budget(store: BlockStore) -> None:
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


def test_index_rows_of_one_transaction_stay_within_the_disk_budget(store: BlockStore) -> None:
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
    """Save sessions until the store evicts a record."""
    for number in range(1000):
        save_turn(store, chain([1000 + number]), f"s{number}")
        if store.disk.n_evicted:
            return


def test_pool_counts_tokens_that_return_after_eviction() -> None:
    pool = BlockPool(20)
    put_and_touch(pool, chain([1, 2], [3]))
    put_and_touch(pool, chain([4], [5]))
    assert pool.stats()["asked_again_tokens"] == 0
    put_and_touch(pool, chain([1, 2], [3]))
    put_and_touch(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3
    pool.remove(chain([6])[0].key)  # removed, but not evicted
    put_and_touch(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3


def test_disk_counts_tokens_that_return_after_eviction(store: BlockStore) -> None:
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


def test_model_above_its_share_is_evicted_first(store: BlockStore) -> None:
    first = save_for(store, ROOT, *range(3))  # the least recently used
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


def test_model_share_is_a_share_of_the_space_on_a_full_volume(
    tmp_path: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is far below its budget, but the volume is at its minimum of free space."""
    limits = replace(limits, max_disk_bytes=1 << 40, min_free_bytes=1 << 20)
    with closing(BlockStore(tmp_path / "store", replace(limits, model_share=0.5))) as store:
        disk = store.disk
        monkeypatch.setattr(disk, "free_bytes", lambda *_: (5 << 20) - disk.used_bytes())
        first = save_for(store, ROOT, *range(8))
        for n in range(20):
            save_for(store, OTHER, *range(100 * n, 100 * n + 4))
        assert {node.key for node in first} <= store.index.keys()
        assert disk.n_evicted > 20 and not store.turns_not_saved


def test_only_model_in_a_store_may_exceed_its_share(tmp_path: Path, limits: StoreLimits) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, model_share=0.01))
    save_for(store, ROOT, *range(8))
    with closing(store):
        assert store.turns_saved == 1 and store.index.totals().n_blocks == 8
        assert store.disk._over_share(0, ROOT, 0) == ("", 0)


def test_remembered_replies_leave_room_for_blocks(tmp_path: Path) -> None:
    """Otherwise a small store fills with replies and saves no more blocks."""
    limits = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=4 << 20)
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(160):
            replies = {n.to_bytes(16, "big"): bytes(30 << 10)}
            store.commit(Commit(ROOT, (), replies=replies), [])
            store.drain()
        save_turn(store, chain([77], [78], [79]), "new")
        assert not store.turns_not_saved and store.index.totals().n_blocks == 3


def test_space_announced_by_a_dead_process_evicts_nothing(tmp_path: Path) -> None:
    """`sessions import` is killed, and a server continues."""
    limits = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=8 << 20)
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(12):
            save_turn(store, chain([n], [n + 50, 2]))
        writing = store.folder / "writing"
        writing.mkdir(mode=0o700, exist_ok=True)
        (writing / "01234567.lock").write_text(f"{6 << 20:020d}")  # no process has this lock
        store.disk.quarantine(chain([0])[-1].key, "a test")
        save_turn(store, chain([99]))
        assert list(store.disk.files.paths("quarantine"))
        assert store.disk.n_evicted == 0 and not store.turns_not_saved


def test_files_that_cannot_be_removed_count_towards_the_budget(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS refuses to remove files with the flag uchg. New files can be made."""
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


def test_later_turns_are_saved_if_a_file_cannot_be_removed(
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
def test_store_evicts_only_if_eviction_can_free_enough_space(
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
    shown = "blocks are evicted before" if is_reachable else "nothing new is stored"
    assert f" of --kvpersist-min-free, so {shown}" in str(disk)
    assert disk.make_room(0) == is_reachable
    assert bool(disk.n_evicted) == is_reachable
