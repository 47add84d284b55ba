from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_lm_kvpersist.block import Block, pack_ids
from mlx_lm_kvpersist.match import FEW, MAX_ALIKE
from mlx_lm_kvpersist.store.pool import BlockPool
from mlx_lm_kvpersist.store.records import KVBlock

from .conftest import ROOT, chain, state, window


def put_blocks(pool: BlockPool, nodes: list[Block], *, pinned: bool = False) -> list[bytes]:
    for node in nodes:
        pool.put(KVBlock(node, arrays=object(), n_bytes=10, pins=int(pinned)))
    return [node.key for node in nodes]


def contents(pool: BlockPool) -> tuple[int, ...]:
    """Return the numbers of blocks and checkpoints, the total bytes, and the checkpoints' bytes."""
    stats = pool.stats()
    return tuple(stats[name] for name in ("blocks", "checkpoints", "bytes", "checkpoint_bytes"))


def test_least_recently_used_leaves_are_evicted_first() -> None:
    pool = BlockPool(max_bytes=50)
    old = put_blocks(pool, chain([1], [2], [3]))
    put_blocks(pool, chain([4], [5], [6]))
    assert pool.n_bytes == 50
    # Only the last block of the old conversation was evicted.
    assert [key in pool for key in old] == [True, True, False]
    assert [node.key for node in pool.children(old[0])] == [old[1]]
    assert pool.children(old[1]) == []
    pool.remove(old[1])
    assert (pool.stats()["evicted"], pool.stats()["blocks"]) == (1, 4)


def test_recently_used_chain_is_not_evicted() -> None:
    pool = BlockPool(max_bytes=40)
    first, second = put_blocks(pool, chain([1], [2])), put_blocks(pool, chain([3], [4]))
    pool.touch(first)
    put_blocks(pool, chain([5]))
    assert all(key in pool for key in first)
    assert [key in pool for key in second] == [True, False]


def test_putting_a_block_again_counts_as_use() -> None:
    pool = BlockPool(max_bytes=20)
    first, second, third = (node for n in (1, 2, 3) for node in chain([n]))
    for node in (first, second, first, third):
        pool.put(KVBlock(node, object(), 10))
    assert [node.key in pool for node in (first, second, third)] == [True, False, True]


def entries_of(pool: BlockPool, keys: list[bytes]) -> list[KVBlock]:
    return [entry for key in keys if (entry := pool.get(key)) is not None]


def test_pinned_blocks_are_not_evicted_until_unpinned() -> None:
    pool = BlockPool(max_bytes=20)
    keys = put_blocks(pool, chain([1], [2], [3], [4]), pinned=True)
    assert pool.n_bytes == 40
    pool.unpin(entries_of(pool, keys[3:]))
    assert pool.n_bytes == 30 and keys[3] not in pool
    pool.unpin(entries_of(pool, keys[:3]))
    assert pool.n_bytes == 20


def test_putting_an_equal_block_keeps_the_first() -> None:
    pool = BlockPool(max_bytes=100)
    (node,) = chain([1])
    first = KVBlock(node, object(), 10)
    pool.put(first)
    pool.put(KVBlock(node, object(), 10, pins=1))
    assert pool.get(node.key) is first and first.pins == 1
    assert pool.put(first) is first
    assert (len(pool), pool.n_bytes) == (1, 10)
    pool.remove(node.key)
    assert (len(pool), pool.n_bytes, pool.children(ROOT.key)) == (0, 0, [])


def test_checkpoints_are_evicted_by_age_and_do_not_keep_blocks() -> None:
    pool = BlockPool(max_bytes=40)
    nodes = chain([1], [2], [3])
    keys = put_blocks(pool, nodes[:2])
    checkpoints = [state(nodes[0]), state(nodes[1])]
    for checkpoint in checkpoints:
        pool.put(KVBlock(checkpoint, object(), 10, is_stored=True))
    assert contents(pool) == (2, 2, 40, 20)
    assert pool.checkpoints(keys) == checkpoints
    pool.touch([checkpoints[0].key])
    # The leaf is the oldest evictable entry, checkpoint or not.
    put_blocks(pool, chain([9]))
    assert [key in pool for key in keys] == [True, False]
    pool.touch(keys)
    put_blocks(pool, chain([8]))
    assert pool.checkpoints(keys) == checkpoints[:1] and contents(pool)[1::2] == (1, 10)


def test_pinned_checkpoints_are_not_evicted_until_unpinned() -> None:
    pool = BlockPool(max_bytes=10)
    nodes = chain([1], [2])
    for node in nodes:
        pool.put(KVBlock(state(node), object(), 10, pins=1))
    assert pool.n_bytes == 20
    pool.unpin(entries_of(pool, [state(nodes[1]).key]))
    assert pool.checkpoints([node.key for node in nodes]) == [state(nodes[0])]


def test_putting_an_equal_checkpoint_keeps_the_first() -> None:
    pool = BlockPool(max_bytes=100)
    (node,) = chain([1])
    first = KVBlock(state(node), object(), 10)
    pool.put(first)
    pool.put(KVBlock(state(node), object(), 10, pins=1))
    assert pool.get(state(node).key) is first and first.pins == 1
    assert contents(pool) == (0, 1, 10, 10)
    pool.remove(state(node).key)
    assert contents(pool) == (0, 0, 0, 0)
    assert pool.checkpoints([node.key]) == []


def test_removing_a_block_removes_its_checkpoints() -> None:
    pool = BlockPool(max_bytes=100)
    nodes = chain([1], [2])
    put_blocks(pool, nodes)
    for node in nodes:
        pool.put(KVBlock(state(node), object(), 10))
        pool.put(KVBlock(window(node), object(), 10))
    pool.remove(nodes[1].key)
    assert pool.checkpoints([node.key for node in nodes]) == [state(nodes[0]), window(nodes[0])]
    assert pool.n_bytes == 30


def test_pool_accepts_blocks_of_zero_bytes() -> None:
    pool = BlockPool(max_bytes=10)
    for node in chain(*([n] for n in range(1, 50))):
        pool.put(KVBlock(node, {}, 0))
    assert len(pool) == 49 and pool.n_bytes == 0


def test_blocks_pinned_by_key_are_not_evicted() -> None:
    pool = BlockPool(max_bytes=20)
    keys = put_blocks(pool, chain([1], [2]))
    pinned = pool.pin([*keys, b"not here"])
    assert [entry.block.key for entry in pinned] == keys
    put_blocks(pool, chain([9]))
    assert len(pool) == 2 and all(key in pool for key in keys)
    pool.unpin(pinned)
    (new,) = put_blocks(pool, chain([9]))
    assert new in pool and keys[1] not in pool


def test_prefetched_block_is_admitted_only_if_there_is_room() -> None:
    pool = BlockPool(max_bytes=20)
    keys = put_blocks(pool, chain([1], [2]), pinned=True)
    (node,) = chain([9])
    entry = KVBlock(node, object(), 10, is_stored=True)
    assert pool.admit(entry) is None
    assert node.key not in pool and pool.n_bytes == 20
    pool.unpin(entries_of(pool, keys))
    entry = KVBlock(node, object(), 10, is_stored=True)
    assert pool.admit(entry) is entry
    assert entry.prefetched == 1 and pool.n_bytes == 20 and keys[1] not in pool
    assert pool.admit(KVBlock(node, object(), 10, is_stored=True)) is entry
    assert entry.prefetched == 2
    pool.unpin([entry, entry], prefetch=True)
    assert entry.prefetched == 0
    put_blocks(pool, chain([1], [2], [3]), pinned=True)
    pool.pin([node.key])
    (present,) = entries_of(pool, [keys[0]])
    assert pool.n_bytes > 20 and pool.admit(KVBlock(present.block, object(), 10)) is present
    assert keys[0] in pool


def test_cleared_pool_equals_a_new_pool() -> None:
    pool = BlockPool(max_bytes=100)
    nodes = chain([1], [2])
    keys = put_blocks(pool, nodes)
    pool.put(KVBlock(state(nodes[0]), object(), 10))
    pool.clear()
    assert pool.stats() == BlockPool(max_bytes=100).stats()
    assert not (pool.children(ROOT.key) or pool.children(keys[0]) or pool.checkpoints(keys))


def test_proven_blocks_count_as_blocks_in_ram() -> None:
    pool = BlockPool(max_bytes=20)
    nodes = chain([1], [2])
    for node in nodes:
        pool.put(KVBlock(node, object(), 10, tier="disk", read_s=0.5))
    pool.touch([nodes[0].key, b"not here"], proven=True)
    entries = [pool.get(node.key) for node in nodes]
    assert [entry and (entry.tier, entry.read_s) for entry in entries] == [
        ("ram", 0.0),
        ("disk", 0.5),
    ]


def test_drop_chain_keeps_blocks_that_another_chain_needs() -> None:
    pool = BlockPool(max_bytes=1000)
    first = chain([1], [2], [3])
    keys = put_blocks(pool, first)
    assert pool.drop_chain(keys) == 0  # none of it is on disk
    pool.set_stored(keys)
    checkpoint = state(first[-1])
    pool.put(KVBlock(checkpoint, object(), 10, is_stored=True))
    (other,) = put_blocks(pool, chain([4], parent=keys[0]))
    for prefetch in (False, True):
        pinned = pool.pin(keys[2:], prefetch=prefetch)
        assert pool.drop_chain(keys) == 0
        pool.unpin(pinned, prefetch=prefetch)
    assert pool.drop_chain(keys) == 30
    assert [key in pool for key in (*keys, other, checkpoint.key)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert pool.drop_chain([keys[0], other]) == 0


def test_children_returns_the_neighbours_among_many_siblings() -> None:
    """In sorted order, the neighbours are the siblings just before and just after the prompt."""
    pool = BlockPool(1 << 30)
    nodes = [chain([10 * n, 7])[0] for n in range(11, 11 + 3 * FEW)]
    for node in nodes:
        pool.put(KVBlock(node, None, 1))
    for wanted, name in (("<195><7>", "text"), (pack_ids([195, 7]), "packed_ids")):
        ordered = sorted(nodes, key=lambda node: getattr(node, name))
        after = next(n for n, node in enumerate(ordered) if getattr(node, name) > wanted)
        children = pool.children(ROOT.key, wanted)
        assert {ordered[after - 1].key, ordered[after].key} <= {node.key for node in children}
        assert len(children) < len(nodes)
    assert nodes[0] in pool.children(ROOT.key, "<110><7> and so on")
    assert len(pool.children(ROOT.key, limit=2)) == 2


def test_children_returns_siblings_that_are_prefixes_of_the_prompt() -> None:
    """In sorted order, a short prefix is far from the prompt, behind siblings that begin alike."""
    pool = BlockPool(1 << 30)
    nodes = [chain([10 * n, 7])[0] for n in range(11, 11 + 3 * FEW)]
    short = [
        replace(chain([n])[0], text="<195><7> and so on"[:n_chars], packed_ids=b"")
        for n, n_chars in enumerate((1, 2, 3, 4, 8))
    ]
    for node in (*nodes, *short):
        pool.put(KVBlock(node, None, 1))
    children = pool.children(ROOT.key, "<195><7> and so on")
    assert {node.text for node in short} <= {node.text for node in children}


def test_children_limits_the_number_of_siblings_with_equal_text() -> None:
    pool = BlockPool(1 << 30)
    nodes = [replace(chain([n])[0], text="alike") for n in range(2 * MAX_ALIKE)]
    for node in nodes:
        pool.put(KVBlock(node, None, 1))
    assert len(pool.children(ROOT.key, "alike, and more")) == MAX_ALIKE
    pool.remove(nodes[1].key)
    assert {node.key for node in pool.children(ROOT.key)} == {
        node.key for node in (nodes[0], *nodes[2:])
    }


def test_release_frees_the_requested_bytes_of_unpinned_blocks() -> None:
    pool = BlockPool(max_bytes=100)
    old, new = put_blocks(pool, chain([1], [2], [3])), put_blocks(pool, chain([4], [5]))
    pool.touch(old)
    pool.pin(new[1:])
    assert pool.release(11) == 20 and [key in pool for key in old] == [True, False, False]
    assert pool.release(100) == 10 and pool.release(100) == 0
    assert [key in pool for key in (*old, *new)] == [False, False, False, True, True]
    # A pinned block stays, also if a lower tier has it.
    pool.set_stored(new)
    assert pool.release(100) == 0 and pool.stats()["evicted"] == 3


def test_resized_pool_evicts_unpinned_blocks() -> None:
    pool = BlockPool(max_bytes=50)
    keys = put_blocks(pool, chain([1], [2], [3]))
    assert pool.resize(25) == 10 and [key in pool for key in keys] == [True, True, False]
    pinned = pool.pin(keys)
    assert pool.resize(10) == 0 and pool.stats()["held_bytes"] == 20
    pool.unpin(pinned)
    assert (pool.n_bytes, pool.stats()["held_bytes"]) == (10, 0)
    pool.resize(20)
    put_blocks(pool, chain([9]))
    assert pool.n_bytes == 20


def test_block_larger_than_the_pool_evicts_nothing() -> None:
    pool = BlockPool(max_bytes=20)
    keys = put_blocks(pool, chain([1], [2]))
    (node,) = chain([9])
    pool.put(KVBlock(node, object(), 21))
    assert [key in pool for key in (*keys, node.key)] == [True, True, False]


def test_cost_of_eviction_does_not_grow_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    n_entries_read = 0
    place_of = BlockPool._place_of

    def counted(pool: BlockPool, entry: KVBlock) -> object:
        nonlocal n_entries_read
        n_entries_read += 1
        return place_of(pool, entry)

    monkeypatch.setattr(BlockPool, "_place_of", counted)
    n_reads = []
    for n in (100, 3000):
        pool = BlockPool(max_bytes=20 * n)
        pinned_keys = put_blocks(pool, [node for i in range(n) for node in chain([i])], pinned=True)
        put_blocks(pool, [node for i in range(n) for node in chain([n + i])])
        before = n_entries_read
        for i in range(50):
            put_blocks(pool, chain([2 * n + i]))
            pool.unpin(pool.pin(pinned_keys[:1]))
        n_reads.append(n_entries_read - before)
        assert len(pool) == 2 * n and all(key in pool for key in pinned_keys)
    assert n_reads[1] <= n_reads[0] + 10, n_reads
