"""The files of sessions with a name or a pin: the budget counts them without reading each."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.disk_tier import Saving
from mlx_lm_kvpersist.store.records import Leaf, NewFile, Saved, write_sidecar

from .conftest import ROOT, arrays_of, chain, save_turn


def store_bytes(folder: Path) -> int:
    """Return the size of all files except the lock and the marker."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    counted = [path for path in paths if path.name not in ("lock", "kvpersist-store")]
    return sum(path.stat().st_size for path in counted)


def test_used_bytes_include_the_sidecars_of_sessions(store: BlockStore) -> None:
    disk = store.disk

    def check() -> None:
        assert disk.used_bytes() == store_bytes(store.folder)
        assert disk.index.faults() == []

    save_turn(store, chain([1], [2, 3]), "a name")
    save_turn(store, chain([1], [9]))
    check()
    (unnamed,) = (session for session in disk.index.sessions() if session.name is None)
    assert disk.index.totals().sidecar_bytes > 0
    before = disk.index.totals().sidecar_bytes
    pinned = disk.set_pinned(unnamed, True)
    check()
    assert disk.index.totals().sidecar_bytes > before
    disk.set_pinned(pinned, False)
    check()
    assert disk.index.totals().sidecar_bytes == before
    old, new = chain([1], [2, 3])[1], chain([1], [2, 3, 4])[1]
    save_turn(store, chain([1], [2, 3, 4]), "a name", replaced=((old.key, new.key),))
    save_turn(store, chain([1], [2, 3, 4]), "another")
    check()
    with disk.lock.held():
        disk.remove_session(disk.index.sessions_named("another")[0])
    check()
    disk.forget(new.key)
    check()
    assert disk.index.totals().sidecar_bytes == 0


@pytest.mark.parametrize(
    "change",
    [
        {"name": 5},
        {"pinned": None},
        {"n_tokens": "x"},
        {"n_tokens": 1 << 80},
        {"used": math.nan},
        {"used": None},
        {"root": 5},
        None,
    ],
    ids=str,
)
def test_rebuild_leaves_out_a_session_with_a_damaged_sidecar(
    store: BlockStore, change: dict[str, object] | None
) -> None:
    save_turn(store, chain([1], [2]), "damaged")
    (path,) = (store.folder / "sessions").iterdir()
    save_turn(store, chain([1], [3]), "good")
    store.close()
    content = json.dumps(json.loads(path.read_bytes()) | change) if change else "[" * 100_000
    path.write_text(content)
    (store.folder / "index.sqlite").unlink()
    with closing(DiskStore(store.folder, store.limits)) as disk:
        assert [session.name for session in disk.index.sessions()] == ["good"]
        assert disk.index.totals().n_blocks == 3 and disk.index.faults() == []


@contextmanager
def counted_file_operations() -> Iterator[Counter[str]]:
    """Count this thread's calls to the file system."""
    counted: Counter[str] = Counter()
    operations = {"stat", "lstat", "scandir", "listdir", "open", "unlink", "replace", "mkdir"}

    def see(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in operations:
            counted[called.__name__] += 1

    sys.setprofile(see)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def test_file_operations_of_a_save_do_not_grow_with_named_sessions(
    tmp_path: Path, limits: StoreLimits
) -> None:
    n_operations = []
    with closing(DiskStore(tmp_path / "store", limits)) as disk:
        for turn, n_sessions in enumerate((0, 10, 1_000)):
            with disk.index.database.transaction():
                for number in range(n_sessions):
                    (first, *_) = disk.index.sessions_named("s")
                    other = replace(first, id=f"{turn}{number:07x}", name=f"other {number}")
                    disk.index.put_session(other, write_sidecar(other, disk.files))
            nodes = chain([1], [2 + turn])
            commit = partial(Commit, ROOT, tuple(nodes), Leaf("s", nodes[-1].key, nodes[-1].stop))
            arrays = {node: arrays_of(node) for node in nodes}

            def file_of(
                root: Root, node: Any, disk: DiskStore = disk, arrays: Any = arrays
            ) -> NewFile:
                return disk.new_file(root, node, arrays[node])

            with counted_file_operations() as counted:
                (saved,) = Saving(disk, file_of).save([commit])
            assert isinstance(saved, Saved)
            n_operations.append(sum(counted.values()))
    assert n_operations[0] > 5 and n_operations[2] == n_operations[1], n_operations
