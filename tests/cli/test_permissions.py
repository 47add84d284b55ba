"""A store of somebody else's: commands read it if they may, and otherwise say so in one line."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import store as store_commands
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.files import block_path
from mlx_lm_kvpersist.store.verify import find_problems
from tests.store.conftest import chain, save_turn

from .conftest import LIMITS, CommandLine, block_files, damage, fill, flip

READING = [
    ["sessions", "list"],
    ["sessions", "show", "last"],
    ["sessions", "export", "last", "FILE"],
    ["store", "stats"],
    ["store", "verify"],
    ["store", "gc", "--dry-run", "--kvpersist-min-free", "0"],
]
CHANGING = [
    ["sessions", "rm", "last"],
    ["sessions", "pin", "last"],
    ["sessions", "import", "FILE"],
    ["store", "verify", "--fix"],
    ["store", "rebuild"],
    ["store", "gc"],
]


@contextmanager
def nobody() -> Iterator[None]:
    """Act as a user without rights; only root has any to give up."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def set_modes(folder: Path, directory_mode: int, file_mode: int) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(directory_mode if path.is_dir() else file_mode)


@pytest.fixture
def store(capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    """A store below a folder that everybody may enter."""
    base = Path(tempfile.mkdtemp(prefix="kvpersist-test-"))
    base.chmod(0o777)
    run = CommandLine(base / "store", capsys)
    fill(run.folder, {"last": chain([1, 2], [30], [31])})
    for argv in READING:  # what is imported late must be imported before rights are given up
        assert run(*(argv if argv[-1] != "FILE" else [*argv[:-1], str(base / "exported")])) == 0
    yield run
    set_modes(base, 0o700, 0o600)
    shutil.rmtree(base)


def with_file(argv: list[str], run: CommandLine) -> list[str]:
    """Put a path in place of FILE: one that exists for an import, a new one for an export."""
    name = "exported" if "import" in argv else "new"
    return [str(run.folder.parent / name) if word == "FILE" else word for word in argv]


@pytest.mark.parametrize("argv", [*READING, *CHANGING], ids=" ".join)
def test_a_store_that_may_not_be_entered_is_one_line(store: CommandLine, argv: list[str]) -> None:
    (store.folder.parent / "exported").chmod(0o644)
    set_modes(store.folder, 0, 0)
    with nobody():
        said = store.error(*with_file(argv, store))
    assert str(store.folder) in said and "ermission" in said


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_a_store_that_may_only_be_read_is_read(store: CommandLine, argv: list[str]) -> None:
    set_modes(store.folder, 0o555, 0o444)
    before = sorted(store.folder.rglob("*"))
    with nobody():
        status = store(*with_file(argv, store))
    assert status == 0, store.err
    expected = ("last", "3 blocks", "3 of 1 model", "0 blocks and 0 checkpoints, 0 B, would be")
    assert any(words in store.out for words in expected)
    assert sorted(store.folder.rglob("*")) == before


def test_what_is_wrong_with_a_store_that_may_only_be_read_is_said(store: CommandLine) -> None:
    bad = block_path(store.folder, chain([1, 2], [30])[1].key)
    damage(bad, flip(400))
    set_modes(store.folder, 0o555, 0o444)
    with nobody():
        assert store("store", "verify") == 1, store.err
    assert "corrupt" in store.out and bad.stem in store.out and "1 problem" in store.out


def test_a_turn_saved_since_the_index_was_copied_is_no_fault(
    store: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = BlockStore(store.folder, LIMITS)

    def find(*args: Any) -> Any:
        save_turn(server, chain([7], [8]), "newest")
        return find_problems(*args)

    monkeypatch.setattr(store_commands, "find_problems", find)
    monkeypatch.setattr(os, "access", lambda *_: False)
    try:
        assert store("store", "verify") == 0, store.out
    finally:
        server.close()


@pytest.mark.parametrize("argv", CHANGING, ids=" ".join)
def test_a_store_that_may_only_be_read_is_not_changed(store: CommandLine, argv: list[str]) -> None:
    (store.folder.parent / "exported").chmod(0o644)
    set_modes(store.folder, 0o555, 0o444)
    before = block_files(store.folder)
    with nobody():
        said = store.error(*with_file(argv, store))
    assert str(store.folder) in said and "ermission" in said
    assert block_files(store.folder) == before


def test_what_is_still_in_the_log_is_read_too(store: CommandLine) -> None:
    """A server has the store open: its last turns stand in the index's log."""
    server = BlockStore(store.folder, LIMITS)
    try:
        save_turn(server, chain([7], [8]), "newest")
        set_modes(store.folder, 0o555, 0o444)
        with nobody():
            assert store("sessions", "list") == 0, store.err
        assert "newest" in store.out
    finally:
        set_modes(store.folder, 0o700, 0o600)
        server.close()


def test_gc_speaks_of_pins_only_where_something_is_pinned(store: CommandLine) -> None:
    nothing = ("--kvpersist-disk", "0", "--kvpersist-min-free", "0")
    assert store("sessions", "pin", "last") == 0
    assert store("store", "gc", *nothing) == 1
    assert "(1 session pinned)" in store.err and "--kvpersist-disk is 0 B" in store.err
    assert store("sessions", "unpin", "last") == 0
    assert store("store", "gc", *nothing) == 1
    assert "pinned" not in store.err and "(only its index)" in store.err
    assert store.ids() == {}


def test_plurals_are_right(store: CommandLine) -> None:
    assert store("store", "stats") == 0 and re.search(r"3 of 1 model\b", store.out)
    assert store("sessions", "rm", "last") == 0
    assert "3 blocks, 0 checkpoints" in store.out
    fill(store.folder, {"one": chain([5])})
    assert store("store", "verify") == 0 and "1 block and 0 checkpoints, all good" in store.out
    assert store("store", "rebuild") == 0 and "1 block, 0 checkpoints, 1 session" in store.out
