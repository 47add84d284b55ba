"""What a store makes of a folder that was removed, half a rebuild, files that outlive the index."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from mlx_lm_kvpersist.match.block import Root
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.files import checkpoint_path, write_block
from mlx_lm_kvpersist.store.index_schema import INDEX_FORMAT, SCHEMA
from mlx_lm_kvpersist.store.lock import StoreLock
from mlx_lm_kvpersist.store.rebuild import rebuild_index

from .conftest import ROOT, arrays_of_part, chain, save_turn, state, window

KILLED = 9


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blocks").glob("*/*")}


def part_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "parts").glob("*/*")}


def test_a_folder_removed_under_an_open_store_is_made_anew(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    shutil.rmtree(store.folder)
    again = chain([3], [4])
    save_turn(store, again, "t")
    assert not store.counters.failures
    assert [x.leaf for x in store.index.sessions() if x.name == "t"] == [again[-1].key]
    assert names(store.folder) == {f"{node.key.hex()}.safetensors" for node in again}


def test_a_rebuild_that_is_killed_loses_nothing(store: BlockStore) -> None:
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    before = names(store.folder)
    (store.folder / "index.sqlite").unlink()
    program = f"""
import os
from pathlib import Path
from mlx_lm_kvpersist.store.budget import StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.index import Index
add, added = Index.add_blocks, []
def killed(self, root, blocks, used=None):
    if added:
        os._exit({KILLED})
    added.append(add(self, root, blocks, used))
Index.add_blocks = killed
DiskStore(Path({str(store.folder)!r}), StoreLimits(0, 1 << 20))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == KILLED
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.n_blocks() == 3
    assert [session.name for session in disk.index.sessions()] == ["s"]
    disk.close()
    assert names(store.folder) == before


def test_an_emptied_index_is_not_taken_at_its_word(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    store.close()
    os.truncate(store.folder / "index.sqlite", 0)
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.n_blocks() == 2
    disk.close()


def test_a_log_without_its_index_is_not_read_into_the_new_one(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    log = store.folder / "index.sqlite-wal"
    left_behind = log.read_bytes()
    assert left_behind
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    (store.folder / "index.sqlite").unlink()
    log.write_bytes(left_behind)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.n_blocks() == 3 and disk.sweep() == 0
    disk.close()


def test_an_index_rebuilt_under_an_open_store(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    for index_is_there in (True, False):
        if not index_is_there:
            (store.folder / "index.sqlite").unlink()
        before = store.index.path.stat().st_ino if index_is_there else None
        with StoreLock(store.folder / "lock").held():
            assert rebuild_index(store.folder) == store.index.n_blocks()
        if index_is_there:  # replaced within: other servers have the file open
            assert store.index.path.stat().st_ino == before
        longer = chain([1], [2], [3 + index_is_there])
        save_turn(store, longer, "s")
        assert not store.counters.failures
        assert longer[-1].key in [x.leaf for x in store.index.sessions() if x.name == "s"]
    store.close()
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.n_blocks() == 4
    disk.close()


def test_sessions_that_moved_with_another_outlive_the_index(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s")
    save_turn(store, [head, tail], "other")
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", replaced=((tail.key, longer[1].key),))
    store.close()
    (store.folder / "index.sqlite").unlink()
    disk = DiskStore(store.folder, store.limits)
    assert {session.name for session in disk.index.sessions()} == {"s", "other"}
    disk.close()


def test_a_folder_removed_while_another_thread_reads(store: BlockStore) -> None:
    """The reader's connection must not be closed under it: that ends the process."""
    save_turn(store, chain([1], [2]), "s")
    stop = threading.Event()
    n_reads = 0

    def read() -> None:
        nonlocal n_reads
        while not stop.is_set():
            store.children(ROOT.key)
            _ = chain([1])[0].key in store
            n_reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for n in range(30):
            shutil.rmtree(store.folder)
            save_turn(store, chain([n, 7], [n, 8]), "s")
            assert store.index.n_blocks() == 2
    finally:
        stop.set()
        reader.join()
    assert n_reads > 100


# Parts.


def test_a_sweep_brings_parts_in_line(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    kept, lost, stray = state(nodes[0]), window(nodes[1]), state(nodes[2])
    save_turn(store, nodes, "s", [kept, lost, stray])
    store.close()
    checkpoint_path(store.folder, lost.key).unlink()
    (elsewhere,) = chain([9])
    write_block(
        checkpoint_path(store.folder, state(elsewhere).key),
        state(elsewhere),
        ROOT,
        arrays_of_part(kept),
        fsync=False,
    )
    path = checkpoint_path(store.folder, kept.key)
    path.with_name(f".{path.stem}.1.tmp.safetensors").write_bytes(b"half")
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute("DELETE FROM blocks WHERE key = ?", (nodes[2].key,))
    disk = DiskStore(store.folder, store.limits)
    # Without a row: a file, a half file, a block's file. Without a file: a row. Without its
    # block: a part.
    assert disk.sweep() == 5
    assert disk.index.checkpoint_keys() == {kept.key}
    assert part_names(store.folder) == {path.name}
    assert disk.sweep() == 0
    disk.close()


def test_parts_outlive_the_index(store: BlockStore) -> None:
    nodes = chain([1], [2])
    parts = [window(nodes[0]), state(nodes[1])]
    save_turn(store, nodes, "s", parts)
    store.close()
    before = sorted(disk_rows(store.folder))
    for path in store.folder.glob("index.sqlite*"):
        path.unlink()
    (elsewhere,) = chain([9])
    write_block(
        checkpoint_path(store.folder, state(elsewhere).key),
        state(elsewhere),
        ROOT,
        arrays_of_part(parts[0]),
        fsync=False,
    )
    other = Root("another", ROOT.precision)
    foreign = window(nodes[1])
    write_block(
        checkpoint_path(store.folder, foreign.key),
        foreign,
        other,
        arrays_of_part(foreign),
        fsync=False,
    )
    bad = checkpoint_path(store.folder, state(nodes[0]).key)
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(checkpoint_path(store.folder, parts[0].key).read_bytes())
    disk = DiskStore(store.folder, store.limits)
    assert sorted(disk_rows(store.folder)) == before
    assert disk.sweep() == 3
    assert part_names(store.folder) == {f"{part.key.hex()}.safetensors" for part in parts}
    disk.close()


def disk_rows(folder: Path) -> list[tuple[bytes, bytes, str, int, int]]:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        return db.execute("SELECT key, block, kind, n_tokens, n_bytes FROM parts").fetchall()


def test_a_rebuild_keeps_when_parts_were_used(store: BlockStore) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute("UPDATE parts SET used = 4e9")
    with StoreLock(store.folder / "lock").held():
        assert rebuild_index(store.folder) == 1
    assert [used for used, _, _ in store.index.unused_checkpoints()] == [4e9]


# A store that was made before there were parts.

FIRST_SCHEMA = """
CREATE TABLE roots (
    key BLOB PRIMARY KEY,
    about TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE blocks (
    key BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    root BLOB NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    text TEXT NOT NULL,
    pending BLOB NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX blocks_by_text ON blocks (parent, text);
CREATE INDEX blocks_by_use ON blocks (used);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    root BLOB NOT NULL,
    name TEXT,
    leaf BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX sessions_by_name ON sessions (root, name);
CREATE INDEX sessions_by_leaf ON sessions (leaf);
CREATE TABLE replies (
    root BLOB NOT NULL,
    digest BLOB NOT NULL,
    ids BLOB NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (root, digest)
) WITHOUT ROWID;
CREATE TABLE file_hashes (
    path TEXT PRIMARY KEY,
    stamp TEXT NOT NULL,
    hash TEXT NOT NULL
);
PRAGMA application_id = 0x6b767001;
PRAGMA user_version = 1;
"""
"""What format 1 made, but for "IF NOT EXISTS", which SQLite does not keep."""

SECOND_SCHEMA = """
CREATE TABLE parts (
    key BLOB PRIMARY KEY,
    block BLOB NOT NULL,
    kind TEXT NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX parts_by_block ON parts (block, kind, n_tokens, n_bytes);
CREATE INDEX parts_by_use ON parts (used, key, block);
PRAGMA application_id = 0x6b767002;
PRAGMA user_version = 2;
"""
"""What format 2 added."""


def as_format(version: int, folder: Path) -> None:
    """Put an index of an older format in place of a store's own, with the same content."""
    path = folder / "index.sqlite"
    aside = folder.parent / f"{time.time_ns()}.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.rename(aside)
    for old in folder.glob("index.sqlite*"):
        old.unlink()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(FIRST_SCHEMA + (SECOND_SCHEMA if version == 2 else ""))
        db.execute("ATTACH ? AS new", (str(aside),))
        for (table,) in db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'"):
            columns = [row[1] for row in db.execute(f"PRAGMA main.table_info({table})")]
            names = ", ".join(columns)
            db.execute(f"INSERT INTO main.{table} SELECT {names} FROM new.{table}")


def test_a_store_of_format_1_goes_on(store: BlockStore) -> None:
    nodes = chain([1], [2])
    save_turn(store, nodes, "s")
    store.index.set_file_hash("path", "stamp", "hash")
    before = store.index.sessions()
    store.close()
    as_format(1, store.folder)
    again = BlockStore(store.folder, store.limits)
    assert again.index.format() == INDEX_FORMAT == 3
    assert again.index.sessions() == before and again.index.file_hash("path", "stamp") == "hash"
    again.drain()
    assert again.index.n_blocks() == 2 and again.load(nodes[1], ROOT) is not None
    longer = chain([1], [2], [3])
    save_turn(again, longer, "s", [window(nodes[1]), state(longer[2])])
    assert again.counters.turns_saved == 1
    again.close()
    once_more = BlockStore(store.folder, store.limits)
    once_more.drain()
    assert once_more.index.checkpoint_keys() == {window(nodes[1]).key, state(longer[2]).key}
    once_more.close()


def test_b1_a_store_of_format_2_goes_on(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    save_turn(store, nodes, "s", [window(nodes[1]), state(nodes[2])])
    save_turn(store, [nodes[0], *chain([9], parent=nodes[0].key)][:1], "t")
    before = (store.index.totals(), store.index.sessions(), list(store.index.unused_leaves()))
    store.close()
    as_format(2, store.folder)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.format() == 3 and disk.index.faults() == []
    after = (disk.index.totals(), disk.index.sessions(), list(disk.index.unused_leaves()))
    assert after == before
    assert [root for root, _ in disk.index.roots()] == [ROOT]
    assert disk.index.children(nodes[0].key, nodes[1].packed_ids) == [nodes[1]]
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert disk.sweep() == 0
    disk.close()


def test_a_migration_that_is_interrupted_goes_on(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    store.close()
    as_format(1, store.folder)
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        sql = next(part for part in SCHEMA.split(";") if "TABLE parts " in part)
        db.executescript(sql)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.format() == INDEX_FORMAT and disk.index.n_blocks() == 2
    disk.close()


@pytest.mark.parametrize("version", [0, 1, 2, 4, 1 << 30, -1])
@pytest.mark.parametrize("was", [1, 2, INDEX_FORMAT])
def test_a_format_that_is_not_what_it_was_heals(store: BlockStore, was: int, version: int) -> None:
    """A flipped bit of the version is no reason to refuse a store."""
    save_turn(store, chain([1], [2]), "s")
    store.close()
    if was < INDEX_FORMAT:
        as_format(was, store.folder)
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {version}")
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.format() == INDEX_FORMAT
    assert disk.sweep() == 0 and disk.index.n_blocks() == 2
    assert [session.name for session in disk.index.sessions()] == ["s"]
    disk.close()
