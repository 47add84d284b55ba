"""What is evicted first: by value, in RAM and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import BLOCK_TOKENS, Block, Root
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.index import Index, Leaf
from mlx_lm_kvpersist.store.pool import BlockPool, KVBlock
from mlx_lm_kvpersist.store.rebuild import rebuild_index
from mlx_lm_kvpersist.store.worth import LRU, VALUE

from .conftest import ROOT, arrays_of, chain, leaves, save_turn, state

EMPTY: tuple[set[bytes], set[bytes]] = set(), set()
OTHER = Root("another", "4b64")


def serve(pool: BlockPool, nodes: list[Block]) -> int:
    """Restore what is there, compute the rest; return how many blocks were there."""
    used = []
    for node in nodes:
        if node.key not in pool:
            break
        used.append(node.key)
    pool.touch(used, proven=True)
    for node in nodes:
        pool.put(KVBlock(node, None, 10, is_stored=True))
    pool.touch(node.key for node in nodes)
    return len(used)


def agents_and_chats(pool: BlockPool) -> int:
    """Return what is left of a system prompt of ten blocks that five agents had."""
    system = [[n] for n in range(10)]
    for n in range(5):
        serve(pool, chain(*system, [100 + n], [200 + n]))
    for n in range(100):
        serve(pool, chain([1000 + n], [2000 + n], [3000 + n]))
    return serve(pool, chain(*system))


def test_a_shared_system_prompt_survives_a_hundred_chats_that_are_asked_once() -> None:
    assert agents_and_chats(BlockPool(400)) == 10
    assert agents_and_chats(BlockPool(400, LRU)) == 0


def test_a_conversation_survives_prompts_that_are_asked_once_after_a_template() -> None:
    found = {}
    for order in (VALUE, LRU):
        pool, n_found = BlockPool(300, order), 0
        for n in range(100):
            if n % 10 == 0:  # a conversation beside them
                n_found += serve(pool, chain([7], [8], [9]))
            serve(pool, chain([1], [2], [100 + n], [200 + n], [300 + n]))
        found[order] = n_found
        assert serve(pool, chain([1], [2])) == 2
    assert found[LRU] == 0 and found[VALUE] >= 24


def test_the_prompt_of_old_agents_goes_in_the_end() -> None:
    pool = BlockPool(200)
    for n in range(5):
        serve(pool, chain([1], [2], [3], [100 + n]))
    for n in range(40):  # conversations that go on
        for n_turns in range(2, 5):
            serve(pool, chain(*([n, turn] for turn in range(n_turns))))
    assert serve(pool, chain([1], [2], [3])) == 0


def test_long_conversations_that_are_over_do_not_stay_for_their_length() -> None:
    pool = BlockPool(100)
    for n_turns in range(1, 40):
        serve(pool, chain([1], *([turn] for turn in range(2, 2 + min(n_turns, 4)))))
    for n in range(6):
        for n_turns in range(1, 4):
            serve(pool, chain(*([n, turn] for turn in range(n_turns))))
    assert serve(pool, chain([1])) == 0


def test_what_a_plugin_values_stays_and_what_it_does_not_goes_first() -> None:
    pool = BlockPool(40)
    nodes = [chain([n])[0] for n in range(4)]
    for node in nodes:
        serve(pool, [node])
    pool.set_worth(nodes[0].key, 9.0)
    pool.set_worth(nodes[2].key, 0.0)
    serve(pool, chain([10]))
    assert [node.key in pool for node in nodes] == [True, True, False, True]
    for n in range(11, 20):
        serve(pool, chain([n]))
    assert nodes[0].key in pool


def test_what_was_evicted_and_asked_for_again_is_counted() -> None:
    pool = BlockPool(20, LRU)
    serve(pool, chain([1, 2], [3]))
    serve(pool, chain([4], [5]))
    assert pool.stats()["asked_again_tokens"] == 0
    serve(pool, chain([1, 2], [3]))
    serve(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3
    pool.drop(chain([6])[0].key)  # not to make room
    serve(pool, chain([6]))
    assert pool.stats()["asked_again_tokens"] == 3


# On disk.


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with closing(Index(tmp_path / "index.sqlite")) as index:
        yield index


MIB = 1 << 20


def save(index: Index, *nodes: Block, root: Root = ROOT, **more: Any) -> None:
    new = [(node, MIB) for node in nodes if node.key not in index]
    index.commit(Commit(root, (), **more), new)


def evict(index: Index, n: int = 1) -> list[bytes]:
    gone = []
    for _ in range(n):
        rank, key = leaves(index, VALUE)[0]
        index.clock = max(index.clock, rank)
        index.forget(key)
        gone.append(key)
    return gone


def test_a_block_inherits_the_branches_of_those_after_it(index: Index) -> None:
    head = chain([1], [2])
    for n in range(9):
        save(index, *chain([1], [2], [10 + n]), share=0.1)
    save(index, *(one for n in range(20) for one in chain([50 + n])))
    # The nine ends, then what was asked for once; the head outlives a whole turnover.
    assert set(evict(index, 9)).isdisjoint({node.key for node in head})
    evict(index, 20)
    assert {node.key for node in head} <= index.keys()
    save(index, *(one for n in range(20) for one in chain([100 + n])))
    evict(index, 20)
    assert head[0].key in index


def worths(index: Index) -> list[float]:
    return [worth for (worth,) in index.ask("SELECT worth FROM blocks ORDER BY used")]


def test_the_seconds_of_a_slower_model_count(index: Index) -> None:
    quick, slow = chain([1])[0], chain([1], parent=OTHER.key)[0]
    save(index, slow, root=OTHER, token_s=0.5)
    save(index, quick, token_s=0.01)
    assert [key for *_, key in leaves(index, VALUE)] == [quick.key, slow.key]
    assert [key for *_, key in leaves(index, LRU)] == [slow.key, quick.key]


def test_what_a_model_is_measured_to_need_changes_little_of_its_order(index: Index) -> None:
    """Pace and sizes vary: of blocks that are worth almost the same, the last used stays."""

    def whole(n: int) -> Block:
        return chain([n] * BLOCK_TOKENS)[0]

    for n, token_s in enumerate((1.0, 1.3, 0.6, 0.9, None)):
        save(index, whole(n), token_s=token_s and token_s / BLOCK_TOKENS)
    assert worths(index) == [1.0] * 5
    assert [key for *_, key in leaves(index, VALUE)] == [whole(n).key for n in range(5)]
    save(index, whole(5), token_s=2.3 / BLOCK_TOKENS)  # it is another machine
    save(index, whole(6), token_s=1.6 / BLOCK_TOKENS)
    assert worths(index) == [1.0] * 5 + [2.0] * 2


def test_an_unfinished_block_is_worth_what_whole_ones_are(index: Index) -> None:
    """It is stored as it was computed, in more bytes: else it would go before older sessions."""
    nodes = chain([1] * BLOCK_TOKENS, [2] * 9)
    for node in (*nodes, chain([3] * BLOCK_TOKENS)[0]):
        save(index, node, token_s=1.0 / BLOCK_TOKENS)
    assert worths(index) == [1.0] * 3
    assert leaves(index, VALUE)[0][-1] == nodes[1].key


def test_ranks_survive_a_restart_and_a_rebuild(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s", [state(chain([1])[0])])
    for n in range(3):
        save_turn(store, chain([1], [3 + n]), f"{n}")
        store.disk.files.forget(chain([1], [3 + n])[1].key)
    store.touch([chain([1])[0].key], [state(chain([1])[0])])
    store.drain()
    store.index.clock = 7.5
    columns = "SELECT key, worth, base, n_branches FROM"
    asked = [f"{columns} blocks ORDER BY key", f"{columns} checkpoints ORDER BY key"]
    before = [store.index.ask(query) for query in asked]
    assert {n for *_, n in before[0]} == {0, 3} and [n for *_, n in before[1]] == [1]
    store.close()
    rebuild_index(store.folder)
    with closing(Index(store.folder / "index.sqlite")) as index:
        assert [index.ask(query) for query in asked] == before
        assert index.clock == 7.5


def test_pinned_sessions_are_never_evicted(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "pinned")
    save_turn(store, chain([3], [4]), "s")
    (session,) = store.index.sessions_named("pinned")
    store.disk.files.set_pinned(session, True)
    with closing(DiskStore(store.folder, StoreLimits(0, 1))) as disk:
        assert not disk.files.make_room(0)
        assert disk.index.keys() == {node.key for node in chain([1], [2])}


def ask(store: BlockStore, nodes: list[Block]) -> list[str]:
    """Serve a prompt as a server does; return the tiers that what is stored of it is in."""
    tiers = [store.tier_of(node.key) for node in nodes if node.key in store]
    if tiers:
        store.touch([node.key for node in nodes[: len(tiers)]])
    save_turn(store, nodes)
    return tiers


@pytest.mark.parametrize("evict", [VALUE, LRU])
def test_in_a_store_the_shared_system_prompt_survives_a_hundred_chats(
    tmp_path: Path, limits: StoreLimits, evict: str
) -> None:
    limits = replace(limits, max_ram_bytes=2 << 20, evict=evict)
    system = [[n] for n in range(6)]
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(4):  # agents over one system prompt
            ask(store, chain(*system, [100 + n], [200 + n]))
        for n in range(100):
            ask(store, chain([1000 + n], [2000 + n], [3000 + n]))
        assert store.disk.files.n_evicted > 200 and store.pool.n_evicted > 200
        found = {node.key for node in chain(*system)}
        in_ram = {key for key in found if key in store.pool}
        assert (in_ram, found & store.index.keys()) == ((found, found) if evict == VALUE else EMPTY)
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        for n in range(20):
            ask(store, chain([5000 + n], [6000 + n]))
        assert found & store.index.keys() == (found if evict == VALUE else set())


# A share for each model.


def save_for(store: BlockStore, root: Root, *ids: int) -> list[Block]:
    nodes = chain(*([n] for n in ids), parent=root.key)
    new = [(node, arrays_of(node)) for node in nodes]
    leaf = Leaf(None, nodes[-1].key, nodes[-1].stop, tuple(node.key for node in nodes))
    store.commit(Commit(root, tuple(nodes), leaf), new)
    store.drain()
    return nodes


@pytest.mark.parametrize("evict", [VALUE, LRU])
def test_a_model_that_has_more_than_its_share_makes_room_itself(
    tmp_path: Path, limits: StoreLimits, evict: str
) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, evict=evict))
    first = save_for(store, ROOT, *range(3))  # used for longest
    for n in range(10):
        save_for(store, OTHER, *range(100 * n, 100 * n + 8))
    used = store.disk.files.used_bytes()
    store.close()
    tight = StoreLimits(0, used - 1, evict=evict, model_share=0.5)
    with closing(DiskStore(store.folder, tight)) as disk:
        sizes = {root.fingerprint: totals.n_bytes for root, totals in disk.index.roots()}
        assert sizes["another"] > 0.5 * used > sizes[ROOT.fingerprint] > 0
        assert disk.files.make_room(0)
        assert {node.key for node in first} <= disk.index.keys()
    alone = StoreLimits(0, used - 1, evict=evict, model_share=1.0)
    with closing(DiskStore(store.folder, replace(alone, max_disk_bytes=used // 2))) as disk:
        assert disk.files.make_room(0)
        assert evict == VALUE or not {node.key for node in first} & disk.index.keys()


@pytest.mark.parametrize("evict", [VALUE, LRU])
def test_a_share_is_one_of_what_a_full_volume_leaves(
    tmp_path: Path, limits: StoreLimits, evict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of the store is far away, and the least free space is not."""
    limits = replace(limits, max_disk_bytes=1 << 40, min_free_bytes=1 << 20, evict=evict)
    with closing(BlockStore(tmp_path / "store", replace(limits, model_share=0.5))) as store:
        files = store.disk.files
        monkeypatch.setattr(files, "free_bytes", lambda: (5 << 20) - files.used_bytes())
        first = save_for(store, ROOT, *range(8))
        for n in range(20):
            save_for(store, OTHER, *range(100 * n, 100 * n + 4))
        assert {node.key for node in first} <= store.index.keys()
        assert files.n_evicted > 20 and not store.turns_not_saved


def test_a_model_that_is_alone_may_have_all(tmp_path: Path, limits: StoreLimits) -> None:
    store = BlockStore(tmp_path / "store", replace(limits, model_share=0.01))
    save_for(store, ROOT, *range(8))
    with closing(store):
        assert store.turns_saved == 1 and store.index.totals().n_blocks == 8
        assert store.disk.files._over_share(0, ROOT, 0) == ("", 0)


# What plugins and the model's pace say.


def test_new_blocks_are_scored_and_timed(tmp_path: Path, limits: StoreLimits) -> None:
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        store.token_s = lambda root: 2.0
        asked: list[int] = []

        def score(root: Root, block: Block) -> float:
            asked.append(block.start)
            return 3.0 if block.start else 1.0

        store.score = score
        save_turn(store, chain([1], [2, 3]))
        save_turn(store, chain([1], [2, 3]))
        assert asked == [0, 1]
        n_bytes = store.index.totals().block_bytes
        ((worth,),) = store.index.ask("SELECT worth FROM roots")
        assert worth / 2 < 2.0 * 3 * MIB / n_bytes < worth * 2
        assert worths(store.index) == [worth, 3 * worth]
        found = [store.pool.get(node.key) for node in chain([1], [2, 3])]
        assert [entry.worth for entry in found if entry] == [1.0, 3.0]


def test_what_the_disk_evicted_and_gets_again_is_counted(store: BlockStore) -> None:
    save_turn(store, chain([1], [2, 3]), "s")
    disk = store.disk
    disk.files.limits = replace(disk.limits, max_disk_bytes=disk.files.used_bytes() - 150_000)
    assert disk.files.make_room(0) and store.index.totals().n_blocks == 1
    disk.files.limits = disk.limits
    save_turn(store, chain([1], [2, 3]), "s")
    assert store.stats()["tiers"]["disk"]["asked_again_tokens"] == 2
