"""What was measured is kept in files that nothing else is lost by."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.kept_file import keep, read_kept


@pytest.mark.parametrize(
    "before",
    [None, '{"format": 99, "measured": {"theirs": 1}}', "unreadable", "{", "[]"],
)
def test_what_others_kept_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: str | None,
) -> None:
    """A file that cannot be read now, or that a newer version wrote, is not written anew."""
    file = tmp_path / "precision.json"
    keep(file, 1, "ours", 1)
    if before == "unreadable":
        ours, read = file.read_text(), Path.read_text

        def fails(path: Path, *args: Any, **options: Any) -> str:
            if path == file:
                raise OSError(errno.EMFILE, "Too many open files")
            return read(path, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", fails)
            assert read_kept(file, 1) == {}
            keep(file, 1, "more", 2)
        assert file.read_text() == ours and "Too many open files" in caplog.text
        return
    if before is not None:
        file.write_text(before)
    keep(file, 1, "more", 2)
    if before and "99" in before:
        assert file.read_text() == before and "a newer version" in caplog.text
    else:
        assert read_kept(file, 1) == ({"more": 2} if before else {"ours": 1, "more": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["precision.json"]


def test_what_an_older_version_kept_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "precision.json"
    keep(file, 1, "older", 1)
    assert read_kept(file, 2) == {}
    keep(file, 2, "ours", 2)
    assert read_kept(file, 2) == {"ours": 2}


def test_a_link_in_its_way_is_not_followed(tmp_path: Path) -> None:
    file, theirs = tmp_path / "precision.json", tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / f"precision.json.{os.getpid()}.tmp").symlink_to(theirs)
    keep(file, 1, "ours", 1)
    assert read_kept(file, 1) == {"ours": 1} and theirs.read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"precision.json", "theirs"}


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    keep(tmp_path / "precision.json", 1, "ours", 1)
    assert (tmp_path / "precision.json").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "precision.json"
    keep(file, 1, "ours", 1)

    def fails(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    keep(file, 1, "more", 2)
    assert read_kept(file, 1) == {"ours": 1} and "No space left" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["precision.json"]
