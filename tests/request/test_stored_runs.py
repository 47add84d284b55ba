"""What is guessed from the store: what others of the same tenant left, and nothing else."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.request.stored_runs import StoredRuns
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.store.conftest import ROOT, chain, save_turn

from .conftest import store_in


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    store = store_in(tmp_path / "store")
    yield store
    store.close()


def known(runs: StoredRuns, root: Root = ROOT) -> StoredRuns:
    runs.read(root)
    runs._reads.join()
    return runs


def test_what_follows_is_found_over_ends_of_blocks(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]), "a")
    runs = StoredRuns(store)
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 9) == []  # not read yet
    known(runs)
    assert runs.after(ROOT, [0, 1, 2, 3, 4, 5, 6], 9) == [7, 8, 9, 10, 11]
    assert runs.after(ROOT, [3, 4, 5, 6, 7, 8], 2) == [9, 10]


def test_of_two_conversations_the_newer_is_believed(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3], [4, 5, 6, 7, 8]), "a")
    save_turn(store, chain([9, 1, 2, 3], [4, 5, 6, 70, 80]), "b")
    runs = known(StoredRuns(store))
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [70, 80]
    store.touch([one.key for one in chain([1, 2, 3], [4, 5, 6, 7, 8])])
    save_turn(store, chain([50, 51]), "c")  # use alone is no reason to read anew
    assert known(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 2) == [7, 8]


def test_each_tenant_has_its_own(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7, 8]), "a")
    runs, other = known(StoredRuns(store)), replace(ROOT, namespace="other")
    assert runs.after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert known(runs, other).after(other, [1, 2, 3, 4, 5, 6], 3) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 3) == []  # one tree at a time
    assert known(runs).after(ROOT, [1, 2, 3, 4, 5, 6], 3) == [7, 8]


def test_it_is_read_anew_only_where_the_store_has_changed(store: BlockStore) -> None:
    save_turn(store, chain([1, 2, 3, 4, 5, 6, 7]), "a")
    runs = known(StoredRuns(store))
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
        store.close()
        os.truncate(path, 100)
    else:
        change = "ids = x'ff'" if damage == "lies" else "parent = key"
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(f"UPDATE blocks SET {change} WHERE key = ?", (bad[0].key,))
    runs = known(StoredRuns(store))
    assert runs.after(ROOT, [21, 22, 23, 24, 25, 26], 1) == []
    assert runs.after(ROOT, [1, 2, 3, 4, 5, 6], 1) == ([7] if damage != "gone" else [])
