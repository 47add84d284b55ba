"""Prefetching: blocks on their way from disk into the pool, where they stay until they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from ..match.block import Block
from .pool import BlockPool, KVBlock
from .workers import Workers

logger = logging.getLogger(__name__)

Read = Callable[[Block], KVBlock | None]
"""Returns the entry of what was read from disk, None when it cannot be had. Any thread."""


class Prefetch:
    """What is prefetched for one prompt. None of it leaves RAM before `release`."""

    def __init__(self, pool: BlockPool, released: Callable[[Prefetch], None]) -> None:
        self.n_bytes = 0
        """Bytes read so far."""
        self.stopped = False
        self._pool = pool
        self._released = released
        self._is_released = False
        self._entries: list[KVBlock] = []
        self._done = False
        self._lock = Lock()

    def is_done(self) -> bool:
        """Say whether no more will be read. Any thread."""
        return self._done

    def finish(self) -> None:
        self._done = True

    def stop(self) -> None:
        """Read no further than the file that is being read; what is there stays."""
        self.stopped = True

    def release(self) -> None:
        """Stop, and unpin everything. Any thread, any number of times."""
        with self._lock:
            self.stopped = self._is_released = True
            entries, self._entries = self._entries, []
        self._pool.unpin(entries, prefetch=True)
        self._released(self)

    def add(self, entries: Iterable[KVBlock], n_read_bytes: int = 0) -> None:
        """Take pinned entries, to unpin them with the others."""
        with self._lock:
            if not self._is_released:
                self._entries += entries
                self.n_bytes += n_read_bytes
                return
        self._pool.unpin(entries, prefetch=True)


class PrefetchReader:
    """Prefetches for one prompt after another, file by file, on one long-lived thread.

    Together the prompts hold at most half of the pool, so that turns to be written have room in
    it, too. What does not fit is left on disk.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._worker = Workers("kvpersist-prefetch", 1)
        self._live: set[Prefetch] = set()
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes that were read and not yet released."""
        with self._lock:
            return sum(prefetch.n_bytes for prefetch in self._live)

    def begin(self, wanted: Sequence[tuple[Block, int]], read: Read) -> Prefetch:
        """Read what is not in the pool, in order; each comes with its size in bytes."""
        prefetch = Prefetch(self._pool, self._forget)
        with self._lock:
            self._live.add(prefetch)
        prefetch.add(self._pool.pin((block.key for block, _ in wanted), prefetch=True))

        def run() -> None:
            try:
                self._run(prefetch, wanted, read)
            except Exception:
                logger.exception("prefetching failed; the rest is read when it is needed")
            finally:
                prefetch.finish()

        if self._worker.submit(run).cancelled():
            prefetch.finish()
        return prefetch

    def release_all(self) -> None:
        """Stop reading, and unpin everything."""
        with self._lock:
            live = list(self._live)
        for prefetch in live:
            prefetch.release()

    def close(self, timeout_s: float) -> bool:
        self.release_all()
        return self._worker.close(timeout_s)

    def _forget(self, prefetch: Prefetch) -> None:
        with self._lock:
            self._live.discard(prefetch)

    def _run(self, prefetch: Prefetch, wanted: Sequence[tuple[Block, int]], read: Read) -> None:
        for block, n_bytes in wanted:
            if prefetch.stopped:
                return
            if block.key in self._pool:
                continue
            if self.n_bytes + n_bytes > self._pool.max_bytes // 2:
                return
            entry = read(block)
            entry = self._pool.admit(entry) if entry is not None else None
            if entry is None:
                return
            prefetch.add([entry], entry.n_bytes)
