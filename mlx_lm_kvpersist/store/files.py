"""Block files: one safetensors file for each block or checkpoint, named by its key.

A file holds KV arrays (possibly none) and all metadata from which the index can be rebuilt. The
checksum covers the metadata, and names, shapes, dtypes and bytes of all arrays. It is verified
whenever arrays are read. Source of the format: https://github.com/huggingface/safetensors (8 bytes
of length, JSON, arrays).
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import xxhash

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreFormatError
from .folder import OwnFiles

FORMAT = 1
"""The format of a file. Newer formats are refused."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library (huggingface/safetensors, MAX_HEADER_SIZE)."""
_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "I32": mx.int32, "F32": mx.float32,
    "U64": mx.uint64, "I64": mx.int64, "F64": mx.float64, "C64": mx.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""The errors that a malformed header raises when it is read."""
Arrays = Mapping[str, mx.array]
FOLDERS = (Block.folder, Checkpoint.folder)


def write_block(path: Path, block: Record, root: Root, arrays: Arrays, files: OwnFiles) -> int:
    """Write the new file of a block or checkpoint; return its size in bytes.

    The arrays must have been evaluated. Raises FileExistsError and OSError.
    """
    metadata = metadata_of(block, root)
    # Arrays without elements are in the metadata, because MLX 0.31 cannot write them.
    empty = {name: x for name, x in arrays.items() if not x.size}
    if empty:
        # For example, ["float32", [0, 8]].
        described = {name: [f"{x.dtype}".rpartition(".")[2], x.shape] for name, x in empty.items()}
        metadata["empty"] = json.dumps(described)
    written = {name: x for name, x in arrays.items() if x.size}
    if mx.cuda.is_available():
        # CUDA moves arrays that are read here into the host's memory, and the next restore would
        # wait until they are back on the device. So a copy is read.
        written = {name: mx.take(x, mx.arange(len(x)), axis=0) for name, x in written.items()}
        mx.eval(written)
    metadata["checksum"] = checksum({**written, **empty}, metadata)
    # mx.save_safetensors truncates the file. On ext4, closing a truncated file waits for the disk.
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, array in written.items():
        start, end = end, end + array.nbytes
        dtype = _NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    header_json = json.dumps(header).encode()
    header_json += b" " * (-len(header_json) % LENGTH_BYTES)
    length = len(header_json).to_bytes(LENGTH_BYTES, "little")
    plain = [_plain(array) for array in written.values()]
    contents = [memoryview(array) for array in plain]
    return files.write(path, length + header_json, *contents)


def _plain(array: mx.array) -> Any:
    """Return an array of the same bytes, without gaps. Keep the array while its memory is read."""
    # numpy and the buffer protocol do not know bfloat16; only the bytes matter here.
    plain: Any = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return plain if memoryview(plain).c_contiguous else mx.contiguous(plain)


def metadata_of(block: Record, root: Root) -> dict[str, str]:
    named = {"format": str(FORMAT), "key": block.key.hex()}
    if isinstance(block, Checkpoint):
        own = {"block": block.block.hex(), "kind": block.kind, "n_tokens": str(block.n_tokens)}
        return {**named, **own, "root": root.to_json()}
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
    """Return the most bytes that a file of this content can take."""
    n_bytes = sum(len(json.dumps(value)) for value in metadata.values())
    return n_bytes + sum(a.nbytes + 2 * len(name) + 192 for name, a in arrays.items()) + 1024


def read_file(path: Path, files: OwnFiles) -> tuple[Record, Root, Arrays]:
    """Return the block or checkpoint that a file holds, its root and its evaluated arrays.

    Raises the errors of `read_record`, and OSError or MemoryError if arrays cannot be read now.
    """
    if files.is_encrypted:
        content = read_content(files.read(path), path.name)
        _check_place(path, content[0], files)
        return content
    record, root, metadata = read_record(path, files)
    try:
        arrays: Any = mx.load(str(path))
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        # The header and size are right, but the file cannot be read now.
        if not path.exists():  # another process evicted it
            raise FileNotFoundError(path) from error
        raise OSError(errno.EIO, f"{path.name}: {error}") from error
    return record, root, _checked(arrays, metadata, path.name)


def read_content(content: bytes, name: str) -> tuple[Record, Root, Arrays]:
    """Like `read_file`, for a file's bytes. Raises BlockCorrupt and StoreFormatError."""
    record, root, metadata = record_in(BytesIO(content), name)
    first = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    arrays_bytes: Any = memoryview(content)[first:]
    arrays: dict[str, mx.array] = {}
    try:
        for array, entry in json.loads(content[LENGTH_BYTES:first]).items():
            if array == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            plain = mx.array(arrays_bytes[start:end])
            arrays[array] = plain.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        mx.eval(arrays)
    except MALFORMED as error:
        raise BlockCorrupt(f"{name}: its arrays cannot be read: {error!r}") from error
    return record, root, _checked(arrays, metadata, name)


def _checked(arrays: dict[str, mx.array], metadata: Mapping[str, str], name: str) -> Arrays:
    """Add the file's empty arrays; return all arrays. Raises BlockCorrupt for a wrong checksum."""
    try:
        for empty, (dtype, shape) in json.loads(metadata.get("empty", "{}")).items():
            if math.prod(shape):  # no memory is allocated before the checksum is verified
                raise ValueError(f"{empty} has the shape {shape}")
            arrays[empty] = mx.zeros(shape, getattr(mx, dtype))
            mx.eval(arrays[empty])  # now, because another thread may use the array
    except (*MALFORMED, RuntimeError) as error:
        raise BlockCorrupt(f"{name}: its metadata cannot be read: {error!r}") from error
    if metadata.get("checksum") != checksum(arrays, metadata):
        raise BlockCorrupt(f"{name}: its content does not match its checksum")
    return arrays


def read_record(path: Path, files: OwnFiles) -> tuple[Record, Root, Mapping[str, str]]:
    """Return a file's block or checkpoint, its root, and all of its metadata.

    Raises BlockCorrupt when the file is incomplete or has the name of another record,
    StoreFormatError when a newer version wrote it, FileNotFoundError, and OSError when it cannot be
    read now.
    """
    with files.open(path) as file:
        record, root, metadata = record_in(file, path.name)
    _check_place(path, record, files)
    return record, root, metadata


def _check_place(path: Path, record: Record, files: OwnFiles) -> None:
    if path != files.path_of(record.key, record.folder):
        raise BlockCorrupt(f"{path.name}: holds {record}")


def record_in(source: BinaryIO, name: str) -> tuple[Record, Root, Mapping[str, str]]:
    """Return an open file's record, root and metadata. Raises BlockCorrupt and StoreFormatError."""
    try:
        metadata = read_header(source)
        version = metadata.get("format", "")
        if version.isdecimal() and int(version) > FORMAT:
            raise StoreFormatError(f"a file of format {version}; this version reads up to {FORMAT}")
        key, root = bytes.fromhex(metadata["key"]), Root.from_json(metadata["root"])
        record: Record
        if "block" in metadata:
            of_block, n_tokens = bytes.fromhex(metadata["block"]), int(metadata["n_tokens"])
            record = Checkpoint(key, of_block, metadata["kind"], n_tokens)
        else:
            record = Block(
                key,
                parent=bytes.fromhex(metadata["parent"]),
                start=int(metadata["start"]),
                packed_ids=bytes.fromhex(metadata["ids"]),
                text=json.loads(metadata["text"]),
                pending=bytes.fromhex(metadata["pending"]),
            )
            record.text.encode()  # raises for text that SQLite refuses
            if not record.packed_ids or len(record.packed_ids) % 4:
                raise ValueError("its token ids are incomplete")
        texts = (root.fingerprint, root.layout, root.namespace, root.session, root.model)
        if not all(isinstance(value, str) for value in texts) or type(root.with_text) is not bool:
            raise TypeError("its root has the wrong types")
        if not record.is_genuine:
            raise ValueError(f"the metadata of {record} do not hash to its key")
    except MALFORMED as error:
        raise BlockCorrupt(f"{name}: its header cannot be read: {error!r}") from error
    return record, root, metadata


def checksum(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    """Return the checksum (XXH3-128, as hex) of arrays and metadata."""
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}:{array.dtype}:{array.shape}".encode())
        digest.update(_plain(array))
    for name in sorted(metadata):
        if name != "checksum":
            digest.update(f"{name}={metadata[name]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def read_header(source: BinaryIO) -> Mapping[str, str]:
    """Return the metadata of an open safetensors file.

    Raises one of MALFORMED unless the arrays lie one after the other and fill the file.
    """
    n_file_bytes = source.seek(0, os.SEEK_END)
    source.seek(0)
    length = source.read(LENGTH_BYTES)
    n_bytes = int.from_bytes(length, "little")
    if n_bytes > min(n_file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ValueError("it is cut off")
    content: dict[str, Any] = json.loads(source.read(n_bytes).decode())
    metadata: dict[str, str] = content.pop("__metadata__")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not text")
    placed = []
    for name, entry in content.items():
        shape = tuple(entry["shape"])
        if any(type(n) is not int or not 0 <= n < 1 << 31 for n in shape):  # MLX's limit
            raise ValueError(f"{name} has the shape {shape}")
        n_array_bytes = math.prod(shape) * _DTYPES[entry["dtype"]].size
        placed.append((entry["data_offsets"], n_array_bytes, name))
    end = 0
    for offsets, n_array_bytes, name in sorted(placed):
        if offsets != [end, end + n_array_bytes]:
            raise ValueError(f"{name} takes {n_array_bytes} bytes and is at {offsets}, not {end}")
        end += n_array_bytes
    if (expected := LENGTH_BYTES + n_bytes + end) != n_file_bytes:
        raise ValueError(f"the file has {n_file_bytes} bytes and should have {expected}")
    return metadata
