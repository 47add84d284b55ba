"""Temporary errors are not damage; a damaged file is quarantined and replaced."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Record
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import LOG_AGAIN_S, BlockCorrupt, StoreError
from mlx_lm_kvpersist.store import folder as store_folder
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore, rebuild_index
from mlx_lm_kvpersist.store.disk_tier import Saving
from mlx_lm_kvpersist.store.files import write_block
from mlx_lm_kvpersist.store.folder import OwnFiles
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Commit, read_sidecar
from tests.support import wait_until, writer_held
from tests.support.store_files import block_path, read_file

from .conftest import ROOT, chain, leaves, save_turn, state

NODES = chain([1], [2])
CHECKPOINT = state(NODES[1])
RECORDS: list[Record] = [*NODES, CHECKPOINT]


@pytest.fixture
def stored(tmp_path: Path, limits: StoreLimits) -> Iterator[BlockStore]:
    """An open store with one pinned session on disk and nothing in RAM."""
    store = BlockStore(tmp_path / "store", limits)
    save_turn(store, NODES, "s", [CHECKPOINT])
    (session,) = store.index.sessions()
    store.disk.set_pinned(session, True)
    store.pool.clear()
    yield store
    store.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no further file: EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def failing_open(code: int) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that makes blocks and checkpoints fail to open for reading."""
    real = os.open

    def fail(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).endswith(".safetensors") and not flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **options)

    @contextmanager
    def trouble() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", fail)
            yield

    return trouble


def failing_load(error: Exception) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that makes MLX's loader fail."""

    def fail(*args: object, **options: object) -> None:
        raise error

    @contextmanager
    def trouble() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx, "load", fail)
            yield

    return trouble


TROUBLES = {
    "EMFILE": no_descriptors,
    "EACCES": failing_open(errno.EACCES),
    "EIO": failing_open(errno.EIO),
    "ENOMEM": failing_open(errno.ENOMEM),
    "loader": failing_load(RuntimeError("[load_safetensors] Failed to open file")),
    "read": failing_load(RuntimeError("[read] Unable to read 100 bytes from file.")),
    "memory": failing_load(MemoryError()),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(("index", "lock"))
    }


@pytest.mark.parametrize("name", TROUBLES)
def test_temporary_read_errors_change_no_file_or_row(stored: BlockStore, name: str) -> None:
    before = files_of(stored.folder)
    stored.drain()
    with TROUBLES[name]():
        for record in RECORDS:
            assert stored.reader.load(record, ROOT) is None
        assert list(stored.reader.load_all(NODES, ROOT)) == [None, None]
        prefetch = stored.reader.prefetch([(node, 1) for node in NODES], ROOT)
        wait_until(lambda: bool(prefetch.finished), "the prefetch")
        prefetch.release()
    stored.drain()
    assert stored.blocks_quarantined == 0
    assert files_of(stored.folder) == before
    assert stored.children(ROOT.key) == [NODES[0]] and NODES[1].key in stored
    (session,) = stored.index.sessions()
    assert session.pinned and session.leaf == NODES[1].key
    for record in RECORDS:  # no other save or open is needed
        assert stored.reader.load(record, ROOT) is not None


def test_repeated_read_errors_are_logged_once(
    stored: BlockStore, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with TROUBLES["EMFILE"]():
            for node in NODES * 3:
                stored.reader.load(node, ROOT)
        assert stored.reader.load(NODES[0], ROOT) is not None
        stored.pool.clear()
    assert [r.getMessage() for r in caplog.records if "cannot be read now" in r.getMessage()] == [
        f"kvpersist: block {NODES[0].key.hex()} cannot be read now: [Errno 24] Too many open "
        f"files: '{block_path(stored.folder, NODES[0].key)}'"
    ]
    assert stored.stats()["failed"]["… cannot be read now: …"] > 2


def test_file_that_reappears_keeps_its_index_row(stored: BlockStore) -> None:
    path = block_path(stored.folder, NODES[1].key)
    with writer_held(stored):
        path.rename(path.with_name("away"))
        assert stored.reader.load(NODES[1], ROOT) is None
        assert NODES[1].key not in stored and stored.children(NODES[0].key) == []
        path.with_name("away").rename(path)
    assert NODES[1].key in stored and stored.reader.load(NODES[1], ROOT) is not None
    assert len(stored.index.sessions()) == 1


def test_missing_file_loses_its_index_row(stored: BlockStore) -> None:
    block_path(stored.folder, NODES[1].key).unlink()
    assert stored.reader.load(NODES[1], ROOT) is None
    stored.drain()
    assert NODES[1].key not in stored.index


def test_verify_reports_read_errors_as_unreadable_not_corrupt(
    stored: BlockStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(stored.folder)
    with TROUBLES["EACCES"]():
        for fix in ([], ["--fix"]):
            options = ["--kvpersist-dir", str(stored.folder)]
            assert cli.main(["store", "verify", *options, *fix]) == 1
            output = capsys.readouterr().out
            assert output.count("unreadable") == 3 and "corrupt" not in output
    assert files_of(stored.folder) == before and stored.index.totals().n_blocks == 2


def test_rebuild_that_cannot_read_a_file_changes_nothing(stored: BlockStore) -> None:
    with TROUBLES["EIO"](), pytest.raises(OSError, match="Input/output error"):
        rebuild_index(OwnFiles(stored.folder))
    assert stored.index.totals().n_blocks == 2 and stored.disk.sweep() == 0
    assert rebuild_index(OwnFiles(stored.folder)) == 2


def damage(store: BlockStore, key: bytes) -> None:
    path = block_path(store.folder, key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_block_is_quarantined(stored: BlockStore) -> None:
    damage(stored, NODES[1].key)
    assert stored.reader.load(NODES[1], ROOT) is None
    stored.drain()
    assert stored.blocks_quarantined == 1
    assert not block_path(stored.folder, NODES[1].key).exists()
    assert len(list((stored.folder / "quarantine").iterdir())) == 2


def test_block_computed_again_replaces_the_damaged_file(
    stored: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced at once, even if it could not be moved to quarantine."""
    node = NODES[1]
    damage(stored, node.key)

    def fail(key: bytes, reason: str) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(stored.disk, "quarantine", fail)
    assert stored.reader.load(node, ROOT) is None
    stored.drain()
    with pytest.raises(BlockCorrupt):
        read_file(block_path(stored.folder, node.key))
    assert node.key not in stored
    content = save_turn(stored, NODES, "s")
    read, _, arrays = read_file(block_path(stored.folder, node.key))
    assert read == node
    assert all(mx.array_equal(arrays[name], array) for name, array in content[node.key].items())
    stored.pool.clear()
    assert node.key in stored and stored.reader.load(node, ROOT) is not None


def test_block_written_again_is_not_quarantined(stored: BlockStore) -> None:
    """The turn was saved between the failed check and the move to quarantine."""
    node = NODES[1]
    damage(stored, node.key)
    with writer_held(stored):
        assert stored.reader.load(node, ROOT) is None
        late = stored.writer._tasks.pop()
        save = threading.Thread(target=save_turn, args=(stored, NODES, "s"))
        save.start()
        wait_until(lambda: bool(stored.writer._tasks), "the turn in the queue")
        stored.writer._tasks.append(late)
    save.join()
    assert read_file(block_path(stored.folder, node.key))[0] == node
    assert not (stored.folder / "quarantine").exists()


def test_recurring_failure_is_logged_once_an_hour(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    for n_failures, n_lines in ((1, 1), (2, 1), (3, 2)):
        now_s[0] += LOG_AGAIN_S / 2
        with monkeypatch.context() as patch:
            patch.setattr(Saving, "save", fail)
            for number in range(3):
                save_turn(store, chain([n_failures], [number]))
        assert len(store._failures) == 1
        logged = [r for r in caplog.records if "cannot save a turn" in r.getMessage()]
        assert (
            len(logged) == n_lines
            and store.stats()["failed"]["save a turn: disk"] == 3 * n_failures
        )
        save_turn(store, chain([n_failures], [7]))
        assert not store._failures
    assert "(5 more like this since" in logged[-1].getMessage()


def test_every_failure_is_counted_by_its_kind(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_turn(store, chain([1]))
    errors = [
        sqlite3.OperationalError("disk I/O error"),
        StoreError("no room"),
        OSError(28, "full"),
    ]
    for error in errors:
        monkeypatch.setattr(Saving, "save", Mock(side_effect=error))
        save_turn(store, chain([2]))
    monkeypatch.setattr(store.disk, "check_index", Mock(side_effect=errors[0]))
    store.writer.submit(store.disk_tier.sweep)
    store.drain()
    store.index.close()
    assert store.view.sessions() == []
    assert store.failures.counts == {
        "save a turn: disk": 2,
        "save a turn: limit": 1,
        "check what is stored: disk": 1,
        "read the index: disk": 1,
    }


def test_only_a_saved_turn_clears_the_failure_to_save_turns(tmp_path: Path) -> None:
    store = BlockStore(
        tmp_path / "store", StoreLimits(max_ram_bytes=64 << 20, max_disk_bytes=1 << 20)
    )
    long = chain(*([n] for n in range(40)))
    save_turn(store, long)
    assert store.stats()["failures"] == ["save a turn: limit"] and store.turns_saved == 0
    store.commit(Commit(ROOT, (), replies={b"k" * 16: b"ids"}), [])
    store.commit(Commit(ROOT, (long[0],)), [])
    store.drain()
    assert store.stats()["failures"] == ["save a turn: limit"]
    save_turn(store, long[:1])
    assert store.stats()["failures"] == [] and store.turns_saved == 1
    store.close()


def test_parent_gets_the_time_of_use_of_a_removed_leaf(store: BlockStore) -> None:
    """The remaining blocks of a conversation are evicted by the latest use of any block."""
    old, recent = chain([1]), chain([2], [3])
    save_turn(store, old, "old")
    save_turn(store, recent, "recent")
    with store.index.database.transaction() as db:
        for node, used in ((old[0], 50), (recent[0], 1), (recent[1], 100)):
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (used, node.key))
    store.disk.forget(recent[1].key)
    assert [key for *_, key in leaves(store.index)] == [old[0].key, recent[0].key]


def test_folder_removed_during_a_save_becomes_a_store_again(
    stored: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that the server writes before it notices the removal have no marker."""
    folder, write, n_written = stored.folder, write_block, []

    def remove_and_write(path: Path, *args: Any, **options: Any) -> int:
        n_written.append(path)
        if len(n_written) == 2:
            shutil.rmtree(folder)
        n_bytes: int = write(path, *args, **options)
        return n_bytes

    monkeypatch.setattr("mlx_lm_kvpersist.store.disk.write_block", remove_and_write)
    save_turn(stored, chain([7], [8], [9]), "removed")
    assert len(n_written) >= 2
    save_turn(stored, chain([5]), "later")
    assert stored.turns_saved >= 1
    again = BlockStore(folder, stored.limits)
    assert next(session.name for session in again.index.sessions()) == "later"
    again.close()


def test_memory_error_during_a_write_leaves_no_pin(
    stored: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise MemoryError

    n_written = stored.index.state.written_last_hour()
    monkeypatch.setattr("mlx_lm_kvpersist.store.disk.write_block", fail)
    save_turn(stored, chain([7], [8]), "s")
    assert stored.turns_not_saved == 1
    assert stored.index.state.written_last_hour() == n_written  # nothing was written
    assert [entry.pins for entry in stored.pool._entries.values()] == [0, 0]
    assert list((stored.folder / "writing").iterdir()) == []


def test_failed_commit_leaves_the_sidecar_of_the_session_unchanged(
    stored: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (session,) = stored.index.sessions()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Index, "commit", fail)
    name = str(session.name)
    save_turn(stored, [*NODES, *chain([3], parent=NODES[-1].key)], name)
    save_turn(stored, chain([4]), "other")
    sidecars = list((stored.folder / "sessions").iterdir())
    assert [read_sidecar(path, stored.disk.files).leaf for path in sidecars] == [session.leaf]


def test_next_turn_writes_the_missing_file_of_a_block_in_ram(stored: BlockStore) -> None:
    """The block is still in RAM, so no read has noticed the missing file."""
    for node in NODES:
        assert stored.reader.load(node, ROOT) is not None
    block_path(stored.folder, NODES[0].key).unlink()
    save_turn(stored, [*NODES, *chain([3], parent=NODES[-1].key)], "s")
    stored.pool.clear()
    assert stored.reader.load(NODES[0], ROOT) is not None


def test_error_names_the_file_that_cannot_be_read_at_the_start(
    stored: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is missing and one file cannot be read: the user can remove this file."""
    stored.close()
    stored.index.path.unlink()
    bad = sorted((stored.folder / "blocks").rglob("*.safetensors"))[0]
    open_regular = store_folder.open_regular

    class Failing(io.BytesIO):
        def read(self, n_bytes: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        peek = read

    def opened(path: Path, **options: Any) -> Any:
        return Failing(b"x" * 999) if path == bad else open_regular(path, **options)

    monkeypatch.setattr(store_folder, "open_regular", opened)
    with pytest.raises(StoreError, match=bad.name):
        DiskStore(stored.folder, stored.limits)
