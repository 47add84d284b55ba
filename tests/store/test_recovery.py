"""Recovery from a removed folder, an interrupted rebuild, or files without an index."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.errors import StoreFormatError
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.database import APPLICATION_ID, INDEX_FORMAT
from mlx_lm_kvpersist.store.disk import DiskStore, rebuild_index
from mlx_lm_kvpersist.store.folder import OwnFiles, StoreLock
from mlx_lm_kvpersist.store.index import Index
from tests.support.store_files import checkpoint_path, write_block

from .conftest import (
    ROOT,
    arrays_of_checkpoint,
    chain,
    save_turn,
    state,
    unused_checkpoints,
    window,
)

KILLED = 9


def block_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blocks").glob("*/*")}


def checkpoint_files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("*/*")}


def test_removed_folder_of_an_open_store_is_created_again(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    shutil.rmtree(store.folder)
    new_nodes = chain([3], [4])
    save_turn(store, new_nodes, "t")
    assert not store._failures
    assert [session.leaf for session in store.index.sessions() if session.name == "t"] == [
        new_nodes[-1].key
    ]
    assert block_files(store.folder) == {f"{node.key.hex()}.safetensors" for node in new_nodes}


def test_no_store_is_created_while_its_volume_is_unmounted(
    tmp_path: Path, limits: StoreLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, away, mounted = tmp_path.resolve() / "volume", tmp_path / "away", [True]
    is_mount = Path.is_mount
    monkeypatch.setattr(
        Path, "is_mount", lambda path: mounted[0] if path == volume else is_mount(path)
    )
    with closing(BlockStore(volume / "store", limits)) as store:
        save_turn(store, chain([1]), "s")
        (volume / "store").rename(away)
        mounted[0] = False
        save_turn(store, chain([1], [2]), "s")
        assert store.turns_not_saved == 1 and not list(volume.iterdir())
        away.rename(volume / "store")
        mounted[0] = True
        save_turn(store, chain([1], [3]), "s")
        assert store.turns_saved == 2 and store.index.totals().n_blocks == 2


def test_killed_rebuild_loses_no_blocks_or_sessions(store: BlockStore) -> None:
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    before = block_files(store.folder)
    (store.folder / "index.sqlite").unlink()
    program = f"""
import os
from pathlib import Path
from typing import Any
from mlx_lm_kvpersist.store.records import StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.index import Index
add, added = Index.add_blocks, []
def killed(self, root, blocks, used=None):
    if added:
        os._exit({KILLED})
    added.append(add(self, root, blocks, used))
Index.add_blocks = killed
DiskStore(Path({str(store.folder)!r}), StoreLimits(0, 1 << 20))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == KILLED
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.totals().n_blocks == 3
    assert [session.name for session in disk.index.sessions()] == ["s"]
    disk.close()
    assert block_files(store.folder) == before


def test_truncated_index_is_rebuilt_from_the_files(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    store.close()
    os.truncate(store.folder / "index.sqlite", 0)
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.totals().n_blocks == 2
    disk.close()


def test_old_log_is_not_read_into_a_rebuilt_index(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    log = store.folder / "index.sqlite-wal"
    old_log = log.read_bytes()
    assert old_log
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    (store.folder / "index.sqlite").unlink()
    log.write_bytes(old_log)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.totals().n_blocks == 3 and disk.sweep() == 0
    disk.close()


def test_open_store_saves_turns_after_its_index_is_rebuilt(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    for index_is_there in (True, False):
        if not index_is_there:
            (store.folder / "index.sqlite").unlink()
        before = store.index.path.stat().st_ino if index_is_there else None
        with StoreLock(store.folder / "lock").held():
            assert rebuild_index(OwnFiles(store.folder)) == store.index.totals().n_blocks
        if index_is_there:  # rewritten in place: other servers have the file open
            assert store.index.path.stat().st_ino == before
        longer = chain([1], [2], [3 + index_is_there])
        save_turn(store, longer, "s")
        assert not store._failures
        assert longer[-1].key in [
            session.leaf for session in store.index.sessions() if session.name == "s"
        ]
    store.close()
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.totals().n_blocks == 4
    disk.close()


def test_rebuild_restores_a_session_that_ends_in_a_replaced_block(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s")
    save_turn(store, [head, tail], "other")
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", replaced=((tail.key, longer[1].key),))
    store.close()
    (store.folder / "index.sqlite").unlink()
    disk = DiskStore(store.folder, store.limits)
    ends = {session.name: (session.leaf, session.n_tokens) for session in disk.index.sessions()}
    assert ends == {"s": (longer[1].key, 4), "other": (tail.key, 3)}
    disk.close()


def test_folder_can_be_removed_while_another_thread_reads(store: BlockStore) -> None:
    """If the reader's connection were closed during a read, the process would crash."""
    save_turn(store, chain([1], [2]), "s")
    stop = threading.Event()
    n_reads = 0

    def read() -> None:
        nonlocal n_reads
        while not stop.is_set():
            store.children(ROOT.key)
            _ = chain([1])[0].key in store
            n_reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for n in count():
            while store.folder.exists():  # the reader may make an index in it at the same time
                shutil.rmtree(store.folder, ignore_errors=True)
            save_turn(store, chain([n, 7], [n, 8]), "s")
            assert store.index.totals().n_blocks == 2
            if n >= 29 and n_reads > 100:
                break
    finally:
        stop.set()
        reader.join()


# Checkpoints.


def test_torn_announcement_counts_no_bytes_and_is_swept(store: BlockStore) -> None:
    """After a power failure a file may contain zeros."""
    store.drain()
    before = store.disk.used_bytes()
    torn = store.folder / "writing" / "1a2b3c4d.lock"
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(bytes(20))
    assert store.disk.used_bytes() == before
    save_turn(store, chain([1]), "s")
    assert store.turns_saved == 1 and store.disk.sweep() == 1 and not torn.exists()


def test_sweep_removes_files_and_rows_of_incomplete_checkpoints(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    kept, lost, stray = state(nodes[0]), window(nodes[1]), state(nodes[2])
    save_turn(store, nodes, "s", [kept, lost, stray])
    store.close()
    checkpoint_path(store.folder, lost.key).unlink()
    (elsewhere,) = chain([9])
    write_block(
        checkpoint_path(store.folder, state(elsewhere).key),
        state(elsewhere),
        ROOT,
        arrays_of_checkpoint(kept),
    )
    path = checkpoint_path(store.folder, kept.key)
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute("DELETE FROM blocks WHERE key = ?", (nodes[2].key,))
    disk = DiskStore(store.folder, store.limits)
    # A checkpoint's file without a row, a block's file without a row, a row without a file, and
    # a checkpoint without its block.
    assert disk.sweep() == 4
    assert disk.index.keys("checkpoints") == {kept.key}
    assert checkpoint_files(store.folder) == {path.name}
    assert disk.sweep() == 0
    disk.close()


def test_rebuild_restores_the_rows_of_checkpoints(store: BlockStore) -> None:
    nodes = chain([1], [2])
    checkpoints = [window(nodes[0]), state(nodes[1])]
    save_turn(store, nodes, "s", checkpoints)
    store.close()
    before = sorted(disk_rows(store.folder))
    for path in store.folder.glob("index.sqlite*"):
        path.unlink()
    (elsewhere,) = chain([9])
    write_block(
        checkpoint_path(store.folder, state(elsewhere).key),
        state(elsewhere),
        ROOT,
        arrays_of_checkpoint(checkpoints[0]),
    )
    other = Root("another", ROOT.layout)
    foreign = window(nodes[1])
    write_block(
        checkpoint_path(store.folder, foreign.key), foreign, other, arrays_of_checkpoint(foreign)
    )
    bad = checkpoint_path(store.folder, state(nodes[0]).key)
    bad.parent.mkdir(exist_ok=True)
    bad.write_bytes(checkpoint_path(store.folder, checkpoints[0].key).read_bytes())
    disk = DiskStore(store.folder, store.limits)
    assert sorted(disk_rows(store.folder)) == before
    assert disk.sweep() == 3
    assert checkpoint_files(store.folder) == {
        f"{checkpoint.key.hex()}.safetensors" for checkpoint in checkpoints
    }
    disk.close()


def disk_rows(folder: Path) -> list[tuple[bytes, bytes, str, int, int]]:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        return db.execute("SELECT key, block, kind, n_tokens, n_bytes FROM checkpoints").fetchall()


def test_rebuild_keeps_the_times_of_use_of_checkpoints(store: BlockStore) -> None:
    (node,) = chain([1])
    save_turn(store, [node], "s", [state(node)])
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db, db:
        db.execute("UPDATE checkpoints SET used = 4e9")
    with StoreLock(store.folder / "lock").held():
        assert rebuild_index(OwnFiles(store.folder)) == 1
    assert [used for used, *_ in unused_checkpoints(store.index)] == [4e9]


# Formats.


@pytest.mark.parametrize("version", [0, 1, INDEX_FORMAT - 1, INDEX_FORMAT + 1, 1 << 30, -1])
def test_damaged_format_number_is_repaired(store: BlockStore, version: int) -> None:
    """A flipped bit of the version must not make the store unusable."""
    save_turn(store, chain([1], [2]), "s")
    store.close()
    set_format(store.folder, version, INDEX_FORMAT)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.ask("PRAGMA user_version") == [(INDEX_FORMAT,)]
    assert disk.sweep() == 0 and disk.index.totals().n_blocks == 2
    assert [session.name for session in disk.index.sessions()] == ["s"]
    disk.close()


@pytest.mark.parametrize(
    ("version", "age"), [(1, "older"), (INDEX_FORMAT - 1, "older"), (INDEX_FORMAT + 1, "newer")]
)
def test_store_of_another_format_is_refused_with_a_one_line_message(
    store: BlockStore, version: int, age: str
) -> None:
    save_turn(store, chain([1], [2]), "s")
    store.close()
    set_format(store.folder, version, version)
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
    with pytest.raises(StoreFormatError) as error:
        DiskStore(store.folder, store.limits)
    message = str(error.value)
    assert f"{store.folder} is {age}" in message
    assert "--kvpersist-dir" in message and "\n" not in message
    assert {path: path.read_bytes() for path in before} == before


def test_open_store_does_not_change_an_index_of_a_newer_format(store: BlockStore) -> None:
    """While a server runs, a newer version may replace the store in its folder."""
    save_turn(store, chain([1], [2]), "s")
    store.index.database.empty_log()
    newer = store.index.path.read_bytes()
    for path in store.folder.glob("index.sqlite*"):
        path.unlink()
    store.index.path.write_bytes(newer)
    set_format(store.folder, INDEX_FORMAT + 1, INDEX_FORMAT + 1)
    newer = store.index.path.read_bytes()
    for n in (3, 4, 5):
        save_turn(store, chain([1], [2], [n]), "s")
    assert store.turns_saved == 1 and store.turns_not_saved == 3
    assert store.index.path.read_bytes() == newer
    store.index.path.unlink()
    save_turn(store, chain([1], [2], [6]), "s")  # the newer version's store was removed
    assert store.turns_saved == 2


def set_format(folder: Path, version: int, made_for: int) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {version}")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID + made_for}")


def test_failed_rebuild_leaves_the_rows_unchanged(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads read the old rows until the rebuild ends."""
    save_turn(store, chain([1], [2]), "a name")
    before, add, seen = store.index.keys(), Index.add_blocks, list[set[bytes]]()
    sessions = store.index.sessions()

    def breaking(index: Index, *args: Any) -> None:
        add(index, *args)
        seen.append(store.index.keys())
        if len(seen) == 2:
            raise OSError(errno.EIO, "a file cannot be read now")

    with monkeypatch.context() as patch, StoreLock(store.folder / "lock").held():
        patch.setattr(Index, "add_blocks", breaking)
        with pytest.raises(OSError, match="now"):
            rebuild_index(OwnFiles(store.folder))
    assert seen == [before, before] and store.index.keys() == before
    assert store.index.sessions() == sessions and store.index.faults() == []
