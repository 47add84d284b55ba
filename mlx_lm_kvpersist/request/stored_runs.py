"""What may follow in a reply, by what is stored of other conversations: guesses, to be checked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Thread

from ..block import BLOCK_TOKENS, Block, Root
from ..match.runs import Runs
from ..store.block_store import BlockStore

N_TOKENS = 1 << 19
"""Of the blocks that were used last: so many are known. They take 8 MiB, and 0.1 s to read."""

logger = logging.getLogger(__name__)


class StoredRuns:
    """The runs of ids in the blocks of one tree, a tenant's, that were used last.

    They are read by a thread beside the replies, anew for each request that finds others stored.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._known: tuple[object, Root, Runs] | None = None
        self._reads = Thread()

    def read(self, root: Root) -> None:
        """Have what is stored of a tree read, if it is not known. Generation thread."""
        if not self._reads.is_alive():
            self._reads = Thread(target=self._read, args=(root,), name="stored runs", daemon=True)
            self._reads.start()

    def after(self, root: Root, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids that followed the end of a run; none where that is unknown."""
        known = self._known
        return [] if known is None or known[1] != root else known[2].after(run, n)

    def _read(self, root: Root) -> None:
        try:
            with self._store.view.asked_once() as index:
                version, known = index.totals(), self._known
                if known is not None and known[:2] == (version, root):
                    return
                blocks = index.newest(root, N_TOKENS // BLOCK_TOKENS)
            self._known = version, root, Runs(_joined(blocks))
        except Exception:
            logger.debug("kvpersist: stored ids could not be read", exc_info=True)


def _joined(blocks: Sequence[Block]) -> bytes:
    """Return the packed ids of blocks, the newest first: as they follow each other, newest last."""
    left, parts = {one.key: one for one in blocks if one.is_genuine}, list[bytes]()
    for block in blocks:
        node = left.pop(block.key, None)
        while node is not None:
            parts.append(node.packed_ids)
            node = left.pop(node.parent, None)
    return b"".join(reversed(parts))
