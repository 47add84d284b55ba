"""A tier: a place that holds blocks and checkpoints. RAM, the disk, and a shared store are tiers.

Records that are read from a tier enter RAM. The writer stores commits in each tier below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..block import Checkpoint, Record, Root
from ..match.tree import BlockSource
from .files import Arrays
from .records import DISK, RAM, SHARED, Commit, KVBlock, Saved

__all__ = ["DISK", "RAM", "SHARED", "LowerTier", "ReadTier", "SearchedTier", "Tier"]


class Tier(Protocol):
    """A place that holds blocks and checkpoints. Any thread may ask."""

    @property
    def name(self) -> str:
        """The tier's name in headers, metrics and rates."""

    def __contains__(self, key: bytes) -> bool:
        """Say whether a block or a checkpoint is known to be there."""

    def stats(self) -> dict[str, Any]:
        """Return "blocks", "checkpoints", "bytes", "checkpoint_bytes", "evicted", "max_bytes"."""


class SearchedTier(Tier, BlockSource, Protocol):
    """A tier that lookups ask."""

    def checkpoints(self, blocks: Sequence[bytes]) -> Iterable[Checkpoint]:
        """Return the checkpoints of these blocks."""


class LowerTier(Tier, Protocol):
    """A tier below RAM, which stores commits."""

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> Sequence[Saved | Exception | None]:
        """Store commits; return for each what is stored, or None. Writer thread.

        `entry_of` returns a record that is in RAM.
        """

    def remove(self, key: bytes, reason: str | None = None) -> None:
        """Hide a record that is missing or, for a reason, must not be used; remove it soon."""


class ReadTier(SearchedTier, LowerTier, Protocol):
    """A tier below RAM that lookups ask, and whose records are read into RAM."""

    def branches(self, path: Mapping[bytes, bytes]) -> Collection[bytes]:
        """Return, of these parents and a child of each, the parents that have another child."""

    def load(self, block: Record, root: Root) -> Arrays:
        """Return the evaluated arrays of a block or checkpoint. Any thread.

        Raises FileNotFoundError if there are none, BlockCorrupt if they failed a check, and
        StoreFormatError, OSError or MemoryError if they cannot be read now.
        """
