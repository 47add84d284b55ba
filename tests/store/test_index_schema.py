"""An index of the format before is converted when it is opened."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import IndexDamaged
from mlx_lm_kvpersist.store import index_schema
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.database import INCREMENTAL
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.encryption import PLAIN, Encryption, read_key
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.index_schema import APPLICATION_ID, INDEX_FORMAT

from .conftest import ROOT, chain, save_turn, state

LIMITS = StoreLimits(max_ram_bytes=4 << 20, max_disk_bytes=64 << 20)
OLD_TABLES = Path(__file__).with_name("format_6.sql").read_text(encoding="utf-8")
OLD_COLUMNS = {"worth": "0.5", "base": "1e6 / used", "n_branches": "2"}
"""Columns that only format 6 has. By its ranks the newest block would go first."""
TABLES = ("roots", "blocks", "checkpoints", "sessions", "replies", "requests", "state", "writes")


def columns(db: sqlite3.Connection, schema: str, table: str) -> list[str]:
    return [name for _, name, *_ in db.execute(f"PRAGMA {schema}.table_info({table})")]


def as_format_6(folder: Path, encryption: Encryption = PLAIN) -> None:
    """Replace the index of a closed store by one of format 6 with the same rows."""
    path, old_path = folder / "index.sqlite", folder / "old.sqlite"
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(OLD_TABLES)
        query = "SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL"
        statements = sorted(made.execute(query), key=lambda row: row[0] != "table")
    old_path.touch()
    with closing(encryption.connect(old_path)) as db:
        db.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        for _, sql in statements[: len(TABLES) + 1]:
            db.execute(sql)
        encryption.attach(db, path, "new")
        for table in (*TABLES, "totals"):
            known, wanted = columns(db, "new", table), columns(db, "main", table)
            values = [name if name in known else OLD_COLUMNS[name] for name in wanted]
            if table == "roots":
                values = ["key", "about", "0.5"]
            db.execute(f"INSERT INTO main.{table} SELECT {', '.join(values)} FROM new.{table}")
        db.execute("INSERT INTO main.state VALUES ('eviction clock', '7.5')")
        for _, sql in statements[len(TABLES) + 1 :]:
            db.execute(sql)
        db.execute(f"PRAGMA user_version = {INDEX_FORMAT - 1}")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID + INDEX_FORMAT - 1}")
        db.commit()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    old_path.rename(path)


def rows(folder: Path, encryption: Encryption = PLAIN) -> dict[str, list[Any]]:
    with closing(encryption.connect(folder / "index.sqlite")) as db:
        tables = (*TABLES, "totals")
        return {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


def version(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        return int(found)


def fill(folder: Path, encryption: Encryption = PLAIN) -> None:
    """Make a store that has rows in every table."""
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        for n in range(6):
            nodes = chain([1], [10 + n], [20 + n])
            save_turn(store, nodes, f"{n}" if n % 2 else None, [state(nodes[1])])
        (session,) = store.index.sessions_named("1")
        store.disk.set_pinned(session, True)
        store.index.state.add_note(session.id, title="Title")
        store.commit(Commit(ROOT, tuple(nodes), replies={b"digest": b"\1\0\0\0"}), [])
        store.touch([chain([1], [10], [20])[2].key])
        store.drain()
        with store.index.database.transaction() as db:
            db.execute("INSERT INTO requests (about) VALUES ('{}')")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(params=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Encryption]:
    if request.param == "plain":
        yield PLAIN
        return
    pytest.importorskip("sqlcipher3")
    assert cli.main(["key", str(tmp_path / "key")]) == 0
    yield read_key(tmp_path / "key")


def test_an_index_of_format_6_loses_no_row(tmp_path: Path, encryption: Encryption) -> None:
    folder = tmp_path / "store"
    fill(folder, encryption)
    before = rows(folder, encryption)
    assert all(before.values())
    as_format_6(folder, encryption)
    with closing(DiskStore(folder, LIMITS, encryption=encryption)) as disk:
        assert rows(folder, encryption) == before
        assert not disk.index.faults() and disk.sweep() == 0
        assert disk.index.ask("PRAGMA freelist_count") == [(0,)]


def test_a_store_of_format_6_evicts_by_use_and_keeps_its_pins(folder: Path) -> None:
    as_format_6(folder)
    with closing(DiskStore(folder, LIMITS)) as disk:
        gone: list[bytes] = []
        disk.forgotten = gone.extend
        disk.limits = StoreLimits(0, 1)
        assert not disk.make_room(0)
        leaves = {chain([1], [10 + n], [20 + n])[2].key: n for n in range(6)}
        assert [leaves[key] for key in gone if key in leaves] == [2, 3, 4, 5, 0]
        assert disk.index.keys() == {node.key for node in chain([1], [11], [21])}


def test_a_command_that_reads_a_store_of_format_6_converts_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_format_6(folder)
    assert cli.main(["sessions", "list", "--kvpersist-dir", str(folder)]) == 0
    assert "Title" in capsys.readouterr().out and version(folder) == INDEX_FORMAT


def test_an_interrupted_conversion_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(folder)
    as_format_6(folder)
    old = rows(folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def interrupt(db: sqlite3.Connection) -> None:
            raise KeyboardInterrupt

        patch.setattr(index_schema, "_mark", interrupt)
        DiskStore(folder, LIMITS)
    assert version(folder) == INDEX_FORMAT - 1 and rows(folder) == old
    with closing(DiskStore(folder, LIMITS)):
        assert rows(folder) == before


def test_several_that_open_a_store_of_format_6_at_once_do_no_harm(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rows(folder)
    as_format_6(folder)
    all_have_seen_the_old_format, convert = threading.Barrier(3, timeout=30), index_schema._convert

    def convert_together(db: sqlite3.Connection) -> None:
        all_have_seen_the_old_format.wait()
        convert(db)

    monkeypatch.setattr(index_schema, "_convert", convert_together)
    with ThreadPoolExecutor(3) as pool:
        opened = [pool.submit(lambda: DiskStore(folder, LIMITS).close()) for _ in range(3)]
        for one in opened:
            one.result()
    assert rows(folder) == before


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER TABLE blocks RENAME COLUMN start TO begin",
        "DROP TABLE checkpoints",
        "CREATE TABLE twice AS SELECT * FROM roots; INSERT INTO twice SELECT * FROM roots;"
        "DROP TRIGGER root_removed; DROP TABLE roots; ALTER TABLE twice RENAME TO roots",
        f"PRAGMA user_version = {INDEX_FORMAT}",
        "PRAGMA user_version = 3",
    ],
)
def test_a_damaged_index_of_format_6_is_rebuilt(folder: Path, damage: str) -> None:
    blocks = {row[0] for row in rows(folder)["blocks"]}
    as_format_6(folder)
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.executescript(damage)
    with pytest.raises(IndexDamaged):
        Index(folder / "index.sqlite", create=False)
    with closing(DiskStore(folder, LIMITS)) as disk:
        assert disk.index.keys() == blocks and len(disk.index.keys("checkpoints")) == 6
        assert not disk.index.faults() and disk.index.sessions_named("1")[0].pinned
