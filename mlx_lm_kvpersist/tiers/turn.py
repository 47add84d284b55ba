"""What goes to disk, in terms that the writer and the folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..match.keys import Root
from ..match.tree import Node
from .index import Leaf, StoredReply

__all__ = ["Gone", "NewFile", "Turn"]


@dataclass(frozen=True)
class Turn:
    """What one turn of a conversation puts on disk.

    `nodes` are the blocks of its chain, in order from the root; those that are not on disk yet
    wait in the pool, pinned. Without a leaf the turn has not ended: no session moves.
    """

    root: Root
    nodes: tuple[Node, ...]
    leaf: Leaf | None = None
    replies: tuple[StoredReply, ...] = ()


@dataclass(frozen=True)
class NewFile:
    """A block whose file `write` makes, of at most `n_bytes`; it returns the size it took."""

    node: Node
    n_bytes: int
    write: Callable[[], int]


class Gone(Enum):
    """Why a block is no longer on disk."""

    EVICTED = "evicted"
    QUARANTINED = "quarantined"
