"""Paths of the files of a store without encryption."""

from __future__ import annotations

from pathlib import Path

from mlx_lm_kvpersist.block import Block, Checkpoint
from mlx_lm_kvpersist.store.folder import OwnFiles


def block_path(folder: Path, key: bytes) -> Path:
    return OwnFiles(folder).path_of(key, Block.folder)


def checkpoint_path(folder: Path, key: bytes) -> Path:
    return OwnFiles(folder).path_of(key, Checkpoint.folder)
