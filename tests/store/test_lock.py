"""Waiting for a store that another process is changing."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from mlx_lm_kvpersist.errors import StoreError
from mlx_lm_kvpersist.store import database
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.folder import StoreLock
from tests.support import wait_until
from tests.support.clock import Clock
from tests.support.lock_holder import lock_holder

from .conftest import ROOT, arrays_of, chain, save_turn


@pytest.fixture
def folder(store: BlockStore) -> Path:
    """A store of one session, closed."""
    save_turn(store, chain([1], [2]), "s")
    store.close()
    return store.folder


def test_opening_a_store_does_not_need_its_lock(folder: Path, limits: StoreLimits) -> None:
    with lock_holder(folder):
        disk = DiskStore(folder, limits)
        assert disk.index.totals().n_blocks == 2
        disk.close()


@pytest.mark.parametrize("error_number", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])
def test_volume_without_file_locks_is_refused_with_advice(
    tmp_path: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    def flock(*args: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"cannot lock files.*with --kvpersist-dir"):
        DiskStore(tmp_path / "store", limits)


def test_store_moved_to_a_volume_without_locks_logs_this_once(
    folder: Path,
    limits: StoreLimits,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Stored blocks are still read."""

    def flock(*args: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", flock)
    store = BlockStore(folder, limits)
    for n in range(3):
        save_turn(store, chain([n + 5], [2]), "s")
        store.change_index("remember something", lambda index: None)
        store.touch([chain([1])[0].key])
    store.drain()
    assert store.reader.load(chain([1])[0], ROOT) is not None
    messages = [record.getMessage() for record in caplog.records]
    assert all("cannot lock files" in (record.exc_text or record.getMessage())
               for record in caplog.records)  # fmt: skip
    assert (
        len([message for message in messages if "save a turn" in message]) == 1
        and len(messages) <= 4
    )
    store.close()


def test_change_fails_with_the_name_of_the_lock_holder(
    folder: Path, limits: StoreLimits, clock: Clock
) -> None:
    disk = DiskStore(folder, limits)
    with lock_holder(folder) as holder:
        with pytest.raises(StoreError) as raised:
            disk.sweep()
        message = str(raised.value)
        assert f"process {holder.pid} (mlx-lm-kvpersist store rebuild)" in message
        assert " since 20" in message and "secret" not in message
        holder.kill()
        holder.wait()
        assert disk.sweep() == 0  # the lock ended with its process
    disk.close()


def test_rebuild_of_a_missing_index_fails_while_another_process_has_the_lock(
    folder: Path, limits: StoreLimits, clock: Clock
) -> None:
    (folder / "index.sqlite").unlink()
    with lock_holder(folder) as holder, pytest.raises(StoreError, match=str(holder.pid)):
        DiskStore(folder, limits)
    disk = DiskStore(folder, limits)
    assert disk.index.totals().n_blocks == 2
    disk.close()


def test_server_reads_while_the_lock_is_taken_and_writes_afterwards(
    folder: Path, limits: StoreLimits, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_holder(folder) as holder, caplog.at_level(logging.INFO):
        store = BlockStore(folder, limits)
        first, second = chain([1], [2])
        assert store.children(first.key) == [second] and store.reader.load(second, ROOT) is not None
        longer = chain([1], [2], [3])
        turn = Commit(ROOT, tuple(longer))
        store.commit(turn, [(longer[-1], arrays_of(longer[-1]))])
        wait_until(lambda: str(holder.pid) in caplog.text, "a line that names the holder")
        assert longer[-1].key not in store.index
        holder.kill()
        holder.wait()
        store.drain()
        assert longer[-1].key in store.index
    assert caplog.text.count(str(holder.pid)) == 1
    store.close()


def test_index_locked_by_another_program_raises_with_advice(
    folder: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not advise another folder, which would not help."""
    monkeypatch.setattr("mlx_lm_kvpersist.store.folder.OPEN_S", 0.1)
    monkeypatch.setattr(database, "_WAIT_S", 0.1)
    disk = DiskStore(folder, limits)
    advice = "index.sqlite is locked: another program has it open"
    with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as browser:
        browser.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match=advice):
            disk.index.forget(b"nothing")
        disk.close()
        browser.execute("ROLLBACK")
        browser.execute("PRAGMA locking_mode = EXCLUSIVE")
        browser.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=advice) as raised:
            DiskStore(folder, limits)
        assert "--kvpersist-dir" not in str(raised.value)
    DiskStore(folder, limits).close()


def test_lock_file_has_only_its_holder_and_is_truncated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncated, truncate = list[int](), os.ftruncate

    def record_and_truncate(descriptor: int, length: int) -> None:
        truncated.append(length)
        truncate(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", record_and_truncate)
    path = tmp_path / "lock"
    path.write_bytes(b"x" * 900)
    lock = StoreLock(path)
    for _ in range(3):
        with lock.held():
            text = path.read_text()
            assert text.startswith(f"process {os.getpid()} ") and "x" * 20 not in text
    assert len(truncated) == 1


def test_program_that_reads_the_index_delays_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is a backup or a database browser. The store evicts for each turn."""
    wait_s = 2.0
    monkeypatch.setattr(database, "_WAIT_S", wait_s)
    with closing(BlockStore(tmp_path / "store", StoreLimits(64 << 20, 3 << 20))) as store:
        for n in range(12):
            save_turn(store, chain([n], [n + 1000, 2, 3, 4]))
        n_evicted = store.disk.n_evicted
        assert n_evicted
        with closing(sqlite3.connect(store.folder / "index.sqlite")) as browser:
            browser.execute("BEGIN")
            browser.execute("SELECT count(*) FROM blocks").fetchall()
            started_s = time.monotonic()
            save_turn(store, chain([20], [1020, 2, 3, 4]))
            assert time.monotonic() - started_s < wait_s
        assert store.disk.n_evicted > n_evicted and not store.turns_not_saved


def test_lock_on_a_removed_file_is_not_taken(tmp_path: Path) -> None:
    """While a server waits for the lock, the folder is removed and made again."""
    path, holds, may_end = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        with StoreLock(path).held():
            holds.set()
            may_end.wait(10)

    waiting = threading.Thread(target=wait)
    with ExitStack() as other:
        with StoreLock(path).held():
            waiting.start()
            time.sleep(0.2)
            path.unlink()
            other.enter_context(StoreLock(path).held())
        assert not holds.wait(0.5)
        may_end.set()
    waiting.join()
