"""Blocks that are read ahead stay until they are used, within half of the budget."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Block
from mlx_lm_kvpersist.store.block_store import BlockStore, Prefetch, StoreLimits
from tests.support import wait_until
from tests.support.store_files import block_path

from .conftest import ROOT, arrays_of, chain, save_turn

BLOCK_BYTES = 70_000
"""About; 2 * 64 * 128 * 4 bytes of weights."""


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[BlockStore, list[Block]]]:
    """Ten blocks on disk, none in RAM, where ten fit."""
    store = BlockStore(tmp_path / "store", StoreLimits(10 * BLOCK_BYTES, 1 << 30))
    nodes = chain(*([n] for n in range(10)))
    save_turn(store, nodes)
    store.pool.clear()
    yield store, nodes
    store.close()


def begin(store: BlockStore, nodes: list[Block]) -> Prefetch:
    ahead = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    wait_until(lambda: ahead.finished, "reading ahead")
    return ahead


def in_ram(store: BlockStore, nodes: list[Block]) -> int:
    return sum(node.key in store.pool for node in nodes)


def fill(store: BlockStore, n_blocks: int = 10) -> None:
    """Keep as many other blocks in RAM as fit."""
    nodes = chain(*([100 + n] for n in range(n_blocks)))
    store.put((node, arrays_of(node)) for node in nodes)


def test_what_was_read_ahead_counts_as_read_until_a_restore_is_complete(stored: Any) -> None:
    store, nodes = stored
    ahead = begin(store, nodes[:3])
    loaded = [store.reader.load(node, ROOT) for node in nodes[:3]]
    assert all(one.tier == "disk" and one.read_s > 0 for one in loaded)
    assert [store.reader.load(node, ROOT).tier for node in nodes[:3]] == ["disk"] * 3
    store.pool.touch([node.key for node in nodes[:3]], proven=True)
    assert [store.reader.load(node, ROOT).tier for node in nodes[:3]] == ["ram"] * 3
    ahead.release()


def test_it_takes_half_of_the_budget_and_stays(stored: Any) -> None:
    store, nodes = stored
    ahead = begin(store, nodes)
    assert in_ram(store, nodes) == 5
    other = begin(store, nodes[5:])
    assert in_ram(store, nodes) == 5
    fill(store)
    assert in_ram(store, nodes) == 5
    assert store.pool.n_bytes <= store.pool.max_bytes
    ahead.release()
    ahead.release()
    fill(store, 20)
    assert in_ram(store, nodes) == 0
    assert begin(store, nodes).sizes
    other.release()


def test_what_was_in_ram_stays_too(stored: Any) -> None:
    store, nodes = stored
    assert store.reader.load(nodes[0], ROOT)
    ahead = begin(store, nodes[:1])
    fill(store, 20)
    assert in_ram(store, nodes) == 1
    ahead.release()
    fill(store, 20)
    assert in_ram(store, nodes) == 0


def test_there_is_no_room_beside_turns_that_wait(stored: Any) -> None:
    """Their blocks may not be evicted, and reads must not exceed the budget."""
    store, nodes = stored
    others = chain(*([100 + n] for n in range(10)))
    store.put((node, arrays_of(node)) for node in others)
    pinned = store.pool.pin(node.key for node in others)
    n_bytes = store.pool.n_bytes
    begin(store, nodes)
    assert store.pool.n_bytes <= max(n_bytes, store.pool.max_bytes)
    assert all(node.key in store.pool for node in others[: len(pinned)])


HANGING = """
import threading, time
from mlx_lm_kvpersist.store.pool import BlockPool
from mlx_lm_kvpersist.store.pool import Reader
from tests.store.conftest import ROOT, chain

reading = threading.Event()

class Tier:
    def load(self, *args):
        reading.set()
        time.sleep(300)

reader = Reader(BlockPool(1 << 20), [Tier()], print)
reader.prefetch([(chain([1])[0], 1)], ROOT)
reading.wait()
print(reader.close(0.1))
"""


def test_a_disk_that_hangs_keeps_no_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, timeout=120)
    assert done.stdout == b"False\n", done.stderr


def test_a_release_while_it_reads_holds_nothing(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = stored
    reading, may_go_on = threading.Event(), threading.Event()
    read = store.reader.read

    def slowly(*args: Any, **kwargs: Any) -> Any:
        reading.set()
        may_go_on.wait(60)
        return read(*args, **kwargs)

    monkeypatch.setattr(store.reader, "read", slowly)
    ahead = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    assert reading.wait(60)
    ahead.release()
    may_go_on.set()
    wait_until(partial(getattr, ahead, "finished"), "the end of reading")
    assert in_ram(store, nodes) == 1
    assert [entry.prefetched for entry in store.pool._entries.values()] == [0]


def test_a_dropped_block_that_comes_anew_is_not_let_go_by_another(stored: Any) -> None:
    """A turn that waits to be written must not lose its pin to an earlier read."""
    store, nodes = stored
    ahead = begin(store, nodes[:1])
    store.pool.remove(nodes[0].key)
    store.put([(nodes[0], arrays_of(nodes[0]))])
    pinned = store.pool.pin([nodes[0].key])
    ahead.release()
    entry = store.pool.get(nodes[0].key)
    assert entry is not None and entry.pins == 1
    store.pool.unpin(pinned)


def test_what_cannot_be_read_ends_it(stored: Any) -> None:
    store, nodes = stored
    block_path(store.folder, nodes[2].key).unlink()
    begin(store, nodes)
    assert in_ram(store, nodes) == 2
    store.drain()
    assert nodes[2].key not in store.index


def test_files_that_come_and_go_under_many_readers(stored: Any) -> None:
    """Whatever happens to the files, each answer is whole or None, and in order."""
    store, nodes = stored
    rng = random.Random(3)
    kept = {node.key: block_path(store.folder, node.key).read_bytes() for node in nodes}
    for _ in range(30):
        store.pool.clear()
        for node in nodes:
            path = block_path(store.folder, node.key)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(kept[node.key])
        bad = rng.choice(nodes)
        aheads = [store.reader.prefetch([(n, BLOCK_BYTES) for n in nodes], ROOT) for _ in range(3)]
        block_path(store.folder, bad.key).unlink(missing_ok=True)
        loaded = list(store.reader.load_all(nodes, ROOT))
        for node, one in zip(nodes, loaded, strict=True):
            assert one is not None or node is bad
        for ahead in aheads:
            ahead.release()
            wait_until(partial(getattr, ahead, "finished"), "the end of reading")
        assert store.pool.n_bytes <= store.pool.max_bytes
        store.drain()  # missing keys are forgotten by then
    assert not any(entry.prefetched for entry in store.pool._entries.values())


def test_load_all_reads_little_beyond_what_is_taken(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = stored
    read, n_read = store.reader.read, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        n_read.append(1)
        return read(*args, **kwargs)

    monkeypatch.setattr(store.reader, "read", counted)
    coming = store.reader.load_all(nodes, ROOT)
    assert next(coming) is not None
    coming.close()
    store.close()
    assert len(n_read) <= 4


def test_what_another_prompt_has_read_stays_for_both(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt may be served, and release the block, before the second."""
    store, nodes = stored
    both_wait = threading.Event()
    read = store.reader.read

    def later(*args: Any, **kwargs: Any) -> Any:
        both_wait.wait(60)
        return read(*args, **kwargs)

    monkeypatch.setattr(store.reader, "read", later)
    first, second = (
        store.reader.prefetch([(n, BLOCK_BYTES) for n in nodes[:3]], ROOT) for _ in "12"
    )
    both_wait.set()
    wait_until(lambda: second.finished, "reading ahead")
    first.release()
    fill(store, 20)
    assert in_ram(store, nodes) == 3
    third = begin(store, nodes[3:])  # they still count, and only once
    assert in_ram(store, nodes) == 5
    third.release()
    second.release()
    fill(store, 20)
    assert in_ram(store, nodes) == 0


def test_a_file_of_a_newer_version_stays_where_it_is(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions may share a folder for a moment: while one is upgraded."""
    store, nodes = stored
    monkeypatch.setattr("mlx_lm_kvpersist.store.files.FORMAT", 0)
    assert store.reader.load(nodes[0], ROOT) is None
    store.drain()
    monkeypatch.undo()
    assert store.blocks_quarantined == 0
    assert store.reader.load(nodes[0], ROOT) is not None


def test_the_index_is_not_closed_under_a_reader(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = stored
    may_go_on = threading.Event()
    read, begun = store.reader.read, []

    def slowly(block: Block, *args: Any) -> Any:
        begun.append(block)
        may_go_on.wait(60)
        return read(block, *args)

    monkeypatch.setattr(store.reader, "read", slowly)
    ahead = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    wait_until(lambda: len(begun) > 0, "reading")
    store.close(0.1)
    assert store.index.totals().n_blocks == len(nodes)
    may_go_on.set()
    wait_until(lambda: ahead.finished, "the end of reading")
    assert begun == nodes[:1]
    store.close()
    with pytest.raises(sqlite3.OperationalError, match="closed"):
        store.index.totals()
