"""A session in one file, to be moved from store to store: its name, its blocks and their parts.

The file is a safetensors file. Its arrays are those of all blocks, in order, block 12's
"0.k.weights" being "000012.0.k.weights", and then those of all parts, part 3's "0.conv" being
"part.000003.0.conv". Its metadata:

    kvpersist-session   the format, "2"; "1" where there are no parts
    session             JSON: name, n_tokens
    block.000012        the header of the 12th block's own file, as it stood there
    part.000003         the same of the third part's
    checksum            XXH3-128 of the whole header, with this field empty

The header of a block or part holds the checksum of its arrays, so every byte of the file is
covered, and with it the own file of each can be made again byte for byte. Both ways, one of them
at a time is in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import xxhash

from ..errors import BlockCorrupt, StoreError, StoreFormatError
from ..match.block import Block
from ..match.keys import Root
from .files import block_of, checksum
from .header import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    MALFORMED,
    OwnHeader,
    open_regular,
    own_header,
    read_header,
)

SESSION_FORMAT = 2
"""A reader refuses what is newer. What has no parts is written as 1, for those who know none."""

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
        """Return the size of a block's or part's own file."""
        return self._headers[number].n_file_bytes

    def own_file(self, number: int) -> bytes:
        """Return a block's or part's own file."""
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
