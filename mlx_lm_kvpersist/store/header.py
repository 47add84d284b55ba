"""The header of a safetensors file. What a file claims is compared with what it has, and bounded.

Source of the format: https://github.com/huggingface/safetensors (8 bytes of length, JSON, arrays).
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

from ..errors import BlockCorrupt

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads (huggingface/safetensors, MAX_HEADER_SIZE)."""
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading a header fails with that is none."""
_IRREGULAR = (errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""What opening a link or a socket fails with."""


@dataclass(frozen=True)
class OwnHeader:
    """The header of a block's or part's own file, as text, and what it says."""

    text: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape, in the order of their bytes."""
    n_data_bytes: int
    n_file_bytes: int
    metadata: Mapping[str, str]


def own_header(text: str) -> OwnHeader:
    """Read the header of a block or part.

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
