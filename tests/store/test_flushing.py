"""Flushing files to the drive: macOS needs another call than Linux."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.encryption import new_key
from mlx_lm_kvpersist.store.folder import whole_file

F_FULLFSYNC = 51
"""The number of this command on macOS; Linux does not have it."""


@pytest.fixture
def flush_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that flush a file, on a simulated macOS."""
    calls: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda file, command: calls.append(f"fcntl {command}"))
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    return calls


def test_keys_and_exports_are_flushed_by_fullfsync_on_macos(
    flush_calls: list[str], tmp_path: Path
) -> None:
    new_key(tmp_path / "key")
    with whole_file(tmp_path / "export", fsync=True) as file:
        file.write(b"content")
    assert flush_calls == [f"fcntl {F_FULLFSYNC}"] * 2


def test_volume_without_fullfsync_is_flushed_by_fsync(
    flush_calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    new_key(tmp_path / "key")
    assert flush_calls == ["fsync"]


def test_linux_flushes_by_fsync(
    flush_calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(fcntl, "F_FULLFSYNC")
    new_key(tmp_path / "key")
    assert flush_calls == ["fsync"]


def test_index_connection_sets_checkpoint_fullfsync(store: BlockStore) -> None:
    """The setting belongs to a connection; the file does not keep it."""
    store.drain()
    db = store.index.database.connection
    assert db.execute("PRAGMA checkpoint_fullfsync").fetchone() == (1,)
