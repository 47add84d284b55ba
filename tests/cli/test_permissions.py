"""A store that belongs to another user: commands report this in one line and change nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.store.conftest import chain

from .conftest import CommandLine, block_files, fill

READING = [["sessions", "export", "last", "FILE"], ["store", "stats"], ["store", "map"]]
CHANGING = [
    ["sessions", "rm", "last"],
    ["sessions", "pin", "last"],
    ["sessions", "import", "FILE"],
    ["store", "verify", "--fix"],
    ["store", "rebuild"],
    ["store", "gc"],
]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Act as a user without rights, if this process runs as root."""
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
    for argv in READING:  # late imports must run before rights are given up
        assert run(*(argv if argv[-1] != "FILE" else [*argv[:-1], str(base / "exported")])) == 0
    yield run
    set_modes(base, 0o700, 0o600)
    shutil.rmtree(base)


def with_file(argv: list[str], run: CommandLine) -> list[str]:
    """Replace FILE by a path: an existing file for an import, a new file for an export."""
    name = "exported" if "import" in argv else "new"
    return [str(run.folder.parent / name) if word == "FILE" else word for word in argv]


@pytest.mark.parametrize("argv", [*READING, *CHANGING], ids=" ".join)
def test_an_unreadable_store_is_reported_in_one_line(store: CommandLine, argv: list[str]) -> None:
    (store.folder.parent / "exported").chmod(0o644)
    set_modes(store.folder, 0, 0)
    with as_nobody():
        error = store.error(*with_file(argv, store))
    assert str(store.folder) in error and "ermission" in error


@pytest.mark.parametrize("argv", [*READING, *CHANGING], ids=" ".join)
def test_a_read_only_store_is_reported_and_not_changed(store: CommandLine, argv: list[str]) -> None:
    (store.folder.parent / "exported").chmod(0o644)
    set_modes(store.folder, 0o555, 0o444)
    before = block_files(store.folder)
    with as_nobody():
        error = store.error(*with_file(argv, store))
    assert str(store.folder) in error and "ermission" in error
    assert block_files(store.folder) == before


@pytest.mark.parametrize("argv", [["sessions", "list"], ["sessions", "rm", "last"]], ids=" ".join)
def test_a_read_only_file_system_is_no_permission_error(
    store: CommandLine, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    error = store.error(*argv)
    assert "Read-only file system" in error and " folder" in error and "ermission" not in error


def test_gc_mentions_pins_only_if_a_session_is_pinned(store: CommandLine) -> None:
    no_space = ("--kvpersist-disk", "0", "--kvpersist-min-free", "0")
    assert store("sessions", "pin", "last") == 0
    assert store("store", "gc", *no_space) == 1
    assert "(1 session pinned)" in store.err and "--kvpersist-disk is 0 B" in store.err
    assert store("sessions", "unpin", "last") == 0
    assert store("store", "gc", *no_space) == 1
    assert "pinned" not in store.err and "(only its index)" in store.err
    assert store.ids() == {}


def test_output_uses_singular_and_plural_nouns(store: CommandLine) -> None:
    assert store("sessions", "rm", "last") == 0
    assert "3 blocks, 0 checkpoints" in store.out
    fill(store.folder, {"one": chain([5])})
    assert store("store", "verify") == 0 and "1 block, 0 checkpoints, all good" in store.out
    assert store("store", "rebuild") == 0 and "1 block, 0 checkpoints, 1 session" in store.out
