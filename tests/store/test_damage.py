"""An index counts as damaged only if SQLite says so, or if its content cannot be right."""

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


def _header(content: bytearray) -> None:
    content[:16] = random.Random(1).randbytes(16)


def _page_size(content: bytearray) -> None:
    content[16] ^= 0x04


def _file_format(content: bytearray) -> None:
    content[47] = 9


def _page_in_the_middle(content: bytearray) -> None:
    at = len(content) // PAGE // 2 * PAGE
    content[at : at + PAGE] = random.Random(2).randbytes(PAGE)


def _zeros(content: bytearray) -> None:
    at = len(content) // PAGE // 2 * PAGE
    content[at : at + PAGE] = bytes(PAGE)


def _schema(content: bytearray) -> None:
    content[100:PAGE] = random.Random(3).randbytes(PAGE - 100)


def _half(content: bytearray) -> None:
    del content[len(content) // 2 :]


def _no_page(content: bytearray) -> None:
    del content[99:]


def _no_database(content: bytearray) -> None:
    content[:] = b"No database, but as long as one.\n" * 300


DAMAGES = [_header, _page_size, _file_format, _page_in_the_middle, _zeros, _schema]
DAMAGES += [_half, _no_page, _no_database]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "messages"])
def test_damage_is_known(
    path: Path,
    encryption: Encryption,
    damage: Callable[[bytearray], None],
    codes: bool,
) -> None:
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError) as raised:
        read_all(path, encryption)
    assert is_damage(raised.value if codes else as_of_python_310(raised.value)), raised.value


@pytest.mark.parametrize("left", [b"", b"S"], ids=["empty", "one byte"])
def test_an_index_that_sqlite_would_take_for_a_new_one_is_missing(
    path: Path, encryption: Encryption, left: bytes
) -> None:
    path.write_bytes(left)
    with pytest.raises(FileNotFoundError):
        read_all(path, encryption)
    assert path.read_bytes() == left


def test_garbage_in_the_log_is_no_damage(path: Path, encryption: Encryption) -> None:
    """SQLite ignores what it did not write there."""
    Path(f"{path}-wal").write_bytes(b"\x37\x7f\x06\x82" + random.Random(4).randbytes(9 * PAGE))
    read_all(path, encryption)


def test_tables_that_are_not_as_they_were_made_are_damage(
    path: Path, encryption: Encryption
) -> None:
    with closing(encryption.connect(path)) as db:
        db.execute("DROP TABLE replies")
    with pytest.raises(IndexDamaged) as raised:
        read_all(path, encryption)
    assert is_damage(raised.value)


# No damage.


@contextmanager
def _closed(index: Index) -> Iterator[None]:
    index.database.connection.close()
    yield


@contextmanager
def _closed_by_another(index: Index) -> Iterator[None]:
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
    """The system refuses to let any file grow: EFBIG, an I/O error like EIO."""
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


@pytest.mark.parametrize("codes", [True, False], ids=["codes", "messages"])
@pytest.mark.parametrize(
    "trouble",
    [
        _closed,
        _closed_by_another,
        _locked,
        _full_disk,
        _file_too_large,
        _read_only,
        _interrupted,
        _moved_away,
    ],
    ids=lambda trouble: trouble.__name__[1:],
)
def test_trouble_that_says_nothing_of_the_file_is_no_damage(
    path: Path,
    encryption: Encryption,
    trouble: Callable[[Index], Iterator[None]],
    codes: bool,
) -> None:
    nodes = chain(*([number] * 200 for number in range(1000, 1200)))
    with closing(Index(path, OwnFiles(path.parent, encryption))) as index:
        with trouble(index), pytest.raises(sqlite3.Error) as raised:  # type: ignore[attr-defined]
            index.add_blocks(ROOT, [(node, 1000) for node in nodes])
    assert not is_damage(raised.value if codes else as_of_python_310(raised.value)), raised.value


def _too_many_variables(db: sqlite3.Connection) -> None:
    db.execute(f"SELECT {','.join('?' * 300_000)}", [1] * 300_000)


def _no_such_table(db: sqlite3.Connection) -> None:
    db.execute("SELECT * FROM nowhere")


def _constraint(db: sqlite3.Connection) -> None:
    db.execute("INSERT INTO state VALUES (NULL, NULL)")


def _wrong_number_of_values(db: sqlite3.Connection) -> None:
    db.execute("SELECT ?, ?", (1,))


def _value_of_no_type(db: sqlite3.Connection) -> None:
    db.execute("SELECT ?", (object(),))


def _too_big(db: sqlite3.Connection) -> None:
    db.execute("SELECT zeroblob(1 << 40)")


WRONG_STATEMENTS = [_too_many_variables, _no_such_table, _constraint, _too_big]
WRONG_STATEMENTS += [_wrong_number_of_values, _value_of_no_type]


@pytest.mark.parametrize("ask", WRONG_STATEMENTS, ids=lambda ask: ask.__name__[1:])
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "messages"])
def test_a_wrong_statement_is_no_damage(
    path: Path, encryption: Encryption, ask: Callable[[sqlite3.Connection], None], codes: bool
) -> None:
    with closing(Index(path, OwnFiles(path.parent, encryption))) as index:
        with pytest.raises(sqlite3.Error) as raised:
            ask(index.database.connection)
    assert not is_damage(raised.value if codes else as_of_python_310(raised.value)), raised.value


def as_of_python_310(error: sqlite3.Error) -> sqlite3.Error:
    """Return the same error without the result code that Python 3.11 adds."""
    if isinstance(error, IndexDamaged):
        return error
    return type(error)(*error.args)


@pytest.mark.parametrize("encryption", ["encrypted"], indirect=True)
def test_every_error_of_sqlcipher_is_one_of_sqlite(encryption: Encryption) -> None:
    driver = sqlcipher()
    kinds = [
        one
        for one in vars(driver).values()
        if isinstance(one, type) and issubclass(one, driver.Error)
    ]
    assert len(kinds) == 9
    for kind in kinds:
        if kind is not driver.Error:  # the base, which is never raised
            assert issubclass(kind, getattr(sqlite3, kind.__name__))


# The reaction.


@pytest.fixture
def folder(tmp_path: Path, path: Path, encryption: Encryption) -> Path:
    """A store with that index, but without block files."""
    folder = tmp_path / "store"
    with closing(DiskStore(folder, LIMITS, encryption=encryption)):
        pass
    for old in folder.glob("index.sqlite*"):
        old.unlink()
    shutil.copy(path, folder / "index.sqlite")
    return folder


def test_a_damaged_index_is_rebuilt_and_one_in_trouble_is_left_alone(
    folder: Path, encryption: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(DiskStore(folder, LIMITS, encryption=encryption)) as disk:
        rebuilt: list[Path] = []
        monkeypatch.setattr(
            "mlx_lm_kvpersist.store.disk.rebuild_index", lambda folder, *_: rebuilt.append(folder)
        )
        for trouble in ("Cannot operate on a closed database.", "too many SQL variables"):

            def fail(*_: object, trouble: str = trouble, **__: object) -> None:
                raise sqlite3.ProgrammingError(trouble)

            with monkeypatch.context() as patch:
                patch.setattr("mlx_lm_kvpersist.store.index.prepare", fail)
                with pytest.raises(sqlite3.ProgrammingError):
                    disk.check_index()
        assert rebuilt == [] and disk.index.totals().n_blocks == 100
    content = bytearray((folder / "index.sqlite").read_bytes())
    _page_in_the_middle(content)
    (folder / "index.sqlite").write_bytes(content)
    monkeypatch.undo()
    with closing(DiskStore(folder, LIMITS, encryption=encryption)) as disk:
        assert disk.index.totals().n_blocks == 0  # as in the files
    assert list((folder / "quarantine").glob("index-*.sqlite"))


def test_the_codes_are_those_of_sqlite() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this version of Python has no codes")
    assert database._CORRUPT == sqlite3.SQLITE_CORRUPT
    assert database._NOT_A_DATABASE == sqlite3.SQLITE_NOTADB
    assert database._ERROR == sqlite3.SQLITE_ERROR


def test_an_index_that_is_damaged_while_a_server_runs_is_rebuilt(tmp_path: Path) -> None:
    """docs/store.md: at its start or while it serves."""
    store = BlockStore(tmp_path / "store", StoreLimits(64 << 20, 64 << 20))
    for n in range(30):
        save_turn(store, chain([n], [n + 1000, 2]))
    store.index.database.empty_log()
    with store.index.path.open("r+b") as file:
        for page in range(2, store.index.path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(os.urandom(4096))
    store.writer.submit(store.index.database.disconnect)  # it has pages in memory
    for n in range(40, 44):
        save_turn(store, chain([n], [n + 1000, 2]))
    assert store.turns_not_saved <= 1 and store.index.totals().n_blocks > 60
    store.close()
