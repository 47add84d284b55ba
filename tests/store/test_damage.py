"""An index counts as damaged only if SQLite reports damage, or if its tables are wrong."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mlx_lm_kvpersist.errors import IndexDamaged
from mlx_lm_kvpersist.store import database
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.database import is_damage
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.encryption import Cipher, sqlcipher
from mlx_lm_kvpersist.store.folder import PLAIN, Encryption, OwnFiles
from mlx_lm_kvpersist.store.index import Index

from .conftest import ROOT, chain, save_turn

LIMITS = StoreLimits(0, 1 << 30)
PAGE = 4096


@pytest.fixture(params=["plain", "encrypted"])
def encryption(request: pytest.FixtureRequest) -> Encryption:
    return PLAIN if request.param == "plain" else Cipher(b"k" * 32)


@pytest.fixture
def path(tmp_path: Path, encryption: Encryption) -> Path:
    """An index of a hundred blocks, in one file."""
    path = tmp_path / "index.sqlite"
    with closing(Index(path, OwnFiles(path.parent, encryption))) as index:
        with index.database.transaction():
            for number in range(50):
                index.add_blocks(ROOT, [(node, 1000) for node in chain([number], [number, 7])])
        index.database.empty_log()
    return path


def read_all(path: Path, encryption: Encryption) -> None:
    """Open an index and read all of it, as a server and the commands do."""
    with closing(Index(path, OwnFiles(path.parent, encryption), create=False)) as index:
        assert index.totals().n_blocks == len(index.sizes()) == 100
        assert index.faults() == [] and index.unreachable() == []


# Damage.


def _random_header(content: bytearray) -> None:
    content[:16] = random.Random(1).randbytes(16)


def _wrong_page_size(content: bytearray) -> None:
    content[16] ^= 0x04


def _unknown_file_format(content: bytearray) -> None:
    content[47] = 9


def _random_page(content: bytearray) -> None:
    offset = len(content) // PAGE // 2 * PAGE
    content[offset : offset + PAGE] = random.Random(2).randbytes(PAGE)


def _zeroed_page(content: bytearray) -> None:
    offset = len(content) // PAGE // 2 * PAGE
    content[offset : offset + PAGE] = bytes(PAGE)


def _random_schema(content: bytearray) -> None:
    content[100:PAGE] = random.Random(3).randbytes(PAGE - 100)


def _half_of_the_file(content: bytearray) -> None:
    del content[len(content) // 2 :]


def _less_than_a_page(content: bytearray) -> None:
    del content[99:]


def _text_instead_of_a_database(content: bytearray) -> None:
    content[:] = b"No database, but as long as one.\n" * 300


DAMAGES = [
    _random_header,
    _wrong_page_size,
    _unknown_file_format,
    _random_page,
    _zeroed_page,
    _random_schema,
]
DAMAGES += [_half_of_the_file, _less_than_a_page, _text_instead_of_a_database]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
@pytest.mark.parametrize("has_code", [True, False], ids=["by code", "by message"])
def test_damaged_index_is_recognized(
    path: Path,
    encryption: Encryption,
    damage: Callable[[bytearray], None],
    has_code: bool,
) -> None:
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError) as raised:
        read_all(path, encryption)
    assert is_damage(raised.value if has_code else as_of_python_310(raised.value)), raised.value


@pytest.mark.parametrize("content", [b"", b"S"], ids=["empty", "one byte"])
def test_empty_or_one_byte_index_counts_as_missing(
    path: Path, encryption: Encryption, content: bytes
) -> None:
    """SQLite would take such a file for a new database."""
    path.write_bytes(content)
    with pytest.raises(FileNotFoundError):
        read_all(path, encryption)
    assert path.read_bytes() == content


def test_garbage_in_the_write_ahead_log_is_ignored(path: Path, encryption: Encryption) -> None:
    """SQLite ignores frames that it did not write."""
    Path(f"{path}-wal").write_bytes(b"\x37\x7f\x06\x82" + random.Random(4).randbytes(9 * PAGE))
    read_all(path, encryption)


def test_missing_table_is_damage(path: Path, encryption: Encryption) -> None:
    with closing(encryption.connect(path)) as db:
        db.execute("DROP TABLE replies")
    with pytest.raises(IndexDamaged) as raised:
        read_all(path, encryption)
    assert is_damage(raised.value)


# Errors that are not damage.


@contextmanager
def _connection_closed(index: Index) -> Iterator[None]:
    index.database.connection.close()
    yield


@contextmanager
def _index_closed(index: Index) -> Iterator[None]:
    index.close()
    yield


@contextmanager
def _locked(index: Index) -> Iterator[None]:
    index.database.connection.execute("PRAGMA busy_timeout = 1")
    with closing(index.files.encryption.connect(index.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


@contextmanager
def _full_disk(index: Index) -> Iterator[None]:
    (n_pages,) = index.database.connection.execute("PRAGMA page_count").fetchone()
    index.database.connection.execute(f"PRAGMA max_page_count = {n_pages}")
    yield


@contextmanager
def _file_too_large(index: Index) -> Iterator[None]:
    """No file may grow: writes fail with EFBIG, an I/O error like EIO."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _read_only(index: Index) -> Iterator[None]:
    index.database.connection.execute("PRAGMA query_only = ON")
    yield


@contextmanager
def _interrupted(index: Index) -> Iterator[None]:
    db = index.database.connection
    db.set_progress_handler(lambda: 1, 1)
    yield
    db.set_progress_handler(None, 1)


@contextmanager
def _moved_away(index: Index) -> Iterator[None]:
    index.database.disconnect()
    index.path.rename(index.path.with_suffix(".away"))
    yield


@pytest.mark.parametrize("has_code", [True, False], ids=["by code", "by message"])
@pytest.mark.parametrize(
    "failure",
    [
        _connection_closed,
        _index_closed,
        _locked,
        _full_disk,
        _file_too_large,
        _read_only,
        _interrupted,
        _moved_away,
    ],
    ids=lambda failure: failure.__name__[1:],
)
def test_errors_unrelated_to_the_file_content_are_not_damage(
    path: Path,
    encryption: Encryption,
    failure: Callable[[Index], Iterator[None]],
    has_code: bool,
) -> None:
    nodes = chain(*([number] * 200 for number in range(1000, 1200)))
    with closing(Index(path, OwnFiles(path.parent, encryption))) as index:
        with failure(index), pytest.raises(sqlite3.Error) as raised:  # type: ignore[attr-defined]
            index.add_blocks(ROOT, [(node, 1000) for node in nodes])
    assert not is_damage(raised.value if has_code else as_of_python_310(raised.value)), raised.value


def _too_many_variables(db: sqlite3.Connection) -> None:
    db.execute(f"SELECT {','.join('?' * 300_000)}", [1] * 300_000)


def _no_such_table(db: sqlite3.Connection) -> None:
    db.execute("SELECT * FROM nowhere")


def _violated_constraint(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO state VALUES (NULL, NULL)")


def _wrong_number_of_values(db: sqlite3.Connection) -> None:
    db.execute("SELECT ?, ?", (1,))


def _unsupported_value(db: sqlite3.Connection) -> None:
    db.execute("SELECT ?", (object(),))


def _too_large_value(db: sqlite3.Connection) -> None:
    db.execute("SELECT zeroblob(1 << 40)")


WRONG_STATEMENTS = [_too_many_variables, _no_such_table, _violated_constraint, _too_large_value]
WRONG_STATEMENTS += [_wrong_number_of_values, _unsupported_value]


@pytest.mark.parametrize("execute", WRONG_STATEMENTS, ids=lambda execute: execute.__name__[1:])
@pytest.mark.parametrize("has_code", [True, False], ids=["by code", "by message"])
def test_invalid_statement_is_not_damage(
    path: Path,
    encryption: Encryption,
    execute: Callable[[sqlite3.Connection], None],
    has_code: bool,
) -> None:
    with closing(Index(path, OwnFiles(path.parent, encryption))) as index:
        with pytest.raises(sqlite3.Error) as raised:
            execute(index.database.connection)
    assert not is_damage(raised.value if has_code else as_of_python_310(raised.value)), raised.value


def as_of_python_310(error: sqlite3.Error) -> sqlite3.Error:
    """Return the same error without the result code that Python 3.11 adds."""
    if isinstance(error, IndexDamaged):
        return error
    return type(error)(*error.args)


@pytest.mark.parametrize("encryption", ["encrypted"], indirect=True)
def test_every_sqlcipher_error_is_a_sqlite3_error(encryption: Encryption) -> None:
    driver = sqlcipher()
    error_types = [
        value
        for value in vars(driver).values()
        if isinstance(value, type) and issubclass(value, driver.Error)
    ]
    assert len(error_types) == 9
    for error_type in error_types:
        if error_type is not driver.Error:  # the base, which is never raised
            assert issubclass(error_type, getattr(sqlite3, error_type.__name__))


# Rebuilding.


@pytest.fixture
def folder(tmp_path: Path, path: Path, encryption: Encryption) -> Path:
    """A store with the index at `path`, but without block files."""
    folder = tmp_path / "store"
    with closing(DiskStore(folder, LIMITS, encryption=encryption)):
        pass
    for old in folder.glob("index.sqlite*"):
        old.unlink()
    shutil.copy(path, folder / "index.sqlite")
    return folder


def test_index_is_rebuilt_after_damage_but_not_after_other_errors(
    folder: Path, encryption: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(DiskStore(folder, LIMITS, encryption=encryption)) as disk:
        rebuilt: list[Path] = []
        monkeypatch.setattr(
            "mlx_lm_kvpersist.store.disk.rebuild_index", lambda folder, *_: rebuilt.append(folder)
        )
        for message in ("Cannot operate on a closed database.", "too many SQL variables"):

            def fail(*_: object, message: str = message, **__: object) -> None:
                raise sqlite3.ProgrammingError(message)

            with monkeypatch.context() as patch:
                patch.setattr("mlx_lm_kvpersist.store.index.prepare", fail)
                with pytest.raises(sqlite3.ProgrammingError):
                    disk.check_index()
        assert rebuilt == [] and disk.index.totals().n_blocks == 100
    content = bytearray((folder / "index.sqlite").read_bytes())
    _random_page(content)
    (folder / "index.sqlite").write_bytes(content)
    monkeypatch.undo()
    with closing(DiskStore(folder, LIMITS, encryption=encryption)) as disk:
        assert disk.index.totals().n_blocks == 0  # no block files exist
    assert list((folder / "quarantine").glob("index-*.sqlite"))


def test_error_codes_equal_those_of_sqlite3() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this version of Python has no codes")
    assert database._CORRUPT == sqlite3.SQLITE_CORRUPT
    assert database._NOT_A_DATABASE == sqlite3.SQLITE_NOTADB
    assert database._ERROR == sqlite3.SQLITE_ERROR


def test_index_damaged_while_a_server_runs_is_rebuilt(tmp_path: Path) -> None:
    """docs/store.md says: at its start or while it serves."""
    store = BlockStore(tmp_path / "store", StoreLimits(64 << 20, 64 << 20))
    for n in range(30):
        save_turn(store, chain([n], [n + 1000, 2]))
    store.index.database.empty_log()
    with store.index.path.open("r+b") as file:
        for page in range(2, store.index.path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(os.urandom(4096))
    store.writer.submit(store.index.database.disconnect)  # the connection has cached pages
    for n in range(40, 44):
        save_turn(store, chain([n], [n + 1000, 2]))
    assert store.turns_not_saved <= 1 and store.index.totals().n_blocks > 60
    store.close()
