"""The format of a file that moves a session, with its blocks and checkpoints, between stores.

The file begins with a line of JSON:

    kvpersist-session   the format, 1
    session             name, n_tokens
    n_blocks            the number of blocks; the other files are checkpoints
    files               size in bytes and XXH3-128 of each file
    checksum            XXH3-128 of this line with an empty checksum

Then come the files of all blocks, in order, and the files of all checkpoints, as in a store that is
not encrypted. Export and import load one file at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreError, StoreFormatError
from .disk import DiskStore
from .disk_tier import Saving
from .files import MALFORMED, MAX_HEADER_BYTES, read_content
from .folder import open_regular
from .index import Index
from .records import Commit, Leaf, NewFile, Session

SESSION_FORMAT = 1

_FORMAT_KEY = "kvpersist-session"
Progress = Callable[[int, int], None]
"""Called with the numbers of files done and of all files."""


class Listed(NamedTuple):
    """A file of an exported session, as its header lists it."""

    n_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: bytes) -> Listed:
        return cls(len(content), xxhash.xxh3_128_hexdigest(content))


def header_of(session: Mapping[str, Any], n_blocks: int, files: Sequence[Listed]) -> bytes:
    content = {
        _FORMAT_KEY: SESSION_FORMAT,
        "session": session,
        "n_blocks": n_blocks,
        "files": files,
        "checksum": "",
    }
    content["checksum"] = xxhash.xxh3_128_hexdigest(_line(content))
    return _line(content)


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


class SessionFile:
    """An exported session. Opening it checks the content of all files.

    Raises StoreFormatError when a newer version wrote it and StoreError when it is malformed.
    """

    def __init__(self, path: Path, progress: Progress = lambda done, total: None) -> None:
        self.path = path
        self._file = open_regular(path, follow=True)
        try:
            self._read(progress)
        except BaseException as error:
            self._file.close()
            newer = isinstance(error, StoreFormatError)
            if newer or not isinstance(error, (StoreError, *MALFORMED)):
                raise
            raise StoreError(f"{path} is not a complete exported session: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _read(self, progress: Progress) -> None:
        line = self._file.readline(MAX_HEADER_BYTES)
        content = json.loads(line)
        version = content[_FORMAT_KEY]
        if version > SESSION_FORMAT:
            raise StoreFormatError(
                f"{self.path} has format {version}; this version reads up to {SESSION_FORMAT}. "
                "Upgrade mlx-lm-kvpersist."
            )
        session, n_blocks = content["session"], content["n_blocks"]
        self.files = [Listed(*listed) for listed in content["files"]]
        if line != header_of(session, n_blocks, self.files):
            raise ValueError("its header does not match its checksum")
        *self._starts, end = accumulate((file.n_bytes for file in self.files), initial=len(line))
        n_bytes = os.fstat(self._file.fileno()).st_size
        if n_bytes != end or min(file.n_bytes for file in self.files) <= 0:
            raise ValueError(f"it has {n_bytes} bytes and should have {end}")
        self._read_items(n_blocks, progress)
        self.name: str | None = session["name"]
        if self.name is not None:
            self.name.encode()  # raises for text that SQLite refuses
        if session["n_tokens"] != self.blocks[-1].stop:
            raise ValueError("the session does not end at the end of its last block")

    def _read_items(self, n_blocks: int, progress: Progress) -> None:
        blocks: list[Block] = []
        checkpoints: dict[bytes, Checkpoint] = {}
        for number, listed in enumerate(self.files):
            content, name = self.own_file(number), f"file {number}"
            if Listed.of(content) != listed:
                raise BlockCorrupt(f"{name} does not match its checksum")
            try:
                item, root, _ = read_content(content, name)
            except StoreFormatError as error:
                raise StoreFormatError(f"{self.path}: {name}: {error}") from error
            if number == 0:
                self.root = root
            if isinstance(item, Checkpoint) != (number >= n_blocks):
                raise ValueError(f"{name} is not what its header says: blocks, then checkpoints")
            if isinstance(item, Block):
                parent, start = (blocks[-1].key, blocks[-1].stop) if blocks else (root.key, 0)
                if (root, item.parent, item.start) != (self.root, parent, start):
                    raise ValueError(f"block {number} does not continue the one before it")
                blocks.append(item)
            else:
                is_known = item.key in checkpoints or root != self.root
                if is_known or all(block.key != item.block for block in blocks):
                    raise ValueError(f"checkpoint {name} belongs to none of its blocks")
                checkpoints[item.key] = item
            progress(number + 1, len(self.files))
        self.blocks, self.checkpoints = tuple(blocks), tuple(checkpoints.values())

    def own_file(self, number: int) -> bytes:
        """Return a file's content. The blocks' files come first."""
        self._file.seek(self._starts[number])
        return self._file.read(self.files[number].n_bytes)


# Out of a store.


def export_records(index: Index, session: Session) -> list[Record]:
    """Return a session's blocks and checkpoints. Raises StoreError when a block is missing."""
    chain = [block for block, _ in index.chain(session.leaf)]
    if not chain:
        raise StoreError(f"session {session.id} has lost blocks; run store verify")
    checkpoints = index.checkpoints([block.key for block in chain])
    return [*chain, *(checkpoint for checkpoint, _ in checkpoints)]


def export_parts(
    index: Index,
    session: Session,
    records: Sequence[Record],
    progress: Progress = lambda done, total: None,
) -> tuple[int, Iterator[bytes]]:
    """Return the size of an exported session in bytes, and its parts.

    All files are checked first. Evicted checkpoints are left out. Raises StoreError when a block is
    missing or a file is damaged, also while the parts are read.
    """
    exported: dict[Path, Listed] = {}
    files = index.files
    for number, item in enumerate(records):
        path = files.path_of(item.key, item.folder)
        try:
            content = files.read(path)
            if read_content(content, path.name)[0] != item:
                raise BlockCorrupt(f"{path.name}: file and index disagree")
            exported[path] = Listed.of(content)
        except (FileNotFoundError, BlockCorrupt) as error:
            if isinstance(item, Block) or isinstance(error, BlockCorrupt):
                what = f"the block at token {item.start}" if isinstance(item, Block) else f"{item}"
                reason = f"{what} of session {session.id}: {error}; run store verify"
                raise StoreError(reason) from error
        progress(number + 1, 2 * len(records))
    described = {"name": session.name, "n_tokens": session.n_tokens}
    n_blocks = sum(isinstance(item, Block) for item in records)
    header = header_of(described, n_blocks, list(exported.values()))
    if len(header) > MAX_HEADER_BYTES:
        raise StoreError(f"session {session.id} is too long for one file ({n_blocks} blocks)")

    def parts() -> Iterator[bytes]:
        yield header
        for number, (path, listed) in enumerate(exported.items()):
            try:
                content = files.read(path)
            except FileNotFoundError as error:
                why = f"{path.name} was removed at the same time"
                raise StoreError(f"session {session.id} cannot be exported: {why}") from error
            if Listed.of(content) != listed:
                raise StoreError(f"{path.name} was replaced during the export; try again")
            yield content
            progress(len(exported) + number + 1, 2 * len(exported))

    return len(header) + sum(listed.n_bytes for listed in exported.values()), parts()


# Into a store.


def import_session(disk: DiskStore, source: SessionFile) -> tuple[Session, Sequence[Record], bool]:
    """Write a checked session to a store, within its budget, completely or not at all.

    A stored session of the same name stays if it contains the imported session. If a session of
    this name ends earlier in the imported chain, it is moved to the end. Return the session,
    its new records, and whether it was added or moved. Raises StoreError.
    """
    leaf = Leaf(source.name, source.blocks[-1].key, source.blocks[-1].stop)

    def new_file(number: int, record: Record) -> NewFile:
        n_bytes = source.files[number].n_bytes + disk.files.encryption.n_added_bytes
        return NewFile(record, n_bytes, lambda p: disk.files.write(p, source.own_file(number)))

    records: tuple[Record, ...] = (*source.blocks, *source.checkpoints)
    files = {record.key: new_file(n, record) for n, record in enumerate(records)}

    def commit() -> Commit:
        # Called for each plan: a session may have been evicted to make room.
        present = _session_through(disk.index, source.root, leaf)
        ends = None if present else leaf
        return Commit(source.root, source.blocks, ends, checkpoints=source.checkpoints)

    (saved,) = Saving(disk, lambda root, record: files[record.key]).save([commit])
    if isinstance(saved, Exception):
        raise saved
    assert saved is not None  # the commit contains all missing records
    if (session := _session_through(disk.index, source.root, leaf)) is None:
        raise StoreError("the session was removed right after its import; import it again")
    return session, saved.written, saved.commit.leaf is not None


def _session_through(index: Index, root: Root, leaf: Leaf) -> Session | None:
    """Return a session of the leaf's name that ends at the leaf or after it."""
    found = root.key, leaf.name
    sessions = index.sessions_through(leaf.key)
    return next((one for one in sessions if (one.root, one.name) == found), None)
