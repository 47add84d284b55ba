"""Reading ahead: blocks and parts on their way into the pool, where they stay until used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from ..match.tree import Node
from .part import Part
from .pool import BlockPool, KVBlock, KVPart
from .workers import Workers

logger = logging.getLogger(__name__)

Read = Callable[["Node | Part"], "KVBlock | KVPart | None"]
"""Returns the entry of what was read from disk, None when it cannot be had. Any thread."""


class ReadAhead:
    """What is read ahead for one prompt. Of it, nothing leaves RAM before `release`."""

    def __init__(self, pool: BlockPool, let_go: Callable[[ReadAhead], None]) -> None:
        self._pool = pool
        self._let_go = let_go
        self._entries: list[KVBlock | KVPart] = []
        self._n_bytes = 0
        self._stopped = False
        self._released = False
        self._done = False
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes read so far."""
        return self._n_bytes

    @property
    def stopped(self) -> bool:
        return self._stopped

    def is_done(self) -> bool:
        """Say whether no more will be read. Any thread."""
        return self._done

    def finish(self) -> None:
        self._done = True

    def stop(self) -> None:
        """Read no further than the file that is being read; what is there stays."""
        self._stopped = True

    def release(self) -> None:
        """Stop, and hold nothing any more. Any thread, any number of times."""
        with self._lock:
            self._stopped = self._released = True
            entries, self._entries = self._entries, []
        self._pool.let_go(entries)
        self._let_go(self)

    def add(self, entries: Iterable[KVBlock | KVPart], n_read_bytes: int = 0) -> None:
        """Take entries that the pool holds, to let them go with the others."""
        with self._lock:
            if not self._released:
                self._entries += entries
                self._n_bytes += n_read_bytes
                return
        self._pool.let_go(entries)


class AheadReader:
    """Reads ahead for one prompt after another, file by file, on one long-lived thread.

    Together they hold at most half of the pool, so that turns to be written have room in it, too.
    What does not fit is left on disk.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._worker = Workers("kvpersist-ahead", 1)
        self._live: set[ReadAhead] = set()
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes that were read and not yet released."""
        with self._lock:
            return sum(ahead.n_bytes for ahead in self._live)

    def begin(self, wanted: Sequence[tuple[Node | Part, int]], read: Read) -> ReadAhead:
        """Read what is not in the pool, in order; each comes with its size in bytes."""
        ahead = ReadAhead(self._pool, self._forget)
        with self._lock:
            self._live.add(ahead)
        ahead.add(self._pool.hold(what.key for what, _ in wanted))

        def run() -> None:
            try:
                self._run(ahead, wanted, read)
            except Exception:
                logger.exception("reading ahead failed; the rest is read when it is needed")
            finally:
                ahead.finish()

        if self._worker.submit(run).cancelled():
            ahead.finish()
        return ahead

    def release_all(self) -> None:
        """Stop reading, and hold nothing any more."""
        with self._lock:
            live = list(self._live)
        for ahead in live:
            ahead.release()

    def close(self, timeout_s: float) -> bool:
        self.release_all()
        return self._worker.close(timeout_s)

    def _forget(self, ahead: ReadAhead) -> None:
        with self._lock:
            self._live.discard(ahead)

    def _run(self, ahead: ReadAhead, wanted: Sequence[tuple[Node | Part, int]], read: Read) -> None:
        for what, n_bytes in wanted:
            if ahead.stopped:
                return
            if what.key in self._pool:
                continue
            if self.n_bytes + n_bytes > self._pool.max_bytes // 2:
                return
            entry = read(what)
            entry = self._pool.admit(entry) if entry is not None else None
            if entry is None:
                return
            ahead.add([entry], entry.n_bytes)
