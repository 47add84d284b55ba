"""Block files: one safetensors file a block or checkpoint, named by its key.

A file holds KV arrays and, in its metadata, everything that the index knows of the block, so that
the index can be rebuilt. The checksum covers names, shapes, dtypes and bytes of all arrays and the
rest of the metadata; it is verified on every read. A block whose model keeps nothing for every
token has no arrays, and a file of metadata alone. Checkpoints have a folder of their own, `parts`:
they can be evicted while their block stays.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreFormatError
from ..match.block import Block
from ..match.keys import Root
from .folder import new_file, sync
from .header import read_metadata

FORMAT = 1
"""Written into every file of a block or checkpoint; a reader refuses what is newer."""

Arrays = Mapping[str, mx.array]


def block_path(folder: Path, key: bytes) -> Path:
    """Return where the block of this key is kept."""
    return _path(folder, "blocks", key)


def checkpoint_path(folder: Path, key: bytes) -> Path:
    """Return where the checkpoint of this key is kept."""
    return _path(folder, "parts", key)


def path_of(folder: Path, block: Block) -> Path:
    """Return where a block or a checkpoint is kept."""
    return _path(folder, "parts" if block.is_checkpoint else "blocks", block.key)


def _path(folder: Path, kind: str, key: bytes) -> Path:
    name = key.hex()
    return folder / kind / name[:2] / f"{name}.safetensors"


def key_of(path: Path) -> bytes | None:
    """Return the key that a file is named by; None for a temporary name."""
    name = path.name.removesuffix(".safetensors")
    return None if name.startswith(".") else bytes.fromhex(name)


def write_block(path: Path, block: Block, root: Root, arrays: Arrays, *, fsync: bool) -> int:
    """Write the file of a block or a checkpoint; return its size in bytes. See `write_file`."""
    return write_file(path, arrays, metadata_of(block, root), fsync=fsync)


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


def metadata_of(block: Block, root: Root) -> dict[str, str]:
    """Return what the file of a block or a checkpoint says of it, but for the checksum."""
    named = {"format": str(FORMAT), "key": block.key.hex()}
    if block.is_checkpoint:
        return {
            **named,
            "block": block.parent.hex(),
            "kind": block.kind,
            "n_tokens": str(block.n_covered),
            "root": root.to_json(),
        }
    return {
        **named,
        "parent": block.parent.hex(),
        "root": root.to_json(),
        "start": str(block.start),
        "ids": block.packed_ids.hex(),
        "text": json.dumps(block.text),
        "pending": block.pending.hex(),
    }


def file_bytes(metadata: Mapping[str, str], arrays: Arrays) -> int:
    """Return the most that a block's or part's file can take, in bytes, before it is written."""
    n_bytes = sum(len(json.dumps(value)) for value in metadata.values())
    return arrays_bytes(arrays) + n_bytes + 1024


def arrays_bytes(arrays: Arrays) -> int:
    """Return the most that arrays take in a file, in bytes, with what its header says of them."""
    return sum(array.nbytes + 2 * len(name) + 192 for name, array in arrays.items())


def read_block(folder: Path, block: Block, *, verify: bool = True) -> tuple[Root, Arrays]:
    """Return the root and the evaluated arrays of a block or a checkpoint.

    Raises what `read_file` does, and BlockCorrupt when the file holds another.
    """
    path = path_of(folder, block)
    found, root, arrays = read_file(path, verify=verify)
    if (found.key, found.packed_ids, found.start) != (block.key, block.packed_ids, block.start):
        raise BlockCorrupt(f"{path.name}: file and index disagree")
    return root, arrays


def read_file(path: Path, *, verify: bool = True) -> tuple[Block, Root, Arrays]:
    """Return the block or checkpoint that a file holds, its root and its evaluated arrays.

    `verify` checks the checksum. Raises what `read_record` does, BlockCorrupt when the arrays are
    damaged, and OSError or MemoryError when they cannot be read now.
    """
    block, root, metadata = read_record(path)
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
    return block, root, arrays


def read_record(path: Path) -> tuple[Block, Root, Mapping[str, str]]:
    """Return what a file says of itself: its block or checkpoint, its root, all of its metadata.

    Raises BlockCorrupt when the file is not whole or has another's name, StoreFormatError when a
    newer version wrote it, FileNotFoundError when there is no such file, and OSError when it cannot
    be read now, which says nothing about it.
    """
    metadata = read_metadata(path)
    is_checkpoint = path.parent.parent.name == "parts"
    block, root = (checkpoint_of if is_checkpoint else block_of)(metadata)
    if block.key != key_of(path):
        raise BlockCorrupt(f"{path.name}: holds {block}")
    return block, root, metadata


def block_of(metadata: Mapping[str, str]) -> tuple[Block, Root]:
    """Return the block and the root that a block file's metadata describe.

    Raises BlockCorrupt when they are incomplete or contradict themselves, and StoreFormatError
    when they were written by a newer version.
    """
    return _described(
        metadata,
        lambda: Block(
            key=bytes.fromhex(metadata["key"]),
            parent=bytes.fromhex(metadata["parent"]),
            start=int(metadata["start"]),
            packed_ids=bytes.fromhex(metadata["ids"]),
            text=json.loads(metadata["text"]),
            pending=bytes.fromhex(metadata["pending"]),
        ),
    )


def checkpoint_of(metadata: Mapping[str, str]) -> tuple[Block, Root]:
    """Return the checkpoint and the root that its file's metadata describe; see `block_of`."""
    return _described(
        metadata,
        lambda: Block(
            key=bytes.fromhex(metadata["key"]),
            parent=bytes.fromhex(metadata["block"]),
            kind=metadata["kind"],
            n_covered=int(metadata["n_tokens"]),
        ),
    )


def _described(metadata: Mapping[str, str], make: Callable[[], Block]) -> tuple[Block, Root]:
    version = metadata.get("format", "")
    if version.isdecimal() and int(version) > FORMAT:
        raise StoreFormatError(f"a file of format {version}; this version reads up to {FORMAT}")
    try:
        block, root = make(), Root.from_json(metadata["root"])
        is_genuine = block.is_genuine
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise BlockCorrupt(f"its metadata cannot be read: {error!r}") from error
    if not is_genuine:
        raise BlockCorrupt(f"{block}: what it says of itself does not hash to its key")
    return block, root


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
