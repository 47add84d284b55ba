"""The token ids that followed a run of ids before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

N_LAST = 6
"""Ids of a run. After four equal ids the next ids often differ; twelve are found too late."""
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Runs:
    """The last end of each run of `N_LAST` ids, in packed ids (see `pack_ids`): 16 bytes an id.

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
