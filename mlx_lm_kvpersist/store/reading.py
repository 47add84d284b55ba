"""Reading: blocks and parts from the pool, or from disk into it. Any long-lived thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..errors import BlockCorrupt, StoreError
from ..match.keys import Root
from ..match.tree import Node
from .files import Arrays, read_block
from .part import Part
from .part_files import read_part
from .pool import BlockPool, KVBlock, KVPart
from .prefetch import AheadReader, ReadAhead
from .workers import Workers

__all__ = ["BlockReader", "Loaded", "in_ram"]

logger = logging.getLogger(__name__)

_N_THREADS = 3
"""Files read at once where somebody waits: while one is hashed the next is read."""


@dataclass(frozen=True)
class Loaded:
    """The arrays of a block or part, and whether they came from disk and are not proven yet.

    They may have been read before, ahead or for a restore that was not completed; that took
    `before_s`.
    """

    arrays: Mapping[str, mx.array]
    from_disk: bool
    before_s: float = 0.0


class BlockReader:
    """Reads what a folder holds into a pool.

    `gone` is told the key of what is no longer on disk; `bad` what must not be trusted: "block" or
    "part", its key, and why.
    """

    def __init__(
        self,
        folder: Path,
        pool: BlockPool,
        *,
        verify: bool,
        gone: Callable[[bytes], None],
        bad: Callable[[str, bytes, str], None],
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._verify = verify
        self._gone = gone
        self._bad = bad
        self._can_read = True
        self._ahead = AheadReader(pool)
        self._workers = Workers("kvpersist-reader", _N_THREADS)

    def load(self, what: Node | Part, root: Root) -> Loaded | None:
        """Return evaluated arrays, or None when they are gone or must not be trusted."""
        hot = self._pool.get(what.key)
        if hot is not None:
            return Loaded(hot.arrays, hot.read_s is not None, hot.read_s or 0.0)
        entry = self._read_entry(what, root)
        if entry is None:
            return None
        self._pool.put(entry)
        return Loaded(entry.arrays, from_disk=True)

    def load_all(self, wanted: Sequence[Node | Part], root: Root) -> Iterator[Loaded | None]:
        """Begin to read; yield what `load` returns for each, in order.

        Several are read at once, and little beyond what the caller has asked for.
        """
        waiting = deque(wanted)
        if sum(what.key not in self._pool for what in wanted) < 2:
            return (self.load(what, root) for what in waiting)
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

    def read_ahead(self, wanted: Sequence[tuple[Node | Part, int]], root: Root) -> ReadAhead:
        """Read into the pool what is not there yet, in order; each comes with its size in bytes.

        Together with what others had read ahead it takes at most half of the budget; what does
        not fit is left on disk. What is there, or comes, stays until `release`.
        """
        return self._ahead.begin(wanted, partial(self._read_entry, root=root))

    def release_ahead(self) -> None:
        """Let go of everything that was read ahead."""
        self._ahead.release_all()

    def close(self, timeout_s: float) -> bool:
        """Stop reading; False when what is being read takes longer than `timeout_s`."""
        return self._ahead.close(timeout_s) and self._workers.close(timeout_s)

    def _read_entry(self, what: Node | Part, root: Root) -> KVBlock | KVPart | None:
        started = time.perf_counter()
        try:
            arrays = self._read(what, root)
        except FileNotFoundError:
            logger.warning("%s %s is no longer on disk", _kind(what), what.key.hex())
            self._gone(what.key)
            return None
        except StoreError as error:
            self._bad(_kind(what), what.key, str(error))
            return None
        except (OSError, MemoryError) as error:
            # It says nothing of the file: the next read tries again.
            if self._can_read:
                logger.warning(
                    "%s %s cannot be read now: %s",
                    _kind(what),
                    what.key.hex(),
                    error or "no memory",
                )
            self._can_read = False
            return None
        self._can_read = True
        entry = in_ram(what, arrays)
        entry.on_disk = True
        entry.read_s = time.perf_counter() - started
        return entry

    def _read(self, what: Node | Part, root: Root) -> Arrays:
        if isinstance(what, Part):
            _, its_root, arrays = read_part(self._folder, what.key, verify=self._verify)
        else:
            node, its_root, arrays = read_block(self._folder, what.key, verify=self._verify)
            if (node.packed_ids, node.start) != (what.packed_ids, what.start):
                raise BlockCorrupt(f"block {what.key.hex()}: file and index disagree")
        if its_root.key != root.key:
            raise BlockCorrupt(f"{_kind(what)} {what.key.hex()} belongs to another model")
        return arrays


def in_ram(what: Node | Part, arrays: Arrays) -> KVBlock | KVPart:
    """Return what the pool holds of a block or part."""
    n_bytes = sum(array.nbytes for array in arrays.values())
    if isinstance(what, Part):
        return KVPart(what, arrays, n_bytes)
    # Blocks without arrays would never be too many.
    return KVBlock(what, arrays, n_bytes + len(what.packed_ids) + len(what.text))


def _kind(what: Node | Part) -> str:
    return "part" if isinstance(what, Part) else "block"
