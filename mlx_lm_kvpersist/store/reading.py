"""Reading: blocks from the pool, or from disk into it, when they are needed or before.

Any long-lived thread may read. What is prefetched stays in RAM until it is used.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ..errors import BlockCorrupt, StoreFormatError
from ..match.block import Block, Root
from .files import Arrays, path_of, read_file
from .pool import BlockPool, KVBlock

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_N_THREADS = 3
"""Files read at once where somebody waits: while one is hashed the next is read."""


@dataclass(frozen=True)
class Loaded:
    """The arrays of a block, and whether they came from disk and are not proven yet.

    They may have been read before: prefetched, or for a restore that was not completed. Reading
    them took `before_s` then.
    """

    arrays: Arrays
    from_disk: bool
    before_s: float = 0.0


class Prefetch:
    """What is prefetched for one prompt. None of it leaves RAM before `release`."""

    def __init__(self, pool: BlockPool, released: Callable[[Prefetch], None]) -> None:
        self.sizes: dict[bytes, int] = {}
        """Bytes of what has come from disk since it began, by key, whoever it was read for."""
        self.stopped = False
        self.finished = False
        """Whether no more will be read."""
        self._pool = pool
        self._released = released
        self._is_released = False
        self._entries: list[KVBlock] = []
        self._lock = threading.Lock()

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

    def add(self, entries: Iterable[KVBlock]) -> None:
        """Take pinned entries, to unpin them with the others."""
        with self._lock:
            if not self._is_released:
                self._entries += entries
                return
        self._pool.unpin(entries, prefetch=True)


class BlockReader(ABC):
    """Reads what a folder holds into a pool."""

    def __init__(self, folder: Path, pool: BlockPool, *, verify: bool) -> None:
        self.folder = folder
        self.pool = pool
        self._verify = verify
        self._can_read = True
        self._workers = Workers("kvpersist-reader", _N_THREADS)
        self._prefetcher = Workers("kvpersist-prefetch", 1)
        self._prefetches: set[Prefetch] = set()

    @abstractmethod
    def quarantine(self, block: Block, reason: str) -> None:
        """Take a block or checkpoint out of use that failed a check. Any thread."""

    @abstractmethod
    def _lose(self, key: bytes) -> None:
        """Forget what was found and is not there. Any thread."""

    def load(self, block: Block, root: Root) -> Loaded | None:
        """Return evaluated arrays, or None when they are gone or must not be trusted."""
        hot = self.pool.get(block.key)
        if hot is not None:
            return Loaded(hot.arrays, hot.read_s is not None, hot.read_s or 0.0)
        entry = self._read(block, root)
        if entry is None:
            return None
        self.pool.put(entry)
        return Loaded(entry.arrays, from_disk=True)

    def load_all(self, wanted: Sequence[Block], root: Root) -> Iterator[Loaded | None]:
        """Yield what `load` returns for each, in order.

        Several are read at once, and little beyond what the caller has asked for.
        """
        if sum(block.key not in self.pool for block in wanted) < 2:
            for block in wanted:
                yield self.load(block, root)
            return
        tasks = (partial(self.load, block, root) for block in wanted)
        coming = deque(map(self._workers.submit, islice(tasks, _N_THREADS + 1)))
        while coming:
            yield coming.popleft().result()
            coming.extend(map(self._workers.submit, islice(tasks, 1)))

    def prefetch(self, wanted: Sequence[tuple[Block, int]], root: Root) -> Prefetch:
        """Read into the pool what is not there yet, in order; each comes with its size in bytes.

        Together with what others had prefetched it takes at most half of the budget, so that turns
        to be written have room, too; what does not fit is left on disk. What is there, or comes,
        stays until `release`.
        """
        prefetch = Prefetch(self.pool, self._prefetches.discard)
        self._prefetches.add(prefetch)
        hot = {e.block.key: e for e in self.pool.pin((b.key for b, _ in wanted), prefetch=True)}
        prefetch.add(hot.values())
        left = [one for one in wanted if one[0].key not in hot]

        def run() -> None:
            try:
                self._read_ahead(prefetch, left, root)
            except Exception:
                logger.exception("prefetching failed; the rest is read when it is needed")
            finally:
                prefetch.finished = True

        if self._prefetcher.submit(run).cancelled():
            prefetch.finished = True
        return prefetch

    def release_prefetched(self) -> None:
        """Let go of everything that was prefetched."""
        for prefetch in list(self._prefetches):
            prefetch.release()

    def _stop_reading(self, timeout_s: float) -> bool:
        """Stop reading; False when what is being read takes longer than `timeout_s`."""
        self.release_prefetched()
        return self._prefetcher.close(timeout_s) and self._workers.close(timeout_s)

    def _read_ahead(
        self, prefetch: Prefetch, wanted: Sequence[tuple[Block, int]], root: Root
    ) -> None:
        for block, n_bytes in wanted:
            if prefetch.stopped:
                return
            come = self.pool.pin([block.key], prefetch=True)  # perhaps for another prompt
            if not come:
                sizes = {key: n for one in list(self._prefetches) for key, n in one.sizes.items()}
                if n_bytes + sum(sizes.values()) > self.pool.max_bytes // 2:
                    return
                read = self._read(block, root)
                entry = self.pool.admit(read) if read is not None else None
                if entry is None:
                    return
                come = [entry]
            prefetch.sizes[block.key] = come[0].n_bytes
            prefetch.add(come)

    def _read(self, block: Block, root: Root) -> KVBlock | None:
        started = time.perf_counter()
        try:
            path = path_of(self.folder, block)
            _, its_root, arrays = read_file(path, verify=self._verify, expected=block)
            if its_root.key != root.key:
                raise BlockCorrupt(f"{block} belongs to another model")
        except FileNotFoundError:
            logger.warning("%s is no longer on disk", block)
            self._lose(block.key)
            return None
        except BlockCorrupt as error:
            self.quarantine(block, str(error))
            return None
        except (OSError, MemoryError, StoreFormatError) as error:
            # It says nothing of the file: the next read tries again, or a newer version.
            if self._can_read:
                logger.warning("%s cannot be read now: %s", block, error or "no memory")
            self._can_read = False
            return None
        self._can_read = True
        entry = KVBlock.of(block, arrays)
        entry.on_disk = True
        entry.read_s = time.perf_counter() - started
        return entry


class Workers:
    """Runs tasks in order on `n_threads` threads, which start with the first of them.

    Each thread that has evaluated MLX leaks one when it ends, so these do not end before the
    store is closed; and they are daemons, so that a disk that hangs keeps no process alive.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.n_threads = n_threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Have a task run; the future is cancelled when the workers are closed before."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closing:
                future.cancel()
                return future
            self._tasks.append((future, task))
            if len(self._threads) < self.n_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        return future

    def close(self, timeout_s: float) -> bool:
        """Drop what waits and stop; False when what runs takes longer than `timeout_s`."""
        with self._changed:
            self._closing = True
            dropped = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            future.cancel()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if self._closing:
                    return
                future, task = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            # An idle worker must not hold the arrays that it read last.
            del future, task
