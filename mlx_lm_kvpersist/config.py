"""The plugin's options: what the command line says, what the device suggests."""

from __future__ import annotations

import os
import re
import shutil
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import platformdirs

from .errors import ConfigError

GIB = 1 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": GIB, "t": 1 << 40}
_ISOLATION = ("shared", "session")


@dataclass(frozen=True)
class Config:
    """What the plugin was asked to do. Sizes are in bytes."""

    folder: Path
    max_ram_bytes: int
    max_disk_bytes: int
    isolate_sessions: bool = False
    kv_bits: int = 4
    kv_group_size: int | None = None
    """None: the largest that the model's head sizes allow, 64 before 32."""


def parse_size(text: str) -> int:
    """Return a size in bytes: a number with an optional unit K, M, G or T (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write for example 8G or 512M")
    return int(float(match[1]) * _UNITS[match[2]])


def add_options(parser: ArgumentParser) -> None:
    """Add the plugin's options to the server's command line."""
    group = parser.add_argument_group(
        "kvpersist", "Keep the KV cache of every conversation, in 4 bits, across restarts."
    )
    group.add_argument(
        "--kvpersist-dir",
        type=Path,
        metavar="FOLDER",
        help="Where conversations are kept (default: the user's cache folder)",
    )
    group.add_argument(
        "--kvpersist-ram",
        type=parse_size,
        metavar="SIZE",
        help="Most memory for blocks of conversations that are not running, such as 8G "
        "(default: an eighth of the device's memory)",
    )
    group.add_argument(
        "--kvpersist-disk",
        type=parse_size,
        metavar="SIZE",
        help="Most disk space for conversations (default: a tenth of the volume, at most 64G)",
    )
    group.add_argument(
        "--kvpersist-isolation",
        choices=_ISOLATION,
        default="shared",
        help="Whether equal beginnings are stored once for all sessions, or each session "
        "finds only what it stored itself (default: shared)",
    )


def from_args(args: Namespace) -> Config:
    """Read the parsed command line. Raises ConfigError where options contradict each other.

    The stock server's own `--kv-bits` and `--kv-group-size` choose the precision; its way of
    quantizing, which turns batching off, is switched off.
    """
    kv_bits, kv_group_size = 4, None
    if getattr(args, "kv_bits", None) is not None:
        kv_bits, kv_group_size = args.kv_bits, args.kv_group_size
        if kv_bits not in (4, 8):
            raise ConfigError(f"--kv-bits {kv_bits} cannot be kept; choose 4 or 8")
        args.kv_bits = None
    folder = args.kvpersist_dir or Path(platformdirs.user_cache_dir("mlx-lm-kvpersist"))
    folder = folder.expanduser().absolute()
    ram = args.kvpersist_ram
    if ram is None:
        ram = getattr(args, "prompt_cache_bytes", None) or device_memory_bytes() // 8
    disk = args.kvpersist_disk
    if disk is None:
        disk = min(volume_bytes(folder) // 10, 64 * GIB)
    return Config(
        folder=folder,
        max_ram_bytes=ram,
        max_disk_bytes=disk,
        isolate_sessions=args.kvpersist_isolation == "session",
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
    )


def device_memory_bytes() -> int:
    """Return the memory of MLX's device, or the machine's where the device does not say."""
    size = mx.device_info().get("memory_size")
    return int(size) if size else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def volume_bytes(folder: Path) -> int:
    """Return the size of the volume that holds `folder` or would hold it."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).total
