"""Block files: one safetensors file a block, named by its key.

A file holds the block's KV arrays and, in its metadata, everything that the index knows of it, so
that the index can be rebuilt. The checksum covers names, shapes, dtypes and bytes of all arrays
and the rest of the metadata; it is verified on every read. A block whose model keeps nothing for
every token has no arrays, and a file of metadata alone. Files of parts are written and read alike
(`part_files`).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreFormatError
from ..match.keys import Root, block_key
from ..match.tree import Node
from .folder import new_file, sync
from .header import read_metadata

FORMAT = 1
"""Written into every file of a block or part; a reader refuses what is newer."""

Arrays = Mapping[str, mx.array]
About = TypeVar("About")


def block_path(folder: Path, key: bytes) -> Path:
    """Return where the block of this key is kept."""
    name = key.hex()
    return folder / "blocks" / name[:2] / f"{name}.safetensors"


def key_of(path: Path) -> bytes | None:
    """Return the key that a block's or part's file is named by; None for a temporary name."""
    name = path.name.removesuffix(".safetensors")
    return None if name.startswith(".") else bytes.fromhex(name)


def write_block(path: Path, node: Node, root: Root, arrays: Arrays, *, fsync: bool) -> int:
    """Write a block's file and return its size in bytes; see `write_file`."""
    return write_file(path, arrays, metadata_of(node, root), fsync=fsync)


def write_file(path: Path, arrays: Arrays, metadata: dict[str, str], *, fsync: bool) -> int:
    """Write arrays with their metadata and the checksum to a new file; return its size in bytes.

    The arrays must have been evaluated. The name must end in .safetensors. Raises FileExistsError
    when there is such a file, and OSError or RuntimeError when the disk refuses.
    """
    new_file(path).close()
    metadata = {**metadata, "checksum": checksum(arrays, metadata)}
    mx.save_safetensors(str(path), dict(arrays), metadata)
    if fsync:
        sync(path)
    return path.stat().st_size


def metadata_of(node: Node, root: Root) -> dict[str, str]:
    """Return what a block's file says of it, but for the checksum."""
    return {
        "format": str(FORMAT),
        "key": node.key.hex(),
        "parent": node.parent.hex(),
        "root": root.to_json(),
        "start": str(node.start),
        "ids": node.packed_ids.hex(),
        "text": json.dumps(node.text),
        "pending": node.pending.hex(),
    }


def file_bytes(metadata: Mapping[str, str], arrays: Arrays) -> int:
    """Return the most that a block's or part's file can take, in bytes, before it is written."""
    n_bytes = sum(len(json.dumps(value)) for value in metadata.values())
    return arrays_bytes(arrays) + n_bytes + 1024


def arrays_bytes(arrays: Arrays) -> int:
    """Return the most that arrays take in a file, in bytes, with what its header says of them."""
    return sum(array.nbytes + 2 * len(name) + 192 for name, array in arrays.items())


def read_block(
    folder: Path, key: bytes, *, verify: bool = True
) -> tuple[Node, Root, dict[str, mx.array]]:
    """Return a block's node, its root and its evaluated arrays; `verify` checks the checksum.

    Raises what `read_file` does, and BlockCorrupt when it is another block's.
    """
    path = block_path(folder, key)
    (node, root), arrays = read_file(path, node_of, verify=verify)
    if node.key != key:
        raise BlockCorrupt(f"{path.name}: holds block {node.key.hex()}")
    return node, root, arrays


def read_file(
    path: Path, about: Callable[[Mapping[str, str]], About], *, verify: bool
) -> tuple[About, dict[str, mx.array]]:
    """Return what `about` makes of a file's metadata, and its evaluated arrays.

    Raises what `about` does, BlockCorrupt when it is not whole, FileNotFoundError when there is no
    such file, and OSError or MemoryError when it cannot be read now, which says nothing about it.
    """
    metadata = read_metadata(path)
    described = about(metadata)
    try:
        arrays: Any = mx.load(str(path))
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        # Its header is sound and its size right: it is the machine that cannot read it now.
        if not path.exists():  # another process made room
            raise FileNotFoundError(path) from error
        raise OSError(errno.EIO, f"{path.name}: {error}") from error
    if verify and metadata.get("checksum") != checksum(arrays, metadata):
        raise BlockCorrupt(f"{path.name}: its content does not match its checksum")
    return described, arrays


def node_of(metadata: Mapping[str, str]) -> tuple[Node, Root]:
    """Return the node and the root that a file's metadata describe.

    Raises BlockCorrupt when they are incomplete or contradict themselves, and StoreFormatError
    when they were written by a newer version.
    """
    check_format(metadata, "block")
    try:
        node = Node(
            key=bytes.fromhex(metadata["key"]),
            parent=bytes.fromhex(metadata["parent"]),
            start=int(metadata["start"]),
            packed_ids=bytes.fromhex(metadata["ids"]),
            text=json.loads(metadata["text"]),
            pending=bytes.fromhex(metadata["pending"]),
        )
        root = Root.from_json(metadata["root"])
    except (KeyError, ValueError, TypeError) as error:
        raise BlockCorrupt(f"block metadata cannot be read: {error!r}") from error
    if block_key(node.parent, node.packed_ids) != node.key:
        raise BlockCorrupt(f"block {node.key.hex()}: its ids do not hash to its key")
    return node, root


def check_format(metadata: Mapping[str, str], what: str) -> None:
    """Raise StoreFormatError when a newer version wrote a file, "block" or "part"."""
    version = metadata.get("format", "")
    if version.isdecimal() and int(version) > FORMAT:
        raise StoreFormatError(f"a {what} of format {version}; this version reads up to {FORMAT}")


def checksum(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    """Return the XXH3-128 of arrays (names, dtypes, shapes, bytes) and metadata, as hex."""
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}:{array.dtype}:{array.shape}".encode())
        # numpy and the buffer protocol know no bfloat16; its bytes are what counts.
        plain: Any = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        content = memoryview(plain)  # holds no reference: `plain` must live as long
        if not content.c_contiguous:
            plain = mx.contiguous(plain)
            content = memoryview(plain)
        digest.update(content)
    for name in sorted(metadata):
        if name != "checksum":
            digest.update(f"{name}={metadata[name]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
