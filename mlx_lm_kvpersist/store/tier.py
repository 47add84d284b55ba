"""A tier: a place that holds blocks and checkpoints. RAM is the first, the disk the second.

What is found in a tier below RAM is read into RAM, and what enters RAM is written to those below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..block import Checkpoint, Record, Root
from ..match.tree import BlockSource
from .files import Arrays
from .records import Commit, Saved

if TYPE_CHECKING:
    from .pool import KVBlock

RAM, DISK, SHARED = "ram", "disk", "shared"


class Tier(BlockSource, Protocol):
    """A place in which blocks are found. Any thread may ask; what it cannot tell is not there."""

    @property
    def name(self) -> str:
        """The tier's name in headers, metrics and rates."""

    def checkpoints(self, blocks: Sequence[bytes]) -> Iterable[Checkpoint]:
        """Return the checkpoints of these blocks."""

    def __contains__(self, key: bytes) -> bool:
        """Say whether a block or a checkpoint is there."""

    def stats(self) -> dict[str, Any]:
        """Return "blocks", "checkpoints", "bytes", "checkpoint_bytes", "evicted", "max_bytes".

        "asked_again_tokens" are those of evicted blocks that came back, where they are counted.
        """


class LowerTier(Tier, Protocol):
    """A tier below RAM."""

    def branches(self, path: Mapping[bytes, bytes]) -> Collection[bytes]:
        """Return, of these parents and a child of each, the parents that have another child."""

    def read(self, block: Record, root: Root) -> Arrays:
        """Return the evaluated arrays of a block or checkpoint. Any thread.

        Raises FileNotFoundError when there are none, BlockCorrupt when they failed a check, and
        StoreFormatError, OSError or MemoryError when they cannot be read now.
        """

    def write(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> Sequence[Saved | Exception | None]:
        """Store commits; return for each what is stored, None for nothing. Writer thread.

        `entry_of` returns a record that is in RAM.
        """

    def forget(self, key: bytes, reason: str | None = None) -> None:
        """Hide what is not there or, for a reason, must not be used, and remove it soon."""
