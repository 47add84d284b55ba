"""Prompts that are being computed, and those that wait for what they have in common with them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as ListLike

from ..cache.blocks import BLOCK_TOKENS
from ..cache.prefill_memory import PASSING_TOKENS
from ..host.prompt import Prepared
from .insert import MIN_TOKENS_BETWEEN
from .lookup import Lookup, Sequence

MIN_SHARED = 2 * BLOCK_TOKENS
"""Fewer common tokens are computed twice: waiting for them would take as long."""


class Computing:
    """The requests whose prompts are being computed. Generation thread."""

    def __init__(self) -> None:
        self._taken: list[Prepared] = []

    def add(self, taken: Prepared) -> None:
        """A prompt begins to be computed; the handle is its `Sequence`."""
        self._taken = [*filter(is_computing, self._taken), taken]

    def awaited(self, lookup: Lookup) -> bool:
        """Tell whether a prompt does better to wait for blocks that another is computing."""
        return any(
            is_computing(one)
            and one.handle.root == lookup.root
            and self._is_ahead(one.handle, self._shared(one, lookup), lookup)
            for one in self._taken
        )

    def _shared(self, taken: Prepared, lookup: Lookup) -> int:
        """Return how many of a prompt's tokens will be stored for both; compared only once."""
        sequence: Sequence = taken.handle
        known, n_shared = lookup.n_shared.get(id(sequence), (None, 0))
        if known is not sequence:
            n_common = common_length(taken.prompt.ids, lookup.fed.ids)
            any_prefix = lookup.model.spec.any_prefix
            n_shared = n_common - n_common % (BLOCK_TOKENS if any_prefix else PASSING_TOKENS)
            if sequence.n_system <= n_common:
                n_shared = max(n_shared, sequence.n_system)  # it is stored up to its last token
            lookup.n_shared[id(sequence)] = sequence, n_shared
        return n_shared

    def _is_ahead(self, sequence: Sequence, n_shared: int, lookup: Lookup) -> bool:
        is_saved = sequence.n_saved > n_shared - MIN_TOKENS_BETWEEN
        return not is_saved and n_shared - lookup.n_found >= MIN_SHARED


def is_computing(taken: Prepared) -> bool:
    """Tell whether more of a request's prompt will be stored."""
    is_over = taken.reply is not None and (taken.reply.is_over or taken.reply.is_stopped)
    return not (taken.handle.is_computed or is_over)


def common_length(one: ListLike[int], other: ListLike[int]) -> int:
    """Return how many first elements two lists have in common. Compares slices, which is quick."""
    n_most = min(len(one), len(other))
    return bisect_left(range(1, n_most + 1), True, key=lambda n: one[:n] != other[:n])
