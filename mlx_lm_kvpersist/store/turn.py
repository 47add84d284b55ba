"""What goes to disk, in terms that the writer and the folder share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..match.keys import Root
from ..match.tree import Node
from .index import Leaf, StoredReply
from .part import Part

__all__ = ["Gone", "NewFile", "Turn"]


@dataclass(frozen=True)
class Turn:
    """What one turn of a conversation puts on disk.

    `nodes` are the blocks of its chain, in order from the root; those that are not on disk yet
    wait in the pool, pinned. Without a leaf the turn has not ended: no session moves.

    `parts` belong to these blocks, or to others on disk; those that are not on disk yet wait in
    the pool, too. What is `superseded` by them is removed once the turn is committed.
    """

    root: Root
    nodes: tuple[Node, ...]
    leaf: Leaf | None = None
    replies: tuple[StoredReply, ...] = ()
    parts: tuple[Part, ...] = ()
    superseded: tuple[Part, ...] = ()

    def keys(self) -> set[bytes]:
        """Return the keys of all that this turn is built on: its blocks, parts, and theirs."""
        keys = {node.key for node in self.nodes}
        keys.update(part.key for part in self.parts)
        keys.update(part.block for part in self.parts)
        return keys


@dataclass(frozen=True)
class NewFile:
    """A block or part whose file `write` makes at a path, of at most `n_bytes`.

    `write` returns the file's size in bytes.
    """

    what: Node | Part
    n_bytes: int
    write: Callable[[Path], int]


class Gone(Enum):
    """Why a block or a part is no longer on disk."""

    EVICTED = "evicted"
    QUARANTINED = "quarantined"
