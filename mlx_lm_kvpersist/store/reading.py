"""Reading on other threads. The process does not wait for them when it ends.

The threads read blocks from tiers into the pool, and runs of ids for drafts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from threading import Thread

import numpy as np

from ..block import BLOCK_TOKENS, Block, Record, Root
from ..errors import BlockCorrupt, Failures, StoreFormatError
from .index import Index
from .pool import BlockPool
from .records import KVBlock, ReadTier
from .threads import Threads

logger = logging.getLogger(__name__)

_N_THREADS = 3
MOST_TOKENS = 1 << 19
"""Most tokens whose ids are read for drafts: 8 MiB, in 0.1 s."""
N_LAST = 6
"""Ids of a run: after 4 equal ids the next ids often differ; 12 equal ids come too late."""
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Prefetch:
    """Entries prefetched for a prompt. They stay in RAM until `release`."""

    def __init__(self, pool: BlockPool, released: Callable[[Prefetch], None]) -> None:
        self.sizes: dict[bytes, int] = {}
        """Bytes of the records read from tiers, by key."""
        self.stopped = False
        self.finished = False
        self._pool = pool
        self._released = released
        self._is_released = False
        self._entries: list[KVBlock] = []

    def stop(self) -> None:
        """Stop after the file that is being read; entries in RAM stay."""
        self.stopped = True

    def release(self) -> None:
        """Stop, and unpin everything. Any thread."""
        with self._pool.lock:
            self.stopped = self._is_released = True
            entries, self._entries = self._entries, []
        self._pool.unpin(entries, prefetch=True)
        self._released(self)

    def add(self, entries: Iterable[KVBlock]) -> None:
        """Take pinned entries, to unpin them at `release`."""
        with self._pool.lock:
            if not self._is_released:
                self._entries += entries
                return
        self._pool.unpin(entries, prefetch=True)


class Reader:
    """Reads from tiers, in their order, into a pool. Any thread.

    `lose_from` is called with the tiers that lack a record or hold a bad record, and the reason.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[ReadTier],
        lose_from: Callable[[Sequence[ReadTier], Record, str | None], None],
        failures: Failures | None = None,
    ) -> None:
        self.pool = pool
        self._tiers, self._lose_from = tiers, lose_from
        self._failures = failures or Failures(logger)
        self._workers = Threads(_N_THREADS, "kvpersist-reader")
        self._prefetcher = Threads(1, "kvpersist-prefetch")
        self._prefetches: set[Prefetch] = set()

    def load(self, block: Record, root: Root) -> KVBlock | None:
        """Return a block with evaluated arrays; None if it no longer exists or failed a check."""
        entry = self.pool.get(block.key)
        if entry is None and (entry := self.read(block, root)) is not None:
            entry = self.pool.put(entry)
        return entry

    def load_all(self, wanted: Sequence[Record], root: Root) -> Iterator[KVBlock | None]:
        """Yield what `load` returns for each record, in order. Several records are read at once."""
        if sum(self.pool.get(block.key) is None for block in wanted) < 2:
            for block in wanted:
                yield self.load(block, root)
            return
        tasks = (partial(self.load, block, root) for block in wanted)
        coming = deque(map(self._workers.submit, islice(tasks, _N_THREADS + 1)))
        while coming:
            yield coming.popleft().result()
            coming.extend(map(self._workers.submit, islice(tasks, 1)))

    def prefetch(self, wanted: Sequence[tuple[Record, int]], root: Root) -> Prefetch:
        """Read missing records, with their sizes, into the pool, up to half of its budget."""
        prefetch = Prefetch(self.pool, self._prefetches.discard)
        self._prefetches.add(prefetch)
        present = {e.block.key: e for e in self.pool.pin((b.key for b, _ in wanted), prefetch=True)}
        prefetch.add(present.values())
        left = [item for item in wanted if item[0].key not in present]

        def run() -> None:
            try:
                self._read_ahead(prefetch, left, root)
            except Exception:
                logger.exception(
                    "kvpersist: prefetching failed; the rest is read when it is needed"
                )
            finally:
                prefetch.finished = True

        if self._prefetcher.submit(run).cancelled():
            prefetch.finished = True
        return prefetch

    def release_prefetched(self) -> None:
        """Release everything that was prefetched."""
        for prefetch in list(self._prefetches):
            prefetch.release()

    def close(self, timeout_s: float) -> bool:
        """Stop reading; return False if the current read takes longer than `timeout_s`."""
        self.release_prefetched()
        return self._prefetcher.close(timeout_s) and self._workers.close(timeout_s)

    def _read_ahead(
        self, prefetch: Prefetch, wanted: Sequence[tuple[Record, int]], root: Root
    ) -> None:
        for block, n_bytes in wanted:
            if prefetch.stopped:
                return
            come = self.pool.pin([block.key], prefetch=True)  # another prompt may have read it
            if not come:
                sizes = {
                    key: n for running in list(self._prefetches) for key, n in running.sizes.items()
                }
                if n_bytes + sum(sizes.values()) > self.pool.max_bytes // 2:
                    return
                read = self.read(block, root)
                admitted = self.pool.admit(read) if read is not None else None
                if admitted is None:
                    return
                come = [admitted]
            prefetch.sizes[block.key] = come[0].n_bytes
            prefetch.add(come)

    def read(self, block: Record, root: Root) -> KVBlock | None:
        """Read from the first tier that can be read now."""
        for tier in self._tiers:
            started = time.perf_counter()
            try:
                arrays = tier.load(block, root)
            except FileNotFoundError:
                if block.key in tier:
                    self._failures.add("%s is no longer on %s", block, tier.name)
                    self._lose_from([tier], block, None)
            except BlockCorrupt as error:
                self._lose_from([tier], block, str(error))
            except (OSError, MemoryError, StoreFormatError) as error:
                # The file may be good: the next read, or a newer version, may succeed.
                self._failures.add("%s cannot be read now: %s", block, error or "no memory")
            else:
                entry = KVBlock.of(block, arrays)
                entry.is_stored, entry.tier = True, tier.name
                entry.read_s = time.perf_counter() - started
                return entry
        return None


class Runs:
    """The last end of each run of `N_LAST` ids in packed ids (see `pack_ids`): 16 bytes an id.

    Runs are found by polynomial hashes modulo 2**64, as Karp and Rabin do (IBM Journal of Research
    and Development 31, 1987), in a sorted array.
    """

    def __init__(self, packed_ids: bytes) -> None:
        self._ids = ids = np.frombuffer(packed_ids, np.int32)
        n_runs = max(0, len(ids) - N_LAST)  # runs with an id after them
        hashes = np.zeros(n_runs, np.uint64)
        for place in range(N_LAST):
            hashes = hashes * np.uint64(_FACTOR) + ids[place : place + n_runs].astype(np.uint64)
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def after(self, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed the last `N_LAST` of a run, without ids of images."""
        run = list(run[-N_LAST:])
        if len(run) < N_LAST or min(run) < 0:
            return []
        wanted = 0
        for token_id in run:
            wanted = (wanted * _FACTOR + token_id) & _WORD
        place = int(np.searchsorted(self._hashes, np.uint64(wanted), side="right")) - 1
        if place < 0 or self._hashes[place] != wanted:
            return []
        start = int(self._order[place])
        ids: list[int] = self._ids[start : start + N_LAST + n].tolist()
        if ids[:N_LAST] != run:
            return []
        first_image = next((place for place, n in enumerate(ids) if n < 0), len(ids))
        return ids[N_LAST:first_image]


class StoredRuns:
    """Runs of ids in the newest blocks of one tree. A thread reads them while replies run."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: tuple[object, Root, Runs] | None = None
        self._n_cleared = 0
        self._reads = Thread()

    def read(self, root: Root) -> bool:
        """Start to read a changed tree; return False while another is read. Generation thread."""
        if self._reads.is_alive():
            return False
        self._reads = Thread(target=self._read, args=(root,), name="stored runs", daemon=True)
        self._reads.start()
        return True

    def after(self, root: Root, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed the end of a run; none if the run is unknown."""
        read = self._known
        return [] if read is None or read[1] != root else read[2].after(run, n)

    def clear(self) -> None:
        """Forget all runs until a tree is read again. Any thread."""
        self._n_cleared += 1
        self._known = None

    def _read(self, root: Root) -> None:
        n_cleared, before = self._n_cleared, self._known
        try:
            with self._index.asked_once() as index:
                version = index.totals(root.key)
                if before is not None and before[:2] == (version, root):
                    return
                blocks = index.newest(root, MOST_TOKENS // BLOCK_TOKENS)
            read = version, root, Runs(_joined(blocks))
        except Exception:
            logger.debug("kvpersist: stored ids could not be read", exc_info=True)
            return
        self._known = read
        if self._n_cleared != n_cleared:  # cleared since it was read, or just now
            self._known = None


def _joined(blocks: Sequence[Block]) -> bytes:
    """Return the packed ids of blocks in chains, the newest last."""
    left, runs = {block.key: block for block in blocks if block.is_genuine}, list[bytes]()
    for block in blocks:
        node = left.pop(block.key, None)
        while node is not None:
            runs.append(node.packed_ids)
            node = left.pop(node.parent, None)
    return b"".join(reversed(runs))
