"""Part files: one safetensors file a part, named by its key.

They are written and read as block files are (`files`), but stand apart from them, so that a part
can go while its block stays. Their metadata say which block they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from ..errors import BlockCorrupt
from ..match.keys import Root
from ..match.tree import Node
from .files import FORMAT, Arrays, block_path, check_format, read_file, write_file
from .part import Part

__all__ = [
    "metadata_of_part",
    "part_of",
    "part_path",
    "path_of",
    "read_part",
    "write_part",
]


def part_path(folder: Path, key: bytes) -> Path:
    """Return where the part of this key is kept."""
    name = key.hex()
    return folder / "parts" / name[:2] / f"{name}.safetensors"


def path_of(folder: Path, what: Node | Part) -> Path:
    """Return where a block or a part is kept."""
    if isinstance(what, Part):
        return part_path(folder, what.key)
    return block_path(folder, what.key)


def write_part(path: Path, part: Part, root: Root, arrays: Arrays, *, fsync: bool) -> int:
    """Write a part's file and return its size in bytes; see `write_file`."""
    return write_file(path, arrays, metadata_of_part(part, root), fsync=fsync)


def metadata_of_part(part: Part, root: Root) -> dict[str, str]:
    """Return what a part's file says of it, but for the checksum."""
    return {
        "format": str(FORMAT),
        "key": part.key.hex(),
        "block": part.block.hex(),
        "kind": part.kind,
        "n_tokens": str(part.n_tokens),
        "root": root.to_json(),
    }


def read_part(
    folder: Path, key: bytes, *, verify: bool = True
) -> tuple[Part, Root, dict[str, mx.array]]:
    """Return a part, its root and its evaluated arrays; `verify` checks the checksum.

    Raises what `read_file` does, and BlockCorrupt when it is another part's.
    """
    path = part_path(folder, key)
    (part, root), arrays = read_file(path, part_of, verify=verify)
    if part.key != key:
        raise BlockCorrupt(f"{path.name}: holds part {part.key.hex()}")
    return part, root, arrays


def part_of(metadata: Mapping[str, str]) -> tuple[Part, Root]:
    """Return the part and the root that a file's metadata describe.

    Raises BlockCorrupt when they are incomplete or contradict themselves, and StoreFormatError
    when they were written by a newer version.
    """
    check_format(metadata, "part")
    try:
        key = bytes.fromhex(metadata["key"])
        part = Part(bytes.fromhex(metadata["block"]), metadata["kind"], int(metadata["n_tokens"]))
        is_genuine = part.key == key
        root = Root.from_json(metadata["root"])
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise BlockCorrupt(f"part metadata cannot be read: {error!r}") from error
    if not is_genuine:
        raise BlockCorrupt(f"part {key.hex()}: what it says of itself does not hash to its key")
    return part, root
