"""The store changes no file that it did not make, in any folder."""

from __future__ import annotations

import ast
import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import BlockCorrupt, ConfigError, StoreError
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.folder import OwnFiles, has_own_name, open_regular
from mlx_lm_kvpersist.store.verify import find_problems, fix_problems
from tests.support.store_files import block_path, checkpoint_path
from tests.test_config import options, parsed

from .conftest import ROOT, chain, save_turn, state

PACKAGE = Path(__file__).parents[2] / "mlx_lm_kvpersist"
FOREIGN = (
    "notes.txt",
    "sessions/diary.json",
    "sessions/00c0ffee.json.bak",
    "sessions/deep/00c0ffee.json",
    "blocks/photo.jpg",
    "blocks/ab/photo.jpg",
    "blocks/ab/thesis.safetensors",
    f"blocks/ab/{'cd' * 16}.safetensors",
    f"blocks/ab/{'ab' * 16}.safetensors.old",
    f"blocks/zz/{'ab' * 16}.safetensors",
    "checkpoints/cd/weights.safetensors",
    f"checkpoints/cd/deep/{'cd' * 16}.safetensors",
    "quarantine/evidence.json",
    "quarantine/old.safetensors",
    "writing/novel.txt",
    "index.sqlite.bak",
)


def fill(folder: Path, names: tuple[str, ...] = FOREIGN) -> dict[Path, bytes]:
    """Put foreign files into a folder; return them with their content."""
    files = {folder / name: os.urandom(50_000) for name in names}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


def check_untouched(files: dict[Path, bytes]) -> None:
    for path, content in files.items():
        assert path.is_file() and path.read_bytes() == content, path


def inodes_and_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and size of all files in a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_size)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of two sessions with checkpoints, closed."""
    store = BlockStore(tmp_path / "store", StoreLimits(4 << 20, 4 << 20))
    for number in (1, 2):
        nodes = chain([9], [number])
        save_turn(store, nodes, f"s{number}", [state(nodes[1])])
    store.close()
    return tmp_path / "store"


def command(*argv: str | Path) -> int:
    return cli.main(list(map(str, argv)))


# A foreign folder.


@pytest.mark.parametrize(
    "names",
    [FOREIGN, ("notes.txt",), ("blocks/ab/photo.jpg",), ("kvpersist-store.notes.txt",)],
    ids=lambda names: names[-1],
)
def test_folder_with_foreign_files_is_refused_unchanged(
    tmp_path: Path, limits: StoreLimits, names: tuple[str, ...]
) -> None:
    folder = tmp_path / "home"
    files = fill(folder, names)
    before = inodes_and_sizes(folder)
    with pytest.raises(StoreError, match="holds no store") as refused:
        BlockStore(folder, limits)
    assert "\n" not in str(refused.value)
    assert inodes_and_sizes(folder) == before
    check_untouched(files)


@pytest.mark.parametrize(
    "argv",
    [
        ("sessions", "list"),
        ("store", "stats"),
        ("store", "verify"),
        ("store", "verify", "--fix"),
        ("store", "rebuild"),
        ("store", "gc", "--kvpersist-disk", "0"),
    ],
    ids=" ".join,
)
def test_every_command_refuses_a_folder_with_foreign_files(
    tmp_path: Path, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "home")
    before = inodes_and_sizes(tmp_path / "home")
    assert command(*argv, "--kvpersist-dir", tmp_path / "home") == 1
    stderr = capsys.readouterr().err
    assert "holds no store" in stderr and stderr.count("\n") == 1
    assert inodes_and_sizes(tmp_path / "home") == before


def test_import_refuses_a_folder_with_foreign_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    assert command("sessions", "export", "--kvpersist-dir", folder, "s1", exported) == 0
    fill(tmp_path / "home")
    before = inodes_and_sizes(tmp_path / "home")
    location = ("--kvpersist-dir", tmp_path / "home")
    assert command("sessions", "import", *location, exported) == 1
    assert "holds no store" in capsys.readouterr().err
    assert inodes_and_sizes(tmp_path / "home") == before


def test_folder_with_a_foreign_index_is_refused(tmp_path: Path, limits: StoreLimits) -> None:
    """A foreign index.sqlite may have a table of blocks, even in WAL mode."""
    folder = tmp_path / "home"
    folder.mkdir()
    db = sqlite3.connect(folder / "index.sqlite")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE blocks (key BLOB PRIMARY KEY)")
    db.commit()
    before = inodes_and_sizes(folder)
    with pytest.raises(StoreError, match="holds no store"):
        BlockStore(folder, limits)
    assert inodes_and_sizes(folder) == before
    db.close()


# Empty and relative names of the folder.


@pytest.mark.parametrize("name", ["", " "])
def test_server_and_commands_refuse_an_empty_folder_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    files = fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    runs: list[Callable[[], Any]] = [lambda: options().parse_args(["--kvpersist-dir", name])]
    commands = (
        *("sessions list", "sessions show x", "sessions rm x", "sessions pin x"),
        *("sessions unpin x", "sessions export x f", "sessions import f", "store stats"),
        *("store verify --fix", "store rebuild", "store gc"),
    )
    for argv in commands:
        runs.append(partial(command, *argv.split(), "--kvpersist-dir", name))
    for run in runs:
        with pytest.raises(SystemExit) as refused:
            run()
        assert refused.value.code == 2
        assert "names no folder" in capsys.readouterr().err
    check_untouched(files)


@pytest.mark.parametrize(("name", "value"), [("XDG_CACHE_HOME", "cache"), ("HOME", "")])
def test_default_folder_is_never_relative_to_the_current_folder(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, value)
    if name == "HOME":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert config.default_folder().is_absolute()
    else:
        monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: f"cache/{app}")
        with pytest.raises(ConfigError, match="not an absolute path"):
            config.from_args(parsed())
    assert not list(tmp_path.iterdir())


# Foreign files in a store.


def evict_everything(folder: Path) -> None:
    command("store", "gc", "--kvpersist-disk", "0", "--kvpersist-dir", folder)
    assert not block_path(folder, chain([9])[0].key).exists()


def verify_and_fix(folder: Path) -> None:
    disk = DiskStore(folder, StoreLimits(0, 1 << 40))
    key = next(iter(disk.index.keys()))
    block_path(folder, key).write_bytes(b"damaged")
    block_path(folder, sorted(disk.index.keys())[-1]).unlink()
    problems = find_problems(folder, disk.index)
    assert problems
    fix_problems(disk, problems)
    assert not find_problems(folder, disk.index)
    disk.close()


def rebuild(folder: Path) -> None:
    assert command("store", "rebuild", "--kvpersist-dir", folder) == 0


def rebuild_without_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        if path.suffix != ".bak":
            path.unlink()
    BlockStore(folder, StoreLimits(0, 1 << 40)).close()


def open_and_sweep(folder: Path) -> None:
    disk = DiskStore(folder, StoreLimits(0, 1 << 40))
    block_path(folder, next(iter(disk.index.keys()))).unlink()
    assert disk.sweep() > 0
    disk.close()


def import_a_session(folder: Path) -> None:
    exported = folder.parent / "exported"
    location = ("--kvpersist-dir", folder)
    assert command("sessions", "export", *location, "s1", exported) == 0
    assert command("sessions", "rm", *location, "s1") == 0
    room = ("--kvpersist-min-free", "0")
    assert command("sessions", "import", *location, exported, *room) == 0


OPERATIONS = [
    open_and_sweep,
    evict_everything,
    verify_and_fix,
    rebuild,
    rebuild_without_index,
    import_a_session,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_foreign_files_in_a_store_are_not_changed(
    folder: Path, operation: Callable[[Path], None]
) -> None:
    files = fill(folder)
    operation(folder)
    check_untouched(files)


def test_foreign_files_do_not_count_as_used_space(folder: Path) -> None:
    disk = DiskStore(folder, StoreLimits(0, 1 << 40))
    used = disk.used_bytes()
    fill(folder)
    assert disk.used_bytes() == used
    disk.close()


# Links.


@pytest.mark.parametrize(
    "name", ["blocks", "checkpoints", "sessions", "quarantine", "index.sqlite"]
)
def test_a_link_in_place_of_a_folder_or_the_index_is_refused(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "quarantine").mkdir(exist_ok=True)
    elsewhere = tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match="is a link"):
        DiskStore(folder, StoreLimits(0, 1 << 20))
    for argv in (("store", "verify", "--fix"), ("store", "gc"), ("store", "rebuild")):
        assert command(*argv, "--kvpersist-dir", folder) == 1
        assert "is a link" in capsys.readouterr().err
    check_untouched(files)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_links_inside_a_store_are_not_followed(
    folder: Path, tmp_path: Path, operation: Callable[[Path], None]
) -> None:
    """The links point outside the store and have names of the store's own form."""
    outside: dict[Path, bytes] = {}
    for number, name in enumerate(("blocks", "checkpoints")):
        target = tmp_path / f"outside{number}"
        outside |= fill(target, (f"{'00' * 16}.safetensors",))
        (folder / name / "00").symlink_to(target)
        target_file = fill(tmp_path, (f"file{number}",))
        outside |= target_file
        (folder / name / "01").mkdir()
        (folder / name / "01" / f"{'01' * 16}.safetensors").symlink_to(next(iter(target_file)))
    outside |= fill(tmp_path, ("a session",))
    (folder / "sessions" / "00c0ffee.json").symlink_to(tmp_path / "a session")
    used = DiskStore(folder, StoreLimits(0, 1 << 40)).used_bytes()
    assert used < 50_000 + sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    operation(folder)
    check_untouched(outside)
    assert (folder / "blocks" / "00").is_symlink()
    assert (folder / "blocks" / "01" / f"{'01' * 16}.safetensors").is_symlink()
    assert (folder / "sessions" / "00c0ffee.json").is_symlink()


def test_a_link_in_place_of_a_block_is_left_alone(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    key = chain([9])[0].key
    block_path(folder, key).rename(secret)
    block_path(folder, key).symlink_to(secret)
    content = secret.read_bytes()
    verify_with_fix = ("store", "verify", "--fix", "--kvpersist-dir", folder)
    assert command(*verify_with_fix) == 0
    assert block_path(folder, key).is_symlink() and secret.read_bytes() == content
    disk = DiskStore(folder, StoreLimits(0, 1 << 40))
    assert key not in disk.index
    disk.close()


def test_a_link_in_place_of_a_sidecar_is_left_alone(folder: Path, tmp_path: Path) -> None:
    with closing(DiskStore(folder, StoreLimits(0, 1 << 40))) as disk:
        session = disk.index.sessions()[0]
        path, secret = folder / "sessions" / f"{session.id}.json", tmp_path / "secret"
        secret.write_text("secret")
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
        with pytest.raises(StoreError, match="move it away"):
            disk.set_pinned(session, True)
        assert path.is_symlink() and secret.read_text() == "secret"
        again = disk.index.session(session.id)
        assert again is not None and not again.pinned


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    store = BlockStore(link, StoreLimits(4 << 20, 4 << 20))
    nodes = chain([9], [3])
    save_turn(store, nodes, "s3")
    assert store.index.totals().n_blocks == 4 and store.turns_saved == 1
    store.disk.quarantine(nodes[1].key, "a test")
    assert store.disk.sweep() == 0 and store.index.totals().n_blocks == 3
    assert len(list((folder / "quarantine").iterdir())) == 2
    store.close()


# Marker.


def test_store_opens_only_with_its_marker(folder: Path) -> None:
    (folder / "kvpersist-store").unlink()
    before = inodes_and_sizes(folder)
    with pytest.raises(StoreError, match="make an empty file of that name"):
        BlockStore(folder, StoreLimits(4 << 20, 4 << 20))
    assert inodes_and_sizes(folder) == before
    (folder / "kvpersist-store").touch()
    store = BlockStore(folder, StoreLimits(4 << 20, 4 << 20))
    store.drain()
    assert store.index.totals().n_blocks == 3 and store.index.totals().n_checkpoints == 2
    store.close()


def test_empty_folder_becomes_a_store(tmp_path: Path, limits: StoreLimits) -> None:
    for name in (".DS_Store", "lost+found"):
        (tmp_path / name).touch()
    BlockStore(tmp_path, limits).close()
    assert (tmp_path / "kvpersist-store").read_text().startswith("This folder is a store")


# Only folder.py removes and moves files.

REMOVERS = {"unlink", "rename", "renames", "rmdir", "rmtree", "removedirs", "move", "truncate"}


def removals(path: Path) -> Iterator[str]:
    """Yield the calls of a module that remove, move or replace files."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            yield from (name.name for name in node.names)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, owner = node.func.attr, node.func.value
        of_os = isinstance(owner, ast.Name) and owner.id in ("os", "shutil")
        by_path = name == "replace" and len(node.args) == 1 and not node.keywords
        is_checked = ast.unparse(owner).endswith("files") and name == "move"  # by `OwnFiles`
        if (
            (name in REMOVERS and not is_checked)
            or by_path
            or (of_os and name in ("replace", "remove"))
        ):
            yield f"{path.name}:{node.lineno} {ast.unparse(node.func)}"


def test_only_folder_py_removes_and_moves_files() -> None:
    calls_by_module = {path.name: list(removals(path)) for path in (PACKAGE / "store").glob("*.py")}
    assert len(calls_by_module.pop("folder.py")) == 4
    assert {name: calls for name, calls in calls_by_module.items() if calls} == {}


# Pipes and devices.


def test_pipe_in_place_of_a_block_is_a_miss(folder: Path) -> None:
    node = chain([9])[0]
    for path in (
        block_path(folder, node.key),
        checkpoint_path(folder, state(chain([9], [1])[1]).key),
    ):
        path.unlink()
        os.mkfifo(path)
    store = BlockStore(folder, StoreLimits(4 << 20, 4 << 20))
    store.drain()
    assert store.reader.load(node, ROOT) is None
    store.drain()
    assert node not in store.children(node.parent)
    store.close()


@pytest.mark.parametrize("error_number", [errno.ENXIO, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_socket_is_refused_as_a_file_on_every_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    """Opening a socket raises ENXIO on Linux, and another error on macOS."""

    def refuse(*args: object) -> int:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BlockCorrupt, match="is not a regular file"):
        open_regular(tmp_path / "socket")


def test_import_of_a_pipe_or_device_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert command("sessions", "import", "--kvpersist-dir", folder, path) == 1
        assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("claimed", [10 << 30, (1 << 64) - 1, 50_000])
def test_block_with_a_header_longer_than_its_file_is_quarantined(
    folder: Path, claimed: int
) -> None:
    key = chain([9])[0].key
    path = block_path(folder, key)
    path.write_bytes(claimed.to_bytes(8, "little") + path.read_bytes()[8:50_000])
    store = BlockStore(folder, StoreLimits(4 << 20, 4 << 20))
    store.drain()
    assert store.reader.load(chain([9])[0], ROOT) is None
    assert store.blocks_quarantined == 1
    store.close()


def test_folder_that_others_may_list_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskStore(folder, StoreLimits(0, 1 << 40)).close()
    assert not caplog.records
    folder.chmod(0o755)
    with closing(BlockStore(folder, StoreLimits(4 << 20, 4 << 20))) as store:
        save_turn(store, chain([9], [3]), "s3")
    assert [r.getMessage() for r in caplog.records if "chmod 700" in r.getMessage()] == [
        f"kvpersist: other users may list {folder} (mode 755); run chmod 700 on it"
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_link_made_between_check_and_removal_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    path = block_path(store, bytes(16))
    for folder in (path.parent, elsewhere):
        folder.mkdir(parents=True)
        (folder / path.name).write_text(folder.name)
    unlink = os.unlink

    def swap_and_unlink(*args: Any, **kwargs: Any) -> None:
        path.parent.rename(store / "was here")
        path.parent.symlink_to(elsewhere)
        unlink(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", swap_and_unlink)
        assert OwnFiles(store).remove(path)
    assert (elsewhere / path.name).read_text() == "elsewhere"
    assert not (store / "was here" / path.name).exists()


@pytest.mark.parametrize(
    "name",
    [
        f"blocks/00/{'00' * 16}.safetensors\n",
        f"blocks/00/{'00' * 15}0g.safetensors",
        f"blocks/01/{'00' * 16}.safetensors",
        f"blocks/{'00' * 16}.safetensors",
        f"Blocks/00/{'00' * 16}.safetensors",
        f"blocks/00/{'00' * 16}.safetensors.tmp",
        f"blocks/00/.{'00' * 16}.safetensors",
        f"quarantine/{'00' * 16}-\u0661.safetensors",
        "kvpersist-store",
        "index.sqlite3",
    ],
)
def test_file_with_a_name_similar_to_the_stores_is_foreign(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    assert not has_own_name(name) and not OwnFiles(tmp_path).remove(tmp_path / name)
    assert (tmp_path / name).exists()


def test_eviction_keeps_another_hard_link_to_a_block(folder: Path, tmp_path: Path) -> None:
    path = block_path(folder, chain([9])[0].key)
    content = path.read_bytes()
    (tmp_path / "copy").hardlink_to(path)
    evict_everything(folder)
    assert not path.exists() and (tmp_path / "copy").read_bytes() == content


def test_nothing_is_removed_or_moved_through_a_link(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    key = bytes(16)
    path, source = block_path(store, key), store / "quarantine" / f"{key.hex()}-1.safetensors"
    for folder in (path.parent.parent, source.parent, elsewhere):
        folder.mkdir(parents=True)
    source.write_text("the store's")
    (elsewhere / path.name).write_text("not the store's")
    path.parent.symlink_to(elsewhere)
    assert not OwnFiles(store).remove(path)
    with pytest.raises(StoreError, match="not the store's file"):
        OwnFiles(store).move(source, path)
    path.parent.unlink()
    path.parent.mkdir()
    path.symlink_to(elsewhere / path.name)
    with pytest.raises(StoreError, match="not the store's file"):
        OwnFiles(store).move(source, path)
    assert path.is_symlink() and (elsewhere / path.name).read_text() == "not the store's"
    assert source.read_text() == "the store's"
