"""Block files: one safetensors file a block or checkpoint, named by its key.

A file holds KV arrays and, in its metadata, everything that the index knows of the block, so that
the index can be rebuilt. The checksum covers names, shapes, dtypes and bytes of all arrays and the
rest of the metadata; it is verified on every read. A block whose model keeps nothing for every
token has no arrays, and a file of metadata alone. Checkpoints have a folder of their own, `parts`:
they can be evicted while their block stays.

What a file's header claims is compared with what the file has, and bounded. Source of the format:
https://github.com/huggingface/safetensors (8 bytes of length, JSON, arrays).
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreFormatError
from ..match.block import Block, Root
from .folder import new_file, sync

FORMAT = 1
"""Written into every file of a block or checkpoint; a reader refuses what is newer."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads (huggingface/safetensors, MAX_HEADER_SIZE)."""
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors that a malformed header raises when it is read."""
_IRREGULAR = (errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""The error numbers of opening a link or a socket."""

Arrays = Mapping[str, mx.array]


def block_path(folder: Path, key: bytes) -> Path:
    """Return where the block of this key is kept."""
    return folder / "blocks" / key.hex()[:2] / f"{key.hex()}.safetensors"


def checkpoint_path(folder: Path, key: bytes) -> Path:
    """Return where the checkpoint of this key is kept."""
    return folder / "parts" / key.hex()[:2] / f"{key.hex()}.safetensors"


def path_of(folder: Path, block: Block) -> Path:
    """Return where a block or a checkpoint is kept."""
    return (checkpoint_path if block.is_checkpoint else block_path)(folder, block.key)


def key_of(path: Path) -> bytes | None:
    """Return the key that a file is named by; None for a temporary name."""
    name = path.name.removesuffix(".safetensors")
    return None if name.startswith(".") else bytes.fromhex(name)


def write_block(path: Path, block: Block, root: Root, arrays: Arrays, *, fsync: bool) -> int:
    """Write the file of a block or a checkpoint, a new one; return its size in bytes.

    The arrays must have been evaluated. The name must end in .safetensors. Raises FileExistsError
    when there is such a file, and OSError or RuntimeError when the disk refuses.
    """
    new_file(path).close()
    metadata = metadata_of(block, root)
    # mlx 0.31 cannot write arrays without elements, such as the values of an indexer.
    empty = {name: x for name, x in arrays.items() if not x.size}
    if empty:
        described = {name: [_name_of(x.dtype), x.shape] for name, x in empty.items()}
        metadata["empty"] = json.dumps(described)
    written = {name: x for name, x in arrays.items() if x.size}
    if mx.cuda.is_available():
        # CUDA moves what is read here into the host's memory; the next restore would have to wait
        # until it is back. So a copy is read.
        written = {name: mx.take(x, mx.arange(len(x)), axis=0) for name, x in written.items()}
        mx.eval(written)
    metadata["checksum"] = checksum({**written, **empty}, metadata)
    mx.save_safetensors(str(path), written, metadata)
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
    """Return the most that a block's or checkpoint's file can take, in bytes, before it is written.

    The file's header names each array.
    """
    n_bytes = sum(len(json.dumps(value)) for value in metadata.values())
    return n_bytes + sum(a.nbytes + 2 * len(name) + 192 for name, a in arrays.items()) + 1024


def read_file(
    path: Path, *, verify: bool = True, expected: Block | None = None
) -> tuple[Block, Root, Arrays]:
    """Return the block or checkpoint that a file holds, its root and its evaluated arrays.

    `verify` checks the checksum. Raises what `read_record` does, BlockCorrupt when the arrays are
    damaged or the block is not the expected one, and OSError or MemoryError when they cannot be
    read now.
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
    add_empty(arrays, metadata)
    if verify and metadata.get("checksum") != checksum(arrays, metadata):
        raise BlockCorrupt(f"{path.name}: its content does not match its checksum")
    if expected is not None and (block.key, block.packed_ids, block.start) != (
        expected.key,
        expected.packed_ids,
        expected.start,
    ):
        raise BlockCorrupt(f"{path.name}: file and index disagree")
    return block, root, arrays


def read_record(path: Path) -> tuple[Block, Root, Mapping[str, str]]:
    """Return what a file says of itself: its block or checkpoint, its root, all of its metadata.

    Raises BlockCorrupt when the file is not whole or has another's name, StoreFormatError when a
    newer version wrote it, FileNotFoundError when there is no such file, and OSError when it cannot
    be read now, which says nothing about it.
    """
    with open_regular(path) as file:
        try:
            header = own_header(read_header(file).decode())
        except MALFORMED as error:
            raise BlockCorrupt(f"{path.name}: its header cannot be read: {error}") from error
        n_bytes = os.fstat(file.fileno()).st_size
    if n_bytes != header.n_file_bytes:
        raise BlockCorrupt(
            f"{path.name}: has {n_bytes} bytes and should have {header.n_file_bytes}"
        )
    block, root = block_of(header.metadata, is_checkpoint=path.parent.parent.name == "parts")
    if path.name != f"{block.key.hex()}.safetensors":
        raise BlockCorrupt(f"{path.name}: holds {block}")
    return block, root, header.metadata


def block_of(metadata: Mapping[str, str], *, is_checkpoint: bool = False) -> tuple[Block, Root]:
    """Return the block or checkpoint, and its root, that the metadata of its file describe.

    Raises BlockCorrupt when they are incomplete or contradict themselves, and StoreFormatError
    when they were written by a newer version.
    """
    version = metadata.get("format", "")
    if version.isdecimal() and int(version) > FORMAT:
        raise StoreFormatError(f"a file of format {version}; this version reads up to {FORMAT}")
    try:
        key, root = bytes.fromhex(metadata["key"]), Root.from_json(metadata["root"])
        if is_checkpoint:
            block = Block(
                key,
                parent=bytes.fromhex(metadata["block"]),
                kind=metadata["kind"],
                n_covered=int(metadata["n_tokens"]),
            )
        else:
            block = Block(
                key,
                parent=bytes.fromhex(metadata["parent"]),
                start=int(metadata["start"]),
                packed_ids=bytes.fromhex(metadata["ids"]),
                text=json.loads(metadata["text"]),
                pending=bytes.fromhex(metadata["pending"]),
            )
        is_genuine = block.is_genuine and block.is_checkpoint == is_checkpoint
    except (*MALFORMED, OverflowError) as error:
        raise BlockCorrupt(f"its metadata cannot be read: {error!r}") from error
    if not is_genuine:
        raise BlockCorrupt(f"{block}: what it says of itself does not hash to its key")
    return block, root


def add_empty(arrays: dict[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Add the arrays without elements, which stand in the metadata of a file alone.

    Raises BlockCorrupt when the metadata describe anything else.
    """
    try:
        for name, (dtype, shape) in json.loads(metadata.get("empty", "{}")).items():
            if math.prod(shape):  # before there is a checksum, no memory is taken
                raise ValueError(f"{name} has the shape {shape}")
            arrays[name] = mx.zeros(shape, getattr(mx, dtype))
            mx.eval(arrays[name])  # another thread may use it
    except (*MALFORMED, OverflowError, RuntimeError) as error:
        raise BlockCorrupt(f"its metadata cannot be read: {error!r}") from error


def _name_of(dtype: mx.Dtype) -> str:
    """Return the name that MLX has for a type, such as "float32"."""
    return str(dtype).rpartition(".")[2]


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


# The header of a safetensors file.


@dataclass(frozen=True)
class OwnHeader:
    """The header of a block's or checkpoint's own file, as text, and what it says."""

    text: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape, in the order of their bytes."""
    n_data_bytes: int
    n_file_bytes: int
    metadata: Mapping[str, str]


def own_header(text: str) -> OwnHeader:
    """Read the header of a block or checkpoint.

    Raises one of MALFORMED unless it describes arrays that lie one after the other.
    """
    content: dict[str, Any] = json.loads(text)
    metadata: dict[str, str] = content.pop("__metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no text")
    placed = []
    for name, entry in content.items():
        shape = tuple(entry["shape"])
        if any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{name} has the shape {shape}")
        n_bytes = math.prod(shape) * DTYPE_BYTES[entry["dtype"]]
        placed.append((entry["data_offsets"], n_bytes, name, entry["dtype"], shape))
    end = 0
    for offsets, n_bytes, name, _, _ in sorted(placed):
        if offsets != [end, end + n_bytes]:
            raise ValueError(f"{name} takes {n_bytes} bytes and stands at {offsets}, not {end}")
        end += n_bytes
    tensors = tuple(tuple(item[2:]) for item in sorted(placed))
    return OwnHeader(text, tensors, end, LENGTH_BYTES + len(text.encode()) + end, metadata)


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a file to read it. A pipe is not waited for, and a device not woken.

    Raises BlockCorrupt where it is no regular file, or a link that is not to be followed.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise BlockCorrupt(f"{path.name}: is no regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BlockCorrupt(f"{path.name}: is no regular file")
    return os.fdopen(descriptor, "rb")


def read_header(source: BinaryIO) -> bytes:
    """Read the header of an open file, which then stands at its arrays.

    Raises ValueError when it is longer than the file, or than a header may be.
    """
    n_bytes = int.from_bytes(source.read(LENGTH_BYTES), "little")
    most = os.fstat(source.fileno()).st_size - LENGTH_BYTES
    header = source.read(n_bytes) if n_bytes <= min(most, MAX_HEADER_BYTES) else b""
    if n_bytes != len(header):
        raise ValueError("its header is cut off")
    return header
