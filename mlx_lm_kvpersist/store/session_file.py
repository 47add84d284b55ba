"""A session in one file, to be moved from store to store: its name, its blocks and checkpoints.

The file is a safetensors file. Its arrays are those of all blocks, in order, block 12's
"0.k.weights" being "000012.0.k.weights", and then those of all checkpoints, checkpoint 3's "0.conv"
being "part.000003.0.conv". Its metadata:

    kvpersist-session   the format, "2"; "1" where there are no checkpoints
    session             JSON: name, n_tokens; choices: what was measured to choose the precision
    block.000012        the header of block 12's own file, as it stood there
    part.000003         the same of checkpoint 3's
    checksum            XXH3-128 of the whole header, with this field empty

The header of a block or checkpoint holds the checksum of its arrays, so every byte of the file is
covered, and with it the own file of each can be made again byte for byte. Both ways, one of them
at a time is in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreError, StoreFormatError
from ..match.block import Block, Root
from .disk import DiskStore
from .files import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    MALFORMED,
    MAX_HEADER_BYTES,
    OwnHeader,
    add_empty,
    block_of,
    checksum,
    open_regular,
    own_header,
    path_of,
    read_file,
    read_header,
)
from .folder import new_file, sync, whole_file
from .index import Index, Leaf, Session
from .records import NewFile, Turn

SESSION_FORMAT = 2
"""A reader refuses a newer one. Without checkpoints it is 1, which old versions read."""

_FORMAT_KEY = "kvpersist-session"
Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Say nothing of how far a transfer is."""


def _own_headers(metadata: Mapping[str, str], kind: str) -> list[OwnHeader]:
    n_headers = sum(name.startswith(f"{kind}.") for name in metadata)
    return [own_header(metadata[f"{kind}.{number:06}"]) for number in range(n_headers)]


def file_header(
    session: str, blocks: Sequence[OwnHeader], parts: Sequence[OwnHeader] = ()
) -> bytes:
    """Return the header of the exported file, checksum included."""
    version = SESSION_FORMAT if parts else 1
    metadata = {_FORMAT_KEY: str(version), "session": session, "checksum": ""}
    content: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    numbered = [
        *((f"block.{number:06}", f"{number:06}", block) for number, block in enumerate(blocks)),
        *((f"part.{number:06}", f"part.{number:06}", part) for number, part in enumerate(parts)),
    ]
    for field, prefix, header in numbered:
        metadata[field] = header.text
        for name, dtype, shape in header.tensors:
            end = position + math.prod(shape) * DTYPE_BYTES[dtype]
            entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            content[f"{prefix}.{name}"] = entry
            position = end
    unsigned = json.dumps(content, separators=(",", ":"))
    metadata["checksum"] = xxhash.xxh3_128_hexdigest(unsigned.encode())
    return json.dumps(content, separators=(",", ":")).encode()


class SessionFile:
    """An exported session, checked from the first byte to the last.

    Raises StoreFormatError when a newer version wrote it and StoreError when it is anything but
    what `export_session` writes.
    """

    def __init__(self, path: Path, progress: Progress = no_progress) -> None:
        self.path = path
        self._file = open_regular(path, follow=True)
        try:
            self._read(progress)
        except BaseException as error:
            self._file.close()
            newer = isinstance(error, StoreFormatError)
            if newer or not isinstance(error, (StoreError, *MALFORMED)):
                raise
            raise StoreError(f"{path} is no whole exported session: {error}") from error

    def close(self) -> None:
        self._file.close()

    def _read(self, progress: Progress) -> None:
        header = read_header(self._file)
        metadata = json.loads(header)["__metadata__"]
        version = metadata.get(_FORMAT_KEY)
        if version is None:
            raise ValueError("it holds no session")
        if version.isdecimal() and int(version) > SESSION_FORMAT:
            raise StoreFormatError(
                f"{self.path} has format {version}; this version reads up to {SESSION_FORMAT}. "
                "Upgrade mlx-lm-kvpersist."
            )
        blocks, parts = _own_headers(metadata, "block"), _own_headers(metadata, "part")
        if header != file_header(metadata["session"], blocks, parts):
            raise ValueError("its header does not match its checksum")
        self._n_blocks, self._headers = len(blocks), [*blocks, *parts]
        self._starts = []
        position = LENGTH_BYTES + len(header)
        for own in self._headers:
            self._starts.append(position)
            position += own.n_data_bytes
        n_bytes = os.fstat(self._file.fileno()).st_size
        if n_bytes != position:
            raise ValueError(f"it has {n_bytes} bytes and should have {position}")
        self._read_chain(progress)
        self._read_parts(progress)
        self._read_session(json.loads(metadata["session"]))

    def _read_chain(self, progress: Progress) -> None:
        nodes: list[Block] = []
        root: Root | None = None
        for number in range(self._n_blocks):
            node, block_root = self._checked(number)
            _check_tokens(node)
            root = root or block_root
            parent, start = (nodes[-1].key, nodes[-1].stop) if nodes else (root.key, 0)
            if (block_root, node.parent, node.start) != (root, parent, start):
                raise ValueError(f"block {number} does not continue the one before it")
            nodes.append(node)
            progress(number + 1, len(self._headers))
        if root is None:
            raise ValueError("it holds no blocks")
        self.root, self.blocks = root, tuple(nodes)

    def _read_session(self, about: dict[str, Any]) -> None:
        name = about["name"]
        if name is not None:
            if not isinstance(name, str):
                raise ValueError(f"the session's name is {name!r}")
            name.encode()
        if about["n_tokens"] != self.blocks[-1].stop:
            raise ValueError("the session does not end where its last block does")
        self.name: str | None = name
        choices = about.get("choices", {})
        if not isinstance(choices, dict):
            raise ValueError(f"its choices are {choices!r:.200}")
        self.choices: dict[str, Any] = choices

    def _read_parts(self, progress: Progress) -> None:
        blocks = {node.key for node in self.blocks}
        parts: dict[bytes, Block] = {}
        for number in range(self._n_blocks, len(self._headers)):
            part, root = self._checked(number)
            if root != self.root or part.parent not in blocks or part.key in parts:
                raise ValueError(f"part {number - self._n_blocks} belongs to none of its blocks")
            parts[part.key] = part
            progress(number + 1, len(self._headers))
        self.checkpoints = tuple(parts.values())

    def _checked(self, number: int) -> tuple[Block, Root]:
        """Check a file as the server does before it uses one, and its root's types besides.

        A server trusts the folder's owner; an exported file may come from anywhere.
        """
        try:
            loaded: Any = mx.load(
                BytesIO(self.own_file(number)), format="safetensors", return_metadata=True
            )
            arrays, metadata = loaded
            mx.eval(arrays)
        except Exception as error:
            raise BlockCorrupt(f"file {number}: {error}") from error
        try:
            what, root = block_of(metadata, is_checkpoint=number >= self._n_blocks)
        except StoreFormatError as error:
            raise StoreFormatError(f"{self.path}: file {number}: {error}") from error
        add_empty(arrays, metadata)
        if metadata.get("checksum") != checksum(arrays, metadata):
            raise BlockCorrupt(f"{what.key.hex()} does not match its checksum")
        texts = (root.fingerprint, root.precision, root.namespace, root.session, root.model)
        if not all(isinstance(text, str) for text in texts) or not isinstance(root.with_text, bool):
            raise BlockCorrupt(f"{what.key.hex()}: its root has the wrong types")
        return what, root

    @property
    def items(self) -> tuple[Block, ...]:
        """All that it holds, in the order of `own_file`."""
        return (*self.blocks, *self.checkpoints)

    def n_own_bytes(self, number: int) -> int:
        """Return the size of a block's or checkpoint's own file."""
        return self._headers[number].n_file_bytes

    def own_file(self, number: int) -> bytes:
        """Return a block's or checkpoint's own file."""
        header = self._headers[number]
        self._file.seek(self._starts[number])
        text = header.text.encode()
        return len(text).to_bytes(LENGTH_BYTES, "little") + text + self._file.read(
            header.n_data_bytes
        )  # fmt: skip


def _check_tokens(node: Block) -> None:
    if not isinstance(node.text, str):
        raise BlockCorrupt(f"block {node.key.hex()}: its text is none")
    node.text.encode()
    if not node.packed_ids or len(node.packed_ids) % 4:
        raise BlockCorrupt(f"block {node.key.hex()} holds no whole tokens")


# Out of a store.


def export_session(
    folder: Path,
    index: Index,
    session: Session,
    target: Path,
    progress: Progress = no_progress,
    choices: Mapping[str, Any] | None = None,
) -> int:
    """Write a session to a file, which appears when it is whole; return its size in bytes.

    `choices` are JSON values that go with it: why it is kept in its precision. Every block and
    checkpoint is checked on the way. Checkpoints that go meanwhile are left out. Raises StoreError
    when a block is missing or anything is damaged.
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
    about: dict[str, Any] = {"name": session.name, "n_tokens": session.n_tokens}
    if choices:
        about["choices"] = choices
    header = file_header(json.dumps(about), headers[: len(chain)], headers[len(chain) :])
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
    return Imported(session, written, is_new=there is None)


def _session_through(index: Index, root: Root, leaf: Leaf) -> Session | None:
    """Return a session of the leaf's name that ends in it or beyond it."""
    for session in index.sessions():
        if (session.root, session.name) == (root.key, leaf.name) and any(
            node.key == leaf.key for node, _ in index.chain(session.leaf)
        ):
            return session
    return None


def _write(content_of: Callable[[], bytes], path: Path, *, fsync: bool) -> int:
    """Write the file of a block or checkpoint; return its size in bytes."""
    with new_file(path) as file:
        n_bytes = file.write(content_of())
    if fsync:
        sync(path)
    return n_bytes
