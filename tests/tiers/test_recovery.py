"""What a store makes of a folder that was removed, half a rebuild, files that outlive the index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from mlx_lm_kvpersist.tiers.disk import DiskStore
from mlx_lm_kvpersist.tiers.lock import StoreLock
from mlx_lm_kvpersist.tiers.rebuild import rebuild_index
from mlx_lm_kvpersist.tiers.store import BlockStore

from .conftest import ROOT, chain, save_turn

KILLED = 9


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blocks").glob("*/*")}


def test_a_folder_removed_under_an_open_store_is_made_anew(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    shutil.rmtree(store.folder)
    again = chain([3], [4])
    save_turn(store, again, "t")
    assert not store.counters.failures
    assert [x.leaf for x in store.index.sessions() if x.name == "t"] == [again[-1].key]
    assert names(store.folder) == {f"{node.key.hex()}.safetensors" for node in again}


def test_a_rebuild_that_is_killed_loses_nothing(store: BlockStore) -> None:
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    before = names(store.folder)
    (store.folder / "index.sqlite").unlink()
    program = f"""
import os
from pathlib import Path
from mlx_lm_kvpersist.tiers.budget import StoreLimits
from mlx_lm_kvpersist.tiers.disk import DiskStore
from mlx_lm_kvpersist.tiers.index import Index
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
    assert disk.sweep() == 0 and disk.index.n_blocks() == 3
    assert [session.name for session in disk.index.sessions()] == ["s"]
    disk.close()
    assert names(store.folder) == before


def test_an_emptied_index_is_not_taken_at_its_word(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    store.close()
    os.truncate(store.folder / "index.sqlite", 0)
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.n_blocks() == 2
    disk.close()


def test_a_log_without_its_index_is_not_read_into_the_new_one(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    log = store.folder / "index.sqlite-wal"
    left_behind = log.read_bytes()
    assert left_behind
    save_turn(store, chain([1], [2], [3]), "s")
    store.close()
    (store.folder / "index.sqlite").unlink()
    log.write_bytes(left_behind)
    disk = DiskStore(store.folder, store.limits)
    assert disk.index.n_blocks() == 3 and disk.sweep() == 0
    disk.close()


def test_an_index_rebuilt_under_an_open_store(store: BlockStore) -> None:
    save_turn(store, chain([1], [2]), "s")
    for index_is_there in (True, False):
        if not index_is_there:
            (store.folder / "index.sqlite").unlink()
        with StoreLock(store.folder / "lock").held():
            assert rebuild_index(store.folder) == store.index.n_blocks()
        longer = chain([1], [2], [3 + index_is_there])
        save_turn(store, longer, "s")
        assert not store.counters.failures
        assert longer[-1].key in [x.leaf for x in store.index.sessions() if x.name == "s"]
    store.close()
    disk = DiskStore(store.folder, store.limits)
    assert disk.sweep() == 0 and disk.index.n_blocks() == 4
    disk.close()


def test_sessions_that_moved_with_another_outlive_the_index(store: BlockStore) -> None:
    head, tail = chain([1], [2, 3])
    save_turn(store, [head, tail], "s")
    save_turn(store, [head, tail], "other")
    longer = chain([1], [2, 3, 4])
    save_turn(store, longer, "s", replaced=((tail.key, longer[1].key),))
    store.close()
    (store.folder / "index.sqlite").unlink()
    disk = DiskStore(store.folder, store.limits)
    assert {session.name for session in disk.index.sessions()} == {"s", "other"}
    disk.close()


def test_a_folder_removed_while_another_thread_reads(store: BlockStore) -> None:
    """The reader's connection must not be closed under it: that ends the process."""
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
        for n in range(30):
            shutil.rmtree(store.folder)
            save_turn(store, chain([n, 7], [n, 8]), "s")
            assert store.index.n_blocks() == 2
    finally:
        stop.set()
        reader.join()
    assert n_reads > 100
