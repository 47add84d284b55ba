"""store stats, verify, rebuild and gc: their output, and the store afterwards."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from mlx_lm_kvpersist.block import Block, Root
from mlx_lm_kvpersist.store.database import INDEX_FORMAT
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.folder import StoreLock
from mlx_lm_kvpersist.store.records import Commit
from tests.store.conftest import ROOT, arrays_of_checkpoint, chain, state, window
from tests.support.lock_holder import lock_holder
from tests.support.store_files import block_path, checkpoint_path, write_block

from .conftest import (
    HEAD,
    LIMITS,
    WEIRD_NAME,
    CommandLine,
    block_files,
    checkpoint_files,
    damage,
    fill,
    flip,
)

NO_MINIMUM = ("--kvpersist-min-free", "0")


def path_of(folder: Path, node: Block) -> Path:
    return block_path(folder, node.key)


def faults(run: CommandLine) -> list[str]:
    """Return the faults that verify reports; verify must fail."""
    report = run.json("store", "verify", status=1)
    assert not report["ok"]
    return sorted(problem["fault"] for problem in report["problems"])


def test_stats_has_counts_and_sizes(run: CommandLine) -> None:
    stats = run.json("store", "stats", "--kvpersist-disk", "2M")
    assert (stats["blocks"], stats["sessions"], stats["models"], stats["pinned"]) == (7, 3, 1, 0)
    assert stats["format"] == INDEX_FORMAT and stats["max_disk_bytes"] == 2 << 20
    assert stats["bytes"]["blocks"] == sum(map(len, block_files(run.folder).values()))
    assert stats["bytes"]["all"] == sum(stats["bytes"][k] for k in stats["bytes"] if k != "all")
    assert run("store", "stats", "--kvpersist-disk", "2M") == 0
    assert str(run.folder) in run.out and "2.0 MiB" in run.out


def test_verify_passes_an_undamaged_store(run: CommandLine) -> None:
    assert run.json("store", "verify") == {
        "folder": str(run.folder), "ok": True, "blocks": 7, "checkpoints": 0,
        "problems": [], "left": 0,
    }  # fmt: skip
    before = block_files(run.folder)
    assert run("store", "verify") == 0 and "7 blocks, 0 checkpoints, all good" in run.out
    assert run("store", "verify", "--fix") == 0
    assert block_files(run.folder) == before


@pytest.mark.parametrize("position", [3, 20, 400, -1])
def test_verify_finds_a_flipped_bit_of_a_block(run: CommandLine, position: int) -> None:
    bad = chain(HEAD, [30], [31])[2]
    damage(path_of(run.folder, bad), flip(position))
    assert faults(run) == ["corrupt"]
    assert run("store", "verify") == 1 and bad.key.hex() in run.out and "--fix" in run.out
    assert len(block_files(run.folder)) == 7
    fixed = run.json("store", "verify", "--fix")
    assert fixed["ok"] and fixed["blocks"] == 5  # the blocks after the bad block were removed, too
    assert run.ids().keys() == {"first", None}
    assert run.json("store", "verify")["ok"]
    aside = {path.suffix for path in (run.folder / "quarantine").iterdir()}
    assert aside == {".safetensors", ".json"}


def test_verify_finds_a_missing_block_file(run: CommandLine) -> None:
    path_of(run.folder, chain(HEAD, [30])[1]).unlink()
    assert faults(run) == ["missing"]
    assert run("store", "verify", "--fix") == 0 and "1 problem fixed" in run.out
    assert run.ids().keys() == {"first", None}
    assert len(block_files(run.folder)) == 4


def test_verify_finds_files_without_a_row(run: CommandLine) -> None:
    path = path_of(run.folder, chain(HEAD)[0])
    before = block_files(run.folder)
    (path.parent / (path.parent.name + "0" * 30 + ".safetensors")).write_bytes(b"no row")
    (run.folder / "sessions" / "00c0ffee.json").write_text("{}")
    assert faults(run) == ["orphan"] * 2
    assert run("store", "verify", "--fix") == 0
    assert block_files(run.folder) == before and len(run.ids()) == 3


def test_verify_finds_a_block_in_the_checkpoint_folder(run: CommandLine) -> None:
    key, before = chain(HEAD)[0].key, block_files(run.folder)
    path = checkpoint_path(run.folder, key)
    path.parent.mkdir(parents=True)
    path.write_bytes(block_path(run.folder, key).read_bytes())
    assert faults(run) == ["orphan"]
    assert run("store", "verify", "--fix") == 0
    assert block_files(run.folder) == before and not path.exists()


def change_index(folder: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(folder / "index.sqlite")
    with db:
        assert db.execute(statement, values).rowcount
    db.close()


def test_verify_finds_a_row_that_differs_from_its_file(run: CommandLine) -> None:
    key = chain(HEAD, [30])[1].key
    change_index(run.folder, "UPDATE blocks SET text = 'another' WHERE key = ?", key)
    assert faults(run) == ["mismatch"]
    assert run("store", "verify", "--fix") == 0
    assert run.json("sessions", "show", "last")["text_start"] == "<1><2><3><30><31><32>"
    assert run.ids().keys() == {"first", None, "last"}


def test_verify_finds_a_block_without_parent(run: CommandLine) -> None:
    head = chain(HEAD)[0]
    change_index(run.folder, "DELETE FROM blocks WHERE key = ?", head.key)
    assert faults(run) == ["orphan", "unreachable", "unreachable", "unreachable"]
    assert run("store", "verify", "--fix") == 0
    assert block_files(run.folder) == {} and run.ids() == {}


def test_verify_finds_a_session_without_its_leaf(run: CommandLine) -> None:
    change_index(run.folder, "UPDATE sessions SET leaf = x'00' WHERE name = 'last'")
    assert faults(run) == ["session"]
    assert run("store", "verify", "--fix") == 0
    assert run.ids().keys() == {"first", None}
    assert not list((run.folder / "sessions").glob("*last*"))


def test_verify_finds_and_fixes_wrong_session_files(run: CommandLine) -> None:
    session_id = run.ids()["last"]
    path = run.folder / "sessions" / f"{session_id}.json"
    content = json.loads(path.read_text())
    for wrong in ('{"id": ', json.dumps({**content, "name": "another"}), "[]"):
        path.write_text(wrong)
        assert faults(run) == ["session"]
        assert run("store", "verify", "--fix") == 0
        assert json.loads(path.read_text()) == content


def test_verify_ignores_a_turn_that_is_being_saved(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that is seen without the lock, but not with it, is not reported."""
    path = path_of(run.folder, chain(HEAD)[0])
    arriving = path.with_name(f"{path.stem[:2]}{'0' * 30}.safetensors")
    arriving.write_bytes(b"no row yet")
    real_held = StoreLock.held

    def held(self: StoreLock) -> object:
        arriving.unlink(missing_ok=True)  # the turn was saved before the lock was free
        return real_held(self)

    monkeypatch.setattr(StoreLock, "held", held)
    assert run.json("store", "verify")["ok"]


@pytest.mark.parametrize("index_state", ["missing", "empty", "damaged", "no table", "whole"])
def test_rebuild_restores_the_index_from_files(run: CommandLine, index_state: str) -> None:
    fill(run.folder, {WEIRD_NAME: chain([7])})
    assert run("sessions", "pin", "first") == 0
    before = run.ids()
    path = run.folder / "index.sqlite"
    if index_state == "missing":
        path.unlink()
    elif index_state == "empty":
        path.write_bytes(b"")
    elif index_state == "damaged":
        path.write_bytes(b"no database " * 1000)
    elif index_state == "no table":
        db = sqlite3.connect(path)
        db.execute("DROP TABLE sessions")
        db.close()
    done = run.json("store", "rebuild")
    named = {name: session_id for name, session_id in before.items() if name is not None}
    # Only the index has the id of the unnamed session, so this session needs a readable index.
    assert run.ids() == (before if index_state == "whole" else named)
    assert (done["blocks"], done["sessions"]) == (8, len(run.ids()))
    assert run.json("sessions", "show", "first")["pinned"]
    assert run.json("store", "verify")["ok"]
    assert len(block_files(run.folder)) == 8
    assert run("store", "rebuild") == 0 and "8 blocks" in run.out


def test_rebuild_keeps_times_of_use_and_reply_ids(run: CommandLine) -> None:
    disk = DiskStore(run.folder, LIMITS)
    disk.index.database.connection.execute("UPDATE blocks SET used = 4e9")
    disk.index.database.connection.commit()
    disk.index.commit(Commit(ROOT, (), replies={b"digest": b"ids"}))
    assert run("store", "rebuild") == 0
    assert disk.index.state.replies(ROOT.key, [b"digest"]) == {b"digest": b"ids"}
    assert disk.index.ask("SELECT DISTINCT used FROM blocks") == [(4e9,)]
    disk.close()


def test_rebuild_leaves_out_a_damaged_block(run: CommandLine) -> None:
    damage(path_of(run.folder, chain(HEAD, [20])[1]), lambda content: content.__setitem__(8, 0))
    assert run.json("store", "rebuild")["blocks"] == 6


def test_gc_within_budget_removes_nothing(run: CommandLine) -> None:
    done = run.json("store", "gc", *NO_MINIMUM)
    assert (done["fits"], done["blocks"], done["sessions"]) == (True, 0, [])
    assert run("store", "gc", *NO_MINIMUM) == 0 and "0 blocks" in run.out


def test_gc_reduces_the_store_to_its_budget(run: CommandLine) -> None:
    for number in range(12):
        fill(run.folder, {f"n{number}": chain([100 + number] * 50, [200 + number] * 50)})
    (run.folder / "quarantine").mkdir(exist_ok=True)
    old = run.folder / "quarantine" / f"{'0' * 32}-1.safetensors"
    old.write_bytes(bytes(5000))
    stats = run.json("store", "stats")["bytes"]
    budget = ("--kvpersist-disk", f"{stats['all'] - 5000 - stats['blocks'] // 3}B", *NO_MINIMUM)
    before = block_files(run.folder)
    result = run.json("store", "gc", *budget)
    assert result["fits"] and result["sessions"] and result["blocks"] and not old.exists()
    assert run.json("store", "stats")["bytes"]["all"] <= result["max_disk_bytes"]
    assert len(block_files(run.folder)) == len(before) - result["blocks"]
    assert run.json("store", "verify")["ok"]


def test_gc_reports_pinned_sessions_that_exceed_the_budget(run: CommandLine) -> None:
    assert run("sessions", "pin", "first") == 0
    budget = ("--kvpersist-disk", "1K", *NO_MINIMUM)
    assert not run.json("store", "gc", *budget, status=1)["fits"]
    assert run("store", "gc", *budget) == 1
    assert "pinned" in run.err and run.err.count("\n") == 1
    assert run.ids().keys() == {"first"}


def test_gc_refuses_an_invalid_size(run: CommandLine) -> None:
    with pytest.raises(SystemExit) as end:
        run("store", "gc", "--kvpersist-disk", "many")
    assert end.value.code == 2


def test_commands_refuse_a_store_of_a_newer_format(run: CommandLine) -> None:
    db = sqlite3.connect(run.folder / "index.sqlite")
    db.execute("PRAGMA user_version = 9")
    db.execute("PRAGMA application_id = 0")
    db.close()
    for argv in (("sessions", "list"), ("sessions", "rm", "last"), ("store", "rebuild")):
        assert "format 9" in run.error(*argv)
    assert len(block_files(run.folder)) == 7


# Checkpoints.


@pytest.mark.usefixtures("with_checkpoints")
def test_stats_counts_checkpoints(run: CommandLine) -> None:
    stats = run.json("store", "stats")
    assert (stats["blocks"], stats["checkpoints"]) == (7, 3)
    (root,) = stats["roots"]
    sizes = [sum(map(len, files(run.folder).values())) for files in (block_files, checkpoint_files)]
    assert (root["blocks"], root["checkpoints"], root["bytes"]) == (7, 3, sum(sizes))
    assert [stats["bytes"][kind] for kind in ("blocks", "checkpoints")] == sizes
    assert stats["bytes"]["all"] == sum(stats["bytes"][k] for k in stats["bytes"] if k != "all")
    assert run("store", "stats") == 0 and "size of checkpoints" in run.out


@pytest.mark.usefixtures("with_checkpoints")
def test_verify_passes_undamaged_checkpoints(run: CommandLine) -> None:
    verified = run.json("store", "verify")
    assert verified["ok"] and (verified["blocks"], verified["checkpoints"]) == (7, 3)
    assert run("store", "verify") == 0 and "7 blocks, 3 checkpoints, all good" in run.out


@pytest.mark.usefixtures("with_checkpoints")
@pytest.mark.parametrize("position", [3, 20, 300, -1])
def test_verify_finds_a_flipped_bit_of_a_checkpoint(run: CommandLine, position: int) -> None:
    bad = state(chain(HEAD, [30], [31], [32])[3])
    damage(checkpoint_path(run.folder, bad.key), flip(position))
    assert faults(run) == ["corrupt"]
    assert run("store", "verify") == 1 and bad.key.hex() in run.out
    fixed = run.json("store", "verify", "--fix")
    assert fixed["ok"] and (fixed["blocks"], fixed["checkpoints"]) == (7, 2)
    assert run.ids().keys() == {"first", None, "last"}
    aside = {path.suffix for path in (run.folder / "quarantine").iterdir()}
    assert aside == {".safetensors", ".json"}


@pytest.mark.usefixtures("with_checkpoints")
def test_verify_finds_each_fault_of_checkpoints(run: CommandLine) -> None:
    nodes = chain(HEAD, [30], [31], [32])
    before = checkpoint_files(run.folder)
    missing, foreign = window(nodes[0]), window(nodes[3])
    checkpoint_path(run.folder, missing.key).unlink()
    checkpoint_path(run.folder, foreign.key).unlink()
    other = Root("another", ROOT.layout)
    write_block(
        checkpoint_path(run.folder, foreign.key), foreign, other, arrays_of_checkpoint(foreign)
    )
    change_index(
        run.folder, "UPDATE checkpoints SET n_bytes = 1 WHERE key = ?", state(nodes[3]).key
    )
    (elsewhere,) = chain([99])
    write_block(
        checkpoint_path(run.folder, state(elsewhere).key),
        state(elsewhere),
        ROOT,
        arrays_of_checkpoint(missing),
    )
    path = checkpoint_path(run.folder, state(nodes[3]).key)
    assert faults(run) == ["corrupt", "mismatch", "missing", "orphan"]
    assert run.json("store", "verify", "--fix")["ok"]
    assert checkpoint_files(run.folder) == {path.name: before[path.name]}
    assert run.ids().keys() == {"first", None, "last"}


@pytest.mark.usefixtures("with_checkpoints")
def test_verify_finds_a_checkpoint_without_its_block(run: CommandLine) -> None:
    last = chain(HEAD, [30], [31], [32])[3]
    change_index(run.folder, "DELETE FROM blocks WHERE key = ?", last.key)
    assert faults(run) == ["orphan", "session", "unreachable", "unreachable"]
    assert run.json("store", "verify", "--fix")["ok"]
    assert len(checkpoint_files(run.folder)) == 1


@pytest.mark.usefixtures("with_checkpoints")
@pytest.mark.parametrize("index_state", ["missing", "whole"])
def test_rebuild_restores_checkpoints(run: CommandLine, index_state: str) -> None:
    if index_state == "missing":
        (run.folder / "index.sqlite").unlink()
    done = run.json("store", "rebuild")
    assert (done["blocks"], done["checkpoints"]) == (7, 3)
    assert run("store", "rebuild") == 0 and "7 blocks, 3 checkpoints" in run.out
    assert run.json("store", "verify")["ok"] and len(checkpoint_files(run.folder)) == 3


@pytest.mark.usefixtures("with_checkpoints")
@pytest.mark.parametrize("n_freed", [1, 100_000, 300_000])
def test_gc_removes_checkpoints_to_meet_the_budget(run: CommandLine, n_freed: int) -> None:
    head = chain(HEAD)[0]
    change_index(run.folder, "UPDATE checkpoints SET used = 1 WHERE key = ?", window(head).key)
    total = run.json("store", "stats")["bytes"]["all"]
    budget = ("--kvpersist-disk", f"{total - n_freed}B", *NO_MINIMUM)
    result = run.json("store", "gc", *budget)
    assert result["fits"] and result["checkpoints"] >= 1
    assert (result["checkpoints"], result["blocks"]) == (1, 0) or n_freed > 1
    assert len(block_files(run.folder)) == 7 - result["blocks"]
    assert len(checkpoint_files(run.folder)) == 3 - result["checkpoints"]
    assert run.json("store", "stats")["bytes"]["all"] <= result["max_disk_bytes"]
    assert run.json("store", "verify")["ok"]


def test_a_locked_store_can_be_read_but_not_changed(run: CommandLine, tmp_path: Path) -> None:
    exported = tmp_path / "session"
    with lock_holder(run.folder) as holder:
        for reading in (["store", "stats"], ["store", "verify"], ["sessions", "list"]):
            assert run(*reading) == 0
        assert run("sessions", "export", "last", exported) == 0
        for changing in (["store", "rebuild"], ["sessions", "import", exported]):
            error = run.error(*changing)
            assert f"process {holder.pid} (mlx-lm-kvpersist store rebuild)" in error
    assert run("sessions", "rm", "last") == 0  # the holder was killed
