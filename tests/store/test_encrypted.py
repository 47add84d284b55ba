"""An encrypted folder reveals nothing without its key, and works like any other folder."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Block, Record, block_key, pack_ids
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.config import from_args
from mlx_lm_kvpersist.errors import ConfigError, StoreError, StoreFormatError
from mlx_lm_kvpersist.store import folder as store_folder
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.encryption import read_key
from mlx_lm_kvpersist.store.files import read_content
from mlx_lm_kvpersist.store.folder import MARKER, PLAIN, Encryption, OwnFiles, Staging
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.objects import Objects
from mlx_lm_kvpersist.store.verify import find_problems
from tests.support import wait_until
from tests.test_config import parsed

from .conftest import ROOT, chain, save_turn, state
from .test_foreign_files import inodes_and_sizes

LIMITS = StoreLimits(max_ram_bytes=8 << 20, max_disk_bytes=64 << 20)
TEXT = "the patient's secret story"
NAME, TITLE = "session-of-the-patient", "Title of the patient"
IDS = list(range(77_000, 77_128))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A new key file."""
    assert cli.main(["key", str(tmp_path / "key")]) == 0
    return tmp_path / "key"


@pytest.fixture
def encryption(key: Path) -> Encryption:
    return read_key(key)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path, encryption: Encryption) -> Iterator[BlockStore]:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        yield store


def conversation() -> list[Block]:
    """Return two blocks; the first has a text that `traces` searches for."""
    packed = pack_ids(IDS)
    first = Block(block_key(ROOT.key, packed), ROOT.key, 0, packed, TEXT)
    second = chain([5], parent=first.key)[0]
    return [first, Block(second.key, first.key, first.stop, second.packed_ids, second.text)]


def save_conversation(store: BlockStore) -> dict[bytes, dict[str, mx.array]]:
    """Save a conversation in every kind of file and row; return its arrays by key."""
    nodes = conversation()
    content = save_turn(store, nodes, NAME, [state(nodes[1])], note={"words": TEXT})
    (session,) = store.index.sessions()
    store.index.state.add_note(session.id, title=TITLE)
    row = {"id": "kvp-1", "received": 1.0, "outcome": "STOCK", "sentence": TEXT, "session": NAME}
    store.index.state.add_request({**row, "divergence": None})
    store.index.state.add_replies(ROOT.key, {b"digest": pack_ids(IDS)}, 1.0)
    return content


def traces(folder: Path, content: dict[bytes, dict[str, mx.array]]) -> set[str]:
    """Return which parts of the conversation are in the names and bytes of a folder's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    searched = b"\0".join(str(path).encode() + b"\0" + path.read_bytes() for path in files)
    needles = {
        "text": TEXT.encode(),
        "ids": pack_ids(IDS),
        "ids as text": pack_ids(IDS).hex().encode(),
        "name": NAME.encode(),
        "title": TITLE.encode(),
        "model": ROOT.fingerprint.encode(),
    }
    for number, (record_key, arrays) in enumerate(content.items()):
        needles[f"key {number}"] = record_key
        needles[f"key {number} as text"] = record_key.hex().encode()
        for name, array in arrays.items():
            plain: Any = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
            needles[f"{name} {number}"] = bytes(memoryview(plain))[:64]
    return {label for label, needle in needles.items() if needle in searched}


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_encrypted_folder_reveals_nothing_of_a_conversation(
    folder: Path, encryption: Encryption, is_encrypted: bool
) -> None:
    """Files are checked after a save, a quarantine, a kill, and damage to the index."""
    chosen = encryption if is_encrypted else PLAIN
    with closing(BlockStore(folder, LIMITS, encryption=chosen)) as store:
        content = save_conversation(store)
        revealed = traces(folder, content)
        store.lose(conversation()[1], f"it says {TEXT}")
        store.drain()
        staging = Staging(store.disk.files)  # never closed, as after a kill
        node = conversation()[0]
        new = store.disk.new_file(ROOT, node, content[node.key])
        new.write(staging.path(node.key))
        assert list((folder / "quarantine").glob("*.safetensors"))
        revealed |= traces(folder, content)
    with (folder / "index.sqlite").open("r+b") as file:
        file.write(b"damage")
    with closing(BlockStore(folder, LIMITS, encryption=chosen)) as store:
        assert list((folder / "quarantine").glob("index-*.sqlite"))
        store.drain()
        assert store.index.totals().n_blocks == 1
        revealed |= traces(folder, content)
    if is_encrypted:
        assert revealed == set()
    else:
        assert {"text", "ids", "name", "title", "model", "key 0", "0.ssm 2"} <= revealed


def test_saved_conversation_is_read_back_from_an_encrypted_store(
    folder: Path, encryption: Encryption
) -> None:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        content = save_conversation(store)
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        nodes = conversation()
        assert store.children(ROOT.key, TEXT + " goes on") == nodes[:1]
        records: list[Record] = [*nodes, state(nodes[1])]
        for record, loaded in zip(records, store.reader.load_all(records, ROOT), strict=True):
            assert loaded is not None and loaded.tier == "disk" and loaded.block == record
            for name, array in content[record.key].items():
                assert mx.array_equal(loaded.arrays[name], array)
        (session,) = store.index.sessions()
        assert session.name == NAME
        assert store.index.state.note(session.id) == {"title": TITLE, "words": TEXT}
        files = sum(path.stat().st_size for path in folder.glob("*/*/*.safetensors"))
        sidecars = sum(path.stat().st_size for path in folder.glob("sessions/*"))
        totals = store.index.totals()
        assert (totals.n_bytes, totals.sidecar_bytes) == (files, sidecars)
        assert find_problems(folder, store.index) == []


def _flipped(files: list[Path]) -> None:
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 4
    files[0].write_bytes(content)


def _truncated(files: list[Path]) -> None:
    files[0].write_bytes(files[0].read_bytes()[:-1])


def _empty(files: list[Path]) -> None:
    files[0].write_bytes(b"")


def _swapped(files: list[Path]) -> None:
    first, second = (path.read_bytes() for path in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


@pytest.mark.parametrize("alter", [_flipped, _truncated, _empty, _swapped])
def test_altered_encrypted_block_is_a_miss_and_is_quarantined(
    store: BlockStore, alter: Callable[[list[Path]], None]
) -> None:
    save_conversation(store)
    nodes = conversation()
    alter([store.disk.files.path_of(node.key, node.folder) for node in nodes])
    store.pool.clear()
    problems = find_problems(store.folder, store.index)
    assert nodes[0].key.hex() in {
        problem.subject for problem in problems if problem.fault.value == "corrupt"
    }
    assert store.reader.load(nodes[0], ROOT) is None
    store.drain()
    assert store.blocks_quarantined == 1 and nodes[0].key not in store
    assert list((store.folder / "quarantine").glob("*.safetensors"))


# Keys.


@pytest.mark.parametrize(
    ("made_with", "opened_with", "advice"),
    [
        ("key", None, "is encrypted; give the key file that it was made with"),
        ("key", "other", "is encrypted with another key; give the key file"),
        (None, "key", "is not encrypted; leave out --kvpersist-encrypt"),
    ],
)
def test_wrong_key_or_no_key_is_refused_and_changes_nothing(
    folder: Path,
    key: Path,
    made_with: str | None,
    opened_with: str | None,
    advice: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = folder.parent / "other"
    assert cli.main(["key", str(other)]) == 0
    keys: dict[str | None, Encryption] = {
        None: PLAIN,
        "key": read_key(key),
        "other": read_key(other),
    }
    with closing(BlockStore(folder, LIMITS, encryption=keys[made_with])) as store:
        save_conversation(store)
    exported = folder.parent / "exported"
    options = ["--kvpersist-encrypt", str(folder.parent / made_with)] if made_with else []
    location = ["--kvpersist-dir", str(folder)]
    assert cli.main(["sessions", "export", *location, *options, NAME, str(exported)]) == 0
    before = inodes_and_sizes(folder)
    with pytest.raises(StoreError, match=advice):
        BlockStore(folder, LIMITS, encryption=keys[opened_with])
    options = ["--kvpersist-encrypt", str(folder.parent / opened_with)] if opened_with else []
    for command in COMMANDS:
        words = command.replace("FILE", str(exported)).split()
        capsys.readouterr()
        assert cli.main([*words[:2], *location, *options, *words[2:]]) == 1, command
        stderr = capsys.readouterr().err
        assert advice in stderr and stderr.count("\n") == 1, command
    assert inodes_and_sizes(folder) == before
    with closing(BlockStore(folder, LIMITS, encryption=keys[made_with])) as store:
        assert store.index.totals().n_blocks == 2


COMMANDS = (
    f"sessions show {NAME}",
    "sessions list",
    f"sessions pin {NAME}",
    f"sessions unpin {NAME}",
    f"sessions export {NAME} FILE --force",
    "sessions import FILE",
    "store stats",
    "store gc",
    "store map",
    "store verify",
    "store verify --fix",
    "store rebuild",
    "why --json",
    f"sessions rm {NAME}",
    "sessions import FILE",
)


def test_every_command_accepts_the_key_and_reveals_nothing(
    folder: Path, key: Path, encryption: Encryption, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        content = save_conversation(store)
    location = ["--kvpersist-dir", str(folder), "--kvpersist-encrypt", str(key)]
    for command in COMMANDS:
        words = command.replace("FILE", str(folder.parent / "exported")).split()
        assert cli.main([*words[:2], *location, *words[2:]]) == 0, (command, capsys.readouterr())
        assert traces(folder, content) == set(), command
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        assert [session.name for session in store.index.sessions()] == [NAME]


def test_exported_session_can_be_imported_into_any_store(
    folder: Path, key: Path, encryption: Encryption
) -> None:
    """An encrypted store and a plain store export the same file."""
    encrypted = ["--kvpersist-dir", str(folder), "--kvpersist-encrypt", str(key)]
    plain = ["--kvpersist-dir", str(folder.parent / "plain")]
    exported = [folder.parent / "first", folder.parent / "second"]
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        save_conversation(store)
    assert cli.main(["sessions", "export", *encrypted, NAME, str(exported[0])]) == 0
    assert cli.main(["sessions", "import", *plain, str(exported[0])]) == 0
    assert cli.main(["sessions", "export", *plain, NAME, str(exported[1])]) == 0
    assert exported[0].read_bytes() == exported[1].read_bytes()


@pytest.mark.parametrize("content", [None, b""])
def test_encrypted_store_without_its_marker_is_refused_unchanged(
    folder: Path, encryption: Encryption, content: bytes | None
) -> None:
    """An empty marker, which a plain store accepts, does not help."""
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        save_conversation(store)
    marker = folder / "kvpersist-store"
    marker_content = marker.read_bytes()
    marker.unlink()
    before = inodes_and_sizes(folder)
    with pytest.raises(StoreError, match="make an empty file of that name") as refused:
        BlockStore(folder, LIMITS, encryption=encryption)
    line = str(refused.value).rpartition("into it: ")[2]
    assert line in marker_content.decode()
    if content is not None:
        marker.write_bytes(content)
        with pytest.raises(StoreFormatError, match="it is encrypted; give its key"):
            BlockStore(folder, LIMITS)
        before["kvpersist-store"] = (marker.lstat().st_ino, 0)
        lock = folder / "lock"
        before["lock"] = (lock.lstat().st_ino, lock.lstat().st_size)
    assert inodes_and_sizes(folder) == before
    marker.write_text(line)
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        store.drain()
        assert store.index.totals().n_blocks == 2


def test_missing_package_is_reported_before_a_folder_is_made(
    folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlcipher3", None)
    options = "--kvpersist-dir", str(folder), "--kvpersist-encrypt", str(key)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-lm-kvpersist\[encrypt\]'"):
        from_args(parsed(*options))
    assert not folder.exists()


# The index.


@pytest.mark.parametrize("damage", ["removed", "first page", "another page", "none"])
def test_index_is_rebuilt_from_encrypted_files(
    folder: Path, key: Path, encryption: Encryption, damage: str
) -> None:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        save_conversation(store)
        store.index.database.empty_log()
    path = folder / "index.sqlite"
    if damage == "removed":
        for index_file in folder.glob("index.sqlite*"):
            index_file.unlink()
    elif damage == "none":
        location = ["--kvpersist-dir", str(folder), "--kvpersist-encrypt", str(key)]
        assert cli.main(["store", "rebuild", *location]) == 0
    else:
        content = bytearray(path.read_bytes())
        content[40 if damage == "first page" else 5 * 4096 + 40] ^= 1
        path.write_bytes(content)
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        store.drain()
        totals = store.index.totals()
        assert (totals.n_blocks, totals.n_checkpoints) == (2, 1)
        assert [session.name for session in store.index.sessions()] == [NAME]
        assert store.children(ROOT.key, TEXT)[0].text == TEXT
        if damage == "none":
            replies = store.index.state.replies(ROOT.key, [b"digest"])
            assert replies == {b"digest": pack_ids(IDS)}
        assert find_problems(folder, store.index) == []


def test_encrypted_index_raises_sqlite3_errors(folder: Path, encryption: Encryption) -> None:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)):
        pass
    with closing(Index(folder / "index.sqlite", OwnFiles(folder, encryption))) as index:
        with pytest.raises(sqlite3.OperationalError):
            index.ask("SELECT nothing FROM nowhere")
        with pytest.raises(sqlite3.IntegrityError), index.database.transaction() as db:
            db.execute("INSERT INTO state VALUES (NULL, NULL)")
        with closing(Index(folder / "index.sqlite", OwnFiles(folder, encryption))) as other:
            other.database.connection.execute("PRAGMA busy_timeout = 1")
            with index.database.transaction(), pytest.raises(sqlite3.OperationalError) as locked:
                with other.database.transaction():
                    pass
            assert "close it" in str(locked.value)


def test_damaged_encrypted_index_adds_no_lines_to_stderr(
    folder: Path, key: Path, encryption: Encryption
) -> None:
    with closing(BlockStore(folder, LIMITS, encryption=encryption)):
        pass
    with (folder / "index.sqlite").open("r+b") as file:
        file.write(os.urandom(64))
    location = ["--kvpersist-dir", str(folder), "--kvpersist-encrypt", str(key)]
    command = [sys.executable, "-m", "mlx_lm_kvpersist", "store", "stats", *location]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        result.returncode == 1 and result.stderr.count("\n") == 1 and "is damaged" in result.stderr
    )


# With a shared store.


def test_plain_shared_store_gets_readable_blocks_from_an_encrypted_folder(
    folder: Path, encryption: Encryption, store: BlockStore
) -> None:
    store.share(Objects(str(folder.parent / "bucket")), PLAIN)
    shared = store.shared
    assert shared is not None
    save_conversation(store)
    wait_until(lambda: shared.putting.has_done_all, "everything is put")
    node = conversation()[0]
    content = (folder.parent / "bucket" / shared.objects.path(node.key)).read_bytes()
    assert read_content(content, "object")[0] == node


# The first start.


class _FileOnFullDisk:
    """A new file on a full disk: it exists, but every write fails."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _FileOnFullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_start_succeeds_after_a_first_start_on_a_full_disk(
    folder: Path, encryption: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves an unfinished file, and some editors leave an empty marker."""
    created = store_folder._created
    with monkeypatch.context() as patch:
        patch.setattr(store_folder, "_created", lambda path: _FileOnFullDisk(created(path)))
        with pytest.raises(StoreError, match="No space left"):
            BlockStore(folder, LIMITS, encryption=encryption)
    assert not (folder / MARKER).exists()
    (folder / f"{MARKER}.12345678.tmp").touch()
    (folder / MARKER).touch()
    with closing(BlockStore(folder, LIMITS, encryption=encryption)) as store:
        save_conversation(store)
    with pytest.raises(StoreError, match="is encrypted; give the key file"):
        BlockStore(folder, LIMITS)


def test_two_servers_can_create_an_encrypted_store_at_once(
    folder: Path, encryption: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second server starts while the first writes the marker."""
    created, refusals = store_folder._created, list[str]()

    def start() -> None:
        try:
            BlockStore(folder, LIMITS, encryption=encryption).close()
        except StoreError as error:
            refusals.append(str(error))

    second_server = threading.Thread(target=start)

    def created_while_second_starts(path: Path) -> Any:
        file = created(path)
        monkeypatch.undo()
        second_server.start()
        time.sleep(0.2)
        return file

    monkeypatch.setattr(store_folder, "_created", created_while_second_starts)
    BlockStore(folder, LIMITS, encryption=encryption).close()
    second_server.join()
    assert refusals == []
