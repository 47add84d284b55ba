"""The index: connections, rows, totals, and invalid rows of a damaged index."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.match import TokenText, match_prompt
from mlx_lm_kvpersist.store import database, small_state
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.database import Database
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Leaf
from mlx_lm_kvpersist.store.verify import find_problems, fix_problems
from tests.support.store_files import checkpoint_path

from .conftest import ROOT, chain, leaves, save_turn, state, unused_checkpoints, window


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
    return len(os.listdir("/dev/fd"))


def test_connection_is_closed_when_its_thread_ends(store: BlockStore) -> None:
    """Each thread of the server that reads the statistics has one connection."""
    save_turn(store, chain([1], [2]), "s")
    in_fresh_threads(2, store.stats)
    before = n_descriptors()
    in_fresh_threads(1100, store.stats)
    assert n_descriptors() <= before + 4
    save_turn(store, chain([1], [2], [3]), "s")
    assert store.turns_saved == 2


def test_concurrent_statistics_leave_no_open_descriptors(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    in_fresh_threads(2, store.stats)
    before = n_descriptors()
    together = threading.Barrier(20)

    def ask() -> None:
        together.wait()
        store.stats()

    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(ask) for _ in range(400)]:
            future.result()
    assert n_descriptors() <= before


def test_close_neither_waits_for_nor_breaks_a_running_read(store: BlockStore) -> None:
    """A connection in use is closed when its thread has finished the read."""
    save_turn(store, chain([1], [2]), "s")
    index, halfway, closed = store.index, threading.Event(), threading.Event()
    answers: list[object] = []

    def read() -> None:
        rows = index.database.connection.execute("SELECT key FROM blocks")
        answers.append(next(rows))
        halfway.set()
        assert closed.wait(60)
        answers.extend(rows)
        try:
            index.totals()
        except sqlite3.Error as error:
            answers.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert halfway.wait(60)
    before = n_descriptors()
    index.close()
    closed.set()
    reader.join()
    assert len(answers) == 3 and isinstance(answers[2], sqlite3.OperationalError)
    assert n_descriptors() < before


def test_short_lived_threads_borrow_one_connection(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.drain()  # the writer has its own connection
    connected: list[Database] = []
    connect = Database._connect

    def record_and_connect(connecting: Database) -> sqlite3.Connection:
        connected.append(connecting)
        return connect(connecting)

    monkeypatch.setattr(Database, "_connect", record_and_connect)
    together = threading.Barrier(8)

    def ask() -> None:
        together.wait()
        with store.index.database.lent():
            store.index.totals()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(ask) for _ in range(80)]:
            future.result()
    assert len(connected) == 1


def test_thread_that_keeps_the_connection_does_not_stop_other_threads(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other threads open and close their own connections."""
    monkeypatch.setattr(database, "_TURN_S", 0.02)
    halfway, may_end = threading.Event(), threading.Event()

    def keep() -> None:
        with store.index.database.lent():
            store.index.totals()
            halfway.set()
            may_end.wait(60)

    def ask() -> None:
        with store.index.database.lent():
            assert store.index.totals().n_blocks == 0

    slow = threading.Thread(target=keep)
    slow.start()
    assert halfway.wait(60)
    in_fresh_threads(1, ask)
    before = n_descriptors()
    in_fresh_threads(5, ask)
    assert slow.is_alive() and n_descriptors() <= before
    may_end.set()
    slow.join()
    in_fresh_threads(2, ask)


@pytest.mark.parametrize("asks_again", [True, False])
def test_connection_lent_during_a_close_is_closed_after_its_use(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, asks_again: bool
) -> None:
    save_turn(store, chain([1], [2]), "s")
    monkeypatch.setattr(database, "_LAST_TURN_S", 0.02)
    halfway, closed = threading.Event(), threading.Event()
    answers: list[object] = []

    def read() -> None:
        with store.index.database.lent():
            rows = store.index.database.connection.execute("SELECT key FROM blocks")
            answers.append(next(rows))
            halfway.set()
            assert closed.wait(60)
            answers.extend(rows)
            if asks_again:
                with pytest.raises(sqlite3.OperationalError, match="the index was closed"):
                    store.index.totals()
            answers.append("no other answer")

    reader = threading.Thread(target=read)
    reader.start()
    assert halfway.wait(60)
    store.close()
    before = n_descriptors()
    closed.set()
    reader.join()
    assert len(answers) == 3
    assert n_descriptors() < before


def test_lookup_among_many_conversations_needs_few_statements(store: BlockStore) -> None:
    """The prompt begins like one of 40 conversations with different beginnings."""
    for n in range(40):
        save_turn(store, chain([100 + n]), f"s{n}")
    statements: list[str] = []
    store.index.database.connection.set_trace_callback(statements.append)
    nodes = store.index.children(ROOT.key, "<120> and more")
    store.index.database.connection.set_trace_callback(None)
    assert "<120>" in [node.text for node in nodes]
    assert len(statements) <= 5


# Rows with wrong content.

DAMAGES = [
    "UPDATE roots SET about = 'no JSON'",
    "UPDATE roots SET about = '{\"fingerprint\": 5}'",
    "UPDATE roots SET about = x'00ff'",
    "DELETE FROM roots",
    "UPDATE blocks SET text = x'ff00'",
    "UPDATE blocks SET text = CAST(x'ff' AS TEXT)",
    "UPDATE blocks SET ids = 'text'",
    "UPDATE blocks SET ids = x'01'",
    "UPDATE blocks SET start = 'first'",
    "UPDATE blocks SET n_bytes = 'big'",
    "UPDATE blocks SET used = 'then'",
    "UPDATE blocks SET pending = 3",
    "UPDATE blocks SET root = 'root'",
    "UPDATE blocks SET parent = 7",
    "UPDATE blocks SET n_children = 'many'",
    "UPDATE blocks SET n_children = 99",
    "UPDATE blocks SET key = 'key' WHERE key = (SELECT max(key) FROM blocks)",
    "UPDATE checkpoints SET kind = x'00', n_tokens = 'all'",
    "UPDATE checkpoints SET n_bytes = 'big', used = x''",
    "UPDATE checkpoints SET root = 7",
    "UPDATE sessions SET n_tokens = 'all' WHERE name = 's'",
    "UPDATE sessions SET created = 'then', used = 'now' WHERE name = 's'",
    "UPDATE sessions SET leaf = 'leaf', root = 5 WHERE name = 's'",
    "UPDATE sessions SET name = x'00' WHERE name = 's'",
    "UPDATE sessions SET name = CAST(x'ff' AS TEXT) WHERE name = 's'",
    "UPDATE sessions SET pinned = 'yes' WHERE name = 's'",
    "UPDATE replies SET ids = 'text', used = 'then'",
    "UPDATE state SET value = x'00'",
    "UPDATE writes SET n_bytes = 'many'",
    "UPDATE sessions SET sidecar_bytes = 'big' WHERE name = 's'",
    "UPDATE totals SET sidecar_bytes = 99",
    "UPDATE totals SET n_blocks = 'many'",
    "UPDATE totals SET n_blocks = 99, checkpoint_bytes = -5",
    "DELETE FROM totals",
]


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        assert db.execute(statement).rowcount, statement


@pytest.fixture
def filled(store: BlockStore) -> BlockStore:
    """A store with two sessions that share a block, checkpoints, a reply and a persisted value."""
    nodes = chain([1, 2], [3, 4])
    save_turn(store, nodes, "s", [window(nodes[0]), state(nodes[1])])
    save_turn(store, chain([1, 2], [5, 6]), "t")
    store.commit(Commit(ROOT, (), None, {b"digest": b"ids!"}), [])
    store.view.state.add_note("0" * 16, title="a title")
    store.drain()
    return store


def run_all_queries(store: BlockStore) -> None:
    """Send the queries of a request, of the statistics and of the commands."""
    index = store.index
    for parent in (ROOT.key, chain([1, 2])[0].key):
        for ahead in (None, "<1><2>", pack_ids([1, 2])):
            store.children(parent, ahead)
            index.children(parent, ahead, 1)
    match_prompt(store, ROOT.key, pack_ids([1, 2, 3, 4, 5]))
    for root, _ in index.roots():
        assert root == ROOT
    store.checkpoints([node.key for node in chain([1, 2], [3, 4])])
    store.replies(ROOT.key, [b"digest"])
    store.view.state.note("0" * 16)
    index.state.written_last_hour()
    for session in index.sessions():
        index.chain(session.leaf)
        index.outline([session.leaf])
        index.sessions_at(session.leaf)
    for node in chain([1, 2], [3, 4]):
        index.block(node.key)
    index.root(ROOT.key)
    assert isinstance(index.totals().n_bytes, int)
    store.stats()


@pytest.mark.parametrize("damage", DAMAGES)
def test_invalid_rows_are_ignored_and_can_be_repaired(filled: BlockStore, damage: str) -> None:
    files = {path.name for path in filled.folder.glob("[bp]*s/*/*")}
    filled.pool.clear()
    change(filled.folder, damage)
    run_all_queries(filled)
    assert not filled._failures
    problems = find_problems(filled.folder, filled.index)
    assert problems
    fix_problems(filled.disk, problems)
    assert find_problems(filled.folder, filled.index) == []
    assert {path.name for path in filled.folder.glob("[bp]*s/*/*")} == files
    assert {session.name for session in filled.index.sessions()} == {"s", "t"}
    assert filled.index.totals().n_blocks == 3 and filled.index.totals().n_checkpoints == 2
    assert leaves(filled.index)[0][-1] == chain([1, 2], [3, 4])[1].key
    run_all_queries(filled)


def test_invalid_total_does_not_affect_other_totals(filled: BlockStore) -> None:
    n_bytes = filled.index.totals().n_bytes
    change(filled.folder, "UPDATE totals SET n_blocks = 'many'")
    assert filled.index.totals().n_bytes == n_bytes > 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_invalid_rows_are_repaired_when_a_server_starts(filled: BlockStore, damage: str) -> None:
    filled.close()
    change(filled.folder, damage)
    again = BlockStore(filled.folder, filled.limits)
    again.drain()
    assert again.index.faults() == []
    assert again.index.totals().n_blocks == 3 and again.index.totals().n_checkpoints == 2
    longer = chain([1, 2], [3, 4], [7])
    save_turn(again, longer, "s")
    assert again.turns_saved == 1 and again.disk.make_room(0)
    again.close()


def test_block_row_with_a_wrong_position_is_ignored(filled: BlockStore) -> None:
    """A key covers parent and ids, not the block's position."""
    filled.pool.clear()
    head, tail = chain([1, 2], [3, 4])
    packed = pack_ids([1, 2, 3, 4])
    change(filled.folder, f"UPDATE blocks SET start = 40 WHERE key = x'{tail.key.hex()}'")
    assert match_prompt(filled, ROOT.key, packed).path == (head,)
    change(filled.folder, f"UPDATE blocks SET start = 7 WHERE key = x'{head.key.hex()}'")
    assert match_prompt(filled, ROOT.key, packed).n_tokens == 0


def test_rows_with_circular_parents_give_an_empty_chain(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes)
    with store.index.database.transaction() as db:
        db.execute("UPDATE blocks SET parent = ? WHERE key = ?", (nodes[2].key, nodes[0].key))
    assert store.index.chain(nodes[2].key) == []


def test_block_row_with_wrong_ids_is_ignored(filled: BlockStore) -> None:
    """Otherwise the block's arrays would be used for other ids."""
    filled.pool.clear()
    tail = chain([1, 2], [3, 4])[1]
    wrong_ids = pack_ids([3, 9]).hex()
    change(filled.folder, f"UPDATE blocks SET ids = x'{wrong_ids}' WHERE key = x'{tail.key.hex()}'")
    tokens = TokenText({i: f"<{i}>".encode() for i in range(1, 10)}.get)
    assert match_prompt(filled, ROOT.key, pack_ids([1, 2, 3, 9])).n_tokens == 2
    assert match_prompt(filled, ROOT.key, "<1><2><3><4>", tokens).n_tokens == 2


# Times of use.


def test_turn_saved_after_the_clock_jumped_back_is_evicted_last(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = chain([1], [2]), chain([3], [4])
    save_turn(store, before, "before", [state(before[1])])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    save_turn(store, after, "after", [state(after[1])])
    first, *_, last = leaves(store.index)
    assert (first[-1], last[-1]) == (before[1].key, after[1].key) and first[0] < last[0]
    checkpoints = [block for *_, block in unused_checkpoints(store.index)]
    assert checkpoints == [before[1].key, after[1].key]
    assert [session.name for session in store.index.sessions()] == ["after", "before"]
    store.touch([before[1].key])
    store.drain()
    assert [key for *_, key in leaves(store.index)] == [after[1].key, before[1].key]


# Views.


def test_view_hides_a_lost_block_while_its_row_is_removed(store: BlockStore) -> None:
    (node,) = chain([1])
    save_turn(store, [node])
    lost = {node.key}
    view = store.index.view(lambda action, error: None, lost)
    real = view.ask

    def ask(*args: Any, **kwargs: Any) -> list[Any]:
        rows = real(*args, **kwargs)
        lost.clear()  # the writer has removed the row by now
        return rows

    view.ask = ask  # type: ignore[method-assign]
    assert node.key not in view


# The size of the index.


@pytest.mark.parametrize("max_replies", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_oldest_remembered_replies_are_deleted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_replies: int
) -> None:
    monkeypatch.setattr(small_state, "_MAX_REPLIES", max_replies)
    index = Index(tmp_path / "index.sqlite")
    for n in range(max_replies + 50):
        index.commit(Commit(ROOT, (), replies={n.to_bytes(4, "big"): b"ids"}))
    (n_replies,) = index.database.connection.execute("SELECT count(*) FROM replies").fetchone()
    assert n_replies == max_replies
    digests = [n.to_bytes(4, "big") for n in range(max_replies + 50)]
    assert index.state.replies(ROOT.key, digests) == dict.fromkeys(digests[50:], b"ids")
    index.close()


def test_queries_for_more_blocks_than_sql_variables_are_answered(store: BlockStore) -> None:
    """SQLite allows 999 or 32,766 variables per statement, depending on its build."""
    nodes = chain(*([number] for number in range(1, 40_000)))
    keys = [node.key for node in nodes]
    path = {node.parent: node.key for node in nodes}
    save_turn(store, nodes[:3], "s", [state(nodes[2])])
    (branch,) = chain([7], parent=nodes[1].key)
    index = store.index
    index.add_blocks(ROOT, [(branch, 1)])
    index.state.add_replies(ROOT.key, {keys[-1]: b"ids", keys[0]: b"more"}, 1.0)
    db = index.database.connection
    if sys.version_info >= (3, 11):  # as SQLite before 3.32
        db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
    assert index.branches(path) == {nodes[1].key}
    assert [checkpoint for checkpoint, _ in index.checkpoints(keys)] == [state(nodes[2])]
    assert [session.name for session in index.sessions_at(*keys)] == ["s"]
    session = index.session_of(Commit(ROOT, tuple(nodes), Leaf("s", keys[-1], nodes[-1].stop)))
    assert session == index.sessions()[0]
    assert index.state.replies(ROOT.key, keys) == {keys[-1]: b"ids", keys[0]: b"more"}
    assert not index.branches({}) and not index.checkpoints([]) and not index.sessions_at()


def test_total_bytes_include_checkpoints(store: BlockStore) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s")
    before = store.index.totals().n_bytes
    save_turn(store, [node], "s", [state(node)])
    checkpoint = checkpoint_path(store.folder, state(node).key)
    assert store.index.totals().n_bytes - before == checkpoint.stat().st_size


def test_index_file_shrinks_when_blocks_are_removed(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    nodes = [chain([n] * 200)[0] for n in range(500)]
    index.add_blocks(ROOT, [(node, 1) for node in nodes])
    index.database.empty_log()
    full = index.path.stat().st_size
    for node in nodes:
        index.forget(node.key)
    index.database.empty_log()
    assert index.path.stat().st_size < full // 10
    index.close()


def test_index_rows_count_towards_the_disk_budget(tmp_path: Path) -> None:
    """The turns have many tokens and tiny arrays, so rows are most of their bytes."""
    limits = StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=4 << 20)
    store = BlockStore(tmp_path / "store", limits)
    peak_bytes = 0

    def measure(*args: object) -> None:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, store.disk.used_bytes())

    store.writer.rest = measure  # type: ignore[method-assign]
    for n in range(12):
        nodes = chain(*([n * 100_000 + m] * 256 for m in range(32)))
        turn = Commit(ROOT, tuple(nodes), Leaf(None, nodes[-1].key, 1))
        tiny = {"0.k": mx.zeros((1, 1, 1, 1))}
        mx.eval(tiny)
        store.commit(turn, [(node, tiny) for node in nodes])
        store.drain()
        measure()
    assert peak_bytes <= limits.max_disk_bytes
    assert store.turns_saved > 8
    store.close()
