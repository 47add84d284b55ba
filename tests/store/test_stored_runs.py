"""Draft tokens from the store come only from blocks of the same tenant."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from mlx_lm_kvpersist.block import Block, Root
from mlx_lm_kvpersist.store import runs as runs_module
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit
from mlx_lm_kvpersist.store.runs import StoredRuns
from mlx_lm_kvpersist.store.stored_sessions import StoredSessions

from .conftest import ROOT, arrays_of, chain, save_turn


def after_reading(runs: StoredRuns, root: Root = ROOT) -> StoredRuns:
    runs.read(root)
    runs._reads.join()
    return runs


def test_draft_tokens_are_found_across_the_ends_of_blocks(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]), "a")
    runs = store.runs
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 9) == []  # not read yet
    after_reading(runs)
    assert runs.after(ROOT, [0, 1, 2, 3, 4, 5, 6], 9) == [7, 8, 9, 10, 11]
    assert runs.after(ROOT, [3, 4, 5, 6, 7, 8], 2) == [9, 10]


def test_draft_tokens_come_from_the_newer_conversation(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3], [4, 5, 6, 7, 8]), "a")
    save_turn(store, chain([9, 1, 2, 3], [4, 5, 6, 70, 80]), "b")
    runs = after_reading(store.runs)
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [70, 80]
    store.touch([node.key for node in chain([1, 2, 3], [4, 5, 6, 7, 8])])
    save_turn(store, chain([50, 51]), "c")  # a use alone causes no new read
    assert after_reading(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 2) == [7, 8]


def test_tenants_get_no_draft_tokens_of_each_other(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7, 8]), "a")
    runs, other = after_reading(store.runs), replace(ROOT, namespace="other")
    assert runs.after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert after_reading(runs, other).after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == []  # only the last tree is kept
    assert after_reading(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [7, 8]


def test_blocks_are_read_again_only_after_the_store_has_changed(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7]), "a")
    runs = after_reading(store.runs)
    first = runs._known
    assert after_reading(runs)._known is first
    save_turn(store, chain([11, 12, 13, 14, 15, 16, 17]), "b")
    assert after_reading(runs).after(ROOT, [11, 12, 13, 14, 15, 16], 1) == [17]


@pytest.mark.parametrize("damage", ["wrong ids", "cycle", "truncated"])
def test_damaged_index_gives_no_wrong_draft_tokens(store: BlockStore, damage: str) -> None:
    whole, bad = chain([1, 2, 3, 4, 5, 6, 7]), chain([21, 22, 23, 24, 25, 26, 27])
    save_turn(store, whole, "a")
    save_turn(store, bad, "b")
    path = store.folder / "index.sqlite"
    if damage == "truncated":
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        os.truncate(path, 100)
    else:
        change = "ids = x'ff'" if damage == "wrong ids" else "parent = key"
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"UPDATE blocks SET {change} WHERE key = ?", (bad[0].key,))
    runs = after_reading(store.runs)
    assert runs.after(ROOT, [21, 22, 23, 24, 25, 26], 1) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == ([7] if damage != "truncated" else [])


def test_deleted_sessions_give_no_draft_tokens(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7]), "a")
    save_turn(store, chain([11, 12, 13, 14, 15, 16, 17]), "b")
    sessions, runs = StoredSessions(store), after_reading(store.runs)
    first, second = (store.index.sessions_named(name)[0].id for name in ("a", "b"))
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == [7]
    sessions.delete(first)
    runs = store.runs
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == []
    assert after_reading(runs).after(ROOT, [11, 12, 13, 14, 15, 16], 1) == [17]
    # Ids read before a deletion are not used after it.
    save_turn(store, chain([21, 22]), "c")
    has_read, may_join, joined = threading.Event(), threading.Event(), runs_module._joined

    def slow(blocks: list[Block]) -> bytes:
        has_read.set()
        assert may_join.wait(60)
        return joined(blocks)

    monkeypatch.setattr(runs_module, "_joined", slow)
    assert runs.read(ROOT) and has_read.wait(60)
    assert not runs.read(ROOT)
    sessions.delete(second)
    may_join.set()
    runs._reads.join()
    assert store.runs.after(ROOT, [11, 12, 13, 14, 15, 16], 1) == []


def test_search_for_the_newest_blocks_reads_few_rows_of_other_trees(store: BlockStore) -> None:
    """At most eight times the requested number of rows are read, over all trees."""
    save_turn(store, chain([1], [2], [3]), "a")
    other = replace(ROOT, namespace="other")
    nodes = chain([4], [5], parent=other.key)
    store.commit(Commit(other, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])
    store.drain()
    assert [block.ids for block in store.index.newest(other, 2)] == [[5], [4]]
    assert [block.ids for block in store.index.newest(ROOT, 2)] == [[3], [2]]
    for n in range(10):
        save_turn(store, chain([100 + n]), "b")
    assert [block.ids for block in store.index.newest(other, 1)] == []
