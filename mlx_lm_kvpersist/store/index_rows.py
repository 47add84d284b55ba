"""What the rows of the index stand for, and how they are read.

A damaged index may hold anything: a row that is not what its table promises is read as None.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import xxhash

from ..match.block import Block
from ..match.keys import Root

BLOCK_COLUMNS = "key, parent, start, ids, text, pending"
SESSION_COLUMNS = "id, root, name, leaf, n_tokens, pinned, created, used"
CHECKPOINT_COLUMNS = "key, block, kind, n_tokens, n_bytes"

_SEAL_BYTES = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Leaf:
    """The end of one conversation: `n_tokens` tokens, the last of them in block `key`.

    `name` is what the client calls it, if anything. `chain` are the keys of all its blocks and
    `replaced` those whose content is now part of longer blocks, with what took their place: the
    session that ended in one of them is the one that moves.
    """

    name: str | None
    key: bytes
    n_tokens: int
    chain: tuple[bytes, ...]
    replaced: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class StoredReply:
    """The ids of a reply whose text, as the client saw it, is not what they decode to."""

    digest: bytes
    packed_ids: bytes


@dataclass(frozen=True)
class Session:
    """A conversation on disk. `created` and `used` are seconds since the epoch."""

    id: str
    root: bytes
    name: str | None
    leaf: bytes
    n_tokens: int
    pinned: bool
    created: float
    used: float


@dataclass(frozen=True)
class Totals:
    """Numbers of blocks and checkpoints, and the bytes of their files."""

    n_blocks: int = 0
    block_bytes: int = 0
    n_checkpoints: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class Forgotten:
    """What was removed with a block: ids of sessions, keys of checkpoints, bytes of all files."""

    n_bytes: int
    sessions: tuple[str, ...]
    checkpoints: tuple[bytes, ...]


def read_block(row: Collection[Any]) -> Block | None:
    """Read BLOCK_COLUMNS."""
    types = (bytes, bytes, int, bytes, str, bytes)
    return Block(*row) if all(map(isinstance, row, types)) and len(tuple(row)[3]) % 4 == 0 else None


def read_session(row: Collection[Any]) -> Session | None:
    """Read SESSION_COLUMNS."""
    types: tuple[Any, ...] = (str, bytes, (str, type(None)), bytes, int, int, float, float)
    if not all(map(isinstance, row, types)):
        return None
    session_id, root, name, leaf, n_tokens, pinned, created, used = row
    return Session(session_id, root, name, leaf, n_tokens, bool(pinned), created, used)


def read_checkpoint(row: Collection[Any]) -> tuple[Block, int] | None:
    """Read CHECKPOINT_COLUMNS: one that hashes to its key, and the size of its file."""
    if not all(map(isinstance, row, (bytes, bytes, str, int, int))):
        return None
    key, block, kind, n_tokens, n_bytes = row
    found = Block(key, block, kind=kind, n_covered=n_tokens)
    return (found, n_bytes) if abs(n_tokens) < 1 << 31 and found.is_genuine else None


def read_root(key: Any, about: Any) -> Root | None:
    """Read a row of `roots`: the root that hashes to this key."""
    try:
        root = Root.from_json(about)
        return root if root.key == key and isinstance(root.model, str) else None
    except (ValueError, TypeError, AttributeError):
        return None


def seal(root: bytes, digest: bytes, ids: bytes) -> bytes:
    """Return a reply's ids with a checksum behind them.

    What else the index says of ids is proved by the keys and files of blocks. These go into a
    prompt as they are.
    """
    return ids + xxhash.xxh3_64_digest(root + digest + ids)


def unsealed(root: bytes, digest: bytes, sealed: Any) -> bytes | None:
    """Return the ids of `seal`; None for anything else."""
    if not isinstance(sealed, bytes):
        return None
    ids = sealed[:-_SEAL_BYTES]
    return ids if seal(root, digest, ids) == sealed else None


def row_bytes(block: Block) -> int:
    """Return the most that a row adds to the index and its log, in bytes.

    A block's ids and text stand in the table and in an order each. What does not fit beside others
    begins a page of its own. The log has every page once more.
    """
    n_ids, n_text = len(block.packed_ids), len(block.text.encode())
    entries = (n_ids, n_text, n_ids + n_text)
    return 2 * sum(64 + n + (_PAGE_BYTES if n > _PAGE_BYTES // 5 else 0) for n in entries)
