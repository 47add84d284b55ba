"""`store prune` removes the oldest objects of a shared store, and no other files."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.objects import Objects

from ..store.conftest import chain, save_turn


def object_name(n: int, n_digits: int = 32) -> str:
    """Return an object's name; 64 digits are for an encrypted store."""
    return f"kvpersist/aa/aa{n:0{n_digits - 2}x}"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """Three objects of 1 KiB, 0, 10 and 20 days old, and a file that is not an object."""
    folder = tmp_path / "bucket"
    objects = Objects(str(folder))
    for n in range(3):
        objects.put(object_name(n, 64 if n == 1 else 32), bytes(1024))
        then_s = time.time() - n * 10 * 86400
        os.utime(folder / object_name(n, 64 if n == 1 else 32), (then_s, then_s))
    (folder / "letter.txt").write_bytes(bytes(4096))
    return folder


def prune(bucket: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, int]:
    assert main(["store", "prune", str(bucket), "--json", *options]) == 0
    result: dict[str, int] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize(
    ("options", "remaining"),
    [
        ((), {0, 1, 2}),
        (("--older", "14d"), {0, 1}),
        (("--older", "36h"), {0}),
        (("--size", "2K"), {0, 1}),
        (("--older", "14d", "--size", "1K"), {0}),
        (("--size", "0"), set()),
    ],
)
def test_prune_removes_the_oldest_objects(
    bucket: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], remaining: set[int]
) -> None:
    removed = {"removed": 3 - len(remaining), "removed_bytes": 1024 * (3 - len(remaining))}
    expected = {**removed, "left_bytes": 1024 * len(remaining)}
    assert prune(bucket, capsys, "--dry-run", *options) == expected
    assert len(list((bucket / "kvpersist/aa").iterdir())) == 3
    assert prune(bucket, capsys, *options) == expected
    assert {int(path.name[2:], 16) for path in (bucket / "kvpersist/aa").iterdir()} == remaining
    assert (bucket / "letter.txt").exists()


def test_prune_refuses_a_missing_folder_and_does_not_make_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "share" / "not mounted"
    assert main(["store", "prune", str(missing), "--size", "0"]) == 1
    assert f"{missing} cannot be used: [Errno 2] No such file" in capsys.readouterr().err
    assert not missing.parent.exists()


def names_similar_to_objects(bucket: Path) -> None:
    digits = "aa" + 30 * "0"
    for relative_path in (
        f"aa/{digits[:-1]}",
        f"aa/{digits}0",
        f"aa/{digits[:-1]}A",
        f"aa/{digits[:-1]}g",
        f"aa/{digits[:-1]}\u0661",
        f"aa/.{digits}",
        f"aa/{digits}.tmp",
        f"aa/{digits}#1",
        f"aa/{digits}.safetensors",
        f"aa/{digits}\n",
        f"aa/{2 * digits}00",
        f"aa/ab{digits[2:]}",
        f"ab/{digits}",
        f"AA/AA{digits[2:]}",
        f"a/{digits}",
        digits,
        f"aa/aa/{digits}",
        "index.sqlite",
        "notes.txt",
    ):
        path = bucket / "kvpersist" / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(4096))


def a_link_to_a_folder(bucket: Path) -> None:
    elsewhere = bucket.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"bb{7:030x}").write_bytes(bytes(4096))
    (bucket / "kvpersist/bb").symlink_to(elsewhere)


def a_link_to_a_file(bucket: Path) -> None:
    (bucket.parent / "letter").write_bytes(bytes(4096))
    (bucket / object_name(7)).symlink_to(bucket.parent / "letter")
    (bucket / object_name(8)).symlink_to(bucket.parent / "nothing")


def pipes_and_sockets_and_folders(bucket: Path) -> None:
    os.mkfifo(bucket / object_name(7))
    (bucket / object_name(8) / "letter").mkdir(parents=True)
    here = os.getcwd()
    os.chdir(bucket / "kvpersist/aa")  # a socket's name must be short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(Path(object_name(9)).name)
    finally:
        os.chdir(here)


def a_store_in_the_same_place(bucket: Path) -> None:
    folder = bucket.parent / "store"
    store = BlockStore(folder, StoreLimits(4 << 20, 64 << 20))
    save_turn(store, chain([1], [2]), "s")
    store.close()
    (bucket / "kvpersist/aa").rename(bucket.parent / "aa")
    (bucket / "kvpersist").rmdir()
    folder.rename(bucket / "kvpersist")
    (bucket.parent / "aa").rename(bucket / "kvpersist/aa")


def foreign_files(folder: Path) -> dict[str, bytes | str | int]:
    """Return the files in and next to a folder, except objects; links are not followed."""
    contents: dict[str, bytes | str | int] = {}
    for path in folder.parent.rglob("*"):
        if path.name in {Path(object_name(n, 64 if n == 1 else 32)).name for n in range(3)}:
            continue
        is_plain = path.is_file() and not path.is_symlink()
        content = path.read_bytes() if is_plain else path.lstat().st_mode
        contents[str(path)] = os.readlink(path) if path.is_symlink() else content
    return contents


FOREIGN = [
    names_similar_to_objects,
    a_link_to_a_folder,
    a_link_to_a_file,
    pipes_and_sockets_and_folders,
    a_store_in_the_same_place,
]


@pytest.mark.parametrize("add_foreign_files", FOREIGN, ids=lambda add: add.__name__)
def test_foreign_files_are_neither_counted_nor_removed(
    bucket: Path, capsys: pytest.CaptureFixture[str], add_foreign_files: Callable[[Path], None]
) -> None:
    add_foreign_files(bucket)
    before = foreign_files(bucket)
    assert prune(bucket, capsys) == {"removed": 0, "removed_bytes": 0, "left_bytes": 3072}
    expected = {"removed": 3, "removed_bytes": 3072, "left_bytes": 0}
    assert prune(bucket, capsys, "--size", "0") == expected
    assert foreign_files(bucket) == before and len(before) > 1


def test_nothing_is_removed_if_the_objects_folder_is_a_link(
    bucket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bucket / "kvpersist").rename(bucket.parent / "elsewhere")
    (bucket / "kvpersist").symlink_to(bucket.parent / "elsewhere")
    assert prune(bucket, capsys, "--size", "0")["removed"] == 0
    assert len(list((bucket.parent / "elsewhere/aa").iterdir())) == 3


def test_the_shared_store_may_be_a_link(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bucket.parent / "link").symlink_to(bucket)
    assert prune(bucket.parent / "link", capsys, "--size", "0")["removed"] == 3


def test_prune_keeps_other_hard_links_to_an_object(
    bucket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bucket.parent / "copy").hardlink_to(bucket / object_name(0))
    assert prune(bucket, capsys, "--size", "0")["removed"] == 3
    assert (bucket.parent / "copy").read_bytes() == bytes(1024)


@pytest.mark.parametrize("method", ["open", "list", "delete"])
def test_prune_fails_if_the_shared_store_hangs(
    bucket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
) -> None:
    release = threading.Event()
    monkeypatch.setattr("mlx_lm_kvpersist.store.objects.ANSWER_S", 0.1)
    monkeypatch.setattr(Objects, method, lambda self, *args: release.wait())
    try:
        assert main(["store", "prune", str(bucket), "--size", "0"]) == 1
        error = capsys.readouterr().err
        assert re.search("cannot be pruned: it has not answered for", error), error
    finally:
        release.set()
