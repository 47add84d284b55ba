"""Small stores, and the command line run in this process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Block
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from tests.store.conftest import chain, save_turn, state, window

LIMITS = StoreLimits(max_ram_bytes=1 << 20, max_disk_bytes=64 << 20)
WEIRD_NAME = "../../etc/passwd\x00\n[red]\u202e🦜" + "x" * 10_000

HEAD = [1, 2, 3]
"""The first token ids of all three conversations in `folder`."""


def fill(folder: Path, turns: dict[str | None, list[Block]]) -> None:
    """Save one session per name, and close the store."""
    store = BlockStore(folder, LIMITS)
    try:
        for name, nodes in turns.items():
            save_turn(store, nodes, name)
    finally:
        store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of three sessions that share their first block: "first", unnamed, and "last"."""
    path = tmp_path / "store"
    fill(
        path,
        {
            "first": chain(HEAD, [10], [11]),
            None: chain(HEAD, [20]),
            "last": chain(HEAD, [30], [31], [32]),
        },
    )
    return path


@pytest.fixture
def with_checkpoints(folder: Path) -> Path:
    """The same store, with checkpoints of the shared block and of the last block of "last"."""
    nodes = chain(HEAD, [30], [31], [32])
    store = BlockStore(folder, LIMITS)
    try:
        save_turn(store, nodes, "last", [window(nodes[0]), state(nodes[3]), window(nodes[3])])
    finally:
        store.close()
    return folder


class CommandLine:
    """Runs commands on one store: a call returns the exit status; .out and .err have the output."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: str | Path) -> int:
        words = list(map(str, argv))
        self._capsys.readouterr()
        try:
            return cli.main([*words[:2], "--kvpersist-dir", str(self.folder), *words[2:]])
        finally:
            self.out, self.err = self._capsys.readouterr()

    def in_terminal(self, columns: int, *argv: str | Path) -> list[str]:
        """Run a command in a terminal with this number of columns; return its lines."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys.stdout, "isatty", lambda: True)
            assert self(*argv) == 0, self.err
        return re.sub(r"\x1b\[[0-9;]*m", "", self.out).splitlines()

    def json(self, *argv: str | Path, status: int = 0) -> Any:
        assert self(*argv, "--json") == status, self.err
        return json.loads(self.out)

    def at(self, folder: Path) -> CommandLine:
        """Return a command line for another store."""
        return CommandLine(folder, self._capsys)

    def ids(self) -> dict[str | None, str]:
        """Return the ids of all sessions by name."""
        listed = self.json("sessions", "list")["sessions"]
        return {session["name"]: session["id"] for session in listed}

    def error(self, *argv: str | Path) -> str:
        """Run a command that must fail; return its only line."""
        assert self(*argv) == 1
        assert self.out == ""
        assert self.err.startswith(f"mlx-lm-kvpersist {argv[0]}: ") and self.err.count("\n") == 1
        return self.err


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(folder, capsys)


def block_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all block files by name."""
    return {path.name: path.read_bytes() for path in (folder / "blocks").glob("*/*")}


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all checkpoint files by name."""
    return {path.name: path.read_bytes() for path in (folder / "checkpoints").glob("*/*")}


def damage(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(position: int) -> Callable[[bytearray], object]:
    """Return a change that flips one bit."""

    def change(content: bytearray) -> None:
        content[position] ^= 1

    return change
