"""Values of the store: limits, commits, entries in RAM, rows, the sidecars of sessions, and tiers.

A tier is a place that holds blocks and checkpoints: RAM, the disk, or a shared store.
Records that are read from a tier enter RAM. The writer stores commits in each tier below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from ..block import Block, Checkpoint, Record, Root
from ..errors import StoreError
from ..match import BlockSource
from .folder import OwnFiles

RAM, DISK, SHARED = "ram", "disk", "shared"
SESSION_COLUMNS = "id, root, name, leaf, n_tokens, pinned, created, used"


@dataclass(frozen=True)
class StoreLimits:
    """The budgets of a store in bytes, and limits for its checkpoints and models."""

    max_ram_bytes: int
    max_disk_bytes: int
    min_free_bytes: int = 0
    """The free bytes that the store leaves on its volume; 0: no limit."""
    max_loss_s: float = 0.0
    """Checkpoints that can be computed within this time are postponed."""
    model_share: float = 0.75
    """The share of the space within the budgets that one model may fill while the store also has
    blocks of another model."""


@dataclass
class KVBlock:
    """A block or checkpoint in RAM, and its KV arrays.

    `is_stored`: a tier below RAM has it, too. `pins` counts the waiting commits that contain it.
    `prefetched` counts the pins of prompts that will restore it. It was read from `tier` in
    `read_s` seconds; a successful restore resets both. `used` grows with each use.
    `place`, in the order of eviction, is None while the entry must stay.
    """

    block: Record
    arrays: Any
    n_bytes: int
    is_stored: bool = False
    pins: int = 0
    prefetched: int = 0
    tier: str = RAM
    read_s: float = 0.0
    used: int = 0
    place: tuple[bool, int, bytes] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the entry must stay: a prompt waits for it, or it is a commit's only copy."""
        return self.prefetched > 0 or (self.pins > 0 and not self.is_stored)

    @classmethod
    def of(cls, block: Record, arrays: Any) -> KVBlock:
        n_bytes = sum(array.nbytes for array in arrays.values())
        if isinstance(block, Block):
            n_bytes += len(block.packed_ids) + len(block.text)
        return cls(block, arrays, n_bytes)


@dataclass(frozen=True)
class Leaf:
    """The end of one conversation: `n_tokens` tokens, the last of them in block `key`.

    The client gives the `name`. `replaced` has pairs of keys: a short block, and a longer block
    that has all of its tokens. The short block is removed unless another session ends in it. `note`
    is for people. The prompt was rendered from `messages`.
    """

    name: str | None
    key: bytes
    n_tokens: int
    replaced: tuple[tuple[bytes, bytes], ...] = ()
    note: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    is_session: bool = True
    """False for the leaf of a draft model: the leaf of the main model is the session."""


@dataclass(frozen=True)
class Commit:
    """A change of the store, made completely or not at all: a turn, part of a prompt, or replies.

    Its records stay pinned in the pool until the commit is on disk, has failed or is dropped.
    `blocks` are in order. The leaf is the end of the last block; without a leaf, the turn has not
    ended. `checkpoints` belong to these blocks, or to blocks on disk. `superseded` checkpoints are
    removed afterwards. `replies` has JSON with the ids and text of replies (request/replies.py), by
    digest of the messages. The prompt of these replies was rendered from `messages`.
    """

    root: Root
    blocks: tuple[Block, ...]
    leaf: Leaf | None = None
    replies: Mapping[bytes, bytes] = field(default_factory=dict)
    checkpoints: tuple[Checkpoint, ...] = ()
    superseded: tuple[Checkpoint, ...] = ()
    messages: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)

    @property
    def records(self) -> list[Record]:
        return [*self.blocks, *self.checkpoints]

    @property
    def parent(self) -> bytes:
        """The key of the first block's parent; without blocks, the root's key."""
        return self.blocks[0].parent if self.blocks else self.root.key

    def keys(self) -> set[bytes]:
        """Return the keys that must stay on disk so that the whole chain stays."""
        keys = {self.parent, *(record.key for record in self.records)} - {self.root.key}
        return keys.union(checkpoint.block for checkpoint in self.checkpoints)


@dataclass(frozen=True)
class Saved:
    """A commit that was made, and the records whose files were written for it."""

    commit: Commit
    written: Sequence[Record] = ()


@dataclass(frozen=True)
class NewFile:
    """A record to write. `write` makes its file and returns the size, at most `n_bytes`."""

    block: Record
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
    """How many blocks and checkpoints are on disk, and the bytes of their files: of one root, or of
    all roots. Only the totals of all roots have the bytes of sidecars."""

    n_blocks: int = 0
    block_bytes: int = 0
    n_checkpoints: int = 0
    checkpoint_bytes: int = 0
    sidecar_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        return self.block_bytes + self.checkpoint_bytes

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class LowerTier(Protocol):
    """A tier below RAM, which stores commits. Any thread may ask."""

    @property
    def name(self) -> str:
        """The tier's name in headers, metrics and rates."""

    def __contains__(self, key: bytes) -> bool:
        """Say whether the tier is known to have a block or a checkpoint."""

    def stats(self) -> dict[str, Any]:
        """Return the tier's numbers for statistics and metrics.

        The keys are "blocks", "checkpoints", "bytes", "checkpoint_bytes", "evicted", "max_bytes"
        and "asked_again_tokens"; a tier may lack some of them.
        """

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> Sequence[Saved | Exception | None]:
        """Store commits; return for each what was stored, an error, or None if left out.

        `entry_of` returns a record that is in RAM. Writer thread.
        """

    def remove(self, key: bytes, reason: str | None = None) -> None:
        """Hide a record that is missing or, if a `reason` is given, is bad; remove it soon."""


class ReadTier(LowerTier, BlockSource, Protocol):
    """A tier below RAM that lookups ask, and whose records are read into RAM."""

    def checkpoints(self, blocks: Sequence[bytes]) -> Iterable[Checkpoint]:
        """Return the checkpoints that belong to blocks of these keys."""

    def branches(self, path: Mapping[bytes, bytes]) -> Collection[bytes]:
        """Return the parents that have a child besides the child that `path` gives."""

    def load(self, block: Record, root: Root) -> Mapping[str, Any]:
        """Return the evaluated arrays of a block or checkpoint. Any thread.

        Raises FileNotFoundError if the tier does not have them, BlockCorrupt if they failed a
        check, and StoreFormatError, OSError or MemoryError if they cannot be read now.
        """


# Rows of the index. A damaged index may contain anything: rows of wrong types are left out.


def read_sessions(rows: Iterable[Any]) -> list[Session]:
    types: tuple[Any, ...] = (str, bytes, (str, type(None)), bytes, int, int, float, float)
    readable = [row for row in rows if all(map(isinstance, row, types))]
    return [Session(*(*row[:5], bool(row[5]), *row[6:])) for row in readable]


def read_root(key: Any, root_json: Any) -> Root | None:
    """Read a row of `roots`: the root that hashes to this key."""
    try:
        root = Root.from_json(root_json)
        return root if root.key == key and isinstance(root.model, str) else None
    except (ValueError, TypeError, AttributeError):
        return None


# A session with a name or a pin also has a small file: block files have no names and pins.


def sidecar_path(folder: Path, session_id: str) -> Path:
    """Return the path of a session's sidecar. A client's name is never part of the path."""
    return folder / "sessions" / f"{session_id}.json"


def has_sidecar(session: Session) -> bool:
    return session.name is not None or session.pinned


def write_sidecar(session: Session, files: OwnFiles) -> int:
    """Write the sidecar of a session, if it has one; return its size in bytes."""
    if not has_sidecar(session):
        return 0
    content = {**asdict(session), "root": session.root.hex(), "leaf": session.leaf.hex()}
    return files.replace(sidecar_path(files.folder, session.id), json.dumps(content).encode())


def read_sidecar(path: Path, files: OwnFiles) -> Session:
    """Read a session's sidecar. Raises ValueError or OSError."""
    try:
        content = json.loads(files.read(path))
        for name in ("root", "leaf"):
            content[name] = bytes.fromhex(content[name])
        (session,) = read_sessions([astuple(Session(**content))])
        if path.name != f"{session.id}.json":
            raise ValueError(f"it holds session {session.id!r}")
        # Both raise for values that SQLite refuses.
        (session.name or "").encode()
        session.n_tokens.to_bytes(8, "little", signed=True)
        if math.isnan(session.created + session.used):
            raise ValueError("it has a time that is not a number")
    except (StoreError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return session
