from __future__ import annotations

from mlx_lm_kvpersist.match.tree import Node
from mlx_lm_kvpersist.tiers.pool import BlockPool, KVBlock

from .conftest import ROOT, chain


def filled(pool: BlockPool, nodes: list[Node], *, pinned: bool = False) -> list[bytes]:
    for node in nodes:
        pool.put(KVBlock(node, arrays=object(), n_bytes=10, pins=int(pinned)))
    return [node.key for node in nodes]


def test_least_recently_used_leaves_go_first() -> None:
    pool = BlockPool(max_bytes=50)
    old = filled(pool, chain([1], [2], [3]))
    filled(pool, chain([4], [5], [6]))
    assert pool.n_bytes == 50
    # The old conversation lost its last block, and only that.
    assert [key in pool for key in old] == [True, True, False]
    assert [node.key for node in pool.children(old[0])] == [old[1]]
    assert pool.children(old[1]) == []


def test_using_a_chain_keeps_it() -> None:
    pool = BlockPool(max_bytes=40)
    first, second = filled(pool, chain([1], [2])), filled(pool, chain([3], [4]))
    pool.touch(first)
    filled(pool, chain([5]))
    assert all(key in pool for key in first)
    assert [key in pool for key in second] == [True, False]


def test_pinned_blocks_stay_until_written() -> None:
    pool = BlockPool(max_bytes=20)
    keys = filled(pool, chain([1], [2], [3], [4]), pinned=True)
    assert pool.n_bytes == 40
    pool.unpin([keys[3]])
    assert pool.n_bytes == 30 and keys[3] not in pool
    pool.unpin(keys[:3])
    assert pool.n_bytes == 20


def test_an_equal_block_is_kept_once() -> None:
    pool = BlockPool(max_bytes=100)
    (node,) = chain([1])
    first = KVBlock(node, object(), 10)
    pool.put(first)
    pool.put(KVBlock(node, object(), 10, pins=1))
    assert pool.get(node.key) is first and first.pins == 1
    assert (len(pool), pool.n_bytes) == (1, 10)
    pool.drop(node.key)
    assert (len(pool), pool.n_bytes, pool.children(ROOT.key)) == (0, 0, [])
