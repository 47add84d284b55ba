"""Prompts that are being computed, and those that wait for what they have in common with them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ..cache.blocks.cut_join import BLOCK_TOKENS
from .checkpoint_saver import MIN_TOKENS_BETWEEN
from .lookup import Lookup
from .state import RunningSequence

MIN_SHARED = 2 * BLOCK_TOKENS
"""Fewer common tokens are computed twice: waiting for them would take as long."""


class Computing:
    """The requests whose prompts are being computed. Generation thread."""

    def __init__(self) -> None:
        self._running: list[RunningSequence] = []

    def add(self, sequence: RunningSequence) -> None:
        """A prompt begins to be computed."""
        self._running = [*(one for one in self._running if one.is_computing), sequence]

    def awaited(self, lookup: Lookup) -> bool:
        """Tell whether a prompt does better to wait for blocks that another is computing."""
        return any(
            one.is_computing
            and one.root == lookup.root
            and self._is_ahead(one, self._shared(one, lookup), lookup)
            for one in self._running
        )

    def _shared(self, sequence: RunningSequence, lookup: Lookup) -> int:
        """Return how many of a prompt's tokens will be stored for both; compared only once."""
        known, n_shared = lookup.n_shared.get(id(sequence), (None, 0))
        if known is not sequence:
            n_common = common_length(sequence.ids, lookup.fed.ids)
            n_shared = n_common - n_common % lookup.model.saver.saves_every
            if sequence.n_system <= n_common:
                n_shared = max(n_shared, sequence.n_system)  # it is stored up to its last token
            lookup.n_shared[id(sequence)] = sequence, n_shared
        return n_shared

    def _is_ahead(self, sequence: RunningSequence, n_shared: int, lookup: Lookup) -> bool:
        is_saved = sequence.n_saved > n_shared - MIN_TOKENS_BETWEEN
        return not is_saved and n_shared - lookup.n_found >= MIN_SHARED


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first elements two lists have in common. Compares slices, which is quick."""
    n_most = min(len(one), len(other))
    return bisect_left(range(1, n_most + 1), True, key=lambda n: one[:n] != other[:n])
