"""Reading: blocks from the pool, or from disk into it. Any long-lived thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import BlockCorrupt, StoreError
from ..match.block import Block
from ..match.keys import Root
from .files import Arrays, read_block
from .pool import BlockPool, KVBlock
from .prefetch import Prefetch, PrefetchReader
from .workers import Workers

__all__ = ["BlockReader", "Loaded"]

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


class BlockReader:
    """Reads what a folder holds into a pool.

    `gone` is told of a block that is no longer on disk, `damaged` of one that must not be trusted,
    and why.
    """

    def __init__(
        self,
        folder: Path,
        pool: BlockPool,
        *,
        verify: bool,
        gone: Callable[[Block], None],
        damaged: Callable[[Block, str], None],
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._verify = verify
        self._gone = gone
        self._damaged = damaged
        self._can_read = True
        self._prefetches = PrefetchReader(pool)
        self._workers = Workers("kvpersist-reader", _N_THREADS)

    def load(self, block: Block, root: Root) -> Loaded | None:
        """Return evaluated arrays, or None when they are gone or must not be trusted."""
        hot = self._pool.get(block.key)
        if hot is not None:
            return Loaded(hot.arrays, hot.read_s is not None, hot.read_s or 0.0)
        entry = self._read(block, root)
        if entry is None:
            return None
        self._pool.put(entry)
        return Loaded(entry.arrays, from_disk=True)

    def load_all(self, wanted: Sequence[Block], root: Root) -> Iterator[Loaded | None]:
        """Begin to read; yield what `load` returns for each, in order.

        Several are read at once, and little beyond what the caller has asked for.
        """
        waiting = deque(wanted)
        if sum(block.key not in self._pool for block in wanted) < 2:
            return (self.load(block, root) for block in waiting)
        coming: deque[Future[Loaded | None]] = deque()

        def begin() -> None:
            while waiting and len(coming) <= self._workers.n_threads:
                coming.append(self._workers.submit(partial(self.load, waiting.popleft(), root)))

        def results() -> Iterator[Loaded | None]:
            while coming:
                yield coming.popleft().result()
                begin()

        begin()
        return results()

    def prefetch(self, wanted: Sequence[tuple[Block, int]], root: Root) -> Prefetch:
        """Read into the pool what is not there yet, in order; each comes with its size in bytes.

        Together with what others had prefetched it takes at most half of the budget; what does not
        fit is left on disk. What is there, or comes, stays until `release`.
        """
        return self._prefetches.begin(wanted, partial(self._read, root=root))

    def release_prefetched(self) -> None:
        """Let go of everything that was prefetched."""
        self._prefetches.release_all()

    def close(self, timeout_s: float) -> bool:
        """Stop reading; False when what is being read takes longer than `timeout_s`."""
        return self._prefetches.close(timeout_s) and self._workers.close(timeout_s)

    def _read(self, block: Block, root: Root) -> KVBlock | None:
        started = time.perf_counter()
        try:
            its_root, arrays = read_block(self._folder, block, verify=self._verify)
            if its_root.key != root.key:
                raise BlockCorrupt(f"{block} belongs to another model")
        except FileNotFoundError:
            logger.warning("%s is no longer on disk", block)
            self._gone(block)
            return None
        except StoreError as error:
            self._damaged(block, str(error))
            return None
        except (OSError, MemoryError) as error:
            # It says nothing of the file: the next read tries again.
            if self._can_read:
                logger.warning("%s cannot be read now: %s", block, error or "no memory")
            self._can_read = False
            return None
        self._can_read = True
        entry = KVBlock.of(block, arrays)
        entry.on_disk = True
        entry.read_s = time.perf_counter() - started
        return entry
