"""Move a session out of a store into one file (`session_file`), and from a file into a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import BlockCorrupt, StoreError
from ..match.block import Block
from ..match.keys import Root
from .disk import DiskStore
from .files import path_of, read_file
from .folder import new_file, sync, whole_file
from .header import LENGTH_BYTES, MAX_HEADER_BYTES, OwnHeader, open_regular, own_header, read_header
from .index import Index, Leaf, Session
from .session_file import Progress, SessionFile, file_header, no_progress
from .turn import NewFile, Turn

# Out of a store.


def export_session(
    folder: Path, index: Index, session: Session, target: Path, progress: Progress = no_progress
) -> int:
    """Write a session to a file, which appears when it is whole; return its size in bytes.

    Every block and part is checked on the way. Parts that go meanwhile are left out. Raises
    StoreError when a block is missing or anything is damaged.
    """
    chain = [block for block, _ in index.chain(session.leaf)]
    if not chain:
        raise StoreError(f"session {session.id} has lost blocks; run store verify")
    checkpoints = [found for found, _ in index.checkpoints([block.key for block in chain])]
    items = [*chain, *checkpoints]
    exported: list[tuple[Path, OwnHeader]] = []
    for number, item in enumerate(items):
        path = path_of(folder, item)
        try:
            read_file(path, expected=item)
            with open_regular(path) as source:
                exported.append((path, own_header(read_header(source).decode())))
        except FileNotFoundError as error:
            if not item.is_checkpoint:
                raise StoreError(f"{_what(item, session)}: {error}; run store verify") from error
        except (BlockCorrupt, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{_what(item, session)}: {error}; run store verify") from error
        progress(number + 1, 2 * len(items))
    headers = [header for _, header in exported]
    about = json.dumps({"name": session.name, "n_tokens": session.n_tokens})
    header = file_header(about, headers[: len(chain)], headers[len(chain) :])
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"session {session.id} is too long for one file ({len(chain)} blocks)")
    try:
        with whole_file(target, fsync=True) as file:
            file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
            for number, (path, own) in enumerate(exported):
                with open_regular(path) as source:
                    if read_header(source) != own.text.encode():
                        raise StoreError(f"{path.name} was replaced meanwhile; try again")
                    shutil.copyfileobj(source, file, 1 << 20)
                progress(len(exported) + number + 1, 2 * len(exported))
    except FileNotFoundError as error:
        raise StoreError(f"session {session.id} cannot be exported: {error}") from error
    return target.stat().st_size


def _what(item: Block, session: Session) -> str:
    if item.is_checkpoint:
        return f"{item} of session {session.id}"
    return f"the block at token {item.start} of session {session.id}"


# Into a store.


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    session: Session
    n_blocks: int
    n_checkpoints: int
    written: Sequence[Block]
    """What was not there yet."""
    is_new: bool
    """Whether the session was added or went on; False where it was there."""


def import_session(disk: DiskStore, source: SessionFile) -> Imported:
    """Write a checked session to a store, within its budget, whole or not at all.

    A session that is there is left as it is, and so is one of the same name that goes on from
    it; one that ends on the way to it moves. Raises StoreError when there is no room.
    """
    keys = tuple(node.key for node in source.blocks)
    leaf = Leaf(source.name, keys[-1], source.blocks[-1].stop, keys)
    files = [
        NewFile(
            item,
            source.n_own_bytes(number),
            partial(_write, partial(source.own_file, number), fsync=disk.limits.fsync),
        )
        for number, item in enumerate(source.items)
    ]
    there: Session | None = None

    def turn() -> Turn:
        nonlocal there
        there = _session_through(disk.index, source.root, leaf)
        return Turn(
            source.root, source.blocks, None if there else leaf, checkpoints=source.checkpoints
        )

    session, written = disk.adopt(turn, files)
    session = there or session
    assert session is not None  # a turn with a leaf has one
    n_blocks, n_checkpoints = len(source.blocks), len(source.checkpoints)
    return Imported(session, n_blocks, n_checkpoints, written, is_new=there is None)


def _session_through(index: Index, root: Root, leaf: Leaf) -> Session | None:
    """Return a session of the leaf's name that ends in it or beyond it."""
    for session in index.sessions():
        if (session.root, session.name) == (root.key, leaf.name) and any(
            node.key == leaf.key for node, _ in index.chain(session.leaf)
        ):
            return session
    return None


def _write(content_of: Callable[[], bytes], path: Path, *, fsync: bool) -> int:
    """Write the file of a block or part; return its size in bytes."""
    with new_file(path) as file:
        n_bytes = file.write(content_of())
    if fsync:
        sync(path)
    return n_bytes
