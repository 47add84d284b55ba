"""What goes to disk, in terms that the writer and the folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..match.block import Block
from ..match.keys import Root
from .index import Leaf, StoredReply


@dataclass(frozen=True)
class Turn:
    """What one turn of a conversation puts on disk.

    `blocks` is its chain, in order from the root; those that are not on disk yet wait in the pool,
    pinned. Without a leaf the turn has not ended: no session moves.

    `checkpoints` belong to these blocks, or to others on disk; those that are not on disk yet wait
    in the pool, too. `superseded` checkpoints are removed once the turn is committed.
    """

    root: Root
    blocks: tuple[Block, ...]
    leaf: Leaf | None = None
    replies: tuple[StoredReply, ...] = ()
    checkpoints: tuple[Block, ...] = ()
    superseded: tuple[Block, ...] = ()

    def keys(self) -> set[bytes]:
        """Return the keys of all that this turn is built on, blocks of its checkpoints included."""
        keys = {block.key for block in (*self.blocks, *self.checkpoints)}
        return keys.union(block.parent for block in self.checkpoints)


@dataclass(frozen=True)
class NewFile:
    """A block whose file `write` makes at a path, of at most `n_bytes`.

    `write` returns the file's size in bytes.
    """

    block: Block
    n_bytes: int
    write: Callable[[Path], int]


class Gone(Enum):
    """Why a block or a checkpoint is no longer on disk."""

    EVICTED = "evicted"
    QUARANTINED = "quarantined"
