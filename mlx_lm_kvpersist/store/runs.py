"""Runs of ids in stored conversations, for the drafts of prompt-lookup decoding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Thread

import numpy as np

from ..block import BLOCK_TOKENS, Block, Root
from .index import Index

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 19
"""At most this number of tokens is read for drafts: 8 MiB, in 0.1 s."""
N_LAST = 6
"""Ids in a run. With 4, the ids after a run often differ; with 12, drafts come too late."""
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Runs:
    """Where each run of `N_LAST` ids last occurs in packed ids (see `pack_ids`): 16 bytes per id.

    Runs are found by polynomial hashes modulo 2**64, as Karp and Rabin do (IBM Journal of Research
    and Development 31, 1987), in a sorted array.
    """

    def __init__(self, packed_ids: bytes) -> None:
        self._ids = ids = np.frombuffer(packed_ids, np.int32)
        n_runs = max(0, len(ids) - N_LAST)  # runs with an id after them
        hashes = np.zeros(n_runs, np.uint64)
        for place in range(N_LAST):
            hashes *= np.uint64(_FACTOR)
            hashes += ids[place : place + n_runs].astype(np.uint64)
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def after(self, run: Sequence[int], n: int) -> list[int]:
        """Return up to `n` ids after the last `N_LAST` ids of `run`, and stop before an image."""
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
        self._reads = Thread()

    def read(self, root: Root) -> bool:
        """Start to read a tree if it changed; False if a read still runs. Generation thread."""
        if self._reads.is_alive():
            return False
        self._reads = Thread(target=self._read, args=(root,), name="stored runs", daemon=True)
        self._reads.start()
        return True

    def after(self, root: Root, run: Sequence[int], n: int) -> list[int]:
        read = self._known
        return [] if read is None or read[1] != root else read[2].after(run, n)

    def _read(self, root: Root) -> None:
        before = self._known
        try:
            with self._index.asked_once() as index:
                version = index.totals(root.key)
                if before is not None and before[:2] == (version, root):
                    return
                blocks = index.newest(root, MOST_TOKENS // BLOCK_TOKENS)
            self._known = version, root, Runs(_joined(blocks))
        except Exception:
            logger.debug("kvpersist: stored ids could not be read", exc_info=True)


def _joined(blocks: Sequence[Block]) -> bytes:
    """Return the packed ids of blocks in chains, the newest chain last."""
    left, runs = {block.key: block for block in blocks if block.is_genuine}, list[bytes]()
    for block in blocks:
        node = left.pop(block.key, None)
        while node is not None:
            runs.append(node.packed_ids)
            node = left.pop(node.parent, None)
    return b"".join(reversed(runs))
