"""Block files: one safetensors file a block, named by its key, never overwritten.

A file holds the block's KV arrays and, in its metadata, everything that the index knows of it, so
that the index can be rebuilt. The checksum covers names, shapes, dtypes and bytes of all arrays
and the rest of the metadata; it is verified on every read. A block whose model keeps nothing for
every token has no arrays, and a file of metadata alone. Files of parts are written and read alike
(`part_files`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreFormatError
from ..match.keys import Root, block_key
from ..match.tree import Node

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
    try:
        return bytes.fromhex(path.name.removesuffix(".safetensors"))
    except ValueError:
        return None


def write_block(folder: Path, node: Node, root: Root, arrays: Arrays, *, fsync: bool) -> int:
    """Publish a block: a reader sees all of it or nothing. Return the file's size in bytes.

    The arrays must have been evaluated. Raises OSError or RuntimeError when the disk refuses.
    """
    return write_file(block_path(folder, node.key), arrays, metadata_of(node, root), fsync=fsync)


def write_file(path: Path, arrays: Arrays, metadata: dict[str, str], *, fsync: bool) -> int:
    """Publish arrays with their metadata and the checksum; as `write_block` for any file."""
    if path.exists():
        return path.stat().st_size
    make_private(path.parent)
    metadata = {**metadata, "checksum": checksum(arrays, metadata)}
    # mlx appends .safetensors to any other name, so the temporary name ends in it too.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp.safetensors")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        mx.save_safetensors(str(temporary), dict(arrays), metadata)
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
        if fsync:
            sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
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


def file_bytes(node: Node, arrays: Arrays) -> int:
    """Return the most that a block's file can take, in bytes, before it is written."""
    return arrays_bytes(arrays) + 2 * len(node.packed_ids) + 12 * len(node.text) + 4096


def arrays_bytes(arrays: Arrays) -> int:
    """Return the most that arrays take in a file, in bytes, with what its header says of them."""
    return sum(array.nbytes + 2 * len(name) + 192 for name, array in arrays.items())


def read_block(
    folder: Path, key: bytes, *, verify: bool = True
) -> tuple[Node, Root, dict[str, mx.array]]:
    """Return a block's node, its root and its evaluated arrays; `verify` checks the checksum.

    Raises FileNotFoundError when there is no such block and BlockCorrupt when the file is not what
    its name, its metadata or its checksum promise.
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

    Raises what `about` does, FileNotFoundError when there is no such file, and BlockCorrupt when
    it is not whole.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays: dict[str, mx.array] = loaded[0]
        metadata: dict[str, str] = loaded[1]
        mx.eval(arrays)
        described = about(metadata)
        is_whole = not verify or metadata.get("checksum") == checksum(arrays, metadata)
    except StoreFormatError:
        raise
    except Exception as error:
        if not path.exists():  # another process made room
            raise FileNotFoundError(path) from error
        raise BlockCorrupt(f"{path.name}: cannot be read: {error}") from error
    if not is_whole:
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


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents; what is new is for its owner alone."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)


def sync(path: Path) -> None:
    """Flush a file or a folder to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a safetensors file without reading its arrays.

    Source of the format: https://github.com/huggingface/safetensors (8 bytes of length, JSON).
    """
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        if n_bytes > path.stat().st_size:
            raise BlockCorrupt(f"{path.name}: its header is cut off")
        try:
            header: dict[str, Any] = json.loads(file.read(n_bytes))
            metadata: dict[str, Any] = header.get("__metadata__", {})
        except (ValueError, AttributeError) as error:
            raise BlockCorrupt(f"{path.name}: its header cannot be read: {error}") from error
        return metadata
