"""The index's file: its connections, its rows, its totals, and what a damaged one may say."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable

from mlx_lm_kvpersist.store.block_store import BlockStore

from .conftest import chain, save_turn


def in_fresh_threads(n_threads: int, act: Callable[[], object]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    for _ in range(n_threads):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not failures, failures[0]


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0


def test_a2_a_connection_ends_with_its_thread(store: BlockStore) -> None:
    """As the server's threads do that answer for the statistics: one each."""
    save_turn(store, chain([1], [2]), "s")
    in_fresh_threads(2, store.stats)
    before = n_descriptors()
    in_fresh_threads(1100, store.stats)
    assert n_descriptors() <= before + 4
    save_turn(store, chain([1], [2], [3]), "s")
    assert store.counters.turns_saved == 2


def test_a2_closing_waits_for_nobody_and_breaks_nobody(store: BlockStore) -> None:
    """A connection that a thread is using is closed when the thread is done with it."""
    save_turn(store, chain([1], [2]), "s")
    index, halfway, closed = store.index, threading.Event(), threading.Event()
    seen: list[object] = []

    def read() -> None:
        rows = index._db.execute("SELECT key FROM blocks")
        seen.append(next(rows))
        halfway.set()
        assert closed.wait(10)
        seen.extend(rows)
        try:
            index.n_blocks()
        except sqlite3.Error as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert halfway.wait(10)
    before = n_descriptors()
    index.close()
    closed.set()
    reader.join()
    assert len(seen) == 3 and isinstance(seen[2], sqlite3.OperationalError)
    assert n_descriptors() < before
