"""A session in one file, to be moved from store to store: its name and its blocks.

The file is a safetensors file. Its arrays are those of all blocks, in order, block 12's
"0.k.weights" being "000012.0.k.weights". Its metadata:

    kvpersist-session   the format, "1"
    session             JSON: name, n_tokens
    block.000012        the header of the 12th block's own file, as it stood there
    checksum            XXH3-128 of the whole header, with this field empty

A block's header holds the checksum of its arrays, so every byte of the file is covered, and with
it the block's own file can be made again byte for byte. Both ways, one block at a time is in
memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreError, StoreFormatError
from ..match.keys import Root
from ..match.tree import Node
from .disk import DiskStore
from .files import block_path, checksum, make_private, node_of, read_block, sync
from .index import Index, Leaf, Session
from .turn import NewFile, Turn

__all__ = ["Imported", "SessionFile", "export_session", "import_session"]

SESSION_FORMAT = 1
"""A reader refuses what is newer."""

_FORMAT_KEY = "kvpersist-session"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads (huggingface/safetensors, MAX_HEADER_SIZE)."""
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip

Progress = Callable[[int, int], None]


def _no_progress(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class _Header:
    """The header of one block's file, as text, and what it says."""

    text: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape, in the order of their bytes."""
    n_data_bytes: int

    @property
    def n_file_bytes(self) -> int:
        return _LENGTH_BYTES + len(self.text.encode()) + self.n_data_bytes


def _block_header(text: str) -> _Header:
    """Read a block's header. Raises ValueError unless its arrays lie one after the other."""
    content: dict[str, Any] = json.loads(text)
    content.pop("__metadata__")
    placed = []
    for name, entry in content.items():
        shape = tuple(entry["shape"])
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{name} has the shape {shape}")
        n_bytes = math.prod(shape) * _DTYPE_BYTES[entry["dtype"]]
        placed.append((entry["data_offsets"], n_bytes, name, entry["dtype"], shape))
    end = 0
    for offsets, n_bytes, name, _, _ in sorted(placed):
        if offsets != [end, end + n_bytes]:
            raise ValueError(f"{name} takes {n_bytes} bytes and stands at {offsets}, not {end}")
        end += n_bytes
    return _Header(text, tuple(tuple(item[2:]) for item in sorted(placed)), end)


def _file_header(session: str, blocks: Sequence[_Header]) -> bytes:
    """Return the header of the exported file, checksum included."""
    metadata = {_FORMAT_KEY: str(SESSION_FORMAT), "session": session, "checksum": ""}
    content: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for number, block in enumerate(blocks):
        metadata[f"block.{number:06}"] = block.text
        for name, dtype, shape in block.tensors:
            end = position + math.prod(shape) * _DTYPE_BYTES[dtype]
            entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            content[f"{number:06}.{name}"] = entry
            position = end
    unsigned = json.dumps(content, separators=(",", ":"))
    metadata["checksum"] = xxhash.xxh3_128_hexdigest(unsigned.encode())
    return json.dumps(content, separators=(",", ":")).encode()


# Out of a store.


def export_session(
    folder: Path, index: Index, session: Session, target: Path, progress: Progress = _no_progress
) -> int:
    """Write a session to a file, which appears when it is whole; return its size in bytes.

    Every block is checked on the way. Raises StoreError when one is missing or damaged.
    """
    chain = [node for node, _ in index.chain(session.leaf)]
    if not chain:
        raise StoreError(f"session {session.id} has lost blocks; run store verify")
    headers: list[_Header] = []
    for number, node in enumerate(chain):
        try:
            read_block(folder, node.key)
            with block_path(folder, node.key).open("rb") as source:
                headers.append(_block_header(_read_header(source).decode()))
        except (FileNotFoundError, BlockCorrupt, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"block {number} of session {session.id}: {error}; run store verify"
            ) from error
        progress(number + 1, 2 * len(chain))
    about = json.dumps({"name": session.name, "n_tokens": session.n_tokens})
    header = _file_header(about, headers)
    if len(header) > _MAX_HEADER_BYTES:
        raise StoreError(f"session {session.id} is too long for one file ({len(chain)} blocks)")
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
            for number, (node, block) in enumerate(zip(chain, headers, strict=True)):
                with block_path(folder, node.key).open("rb") as source:
                    if _read_header(source) != block.text.encode():
                        raise StoreError(f"block {number} was replaced meanwhile; try again")
                    shutil.copyfileobj(source, file, 1 << 20)
                progress(len(chain) + number + 1, 2 * len(chain))
        sync(temporary)
        os.replace(temporary, target)
    except FileNotFoundError as error:
        raise StoreError(f"session {session.id} cannot be exported: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target.stat().st_size


def _read_header(source: BinaryIO) -> bytes:
    """Read length and header of a safetensors file; what follows are its arrays."""
    n_bytes = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    header = source.read(n_bytes) if n_bytes <= _MAX_HEADER_BYTES else b""
    if n_bytes != len(header):
        raise ValueError("its header is cut off")
    return header


# Into a store.


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    session: Session
    n_blocks: int
    n_written: int
    """Blocks that were not there yet."""
    is_new: bool
    """Whether the session was added or went on; False where it was there."""


class SessionFile:
    """An exported session, checked from the first byte to the last.

    Raises StoreFormatError when a newer version wrote it and StoreError when it is anything but
    what `export_session` writes.
    """

    def __init__(self, path: Path, progress: Progress = _no_progress) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._read(progress)
        except StoreFormatError:
            self._file.close()
            raise
        except (
            StoreError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            self._file.close()
            raise StoreError(f"{path} is no whole exported session: {error}") from error
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _read(self, progress: Progress) -> None:
        header = _read_header(self._file)
        metadata = json.loads(header)["__metadata__"]
        version = metadata.get(_FORMAT_KEY)
        if version is None:
            raise ValueError("it holds no session")
        if version.isdecimal() and int(version) > SESSION_FORMAT:
            raise StoreFormatError(
                f"{self.path} has format {version}; this version reads up to {SESSION_FORMAT}. "
                "Upgrade mlx-lm-kvpersist."
            )
        n_blocks = sum(name.startswith("block.") for name in metadata)
        texts = [metadata[f"block.{number:06}"] for number in range(n_blocks)]
        self._headers = [_block_header(text) for text in texts]
        if header != _file_header(metadata["session"], self._headers):
            raise ValueError("its header does not match its checksum")
        self._starts = []
        position = _LENGTH_BYTES + len(header)
        for block in self._headers:
            self._starts.append(position)
            position += block.n_data_bytes
        n_bytes = os.fstat(self._file.fileno()).st_size
        if n_bytes != position:
            raise ValueError(f"it has {n_bytes} bytes and should have {position}")
        self._read_chain(progress)
        self._read_session(json.loads(metadata["session"]))

    def _read_chain(self, progress: Progress) -> None:
        nodes: list[Node] = []
        root: Root | None = None
        for number in range(len(self._headers)):
            try:
                node, block_root = _checked(self.block_bytes(number))
            except StoreFormatError as error:
                raise StoreFormatError(f"{self.path}: block {number}: {error}") from error
            root = root or block_root
            parent, start = (nodes[-1].key, nodes[-1].stop) if nodes else (root.key, 0)
            if (block_root, node.parent, node.start) != (root, parent, start):
                raise ValueError(f"block {number} does not continue the one before it")
            nodes.append(node)
            progress(number + 1, len(self._headers))
        if root is None:
            raise ValueError("it holds no blocks")
        self.root, self.nodes = root, tuple(nodes)

    def _read_session(self, about: dict[str, Any]) -> None:
        name = about["name"]
        if name is not None:
            if not isinstance(name, str):
                raise ValueError(f"the session's name is {name!r}")
            name.encode()
        if about["n_tokens"] != self.nodes[-1].stop:
            raise ValueError("the session does not end where its last block does")
        self.name: str | None = name

    def n_block_bytes(self, number: int) -> int:
        """Return the size of a block's own file."""
        return self._headers[number].n_file_bytes

    def block_bytes(self, number: int) -> bytes:
        """Return a block's own file."""
        header = self._headers[number]
        self._file.seek(self._starts[number])
        text = header.text.encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text + self._file.read(
            header.n_data_bytes
        )  # fmt: skip


def _checked(content: bytes) -> tuple[Node, Root]:
    """Check a block's file as the server does before it uses one, and its types besides.

    A server trusts the folder's owner; an exported file may come from anywhere.
    """
    try:
        loaded: Any = mx.load(BytesIO(content), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        mx.eval(arrays)
    except Exception as error:
        raise BlockCorrupt(str(error)) from error
    node, root = node_of(metadata)
    if metadata.get("checksum") != checksum(arrays, metadata):
        raise BlockCorrupt(f"block {node.key.hex()} does not match its checksum")
    about = (root.fingerprint, root.precision, root.namespace, root.session, root.model)
    texts = (*about, node.text)
    if not all(isinstance(text, str) for text in texts) or not isinstance(root.with_text, bool):
        raise BlockCorrupt(f"block {node.key.hex()}: its metadata have the wrong types")
    node.text.encode()
    if not node.packed_ids or len(node.packed_ids) % 4:
        raise BlockCorrupt(f"block {node.key.hex()} holds no whole tokens")
    return node, root


def import_session(disk: DiskStore, source: SessionFile) -> Imported:
    """Write a checked session to a store, within its budget, whole or not at all.

    A session that is there is left as it is, and so is one of the same name that goes on from
    it; one that ends on the way to it moves. Raises StoreError when there is no room.
    """
    keys = tuple(node.key for node in source.nodes)
    leaf = Leaf(source.name, keys[-1], source.nodes[-1].stop, keys)
    files = [
        NewFile(
            node,
            source.n_block_bytes(number),
            partial(_publish, disk, node, partial(source.block_bytes, number)),
        )
        for number, node in enumerate(source.nodes)
    ]
    with disk.lock.held():
        there = _session_through(disk.index, source.root, leaf)
        turn = Turn(source.root, source.nodes, leaf)
        session, n_written = disk.adopt(replace(turn, leaf=None) if there else turn, files)
    session = there or session
    assert session is not None  # a turn with a leaf has one
    return Imported(session, len(files), n_written, is_new=there is None)


def _session_through(index: Index, root: Root, leaf: Leaf) -> Session | None:
    """Return a session of the leaf's name that ends in it or beyond it."""
    for session in index.sessions():
        if (session.root, session.name) == (root.key, leaf.name) and any(
            node.key == leaf.key for node, _ in index.chain(session.leaf)
        ):
            return session
    return None


def _publish(disk: DiskStore, node: Node, content_of: Callable[[], bytes]) -> int:
    """Make a block's file appear: a reader sees all of it or nothing."""
    path = block_path(disk.folder, node.key)
    if path.exists():
        return path.stat().st_size
    make_private(path.parent)
    temporary = path.with_name(f".{node.key.hex()}.{os.getpid()}.tmp.safetensors")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content_of())
        if disk.limits.fsync:
            sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size
