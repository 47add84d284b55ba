"""Find runs of token ids in stored conversations, for prompt-lookup decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Thread

from ..block import BLOCK_TOKENS, Block, Root
from ..match.runs import Runs
from .index import Index

MOST_TOKENS = 1 << 19
"""Most tokens that are read: 8 MiB, in 0.1 s."""

logger = logging.getLogger(__name__)


class StoredRuns:
    """Runs of ids in the newest blocks of one tree. A thread reads them while replies run."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: tuple[object, Root, Runs] | None = None
        self._n_cleared = 0
        self._reads = Thread()

    def read(self, root: Root) -> bool:
        """Have a tree read if it has changed; False if another is being read. Generation thread."""
        if self._reads.is_alive():
            return False
        self._reads = Thread(target=self._read, args=(root,), name="stored runs", daemon=True)
        self._reads.start()
        return True

    def after(self, root: Root, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed the end of a run; none where that is unknown."""
        read = self._known
        return [] if read is None or read[1] != root else read[2].after(run, n)

    def clear(self) -> None:
        """Know nothing until it is read again. Any thread."""
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
