"""The files of a store without encryption."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlx_lm_kvpersist.block import Block, Checkpoint, Record, Root
from mlx_lm_kvpersist.store import files
from mlx_lm_kvpersist.store.files import Arrays
from mlx_lm_kvpersist.store.folder import OwnFiles


def block_path(folder: Path, key: bytes) -> Path:
    return OwnFiles(folder).path_of(key, Block.folder)


def checkpoint_path(folder: Path, key: bytes) -> Path:
    return OwnFiles(folder).path_of(key, Checkpoint.folder)


def write_block(path: Path, block: Record, root: Root, arrays: Arrays) -> int:
    return files.write_block(path, block, root, arrays, OwnFiles(path.parents[2]))


def read_file(path: Path) -> tuple[Record, Root, Arrays]:
    return files.read_file(path, OwnFiles(path.parents[2]))


def read_record(path: Path) -> tuple[Record, Root, Mapping[str, str]]:
    return files.read_record(path, OwnFiles(path.parents[2]))
