"""The records of the store: turns that come to disk, and rows and notes of what is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import xxhash

from ..match.block import Block, Root
from .folder import make_private, whole_file

SESSION_COLUMNS = "id, root, name, leaf, n_tokens, pinned, created, used"

MAX_PINNED = 8

_SEAL_BYTES = 8


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
    pinned: bool = False
    """Whether its session is pinned; of those of one name only the newest `MAX_PINNED` are."""


@dataclass(frozen=True)
class StoredReply:
    """The ids of a reply whose text, as the client saw it, is not what they decode to."""

    digest: bytes
    packed_ids: bytes


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

    @property
    def n_bytes(self) -> int:
        return self.block_bytes + self.checkpoint_bytes


@dataclass(frozen=True)
class Forgotten:
    """What was removed with a block: ids of sessions, keys of checkpoints, bytes of all files."""

    n_bytes: int
    sessions: tuple[str, ...]
    checkpoints: tuple[bytes, ...]


# Rows of the index. A damaged index may hold anything: a row that is not what its table promises is
# read as None.


def read_session(row: Collection[Any]) -> Session | None:
    """Read SESSION_COLUMNS."""
    types: tuple[Any, ...] = (str, bytes, (str, type(None)), bytes, int, int, float, float)
    if not all(map(isinstance, row, types)):
        return None
    session_id, root, name, leaf, n_tokens, pinned, created, used = row
    return Session(session_id, root, name, leaf, n_tokens, bool(pinned), created, used)


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


# What a session has besides its row: a small file, if it has a name or a pin.


def note_path(folder: Path, session_id: str) -> Path:
    """Return where the note of a session is kept. No name of a client's is part of it."""
    return folder / "sessions" / f"{session_id}.json"


def write_note(folder: Path, session: Session, *, fsync: bool) -> None:
    """Write the file of a session that has a name or a pin: a rebuilt index knows neither."""
    if session.name is None and not session.pinned:
        return
    content = {**asdict(session), "root": session.root.hex(), "leaf": session.leaf.hex()}
    path = note_path(folder, session.id)
    make_private(path.parent)
    with whole_file(path, fsync=fsync) as file:
        file.write(json.dumps(content).encode())


def read_note(path: Path) -> Session:
    """Read the file of a session.

    Raises ValueError, TypeError, KeyError or OSError when it is not the file of this session.
    """
    content = json.loads(path.read_text())
    content["root"] = bytes.fromhex(content["root"])
    content["leaf"] = bytes.fromhex(content["leaf"])
    session = Session(**content)
    if path.name != f"{session.id}.json":
        raise ValueError(f"it holds session {session.id!r}")
    if session.name is not None:
        session.name.encode()
    return session


def read_text(raw: bytes) -> str | bytes:
    """Read a text; the bytes of a damaged one, which is then no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
