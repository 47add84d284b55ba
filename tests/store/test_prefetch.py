"""Prefetched blocks stay in RAM until they are used, within half of the budget."""

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
"""Approximate size: 2 * 64 * 128 * 4 bytes of weights, and the scales."""


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[BlockStore, list[Block]]]:
    """A store with ten blocks on disk and none in RAM; RAM has room for ten."""
    store = BlockStore(tmp_path / "store", StoreLimits(10 * BLOCK_BYTES, 1 << 30))
    nodes = chain(*([n] for n in range(10)))
    save_turn(store, nodes)
    store.pool.clear()
    yield store, nodes
    store.close()


def prefetch_all(store: BlockStore, nodes: list[Block]) -> Prefetch:
    prefetch = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    wait_until(lambda: prefetch.finished, "the prefetch")
    return prefetch


def n_in_ram(store: BlockStore, nodes: list[Block]) -> int:
    return sum(node.key in store.pool for node in nodes)


def fill(store: BlockStore, n_blocks: int = 10) -> None:
    """Put other blocks into RAM, which evicts unpinned blocks."""
    nodes = chain(*([100 + n] for n in range(n_blocks)))
    store.put((node, arrays_of(node)) for node in nodes)


def test_prefetched_blocks_count_as_disk_reads_until_a_restore_uses_them(stored: Any) -> None:
    store, nodes = stored
    prefetch = prefetch_all(store, nodes[:3])
    loaded = [store.reader.load(node, ROOT) for node in nodes[:3]]
    assert all(entry.tier == "disk" and entry.read_s > 0 for entry in loaded)
    assert [store.reader.load(node, ROOT).tier for node in nodes[:3]] == ["disk"] * 3
    store.pool.touch([node.key for node in nodes[:3]], proven=True)
    assert [store.reader.load(node, ROOT).tier for node in nodes[:3]] == ["ram"] * 3
    prefetch.release()


def test_prefetched_blocks_take_half_of_the_budget_and_stay(stored: Any) -> None:
    store, nodes = stored
    prefetch = prefetch_all(store, nodes)
    assert n_in_ram(store, nodes) == 5
    other = prefetch_all(store, nodes[5:])
    assert n_in_ram(store, nodes) == 5
    fill(store)
    assert n_in_ram(store, nodes) == 5
    assert store.pool.n_bytes <= store.pool.max_bytes
    prefetch.release()
    prefetch.release()
    fill(store, 20)
    assert n_in_ram(store, nodes) == 0
    assert prefetch_all(store, nodes).sizes
    other.release()


def test_prefetch_keeps_blocks_that_were_already_in_ram(stored: Any) -> None:
    store, nodes = stored
    assert store.reader.load(nodes[0], ROOT)
    prefetch = prefetch_all(store, nodes[:1])
    fill(store, 20)
    assert n_in_ram(store, nodes) == 1
    prefetch.release()
    fill(store, 20)
    assert n_in_ram(store, nodes) == 0


def test_prefetch_evicts_no_blocks_of_waiting_turns(stored: Any) -> None:
    """Blocks of waiting turns are pinned, and a prefetch must not exceed the budget."""
    store, nodes = stored
    others = chain(*([100 + n] for n in range(10)))
    store.put((node, arrays_of(node)) for node in others)
    pinned = store.pool.pin(node.key for node in others)
    n_bytes = store.pool.n_bytes
    prefetch_all(store, nodes)
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


def test_hanging_disk_does_not_keep_the_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, timeout=120)
    assert done.stdout == b"False\n", done.stderr


def test_release_during_a_read_leaves_no_pin(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, nodes = stored
    reading, may_read = threading.Event(), threading.Event()
    read = store.reader.read

    def slowly(*args: Any, **kwargs: Any) -> Any:
        reading.set()
        may_read.wait(60)
        return read(*args, **kwargs)

    monkeypatch.setattr(store.reader, "read", slowly)
    prefetch = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    assert reading.wait(60)
    prefetch.release()
    may_read.set()
    wait_until(partial(getattr, prefetch, "finished"), "the end of reading")
    assert n_in_ram(store, nodes) == 1
    assert [entry.prefetched for entry in store.pool._entries.values()] == [0]


def test_old_prefetch_does_not_unpin_a_block_that_was_put_again(stored: Any) -> None:
    """A waiting turn must not lose its pin to an earlier prefetch."""
    store, nodes = stored
    prefetch = prefetch_all(store, nodes[:1])
    store.pool.remove(nodes[0].key)
    store.put([(nodes[0], arrays_of(nodes[0]))])
    pinned = store.pool.pin([nodes[0].key])
    prefetch.release()
    entry = store.pool.get(nodes[0].key)
    assert entry is not None and entry.pins == 1
    store.pool.unpin(pinned)


def test_unreadable_block_ends_the_prefetch(stored: Any) -> None:
    store, nodes = stored
    block_path(store.folder, nodes[2].key).unlink()
    prefetch_all(store, nodes)
    assert n_in_ram(store, nodes) == 2
    store.drain()
    assert nodes[2].key not in store.index


def test_readers_get_whole_blocks_or_none_while_files_vanish(stored: Any) -> None:
    """Each result is a whole block or None, in the order of the requests."""
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
        prefetches = [
            store.reader.prefetch([(n, BLOCK_BYTES) for n in nodes], ROOT) for _ in range(3)
        ]
        block_path(store.folder, bad.key).unlink(missing_ok=True)
        loaded = list(store.reader.load_all(nodes, ROOT))
        for node, entry in zip(nodes, loaded, strict=True):
            assert entry is not None or node is bad
        for prefetch in prefetches:
            prefetch.release()
            wait_until(partial(getattr, prefetch, "finished"), "the end of reading")
        assert store.pool.n_bytes <= store.pool.max_bytes
        store.drain()  # forgets missing keys
    assert not any(entry.prefetched for entry in store.pool._entries.values())


def test_load_all_reads_few_blocks_beyond_the_consumed_ones(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = stored
    read, n_read = store.reader.read, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        n_read.append(1)
        return read(*args, **kwargs)

    monkeypatch.setattr(store.reader, "read", counted)
    results = store.reader.load_all(nodes, ROOT)
    assert next(results) is not None
    results.close()
    store.close()
    assert len(n_read) <= 4


def test_block_prefetched_for_two_prompts_stays_until_both_release_it(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt may be served before the second, and release the blocks."""
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
    wait_until(lambda: second.finished, "the prefetch")
    first.release()
    fill(store, 20)
    assert n_in_ram(store, nodes) == 3
    third = prefetch_all(store, nodes[3:])  # these blocks still count, and only once
    assert n_in_ram(store, nodes) == 5
    third.release()
    second.release()
    fill(store, 20)
    assert n_in_ram(store, nodes) == 0


def test_file_of_a_newer_format_is_not_quarantined(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions may share a folder during an upgrade."""
    store, nodes = stored
    monkeypatch.setattr("mlx_lm_kvpersist.store.files.FORMAT", 0)
    assert store.reader.load(nodes[0], ROOT) is None
    store.drain()
    monkeypatch.undo()
    assert store.blocks_quarantined == 0
    assert store.reader.load(nodes[0], ROOT) is not None


def test_index_stays_open_while_a_prefetch_reads(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = stored
    may_read = threading.Event()
    read, started = store.reader.read, []

    def slowly(block: Block, *args: Any) -> Any:
        started.append(block)
        may_read.wait(60)
        return read(block, *args)

    monkeypatch.setattr(store.reader, "read", slowly)
    prefetch = store.reader.prefetch([(node, BLOCK_BYTES) for node in nodes], ROOT)
    wait_until(lambda: len(started) > 0, "reading")
    store.close(0.1)
    assert store.index.totals().n_blocks == len(nodes)
    may_read.set()
    wait_until(lambda: prefetch.finished, "the end of reading")
    assert started == nodes[:1]
    store.close()
    with pytest.raises(sqlite3.OperationalError, match="closed"):
        store.index.totals()
