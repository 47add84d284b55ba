"""Flushing to the device, which macOS does by another call than Linux."""

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
"""Its number on macOS; Linux has none."""


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that flushed a file, on a system like macOS."""
    calls: list[str] = []
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda file, command: calls.append(f"fcntl {command}"))
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("fsync"))
    return calls


def test_a_key_and_an_export_are_in_the_drive_on_macos(flushed: list[str], tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    with whole_file(tmp_path / "export", fsync=True) as file:
        file.write(b"content")
    assert flushed == [f"fcntl {F_FULLFSYNC}"] * 2


def test_a_volume_of_another_system_gets_fsync(
    flushed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    new_key(tmp_path / "key")
    assert flushed == ["fsync"]


def test_linux_has_fsync_only(
    flushed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(fcntl, "F_FULLFSYNC")
    new_key(tmp_path / "key")
    assert flushed == ["fsync"]


def test_checkpoints_of_the_index_reach_the_drive(store: BlockStore) -> None:
    """A connection has this setting; it is not kept in the file."""
    store.drain()
    db = store.index.database.connection
    assert db.execute("PRAGMA checkpoint_fullfsync").fetchone() == (1,)
