from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, block_key, pack_ids
from mlx_lm_kvpersist.errors import StoreError
from mlx_lm_kvpersist.match import TokenText, common_prefix, match_prompt
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.disk_tier import Saving
from mlx_lm_kvpersist.store.records import Gone, KVBlock, Leaf, Saved
from mlx_lm_kvpersist.store.session_file import SessionFile, export_parts, export_records
from tests.support import writer_held
from tests.support.store_files import block_path

from .conftest import ROOT, arrays_of, chain, leaves, save_turn, state, unused_checkpoints


def reopened(store: BlockStore) -> BlockStore:
    store.close()
    return BlockStore(store.folder, store.limits)


def test_blocks_are_read_after_the_store_is_reopened(store: BlockStore) -> None:
    nodes = chain([1, 2], [3])
    content = save_turn(store, nodes, name="s")
    again = reopened(store)
    assert again.children(ROOT.key) == [nodes[0]]
    assert again.children(nodes[0].key) == [nodes[1]]
    assert [session.leaf for session in again.index.sessions() if session.name == "s"] == [
        nodes[1].key
    ]
    for node in nodes:
        loaded = again.reader.load(node, ROOT)
        assert loaded is not None and loaded.tier == "disk"
        assert loaded.arrays.keys() == content[node.key].keys()
        for name, array in content[node.key].items():
            assert mx.array_equal(loaded.arrays[name], array)
        again.pool.touch([node.key], proven=True)
        hot = again.reader.load(node, ROOT)
        assert hot is not None and hot.tier == "ram"
    again.close()


def test_unwritten_blocks_are_found_in_ram(store: BlockStore) -> None:
    (node,) = chain([1, 2, 3])
    store.put([(node, arrays_of(node))])
    assert store.children(ROOT.key) == [node]
    assert node.key in store and node.key not in store.index


def test_turn_writes_only_new_blocks(store: BlockStore) -> None:
    first = chain([1], [2])
    save_turn(store, first, "s")
    stamps = {node.key: block_path(store.folder, node.key).stat().st_mtime_ns for node in first}
    save_turn(store, chain([1], [2], [3]), "s")
    assert store.index.totals().n_blocks == 3
    for key, stamp in stamps.items():
        assert block_path(store.folder, key).stat().st_mtime_ns == stamp


def test_stats_report_bytes_written_per_turn_and_per_hour(
    tmp_path: Path, limits: StoreLimits
) -> None:
    """A turn that is saved twice counts once. The last hour's bytes are kept over a restart."""
    nodes = chain([1], [2], [3])
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        assert store.stats()["written_turn_bytes"] is None
        store.commit(
            Commit(ROOT, tuple(nodes[:2])), [(node, arrays_of(node)) for node in nodes[:2]]
        )
        store.drain()
        save_turn(store, nodes)
        save_turn(store, chain([4]))
        stats = store.stats()
    n_written = sum(path.stat().st_size for path in (tmp_path / "store/blocks").glob("*/*"))
    assert stats["tiers"]["disk"]["written_bytes"] == n_written
    assert (stats["turns_saved"], stats["written_turn_bytes"]) == (2, n_written // 2)
    assert n_written <= stats["written_last_hour_bytes"] < 1.1 * n_written
    with closing(BlockStore(tmp_path / "store", limits)) as again:
        after = again.stats()
    assert after["written_last_hour_bytes"] == stats["written_last_hour_bytes"]
    assert after["written_turn_bytes"] is None


def test_session_ends_at_the_leaf_of_its_last_turn(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    longer = chain([1], [2], [3])
    save_turn(store, longer, "s")
    assert [session.leaf for session in store.index.sessions() if session.name == "s"] == [
        longer[-1].key
    ]
    # A branch adds a second session; the first session stays.
    branch = chain([1], [9])
    save_turn(store, branch, "s")
    assert set([session.leaf for session in store.index.sessions() if session.name == "s"]) == {
        longer[-1].key,
        branch[-1].key,
    }


def test_longer_block_replaces_the_tail_that_it_contains(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s")
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", replaced=((tail.key, longer[1].key),))
    assert tail.key not in store
    assert not block_path(store.folder, tail.key).exists()
    assert [(session.leaf, session.n_tokens) for session in store.index.sessions()] == [
        (longer[1].key, 4)
    ]


@pytest.mark.parametrize("pinned", [False, True])
def test_replaced_tail_stays_while_another_session_ends_in_it(
    store: BlockStore, tmp_path: Path, pinned: bool
) -> None:
    """Both turns wait in the queue together; then the second session continues."""
    (short,), (longer,), (longest,) = chain([2, 3]), chain([2, 3, 4]), chain([2, 3, 4, 5])
    tails = short, longer, longest
    with writer_held(store):
        for name, end, old in (("alice", short, None), ("bob", longer, short)):
            leaf = Leaf(name, end.key, end.stop, ((old.key, end.key),) if old else ())
            store.commit(Commit(ROOT, (end,), leaf), [(end, arrays_of(end))])
    (alice,) = store.index.sessions_named("alice")
    alice = store.disk.set_pinned(alice, pinned)
    replaced = tuple((old.key, longest.key) for old in (short, longer))
    save_turn(store, [longest], "bob", replaced=replaced)
    assert [store.disk.has(tail.key) for tail in tails] == [True, False, True]
    assert [tail.key in store.pool for tail in tails] == [True, False, True]
    (bob,) = store.index.sessions_named("bob")
    assert store.index.session(alice.id) == alice and alice.leaf == short.key
    assert (bob.leaf, bob.n_tokens) == (longest.key, 4)
    _, parts = export_parts(store.index, alice, export_records(store.index, alice))
    (tmp_path / "alice").write_bytes(b"".join(parts))
    with closing(SessionFile(tmp_path / "alice")) as exported:
        assert exported.blocks == (short,)
    store.disk.remove_session(bob)
    assert [tail.key in store.index for tail in tails] == [True, False, False]
    save_turn(store, [longer], "alice", replaced=((short.key, longer.key),))
    assert [tail.key in store.index for tail in tails] == [False, True, False]


def test_touch_updates_the_times_of_use_in_the_index(store: BlockStore) -> None:
    (used,), (other,) = chain([1]), chain([2])
    save_turn(store, [used], "used", [state(used)])
    save_turn(store, [other], "other", [state(other)])
    store.touch([used.key], [state(used)])
    store.writer.drain()
    assert [key for *_, key in leaves(store.index)] == [other.key, used.key]
    checkpoints = [block for *_, block in unused_checkpoints(store.index)]
    assert checkpoints == [other.key, used.key]


def test_least_recently_used_conversations_are_evicted_first(store: BlockStore) -> None:
    save_turn(store, chain([1], [2], [3]), "old")
    save_turn(store, chain([4], [5], [6]), "used")
    store.touch([chain([1], [2], [3])[-1].key])
    store.drain()
    block_bytes = store.index.totals().n_bytes // 6
    store.close()
    tight = DiskStore(store.folder, store.limits)
    used = tight.used_bytes()
    tight.limits = replace(tight.limits, max_disk_bytes=used - block_bytes * 2)
    assert tight.make_room(0)
    assert [n.key in tight.index for n in chain([1], [2], [3])] == [True] * 3
    assert [n.key in tight.index for n in chain([4], [5], [6])] == [True, False, False]
    assert [session.name for session in tight.index.sessions()] == ["old"]
    assert len(list((store.folder / "blocks").glob("*/*"))) == tight.index.totals().n_blocks
    tight.close()


def test_damaged_or_missing_block_is_removed_from_the_index(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes)
    store.pool.clear()
    path = block_path(store.folder, nodes[1].key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert store.reader.load(nodes[1], ROOT) is None
    block_path(store.folder, nodes[0].key).unlink()
    assert store.reader.load(nodes[0], ROOT) is None
    store.drain()
    assert nodes[0].key not in store.index and nodes[1].key not in store.index


def test_lost_block_is_hidden_at_once(store: BlockStore) -> None:
    """The block may be in RAM, and the writer may be busy for a long time."""
    nodes = chain([1], [2])
    save_turn(store, nodes)
    with writer_held(store):
        store.lose(nodes[1], "the canary differs")
        assert nodes[1].key not in store and nodes[1].key not in store.pool
        assert store.children(nodes[0].key) == []


def test_commit_without_a_leaf_makes_no_session(store: BlockStore) -> None:
    nodes = chain([1], [2])
    store.commit(Commit(ROOT, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])
    store.drain()
    assert store.index.totals().n_blocks == 2
    assert [session.leaf for session in store.index.sessions() if session.name == "s"] == []


def test_failed_write_commits_nothing(store: BlockStore, caplog: pytest.LogCaptureFixture) -> None:
    nodes = chain([1], [2])
    (store.folder / "blocks").write_text("in the way")
    save_turn(store, nodes, "s")
    assert store.index.totals().n_blocks == 0
    assert [session.leaf for session in store.index.sessions() if session.name == "s"] == []
    assert "cannot save a turn" in caplog.text
    # Unwritten blocks are still served from RAM, and are evicted when RAM is needed.
    block = store.pool.get(nodes[0].key)
    assert block is not None and not block.pins


def test_error_for_an_unusable_folder_names_the_option(tmp_path: Path, limits: StoreLimits) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--kvpersist-dir"):
        BlockStore(tmp_path / "file" / "store", limits)


def test_index_returns_the_children_nearest_to_the_text(store: BlockStore) -> None:
    """Omitted children have no more in common with the text ahead than returned ones."""
    rng = random.Random(5)

    def word() -> str:
        return "".join(rng.choice("ab") for _ in range(rng.randrange(1, 12)))

    nodes = []
    for n in range(400):
        packed = pack_ids([n])
        nodes.append(Block(block_key(ROOT.key, packed), ROOT.key, 0, packed, word()))
    store.drain()  # the sweep would remove rows of blocks without files
    store.index.add_blocks(ROOT, [(node, 1) for node in nodes])
    for _ in range(300):
        ahead = word() + word()
        children = store.index.children(ROOT.key, ahead)
        whole = {node.key for node in nodes if ahead.startswith(node.text)}
        assert whole <= {node.key for node in children}
        best = max(common_prefix(node.text, ahead, 0) for node in nodes)
        assert max(common_prefix(node.text, ahead, 0) for node in children) == best
        assert len(children) < len(nodes) // 2


SPELLINGS = TokenText({1: b"a", 2: b"b", 3: b"ab", 4: b"ba", 5: b"aab"}.get)


def random_tree(store: BlockStore, rng: random.Random) -> list[Block]:
    """Add blocks to the store: on disk, in RAM, or both. Many have equal texts but other ids."""
    nodes: dict[bytes, Block] = {}
    for _ in range(rng.randrange(1, 14)):
        parent, start = rng.choice([(ROOT.key, 0), *((n.key, n.stop) for n in nodes.values())])
        ids = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
        packed = pack_ids(ids)
        node = Block(block_key(parent, packed), parent, start, packed, SPELLINGS.decode(ids))
        nodes[node.key] = node
    for node in nodes.values():
        where = rng.choice(["disk", "RAM", "both", "both"])
        if where != "RAM":
            store.index.add_blocks(ROOT, [(node, 1)])
        if where != "disk":
            store.pool.put(KVBlock.of(node, {}))
    return list(nodes.values())


def test_match_that_searches_ram_first_equals_the_full_match(store: BlockStore) -> None:
    store.drain()  # the sweep would remove rows of blocks without files
    rng = random.Random(3)
    n_fewer = 0
    for _ in range(150):
        nodes = random_tree(store, rng)
        ids = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 4))]
        ancestor: Block | None = rng.choice(nodes)
        while ancestor is not None:
            ids = [*ancestor.ids, *ids]
            ancestor = next((node for node in nodes if node.key == ancestor.parent), None)
        text, packed = SPELLINGS.decode(ids), pack_ids(ids)
        by_text, by_ids = (store.ram_first(ROOT.key, prompt) for prompt in (text, packed))
        n_fewer += bool(by_text.complete)
        match = match_prompt(by_text, ROOT.key, text, SPELLINGS)
        assert match == match_prompt(store, ROOT.key, text, SPELLINGS)
        match = match_prompt(by_ids, ROOT.key, packed)
        assert match == match_prompt(store, ROOT.key, packed)
        store.pool.clear()
        for node in nodes:
            store.index.forget(node.key)
    assert n_fewer > 35


def test_match_of_a_conversation_in_ram_runs_few_queries(store: BlockStore) -> None:
    store.drain()
    nodes = chain(*([n] for n in range(1, 600)))
    store.index.add_blocks(ROOT, [(node, 1) for node in nodes])
    for node in nodes:
        store.pool.put(KVBlock.of(node, {}))
    statements: list[str] = []
    store.index.database.connection.set_trace_callback(statements.append)
    packed = pack_ids(range(1, 600))
    source = store.ram_first(ROOT.key, packed)
    assert match_prompt(source, ROOT.key, packed).n_tokens == 599
    # Three queries for the other children, and one for the child of the last block.
    assert len(statements) <= 5
    store.pool.remove(nodes[300].key)
    assert match_prompt(source, ROOT.key, packed).n_tokens == 599  # evicted, so read from the index


def test_block_found_damaged_while_a_turn_is_saved_is_removed(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes[:1])
    save = Saving.save

    def saving(*args: Any) -> Any:
        saved = save(*args)
        store.lose(nodes[0], "a reader found damage")
        return saved

    monkeypatch.setattr(Saving, "save", saving)
    save_turn(store, nodes)
    store.drain()  # runs the tasks that were submitted during the save
    assert nodes[0].key not in store.index
    assert len(list((store.folder / "quarantine").glob("*.safetensors"))) == 1


def test_waiting_turn_keeps_a_tail_that_another_turn_replaces(store: BlockStore) -> None:
    """The same prompt was answered twice, and the first conversation has continued."""
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "first")
    longer = chain([1], [2, 3, 4])
    with writer_held(store):
        for nodes, name, replaced in (
            (longer, "first", ((tail.key, longer[1].key),)),
            ([head, tail], "second", ()),
        ):
            new = [(node, arrays_of(node)) for node in nodes if node.key not in store]
            leaf = Leaf(name, nodes[-1].key, nodes[-1].stop, replaced)
            store.commit(Commit(ROOT, tuple(nodes), leaf), new)
    assert {session.name: session.leaf for session in store.index.sessions()} == {
        "first": longer[1].key,
        "second": tail.key,
    }
    assert tail.key in store.index and store.turns_not_saved == 0


@pytest.mark.parametrize("change", ["saved", "put", "missing", "damaged"])
def test_changes_of_the_stored_blocks_are_counted(store: BlockStore, change: str) -> None:
    """If the count has changed, a prompt is matched again."""
    nodes = chain([1], [2])
    save_turn(store, nodes[:1])
    before = store.n_changes
    if change == "saved":
        save_turn(store, nodes)
    elif change == "put":
        store.put([(nodes[1], arrays_of(nodes[1]))])
    elif change == "missing":
        store.pool.clear()
        block_path(store.folder, nodes[0].key).unlink()
        assert store.reader.load(nodes[0], ROOT) is None
    else:
        store.lose(nodes[0], "damaged")
    assert store.n_changes != before


def test_turn_that_cannot_be_saved_is_counted_and_unpinned(
    store: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process removed one of the turn's blocks, which is not in RAM."""
    nodes = chain([1], [2])
    save_turn(store, nodes[:1])
    store.pool.clear()
    with closing(DiskStore(store.folder, store.limits)) as other:
        other.forget(nodes[0].key)
    new = [(nodes[1], arrays_of(nodes[1]))]
    leaf = Leaf(None, nodes[-1].key, nodes[-1].stop)
    store.commit(Commit(ROOT, tuple(nodes)), new)
    store.drain()
    assert store.turns_not_saved == 0  # a prompt that is being computed is not a turn
    store.commit(Commit(ROOT, tuple(nodes), leaf), new)
    store.drain()
    assert store.turns_not_saved == 1
    assert [entry.pins for entry in store.pool._entries.values()] == [0]
    store.close()
    assert "turns that could not be saved since the last saved turn: 1;" in caplog.text


def test_end_says_nothing_about_a_failed_turn_that_a_later_turn_has_saved(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = chain([1], [2])

    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store.disk_tier, "store", fail)
        save_turn(store, nodes[:1])
    save_turn(store, nodes)
    assert store.turns_not_saved == 1 and nodes[0].key in store.index
    store.close()
    assert "could not be saved" not in caplog.text


def test_blocks_evicted_from_disk_stay_in_ram_while_a_turn_needs_them(tmp_path: Path) -> None:
    """The disk is small, and RAM is full of prefetched blocks."""
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 20, 4 << 20))
    prefetched = chain(*([n] for n in range(10, 19)))
    for n_blocks in (5, 9):
        save_turn(store, prefetched[:n_blocks])
    first, second = chain(*([n] for n in range(6))), chain([20])
    save_turn(store, first[:5])
    for node in reversed(first[:5]):
        store.disk.forget(node.key, Gone.EVICTED)
    assert store.index.totals().n_blocks == 9 and len(store.pool) == 14
    store.pool.pin([node.key for node in prefetched], prefetch=True)
    with writer_held(store):
        store.commit(Commit(ROOT, tuple(first)), [(first[5], arrays_of(first[5]))])
        store.commit(Commit(ROOT, tuple(second)), [(second[0], arrays_of(second[0]))])
    assert store.turns_not_saved == 0
    assert all(node.key in store.index for node in (*first, *second))
    store.close()


@pytest.mark.parametrize("cause", ["evicted", "damaged", "by another process"])
def test_log_says_why_a_turn_was_not_saved(
    store: BlockStore, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    head, tail = chain([1], [2])
    save_turn(store, [head])
    store.pool.clear()
    if cause == "evicted":
        store.disk.forget(head.key, Gone.EVICTED)
    elif cause == "damaged":
        store.lose(head, "a test")
    else:
        with closing(DiskStore(store.folder, store.limits)) as other:
            other.forget(head.key)
    store.commit(Commit(ROOT, (head, tail)), [(tail, arrays_of(tail))])
    store.drain()
    (message,) = (record.getMessage() for record in caplog.records if "not saved" in record.msg)
    assert str(head) in message and ("another process" in message) is (
        cause == "by another process"
    )


@pytest.mark.parametrize("is_full_precision", [True, False])
def test_saving_a_turn_does_not_evict_its_parent_blocks(
    store: BlockStore, is_full_precision: bool
) -> None:
    """Parents of waiting turns are not evicted, either, though they are least recently used."""
    ids = [list(range(first, first + 12)) for first in (10, 30, 50)]
    old, other = chain(ids[0]), chain(ids[1])
    new = chain(ids[0], ids[2])[1:] if is_full_precision else chain(ids[2])
    save_turn(store, old)
    save_turn(store, other)
    store.close()
    block_bytes = block_path(store.folder, old[0].key).stat().st_size
    with closing(DiskStore(store.folder, store.limits)) as disk:
        room = disk.reserve_bytes + block_bytes // 2
        disk.limits = replace(disk.limits, max_disk_bytes=disk.used_bytes() + room)
        file = disk.new_file(ROOT, new[0], arrays_of(new[0]))
        turn = Commit(ROOT, tuple(new))
        keep = () if is_full_precision else (old[0].key,)
        (saved,) = Saving(disk, lambda root, node: file, keep=keep).save([lambda: turn])
        assert isinstance(saved, Saved)
        assert [block.key in disk.index for block in (*old, *other, *new)] == [True, False, True]


def test_blocks_of_a_pinned_session_are_not_evicted(store: BlockStore) -> None:
    pinned, other = chain([1], [2]), chain([3])
    save_turn(store, pinned, "pinned")
    save_turn(store, other)
    store.close()
    with closing(DiskStore(store.folder, store.limits)) as disk:
        (session,) = (session for session in disk.index.sessions() if session.name == "pinned")
        disk.set_pinned(session, True)
        disk.limits = replace(disk.limits, max_disk_bytes=1000)
        assert not disk.make_room(0)
        assert [block.key in disk.index for block in (*pinned, *other)] == [True, True, False]
