"""store map: each byte is in one part, each session ends in one part, the drawing is short."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from mlx_lm_kvpersist.store.index import Index
from tests.store.conftest import ROOT, chain

from .conftest import HEAD, WEIRD_NAME, CommandLine, block_files, checkpoint_files, fill


def map_lines(run: CommandLine) -> list[str]:
    assert run("store", "map") == 0, run.err
    return run.out.splitlines()


def lines_with(run: CommandLine, *words: str) -> list[str]:
    return [line for line in map_lines(run) if all(word in line for word in words)]


def chain_of(parts: list[dict[str, Any]], part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a part, and the parts that it continues."""
    while part is not None:
        yield part
        parent = part["goes_on_from"]
        part = None if parent is None else parts[parent]


def test_parts_sum_to_the_sizes_of_store_and_sessions(
    run: CommandLine, with_checkpoints: Path
) -> None:
    store_map = run.json("store", "map")
    parts = store_map["parts"]
    files = {**block_files(run.folder), **checkpoint_files(run.folder)}
    assert store_map["bytes"] == sum(map(len, files.values())) > 0
    assert sum(part["bytes"] for part in parts) == store_map["bytes"]
    assert store_map["bytes_by_age"]["1 hour"] == store_map["bytes"]
    with closing(sqlite3.connect(run.folder / "index.sqlite")) as db, db:
        # A use updates only the time of the last block, but counts for all blocks of the chain.
        db.execute("UPDATE blocks SET used = used - 9e9 WHERE n_children > 0")
    assert run.json("store", "map")["bytes_by_age"]["1 hour"] == store_map["bytes"]
    (shared,) = (part for part in parts if part["shared_by"] > 1)
    assert (shared["shared_by"], shared["tokens"], shared["goes_on_from"]) == (3, len(HEAD), None)
    assert shared["words"] == "<1><2><3>" and shared["sessions"] == []
    sessions = {session["id"]: part for part in parts for session in part["sessions"]}
    listed = run.json("sessions", "list")["sessions"]
    assert sessions.keys() == {session["id"] for session in listed}
    for session in listed:
        chain_parts = list(chain_of(parts, sessions[session["id"]]))
        assert chain_parts[-1] is shared
        for field in ("tokens", "bytes", "blocks"):
            assert sum(part[field] for part in chain_parts) == session[field], field


def test_map_draws_parts_sessions_and_ages(run: CommandLine) -> None:
    first, *_ = map_lines(run)
    assert str(run.folder) in first and first.endswith("in 3 sessions")
    (shared,) = lines_with(run, "shared by 3, 3 tokens")
    assert '"<1><2><3>"' in shared and "▒" in shared and "█" not in shared
    (last,) = lines_with(run, "last", "█" * 20)  # the longest session
    assert "├ " in last
    assert lines_with(run, "1 hour", "█" * 20) and lines_with(run, "└ ")


def test_map_of_nested_equal_and_removed_sessions(run: CommandLine) -> None:
    """One session is a prefix of the rest, two end at the same block, and one is removed."""
    fill(run.folder, {"short": chain(HEAD), "again": chain(HEAD, [10], [11])})
    with sqlite3.connect(run.folder / "index.sqlite") as db:
        db.execute("DELETE FROM sessions WHERE name = 'last'")
        db.execute("UPDATE blocks SET used = used - 100000 WHERE start > 2")
    db.close()
    parts = run.json("store", "map")["parts"]
    by_names = {
        tuple(sorted(session["name"] or "" for session in part["sessions"])): part for part in parts
    }
    assert by_names["short",]["shared_by"] == 4 and by_names["again", "first"]["shared_by"] == 2
    assert by_names["again", "first"]["goes_on_from"] == by_names["short",]["part"]
    assert by_names[()]["shared_by"] == 0 and by_names[()]["blocks"] == 3
    assert lines_with(run, "of no session") and lines_with(run, "shared by 4", "end here", "short")
    assert lines_with(run, "again and 1 more", "1 d", "▒")


def test_map_summarizes_many_sessions(run: CommandLine) -> None:
    with closing(Index(run.folder / "index.sqlite")) as index:
        session = index.sessions()[0]
        for n in range(600):
            (node,) = chain([n, 1])
            index.add_blocks(ROOT, [(node, 1000 + n)])
            index.put_session(replace(session, id=f"{n:08x}", name=f"talk {n}", leaf=node.key))
    lines = map_lines(run)
    assert len(lines) < 60
    (more,) = (line for line in lines if "… and" in line)
    n_named = sum("talk" in line for line in lines)
    assert f"{600 - n_named:,} more sessions" in more and n_named > 30
    assert len(run.json("store", "map")["parts"]) == 604


def test_map_names_sessions_by_title_name_or_first_words(run: CommandLine) -> None:
    """First words replace a generated or missing name, and a title replaces any name."""
    session_id = "386d61b8-91d0-4b5c-a1ce-9f4f8ad9ce11"
    fill(run.folder, {session_id: chain(HEAD, [50])})
    with closing(Index(run.folder / "index.sqlite")) as index:
        for session in index.sessions():
            index.state.add_note(session.id, words=f"words of {session.name}"[:20])
            if session.name == "first":
                index.state.add_note(session.id, title="Parser")
    assert lines_with(run, "words of 386d61b8") and lines_with(run, "words of None")
    assert lines_with(run, "Parser") and lines_with(run, " last ")
    assert not lines_with(run, session_id) and not lines_with(run, "words of last")


def test_long_first_words_end_with_an_ellipsis(run: CommandLine) -> None:
    head = list(range(100, 150))
    fill(run.folder, {"one": chain(head, [50]), "other": chain(head, [51])})
    words = "".join(f"<{n}>" for n in head)[:59] + "…"
    assert words in [part["words"] for part in run.json("store", "map")["parts"]]
    assert any(f'"{words}"' in line for line in run.in_terminal(200, "store", "map"))


def test_session_names_are_not_read_as_markup(run: CommandLine) -> None:
    fill(run.folder, {WEIRD_NAME: chain(HEAD, [50])})
    lines = run.in_terminal(200, "store", "map")
    assert any("../../etc/passwd\\x00\\n[red]\\u202e🦜" in line for line in lines)


@pytest.mark.parametrize("columns", [None, 70, 120])
def test_map_fits_the_terminal_or_80_columns_in_a_pipe(
    run: CommandLine, columns: int | None
) -> None:
    long_name = "refactor the parser of the front end, second attempt, branch of Tuesday"
    fill(run.folder, {long_name: chain(HEAD, [50]), "漢字" * 40: chain(HEAD, [50], [51])})
    with closing(Index(run.folder / "index.sqlite")) as index, index.database.transaction() as db:
        db.execute(
            "UPDATE roots SET about = json_set(about, '$.model', ?)",
            ("/models/of/mine/" * 8 + "Qwen3-4B",),
        )
    lines = map_lines(run) if columns is None else run.in_terminal(columns, "store", "map")
    folder, *drawing = lines
    assert folder.startswith(str(run.folder)[:20]), "whole, so that it can be copied"
    assert max(map(cell_len, drawing)) <= (columns or 80)
    (named,) = (line for line in lines if "Tuesday" in line)
    assert ("…" in named) == (long_name not in named)
    assert sum("Qwen3-4B, keys 4 bits" in line for line in lines) == 1
    assert all(line.count("█") in (0, *range(1, 21)) for line in lines)


def test_map_of_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = CommandLine(tmp_path / "empty", capsys)
    fill(run.folder, {})
    assert map_lines(run) == [f"{run.folder}: 0 B in 0 sessions"]
    assert run.json("store", "map")["parts"] == []


def test_map_reports_a_damaged_index_in_one_line(run: CommandLine) -> None:
    path = run.folder / "index.sqlite"
    with sqlite3.connect(path) as db:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'blocks'"
        (page,) = db.execute(query).fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    assert "store rebuild" in run.error("store", "map")


def test_map_draws_blocks_with_a_wrong_parent_and_start(run: CommandLine) -> None:
    """Two blocks are parents of each other, and one begins before its parent."""
    _, b, c = chain(HEAD, [30], [31])
    with sqlite3.connect(run.folder / "index.sqlite") as db:
        db.execute("UPDATE blocks SET parent = ? WHERE key = ?", (c.key, b.key))
        db.execute("UPDATE blocks SET start = -1 WHERE key = ?", (b.key,))
    db.close()
    assert lines_with(run, "first") and lines_with(run, "last")
    parts, files = run.json("store", "map")["parts"], block_files(run.folder)
    assert sum(part["blocks"] for part in parts) == len(files)
    assert sum(part["bytes"] for part in parts) == sum(map(len, files.values()))
