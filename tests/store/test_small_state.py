"""Small state in the index: it outlives the process, a rebuild, and other processes' changes."""

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

PUT_100 = """
import sys
from pathlib import Path
from mlx_lm_kvpersist.store.index import Index

index = Index(Path(sys.argv[1]))
for number in range(100):
    index.state.put(f"choice/{sys.argv[2]} {number}", [number])
"""


@pytest.fixture
def folder(store: BlockStore) -> Path:
    """A closed store with a session and some state."""
    save_turn(store, chain([1], [2]), "s")
    store.view.state.put("choice/b", None)
    store.view.state.put("choice/a", {"bits": [4, 8.5]})
    store.view.state.put("choice/a", {"bits": [5, 8.5]})
    store.view.state.put("other", "ä")
    store.close()
    return store.folder


def choices(folder: Path) -> dict[str, object]:
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        keys = disk.index.ask("SELECT key FROM state WHERE key LIKE 'choice/%'")
        return {key.removeprefix("choice/"): disk.index.state.get(key) for (key,) in keys}


def test_a_schema_that_is_no_text_costs_the_state_only(folder: Path) -> None:
    """SQLite's own message quotes it, so reading what is left fails with another error."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = (folder / "index.sqlite").read_bytes()
    assert b"CREATE TABLE state" in content
    damaged = content.replace(b"CREATE TABLE state", b"CREATE TABLE\xd7\xff\x85ate")
    (folder / "index.sqlite").write_bytes(damaged)
    assert choices(folder) == {}
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        assert disk.index.ask("SELECT count(*) FROM blocks") == [(2,)]


def test_values_are_found_by_their_keys_after_a_restart(folder: Path) -> None:
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        state = disk.index.state
        assert state.get("choice/a") == {"bits": [5, 8.5]} and state.get("other") == "ä"
        assert state.get("choice/") is None and state.get("choice/c") is None
    assert not list(folder.glob("*.json"))
    with closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
        db.execute("INSERT INTO state SELECT 'choice/c', value FROM state WHERE key = 'choice/a'")
        db.execute("UPDATE state SET value = replace(value, '8.5', '9.5') WHERE key = 'choice/a'")
        db.execute("UPDATE state SET value = '[' WHERE key = 'choice/b'")
    assert choices(folder) == {"a": None, "b": None, "c": None}


def test_two_processes_lose_none_of_each_others_choices(folder: Path) -> None:
    command = [sys.executable, "-c", PUT_100, str(folder / "index.sqlite")]
    writers = [subprocess.Popen([*command, name]) for name in ("one", "two")]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    expected = {f"{name} {n}": [n] for name in ("one", "two") for n in range(100)}
    assert choices(folder).items() >= expected.items()


def _lose_a_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE blocks")


def _spoil_a_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE blocks SET n_bytes = 'big'")


@pytest.mark.parametrize("damage", [_lose_a_table, _spoil_a_row], ids=["unreadable", "readable"])
def test_a_rebuild_keeps_what_was_chosen(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "index.sqlite")
    with closing(DiskStore(folder, StoreLimits(0, 1 << 30))) as disk:
        disk.files.sweep()
        assert len(disk.index.sessions()) == disk.index.totals().n_blocks - 1 == 1
    assert choices(folder) == {"a": {"bits": [5, 8.5]}, "b": None}


def test_no_note_of_a_session_outlives_it(store: BlockStore) -> None:
    """A session without a name or a pin is lost when a damaged index is rebuilt."""
    for number, name in enumerate(["kept", None]):
        save_turn(store, chain([number]), name, note={"words": "what its user said first"})
    store.index.state.put("choice", 5)
    (kept,) = store.index.sessions_named("kept")
    store.close()
    _lose_a_table(store.folder / "index.sqlite")
    with closing(DiskStore(store.folder, store.limits)) as disk:
        assert disk.index.sessions() == [kept]
        disk.files.sweep()
        notes = disk.index.ask("SELECT key FROM state WHERE key LIKE 'session %'")
        assert notes == [(f"session {kept.id}",)]
        assert disk.index.state.note(kept.id) == {"words": "what its user said first"}
        assert disk.index.state.get("choice") == 5


@pytest.mark.parametrize("left", [b"", b"no database " * 1000])
def test_an_index_that_says_nothing_has_no_choices(folder: Path, left: bytes) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{folder / 'index.sqlite'}{suffix}").unlink(missing_ok=True)
    (folder / "index.sqlite").write_bytes(left)
    assert choices(folder) == {}


# What may be written within an hour.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds since the epoch: its only item."""
    now = [1e9]
    monkeypatch.setattr("mlx_lm_kvpersist.store.small_state.time.time", lambda: now[0])
    return now


def written(store: BlockStore, *numbers: int) -> list[bool]:
    """Save a conversation of one block for each number; say which were written."""
    for number in numbers:
        save_turn(store, chain([number]))
    return [chain([number])[0].key in store.index for number in numbers]


def n_block_bytes(store: BlockStore) -> int:
    return sum(path.stat().st_size for path in store.folder.glob("blocks/*/*"))


def test_two_servers_count_what_they_write_together(
    tmp_path: Path, limits: StoreLimits, clock: list[float]
) -> None:
    with (
        closing(BlockStore(tmp_path / "store", limits)) as first,
        closing(BlockStore(tmp_path / "store", limits)) as second,
    ):
        assert written(first, 1) + written(second, 2) == [True, True]
        hours = [store.index.state.written_last_hour() for store in (first, second)]
        assert hours[0] == hours[1] >= n_block_bytes(first)


def test_no_minute_is_remembered_for_longer_than_an_hour(
    store: BlockStore, clock: list[float]
) -> None:
    for _ in range(200):
        clock[0] += 60
        store.index.state.count_write(1)
    assert store.index.state.written_last_hour() == 61
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM writes").fetchone() == (61,)
