"""Draft tokens from the store come from blocks of the same tenant, and from nothing else."""

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


def known(runs: StoredRuns, root: Root = ROOT) -> StoredRuns:
    runs.read(root)
    runs._reads.join()
    return runs


def test_what_follows_is_found_over_ends_of_blocks(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]), "a")
    runs = store.runs
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 9) == []  # not read yet
    known(runs)
    assert runs.after(ROOT, [0, 1, 2, 3, 4, 5, 6], 9) == [7, 8, 9, 10, 11]
    assert runs.after(ROOT, [3, 4, 5, 6, 7, 8], 2) == [9, 10]


def test_of_two_conversations_the_newer_is_believed(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3], [4, 5, 6, 7, 8]), "a")
    save_turn(store, chain([9, 1, 2, 3], [4, 5, 6, 70, 80]), "b")
    runs = known(store.runs)
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [70, 80]
    store.touch([one.key for one in chain([1, 2, 3], [4, 5, 6, 7, 8])])
    save_turn(store, chain([50, 51]), "c")  # use alone is no reason to read again
    assert known(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 2) == [7, 8]


def test_each_tenant_has_its_own(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7, 8]), "a")
    runs, other = known(store.runs), replace(ROOT, namespace="other")
    assert runs.after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert known(runs, other).after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == []  # one tree at a time
    assert known(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [7, 8]


def test_it_is_read_anew_only_where_the_store_has_changed(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7]), "a")
    runs = known(store.runs)
    first = runs._known
    assert known(runs)._known is first
    save_turn(store, chain([11, 12, 13, 14, 15, 16, 17]), "b")
    assert known(runs).after(ROOT, [11, 12, 13, 14, 15, 16], 1) == [17]


@pytest.mark.parametrize("damage", ["lies", "circle", "gone"])
def test_a_damaged_index_is_no_harm(store: BlockStore, damage: str) -> None:
    whole, bad = chain([1, 2, 3, 4, 5, 6, 7]), chain([21, 22, 23, 24, 25, 26, 27])
    save_turn(store, whole, "a")
    save_turn(store, bad, "b")
    path = store.folder / "index.sqlite"
    if damage == "gone":
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        os.truncate(path, 100)
    else:
        change = "ids = x'ff'" if damage == "lies" else "parent = key"
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"UPDATE blocks SET {change} WHERE key = ?", (bad[0].key,))
    runs = known(store.runs)
    assert runs.after(ROOT, [21, 22, 23, 24, 25, 26], 1) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == ([7] if damage != "gone" else [])


def test_what_is_deleted_is_guessed_no_more(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7]), "a")
    save_turn(store, chain([11, 12, 13, 14, 15, 16, 17]), "b")
    sessions, runs = StoredSessions(store), known(store.runs)
    first, second = (store.index.sessions_named(name)[0].id for name in ("a", "b"))
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == [7]
    sessions.delete(first)
    runs = store.runs
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == []
    assert known(runs).after(ROOT, [11, 12, 13, 14, 15, 16], 1) == [17]
    # Ids read before a deletion are not used after it.
    save_turn(store, chain([21, 22]), "c")
    has_read, may_go_on, joined = threading.Event(), threading.Event(), runs_module._joined

    def slow(blocks: list[Block]) -> bytes:
        has_read.set()
        assert may_go_on.wait(60)
        return joined(blocks)

    monkeypatch.setattr(runs_module, "_joined", slow)
    assert runs.read(ROOT) and has_read.wait(60)
    assert not runs.read(ROOT)
    sessions.delete(second)
    may_go_on.set()
    runs._reads.join()
    assert store.runs.after(ROOT, [11, 12, 13, 14, 15, 16], 1) == []


def test_a_small_tree_among_many_newer_blocks_costs_little(store: BlockStore) -> None:
    """At most eight times as many rows are read as are wanted, of any tree."""
    save_turn(store, chain([1], [2], [3]), "a")
    other = replace(ROOT, namespace="other")
    nodes = chain([4], [5], parent=other.key)
    store.commit(Commit(other, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])
    store.drain()
    assert [one.ids for one in store.index.newest(other, 2)] == [[5], [4]]
    assert [one.ids for one in store.index.newest(ROOT, 2)] == [[3], [2]]
    for n in range(10):
        save_turn(store, chain([100 + n]), "b")
    assert [one.ids for one in store.index.newest(other, 1)] == []
