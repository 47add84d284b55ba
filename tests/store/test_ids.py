"""Ids of sessions: no session replaces another session that has the same id."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore, rebuild_index
from mlx_lm_kvpersist.store.folder import OwnFiles, StoreLock
from mlx_lm_kvpersist.store.records import Session, read_sidecar, sidecar_path, write_sidecar
from mlx_lm_kvpersist.store.verify import find_problems

from .conftest import ROOT, chain, save_turn

OLD_ID = "0012ab34"
"""An id in the form of older versions."""


def named(store: BlockStore, name: str | None) -> Session:
    (session,) = (session for session in store.index.sessions() if session.name == name)
    return session


def with_old_id(store: BlockStore, name: str | None) -> Session:
    """Give a stored session, and its file, an id in the form of older versions."""
    with store.disk.lock.held():
        session = named(store, name)
        store.index.remove_session(session.id)
        store.disk.remove_sidecar(session.id)
        old = replace(session, id=OLD_ID)
        store.index.put_session(old, write_sidecar(old, store.disk.files))
    return old


def test_session_id_has_at_least_64_random_bits(store: BlockStore) -> None:
    for number in range(20):
        save_turn(store, chain([number]), f"talk {number}")
    ids = {session.id for session in store.index.sessions()}
    assert len(ids) == 20 and all(re.fullmatch("[0-9a-f]{16,}", session_id) for session_id in ids)
    # Each digit takes many values, so no digit marks a version.
    assert min(len(set(digits)) for digits in zip(*ids, strict=True)) > 4


def test_turn_with_an_existing_session_id_is_not_saved(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_lm_kvpersist.store.disk.secrets.token_hex", lambda _: "a" * 16)
    save_turn(store, chain([1], [2]), "a name")
    before = named(store, "a name")
    save_turn(store, chain([5], [6]), "another name")
    assert "cannot save a turn" in caplog.text and store.turns_not_saved == 1
    assert store.index.sessions() == [before] and find_problems(store.folder, store.index) == []
    assert read_sidecar(sidecar_path(store.folder, before.id), OwnFiles(store.folder)) == before
    monkeypatch.undo()
    save_turn(store, chain([5], [6]), "another name")
    assert len(store.index.sessions()) == 2 and store.index.faults() == []


@pytest.mark.parametrize("name", ["a name", "another name", None])
def test_index_refuses_a_second_session_with_the_same_id(
    store: BlockStore, name: str | None
) -> None:
    save_turn(store, chain([1], [2]), "a name")
    before = named(store, "a name")
    other = replace(before, name=name, leaf=chain([5])[0].key, created=before.created + 1)
    with pytest.raises(sqlite3.IntegrityError):
        store.index.put_session(other)
    assert store.index.sessions() == [before] and store.index.faults() == []
    changed = replace(before, pinned=True, used=before.used + 1)
    store.index.put_session(changed)
    assert store.index.sessions() == [changed] and store.index.faults() == []


def test_a_rebuild_keeps_two_sessions_that_had_the_same_id(store: BlockStore) -> None:
    """In older versions, an unnamed session could overwrite another session's row, not its file."""
    save_turn(store, chain([1], [2]), "a name")
    save_turn(store, chain([5], [6]))
    owner, unnamed = named(store, "a name"), named(store, None)
    with store.index.database.transaction() as db:
        db.execute("DELETE FROM sessions WHERE id = ?", (owner.id,))
        db.execute("UPDATE sessions SET id = ? WHERE id = ?", (owner.id, unnamed.id))
    with StoreLock(store.folder / "lock").held():
        rebuild_index(OwnFiles(store.folder))
    by_name = {session.name: session for session in store.index.sessions()}
    assert by_name["a name"] == owner
    assert by_name[None] == replace(unnamed, id=by_name[None].id) and by_name[None].id != owner.id
    assert store.index.faults() == []


# Ids of older versions.


def test_session_with_a_short_old_id_can_be_continued(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "old")
    old = with_old_id(store, "old")
    save_turn(store, chain([1], [2], [3]), "old")
    grown = named(store, "old")
    assert grown.id == OLD_ID and grown.n_tokens > old.n_tokens
    assert read_sidecar(sidecar_path(store.folder, OLD_ID), OwnFiles(store.folder)) == grown
    assert store.disk.set_pinned(grown, True).id == OLD_ID
    with StoreLock(store.folder / "lock").held():
        rebuild_index(OwnFiles(store.folder))
    assert named(store, "old").pinned and find_problems(store.folder, store.index) == []
    assert store.disk.sweep() == 0
    store.disk.remove_session(named(store, "old"))
    assert not list((store.folder / "sessions").iterdir())


def test_commands_find_short_and_long_ids(
    tmp_path: Path, limits: StoreLimits, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(BlockStore(tmp_path / "store", limits)) as store:
        save_turn(store, chain([1], [2]), "old")
        save_turn(store, chain([5], [6]), "new")
        with_old_id(store, "old")
        new = named(store, "new")
    location = ["--kvpersist-dir", str(tmp_path / "store")]
    for wanted, name in (
        (OLD_ID, "old"),
        (OLD_ID[:5], "old"),
        (new.id, "new"),
        (new.id[:9], "new"),
    ):
        capsys.readouterr()
        assert cli.main(["sessions", "show", *location, wanted]) == 0
        assert name in capsys.readouterr().out
    exported = tmp_path / "exported"
    assert cli.main(["sessions", "export", *location, OLD_ID, str(exported)]) == 0
    assert cli.main(["sessions", "rm", *location, OLD_ID, new.id]) == 0
    assert cli.main(["sessions", "import", *location, str(exported)]) == 0
    with closing(DiskStore(tmp_path / "store", limits)) as disk:
        (session,) = disk.index.sessions()
        assert session.name == "old" and len(session.id) == 16
        assert [path.stem for path in disk.files.paths("sessions")] == [session.id]
        assert ROOT.key == session.root
