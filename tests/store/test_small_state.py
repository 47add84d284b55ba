"""The index's small state survives a restart, a rebuild, and changes by other processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore

from .conftest import chain, save_turn

ADD_100_NOTES = """
import sys
from pathlib import Path
from mlx_lm_kvpersist.store.index import Index

index = Index(Path(sys.argv[1]))
for number in range(100):
    index.state.add_note(f"{sys.argv[2]} {number}", title=f"{number}")
"""
RECORD = {"sentence": "12 tokens reused", "session": "s", "divergence": None, "reused_tokens": 12}


@pytest.fixture
def folder(store: BlockStore) -> Path:
    """A closed store with a session and some state."""
    save_turn(store, chain([1], [2]), "s")
    with store.disk.lock.held():
        (session,) = store.index.sessions()
        store.index.state.add_note(session.id, title="first")
        store.index.state.add_note(session.id, title="ä", client="c")
        store.index.state.add_request({**RECORD, "saved_s": 0.5})
    store.close()
    return store.folder


def small_state(folder: Path) -> tuple[dict[str, str], float]:
    """Return the note of a store's session, and the number of reused tokens."""
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        notes = [disk.index.state.note(session.id) for session in disk.index.sessions()]
        return (notes or [{}])[0], disk.index.state.saved()["tokens"]


STATE = {"title": "ä", "client": "c"}, 12
NOTHING: tuple[dict[str, str], float] = {}, 0


def test_undecodable_schema_loses_only_the_small_state(folder: Path) -> None:
    """SQLite's message quotes the schema, so the failure has another exception than usual."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (folder / "index.sqlite").read_bytes()
    assert b"CREATE TABLE state" in content
    damaged = content.replace(b"CREATE TABLE state", b"CREATE TABLE\xd7\xff\x85ate")
    (folder / "index.sqlite").write_bytes(damaged)
    assert small_state(folder) == NOTHING
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        assert disk.index.ask("SELECT count(*) FROM blocks") == [(2,)]


def test_state_survives_a_restart_but_changed_values_are_refused(folder: Path) -> None:
    assert small_state(folder) == STATE
    assert not list(folder.glob("*.json"))
    with closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        db.execute("INSERT INTO state SELECT 'session 0', value FROM state WHERE key = 'saved'")
        db.execute("UPDATE state SET value = replace(value, '12', '13') WHERE key = 'saved'")
        db.execute("UPDATE state SET value = '[' WHERE key GLOB 'session ?*'")
    assert small_state(folder) == NOTHING
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        assert disk.index.state.note("0") == {}


def test_concurrent_processes_keep_each_others_notes(folder: Path) -> None:
    command = [sys.executable, "-c", ADD_100_NOTES, str(folder / "index.sqlite")]
    writers = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        for name in ("one", "two"):
            notes = [disk.index.state.note(f"{name} {n}") for n in range(100)]
            assert notes == [{"title": f"{n}"} for n in range(100)]


def _drop_a_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE blocks")


def _damage_a_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE blocks SET n_bytes = 'big'")


@pytest.mark.parametrize("damage", [_drop_a_table, _damage_a_row], ids=["unreadable", "readable"])
def test_a_rebuild_keeps_the_small_state(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "index.sqlite")
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        disk.sweep()
        assert len(disk.index.sessions()) == disk.index.totals().n_blocks - 1 == 1
    assert small_state(folder) == STATE


def test_note_is_removed_with_its_session(store: BlockStore) -> None:
    """A session without a name or a pin is lost when a damaged index is rebuilt."""
    for number, name in enumerate(["kept", None]):
        save_turn(store, chain([number]), name, note={"words": "what its user said first"})
    store.index.state.add_request({**RECORD, "saved_s": None})
    (kept,) = store.index.sessions_named("kept")
    store.close()
    _drop_a_table(store.folder / "index.sqlite")
    with closing(DiskStore(store.folder, store.limits)) as disk:
        assert disk.index.sessions() == [kept]
        disk.sweep()
        notes = disk.index.ask("SELECT key FROM state WHERE key LIKE 'session %'")
        assert notes == [(f"session {kept.id}",)]
        assert disk.index.state.note(kept.id) == {"words": "what its user said first"}
        assert disk.index.state.saved()["tokens"] == 12


@pytest.mark.parametrize("content", [b"", b"no database " * 1000])
def test_empty_or_invalid_index_has_no_small_state(folder: Path, content: bytes) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{folder / 'index.sqlite'}{suffix}").unlink(missing_ok=True)
    (folder / "index.sqlite").write_bytes(content)
    assert small_state(folder) == NOTHING


# The bytes written in the last hour.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list with the time in seconds since the epoch."""
    now = [1e9]
    monkeypatch.setattr("mlx_lm_kvpersist.store.small_state.time.time", lambda: now[0])
    return now


def written(store: BlockStore, *numbers: int) -> list[bool]:
    """Save a conversation of one block for each number; return which blocks are in the index."""
    for number in numbers:
        save_turn(store, chain([number]))
    return [chain([number])[0].key in store.index for number in numbers]


def n_block_bytes(store: BlockStore) -> int:
    return sum(path.stat().st_size for path in store.folder.glob("blocks/*/*"))


def test_servers_of_one_folder_add_up_their_written_bytes(
    tmp_path: Path, limits: StoreLimits, clock: list[float]
) -> None:
    with (
        closing(BlockStore(tmp_path / "store", limits)) as first,
        closing(BlockStore(tmp_path / "store", limits)) as second,
    ):
        assert written(first, 1) + written(second, 2) == [True, True]
        hours = [store.index.state.written_last_hour() for store in (first, second)]
        assert hours[0] == hours[1] >= n_block_bytes(first)


def test_write_counts_older_than_an_hour_are_deleted(store: BlockStore, clock: list[float]) -> None:
    for _ in range(200):
        clock[0] += 60
        store.index.state.count_write(1)
    assert store.index.state.written_last_hour() == 61
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM writes").fetchone() == (61,)
