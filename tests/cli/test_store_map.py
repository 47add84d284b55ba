"""store map: every byte is in one part, every session ends in one, and a drawing stays small."""

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


def drawn(run: CommandLine) -> list[str]:
    assert run("store", "map") == 0, run.err
    return run.out.splitlines()


def lines_with(run: CommandLine, *words: str) -> list[str]:
    return [line for line in drawn(run) if all(word in line for word in words)]


def way(parts: list[dict[str, Any]], part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a part, and the parts that it continues."""
    while part is not None:
        yield part
        above = part["goes_on_from"]
        part = None if above is None else parts[above]


def test_parts_add_up(run: CommandLine, with_checkpoints: Path) -> None:
    found = run.json("store", "map")
    parts = found["parts"]
    files = {**block_files(run.folder), **checkpoint_files(run.folder)}
    assert found["bytes"] == sum(map(len, files.values())) > 0
    assert sum(part["bytes"] for part in parts) == found["bytes"]
    assert found["bytes_by_age"]["1 hour"] == found["bytes"]
    with closing(sqlite3.connect(run.folder / "index.sqlite")) as db, db:
        # A use marks only the ends of chains; it counts for the blocks before them, too.
        db.execute("UPDATE blocks SET used = used - 9e9 WHERE n_children > 0")
    assert run.json("store", "map")["bytes_by_age"]["1 hour"] == found["bytes"]
    (shared,) = (part for part in parts if part["shared_by"] > 1)
    assert (shared["shared_by"], shared["tokens"], shared["goes_on_from"]) == (3, len(HEAD), None)
    assert shared["words"] == "<1><2><3>" and shared["sessions"] == []
    sessions = {one["id"]: part for part in parts for one in part["sessions"]}
    listed = run.json("sessions", "list")["sessions"]
    assert sessions.keys() == {one["id"] for one in listed}
    for one in listed:
        on_it = list(way(parts, sessions[one["id"]]))
        assert on_it[-1] is shared
        for field in ("tokens", "bytes", "blocks"):
            assert sum(part[field] for part in on_it) == one[field], field


def test_it_is_drawn(run: CommandLine) -> None:
    first, *_ = drawn(run)
    assert str(run.folder) in first and first.endswith("in 3 sessions")
    (shared,) = lines_with(run, "shared by 3, 3 tokens")
    assert '"<1><2><3>"' in shared and "▒" in shared and "█" not in shared
    (last,) = lines_with(run, "last", "█" * 20)  # the longest
    assert "├ " in last
    assert lines_with(run, "1 hour", "█" * 20) and lines_with(run, "└ ")


def test_sessions_within_others_and_none(run: CommandLine) -> None:
    """One ends where another continues, two end at the same block, and one is removed."""
    fill(run.folder, {"short": chain(HEAD), "again": chain(HEAD, [10], [11])})
    with sqlite3.connect(run.folder / "index.sqlite") as db:
        db.execute("DELETE FROM sessions WHERE name = 'last'")
        db.execute("UPDATE blocks SET used = used - 100000 WHERE start > 2")
    db.close()
    parts = run.json("store", "map")["parts"]
    by_names = {
        tuple(sorted(one["name"] or "" for one in part["sessions"])): part for part in parts
    }
    assert by_names["short",]["shared_by"] == 4 and by_names["again", "first"]["shared_by"] == 2
    assert by_names["again", "first"]["goes_on_from"] == by_names["short",]["part"]
    assert by_names[()]["shared_by"] == 0 and by_names[()]["blocks"] == 3
    assert lines_with(run, "of no session") and lines_with(run, "shared by 4", "end here", "short")
    assert lines_with(run, "again and 1 more", "1 d", "▒")


def test_many_sessions_are_summed_up(run: CommandLine) -> None:
    with closing(Index(run.folder / "index.sqlite")) as index:
        one = index.sessions()[0]
        for n in range(600):
            (node,) = chain([n, 1])
            index.add_blocks(ROOT, [(node, 1000 + n)])
            index.put_session(replace(one, id=f"{n:08x}", name=f"talk {n}", leaf=node.key))
    lines = drawn(run)
    assert len(lines) < 60
    (more,) = (line for line in lines if "… and" in line)
    n_named = sum("talk" in line for line in lines)
    assert f"{600 - n_named:,} more sessions" in more and n_named > 30
    assert len(run.json("store", "map")["parts"]) == 604


def test_a_session_is_called_what_people_call_it(run: CommandLine) -> None:
    """A name for programs gives way to the first words, and both to a title."""
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


def test_long_words_end_with_an_ellipsis(run: CommandLine) -> None:
    head = list(range(100, 150))
    fill(run.folder, {"one": chain(head, [50]), "other": chain(head, [51])})
    words = "".join(f"<{n}>" for n in head)[:59] + "…"
    assert words in [part["words"] for part in run.json("store", "map")["parts"]]
    assert any(f'"{words}"' in line for line in run.in_terminal(200, "store", "map"))


def test_names_are_no_markup(run: CommandLine) -> None:
    fill(run.folder, {WEIRD_NAME: chain(HEAD, [50])})
    lines = run.in_terminal(200, "store", "map")
    assert any("../../etc/passwd\\x00\\n[red]\\u202e🦜" in line for line in lines)


@pytest.mark.parametrize("columns", [None, 70, 120])
def test_it_fits_the_terminal_and_80_columns_in_a_pipe(
    run: CommandLine, columns: int | None
) -> None:
    long_name = "refactor the parser of the front end, second attempt, branch of Tuesday"
    fill(run.folder, {long_name: chain(HEAD, [50]), "漢字" * 40: chain(HEAD, [50], [51])})
    with closing(Index(run.folder / "index.sqlite")) as index, index.database.transaction() as db:
        db.execute(
            "UPDATE roots SET about = json_set(about, '$.model', ?)",
            ("/models/of/mine/" * 8 + "Qwen3-4B",),
        )
    lines = drawn(run) if columns is None else run.in_terminal(columns, "store", "map")
    folder, *drawing = lines
    assert folder.startswith(str(run.folder)[:20]), "whole, so that it can be copied"
    assert max(map(cell_len, drawing)) <= (columns or 80)
    (named,) = (line for line in lines if "Tuesday" in line)
    assert ("…" in named) == (long_name not in named)
    assert sum("Qwen3-4B, keys 4 bits" in line for line in lines) == 1
    assert all(line.count("█") in (0, *range(1, 21)) for line in lines)


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = CommandLine(tmp_path / "empty", capsys)
    fill(run.folder, {})
    assert drawn(run) == [f"{run.folder}: 0 B in 0 sessions"]
    assert run.json("store", "map")["parts"] == []


def test_a_damaged_index_is_one_line(run: CommandLine) -> None:
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


def test_a_row_that_lies_about_its_place(run: CommandLine) -> None:
    """Blocks in a circle, and one before its parent."""
    a, b, c = chain(HEAD, [30], [31])
    with sqlite3.connect(run.folder / "index.sqlite") as db:
        db.execute("UPDATE blocks SET parent = ? WHERE key = ?", (c.key, b.key))
        db.execute("UPDATE blocks SET start = -1 WHERE key = ?", (b.key,))
    db.close()
    assert a.key != b.key and drawn(run)
    assert sum(part["bytes"] for part in run.json("store", "map")["parts"]) > 0
