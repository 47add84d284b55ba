"""If files or index rows change or disappear, checkpoints are correct or missing."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.records import StoreLimits
from mlx_lm_kvpersist.store.verify import find_problems
from tests.support.store_files import checkpoint_path

from .test_bit_flips import TORN, Change, few_or_many, files_of, flip_a_bit, flip_in_any_file
from .turns import (
    LIMITS,
    ROOT,
    SESSIONS,
    chain_of,
    check_arrays,
    expected_checkpoint_arrays,
    expected_checkpoints,
    keep_turn,
    session_ids,
)

LENGTHS = {"anna": 130, "ben": 64, "carl": 33}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store left by kill -9; a part of its index is only in the write-ahead log."""
    work, folder = (tmp_path_factory.mktemp(name) for name in ("work", "prepared"))
    store = BlockStore(work, LIMITS)
    for name, n_tokens in LENGTHS.items():
        keep_turn(store, name, 0, n_tokens // 2)
        keep_turn(store, name, n_tokens // 2, n_tokens)
    store.drain()
    assert (work / "index.sqlite-wal").stat().st_size > 4096
    shutil.copytree(work, folder, dirs_exist_ok=True)
    store.close()
    return folder


def load_checkpoints(store: BlockStore, name: str, n_tokens: int) -> int:
    """Load and check all checkpoints of a session; return how many exist."""
    keys = [node.key for node in chain_of(session_ids(name, n_tokens))]
    n_loaded = 0
    for checkpoints in store.checkpoints(keys).values():
        for checkpoint in checkpoints:
            loaded = store.reader.load(checkpoint, ROOT)
            if loaded is not None:
                check_arrays(loaded.arrays, expected_checkpoint_arrays(checkpoint))
                n_loaded += 1
    return n_loaded


def attack(prepared: Path, folder: Path, change: Change, seed: int) -> None:
    """Change a copy of the store, use it, store another turn, and use it again."""
    rng = random.Random(seed)
    shutil.copytree(prepared, folder)
    if rng.random() < 0.2:
        # The index is rebuilt from the files.
        for path in folder.glob("index.sqlite*"):
            path.unlink()
    label = f"seed {seed}: {change(folder, rng)}"
    try:
        for _ in range(2):
            store = BlockStore(folder, LIMITS)
            try:
                for name, n_tokens in LENGTHS.items():
                    load_checkpoints(store, name, n_tokens)
                for name, n_tokens in LENGTHS.items():
                    keep_turn(store, name, n_tokens, n_tokens)
                store.drain()
                store.pool.clear()
                n_loaded = sum(load_checkpoints(store, *session) for session in LENGTHS.items())
            finally:
                store.close()
        # Each session has a window, which all share, and a state. But a row that claims more bytes
        # than the budget causes evictions of other rows until this row is evicted.
        if n_loaded < len(LENGTHS) * 2 and "n_bytes = 1 << 40" not in label:
            raise ValueError(f"{n_loaded} checkpoints can be loaded")
    except Exception as error:
        raise AssertionError(label) from error
    shutil.rmtree(folder)


def attack_often(prepared: Path, folder: Path, change: Change, n: int) -> None:
    failures = []
    for seed in range(n):
        try:
            attack(prepared, folder / str(seed), change, seed)
        except AssertionError as error:
            failures.append(f"{error} <- {error.__cause__!r}")
    assert not failures, f"{len(failures)} of {n}:\n" + "\n".join(failures[:20])


def test_undamaged_prepared_store_has_all_checkpoints(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    store = BlockStore(tmp_path / "copy", LIMITS)
    assert [load_checkpoints(store, *session) for session in LENGTHS.items()] == [2, 2, 2]
    store.close()


def flip_in_a_checkpoint(folder: Path, rng: random.Random) -> str:
    return flip_a_bit(rng.choice(files_of(folder / "checkpoints")), rng)


def flip_in_the_index(folder: Path, rng: random.Random) -> str:
    paths = [path for path in files_of(folder) if path.name.startswith("index")]
    return flip_a_bit(rng.choice(paths), rng) if paths else "no index"


def change_a_row(folder: Path, rng: random.Random) -> str:
    """Give a column of a checkpoint's row another value, or the value of another row."""
    if not (folder / "index.sqlite").exists():
        return "no index"
    column = rng.choice(["block", "kind", "n_tokens", "n_bytes", "used"])
    other = f"(SELECT {column} FROM checkpoints ORDER BY random() LIMIT 1)"
    value = rng.choice([other, "0", "-1", "'x'", "x'00'", "1e300", "1 << 40"])
    db = sqlite3.connect(folder / "index.sqlite")
    with db:
        where = "key = (SELECT key FROM checkpoints ORDER BY random() LIMIT 1)"
        db.execute(f"UPDATE checkpoints SET {column} = {value} WHERE {where}")
    db.close()
    return f"{column} = {value}"


@few_or_many(10, 200)
@pytest.mark.parametrize(
    "change",
    [flip_in_a_checkpoint, flip_in_the_index, flip_in_any_file, change_a_row, *TORN],
    ids=lambda change: change.__name__,
)
def test_damaged_files_and_rows_never_give_wrong_checkpoints(
    prepared: Path, tmp_path: Path, change: Change, n: int
) -> None:
    attack_often(prepared, tmp_path, change, n)


def test_missing_checkpoint_is_written_again(prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    store = BlockStore(folder, LIMITS)
    store.drain()
    checkpoint = expected_checkpoints(chain_of(session_ids("anna", LENGTHS["anna"])))[1]
    checkpoint_path(folder, checkpoint.key).unlink()
    assert store.reader.load(checkpoint, ROOT) is None
    assert load_checkpoints(store, "anna", LENGTHS["anna"]) == 1
    store.drain()
    keep_turn(store, "anna", LENGTHS["anna"], LENGTHS["anna"])
    store.drain()
    store.pool.clear()
    assert load_checkpoints(store, "anna", LENGTHS["anna"]) == 2
    store.close()


LOG_BYTES = 512 << 10
"""The size to which SQLite truncates the index's write-ahead log."""


def test_stores_that_share_a_folder_load_only_correct_checkpoints(tmp_path: Path) -> None:
    """Both write the same sessions and remove each other's states, within a small budget."""
    limits = StoreLimits(max_ram_bytes=1 << 18, max_disk_bytes=420 << 10)
    stores = [BlockStore(tmp_path / "store", limits) for _ in range(2)]
    counts = {"loaded": 0, "gone": 0}
    failures: list[BaseException] = []

    def talk(number: int) -> None:
        try:
            converse(stores[number], random.Random(number))
        except BaseException as error:
            failures.append(error)

    def converse(store: BlockStore, rng: random.Random) -> None:
        lengths = dict.fromkeys(SESSIONS, 0)
        for _ in range(150):
            name = rng.choice(SESSIONS)
            before = lengths[name]
            if before:
                chain = chain_of(session_ids(name, before))
                store.pool.clear()
                for checkpoint in expected_checkpoints(chain):
                    loaded = store.reader.load(checkpoint, ROOT)
                    counts["gone" if loaded is None else "loaded"] += 1
                    if loaded is not None:
                        check_arrays(loaded.arrays, expected_checkpoint_arrays(checkpoint))
            lengths[name] = 33 if before > 300 else before + rng.randrange(33, 60)
            keep_turn(store, name, before, lengths[name])
            if rng.random() < 0.5:
                store.drain()
            assert store.index.totals().n_bytes <= limits.max_disk_bytes
            # In such a small store the index's log can outgrow its reserve.
            assert store.disk.used_bytes() <= limits.max_disk_bytes + LOG_BYTES

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert min(counts.values()) > 20, counts
    for store in stores:
        store.drain()
        assert store.blocks_quarantined == 0 and not store._failures
        store.close()
    again = BlockStore(tmp_path / "store", limits)
    assert again.disk.sweep() == 0
    assert find_problems(again.folder, again.index) == []
    again.close()
