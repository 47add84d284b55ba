"""sessions list, show, rename, rm and pin: their output, and the store afterwards."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from mlx_lm_kvpersist.cli.output import fitted
from mlx_lm_kvpersist.cli.output import shown as shown_in_line
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import Commit
from tests.store.conftest import ROOT, chain, state, window
from tests.support.store_files import block_path, checkpoint_path

from .conftest import HEAD, WEIRD_NAME, CommandLine, block_files, checkpoint_files, fill


def test_list_shows_sizes_and_precision_of_sessions(run: CommandLine) -> None:
    sessions = run.json("sessions", "list")["sessions"]
    assert [session["name"] for session in sessions] == ["last", None, "first"]
    last = sessions[0]
    assert (last["tokens"], last["blocks"], last["pinned"]) == (6, 4, False)
    nodes = chain(HEAD, [30], [31], [32])
    assert last["bytes"] == sum(block_path(run.folder, n.key).stat().st_size for n in nodes)
    assert last["precision"] == "4b64" and last["namespace"] == ""
    assert run("sessions", "list") == 0
    assert run.out.index("last") < run.out.index("first")
    assert last["id"] in run.out and "keys 4 bits, values 4" in run.out


def test_list_of_an_empty_store(run: CommandLine, tmp_path: Path) -> None:
    fill(tmp_path / "empty", {})
    empty = run.at(tmp_path / "empty")
    assert empty("sessions", "list") == 0 and "no sessions" in empty.out
    assert empty.json("sessions", "list")["sessions"] == []


LONG_NAME = "refactor the parser of the front end, second attempt, branch of Tuesday"


@pytest.fixture
def varied_sessions(run: CommandLine) -> CommandLine:
    """Sessions with a title or first words; some names are an id, long, wide or unprintable."""
    fill(
        run.folder,
        {
            "386d61b8-91d0-4b5c-a1ce-9f4f8ad9ce11": chain(HEAD, *([n] for n in range(100, 120))),
            LONG_NAME: chain(HEAD, [51]),
            "漢字の名前" * 12: chain(HEAD, [52]),
            WEIRD_NAME: chain(HEAD, [53]),
        },
    )
    with closing(Index(run.folder / "index.sqlite")) as index:
        for session in index.sessions():
            index.state.add_note(session.id, words="words of it", client="an editor")
            if session.name == "first":
                index.state.add_note(session.id, title="The parser")
    assert run("sessions", "pin", LONG_NAME) == 0
    return run


@pytest.mark.parametrize("columns", [70, 80, 200])
def test_the_list_fits_the_terminal(varied_sessions: CommandLine, columns: int) -> None:
    head, *lines = varied_sessions.in_terminal(columns, "sessions", "list")
    assert head.split() == ["id", "session", "tokens", "size", "used"]
    ids = [session["id"] for session in varied_sessions.json("sessions", "list")["sessions"]]
    assert [line.split()[0] for line in lines] == ids
    assert max(map(cell_len, lines)) <= columns
    (pinned,) = (line for line in lines if line.endswith("pinned"))
    assert "refa" in pinned and "day " in pinned
    assert ("…" in pinned) == (LONG_NAME not in pinned) == (columns < 200)
    assert sum("The parser" in line for line in lines) == 1
    assert (
        sum("words of it" in line for line in lines) == 2
    )  # of the session named by an id, and of the unnamed session
    assert all(" now" in line for line in lines)


def test_the_list_in_a_pipe_is_tab_separated(varied_sessions: CommandLine) -> None:
    assert varied_sessions("sessions", "list") == 0
    rows = [line.split("\t") for line in varied_sessions.out.splitlines()]
    sessions = varied_sessions.json("sessions", "list")["sessions"]
    assert {(session["client"], session["words"]) for session in sessions} == {
        ("an editor", "words of it")
    }
    assert {len(row) for row in rows} == {len(rows[0])} and len(rows) == len(sessions) + 1
    for row, session in zip(rows[1:], sessions, strict=True):
        fields = dict(zip(rows[0], row, strict=True))
        for name in ("id", "used", "title", "client", "words"):
            assert fields[name] == (session[name] or "")
        for name in ("tokens", "bytes", "pinned"):
            assert fields[name] == json.dumps(session[name])
        assert fields["name"] == (session["name"] or "") or len(session["name"]) > 160


@pytest.mark.parametrize(
    ("sort", "key", "is_falling"),
    [
        ("size", lambda session: session["bytes"], True),
        ("tokens", lambda session: session["tokens"], True),
        ("used", lambda session: session["used"], True),
        ("name", lambda session: session["title"] or "words of it", False),
    ],
)
def test_list_sorts_and_limits_sessions(
    run: CommandLine, sort: str, key: Callable[[Any], Any], is_falling: bool
) -> None:
    with closing(Index(run.folder / "index.sqlite")) as index:
        for n, session in enumerate(index.sessions()):
            index.put_session(replace(session, used=session.used - 100 * n))
            index.state.add_note(session.id, title=("b", "C", "a")[n])
    sessions = run.json("sessions", "list", "--sort", sort)["sessions"]
    keys = [
        str(key(session)).casefold() if sort == "name" else key(session) for session in sessions
    ]
    assert keys == sorted(keys, reverse=is_falling) and len(set(keys)) > 1
    (first,) = run.json("sessions", "list", "--sort", sort, "--limit", "1")["sessions"]
    assert first == sessions[0]
    *_, more = run.in_terminal(80, "sessions", "list", "--sort", sort, "--limit", "1")
    assert more == "… and 2 more sessions"


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "\u0663"])
def test_list_refuses_an_invalid_limit(
    run: CommandLine, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run("sessions", "list", f"--limit={limit}")
    assert end.value.code == 2
    assert "is not a count; write for example 20" in run.err


def test_list_filters_by_name_title_first_words_and_id(varied_sessions: CommandLine) -> None:
    for text, n_found in (("PARSER", 2), ("first", 1), ("tuesday", 1), ("words of it", 7)):
        assert len(varied_sessions.json("sessions", "list", text)["sessions"]) == n_found
    session_id = varied_sessions.ids()["last"]
    (session,) = varied_sessions.json("sessions", "list", session_id[2:])["sessions"]
    assert session["id"] == session_id
    assert varied_sessions("sessions", "list", "nowhere") == 0
    assert "no sessions with nowhere in the name, the title, the first words" in varied_sessions.out


def test_commands_name_a_session_by_title_or_first_words(varied_sessions: CommandLine) -> None:
    titled, unnamed = varied_sessions.ids()["first"], varied_sessions.ids()[None]
    assert varied_sessions("sessions", "pin", titled) == 0
    assert f"{titled}  The parser  is pinned" in varied_sessions.out
    assert (
        varied_sessions("sessions", "unpin", titled)
        == varied_sessions("sessions", "rm", titled)
        == 0
    )
    assert f"removed {titled}  The parser\n" in varied_sessions.out
    assert (
        varied_sessions("store", "gc", "--kvpersist-disk", "1K") == 1
    )  # the index alone is larger
    assert f"removed {unnamed}  words of it\n" in varied_sessions.out


def test_rename_gives_a_title(run: CommandLine) -> None:
    renamed = run.json("sessions", "rename", "first", " The parser\t")
    assert (renamed["name"], renamed["title"]) == ("first", "The parser")
    (listed,) = run.json("sessions", "list", "the parser")["sessions"]
    assert listed["id"] == renamed["id"]
    assert run.json("sessions", "rename", "The parser", "other")["id"] == renamed["id"]
    assert run.json("sessions", "show", "first")["title"] == "other"
    fill(run.folder, {"other": chain([77])})
    assert (
        run.json("sessions", "show", "other")["name"] == "other"
    )  # a name is preferred to an equal title
    assert run.json("sessions", "rename", "first", "")["title"] is None
    assert "at most 200 characters" in run.error("sessions", "rename", "first", "x" * 201)
    assert "no session" in run.error("sessions", "rename", "nobody", "x")


def test_shortened_text_keeps_its_beginning_or_its_end() -> None:
    assert shown_in_line("first\nlast", 6) == "first…"
    assert shown_in_line("first\nlast", 6, is_end=True) == "…nlast"
    assert shown_in_line("a\nb", 6, is_end=True) == "a\\nb"
    assert cell_len(fitted("a long model's name", -3)) == 8


def test_show_prints_the_chain_and_text_of_a_session(run: CommandLine) -> None:
    shown = run.json("sessions", "show", "last")
    nodes = chain(HEAD, [30], [31], [32])
    assert [block["key"] for block in shown["chain"]] == [node.key.hex() for node in nodes]
    assert [block["start"] for block in shown["chain"]] == [0, 3, 4, 5]
    assert shown["text_start"] == "<1><2><3><30><31><32>" == shown["text_end"]
    assert run("sessions", "show", shown["id"][:6]) == 0
    assert nodes[0].key.hex() in run.out and "<1><2><3><30>" in run.out


def test_weird_names_are_escaped_and_shortened(run: CommandLine) -> None:
    fill(run.folder, {WEIRD_NAME: chain([7])})
    assert run.ids().keys() == {"first", None, "last", WEIRD_NAME}
    session_id = run.ids()[WEIRD_NAME]
    for command in (("list",), ("show", session_id), ("pin", session_id), ("rm", session_id)):
        assert run("sessions", *command) == 0
        assert r"../../etc/passwd\x00\n[red]\u202e" in run.out
        assert "\x00" not in run.out and "\u202e" not in run.out and "x" * 200 not in run.out
    files = {path.name for path in run.folder.parent.rglob("*")}
    assert not any("passwd" in name for name in files)


def test_rm_keeps_blocks_of_other_sessions(run: CommandLine) -> None:
    head, *own = chain(HEAD, [30], [31], [32])
    done = run.json("sessions", "rm", "last")
    assert [session["name"] for session in done["removed"]] == ["last"] and done["blocks"] == 3
    assert run.ids().keys() == {"first", None}
    assert block_path(run.folder, head.key).exists()
    assert not any(block_path(run.folder, node.key).exists() for node in own)
    run("sessions", "pin", "first")
    assert run("sessions", "rm", "first", run.ids()[None]) == 0
    assert "  first (pinned)\n" in run.out and "  - (pinned)" not in run.out
    assert block_files(run.folder) == {}
    assert run.json("store", "verify")["ok"]


def test_rm_keeps_a_session_inside_the_removed_chain(run: CommandLine) -> None:
    fill(run.folder, {"longer": chain(HEAD, [10], [11], [12])})
    assert run.json("sessions", "rm", "longer")["blocks"] == 1
    assert run.json("sessions", "show", "first")["blocks"] == 3


def test_rm_leaves_no_text_in_any_file(run: CommandLine) -> None:
    secret = 123456789
    fill(run.folder, {"secret": chain([secret], [5])})

    def files_with_secret() -> list[str]:
        files = [path for path in run.folder.rglob("*") if path.is_file()]
        return [path.name for path in files if f"<{secret}>".encode() in path.read_bytes()]

    assert files_with_secret()
    assert run("sessions", "rm", "secret") == 0
    assert files_with_secret() == []


def test_rm_all_requires_yes(run: CommandLine, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--all"], [], ["--all", "--yes", "first"]):
        with pytest.raises(SystemExit) as end:
            run("sessions", "rm", *argv)
        assert end.value.code == 2
    assert len(run.ids()) == 3
    *_, last = run.in_terminal(80, "sessions", "rm", "--all", "--yes")
    assert last.startswith("A server that runs now still has their blocks in RAM, and may")
    assert run.ids() == {} and block_files(run.folder) == {}


def test_rm_all_removes_blocks_that_no_session_reaches(run: CommandLine) -> None:
    """A kill during a reply leaves such blocks: the whole blocks of the reply's prompt."""
    head, *_ = chain(HEAD, [10])
    with closing(Index(run.folder / "index.sqlite")) as index:
        index.add_blocks(ROOT, [(block, 10) for block in chain([77], [78], parent=head.key)])
    assert run("sessions", "rm", "--all", "--yes") == 0
    assert run.json("store", "stats")["blocks"] == 0 and run.json("store", "verify")["ok"]


def test_rm_all_forgets_all_replies(run: CommandLine) -> None:
    with closing(Index(run.folder / "index.sqlite")) as index:
        index.commit(Commit(ROOT, (), replies={b"digest": b"the words of a reply"}))
    assert run("sessions", "rm", "--all", "--yes") == 0
    with closing(Index(run.folder / "index.sqlite")) as index:
        assert index.state.replies(ROOT.key, [b"digest"]) == {}


def test_rm_with_an_unknown_name_removes_nothing(run: CommandLine) -> None:
    message = run.error("sessions", "rm", "first", "nobody")
    assert "no session has the name or the title nobody, " in message
    assert "first words are not names" in message
    assert len(run.ids()) == 3


def test_rm_refuses_a_name_of_several_branches(run: CommandLine) -> None:
    fill(run.folder, {"first": chain(HEAD, [40])})
    sessions = run.json("sessions", "list")["sessions"]
    ids = [session["id"] for session in sessions if session["name"] == "first"]
    error = run.error("sessions", "rm", "first")
    assert "2 branches" in error and all(session_id in error for session_id in ids)
    assert run("sessions", "rm", ids[0]) == 0
    assert run("sessions", "rm", "first") == 0


def test_an_id_is_preferred_to_an_equal_name(run: CommandLine) -> None:
    session_id = run.ids()["first"]
    fill(run.folder, {session_id: chain([99])})
    assert run.json("sessions", "show", session_id)["name"] == "first"


@pytest.mark.parametrize("side", [slice(None, 1), slice(-1, None)], ids=["beginning", "end"])
def test_show_refuses_an_ambiguous_part_of_an_id(run: CommandLine, side: slice) -> None:
    for number in range(40):
        fill(run.folder, {f"n{number}": chain([1000 + number])})
    ids = list(run.ids().values())
    id_part = next(i[side] for i in ids if sum(other[side] == i[side] for other in ids) > 1)
    assert "ids begin or end with" in run.error("sessions", "show", id_part)


def test_a_session_is_found_by_either_end_of_its_id(run: CommandLine) -> None:
    for session_id in run.ids().values():
        for id_part in (session_id[:10], session_id[-10:]):
            assert run.json("sessions", "show", id_part)["id"] == session_id
        error = run.error("sessions", "show", session_id[3:-3])
        assert "or an id that begins or ends with it" in error


def test_pins_survive_gc_and_rebuild(run: CommandLine) -> None:
    nameless = run.ids()[None]
    assert run.json("sessions", "pin", "first")["pinned"]
    assert run("sessions", "pin", nameless) == 0 and "is pinned" in run.out
    assert run("store", "gc", "--kvpersist-disk", "1K", "--kvpersist-min-free", "0") == 1
    assert run.ids().keys() == {"first", None}
    (run.folder / "index.sqlite").unlink()
    assert run("store", "rebuild") == 0
    assert run.ids() == {"first": run.ids()["first"], None: nameless}
    for name in ("first", nameless):
        assert run.json("sessions", "show", name)["pinned"]
        assert not run.json("sessions", "unpin", name)["pinned"]
    assert run.json("store", "verify")["ok"]
    assert run("store", "gc", "--kvpersist-disk", "1K", "--kvpersist-min-free", "0") == 1
    assert run.ids() == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["sessions", "list"],
        ["sessions", "show", "x"],
        ["sessions", "rm", "x"],
        ["sessions", "pin", "x"],
        ["sessions", "export", "x", "file"],
        ["store", "stats"],
        ["store", "verify"],
        ["store", "verify", "--fix"],
        ["store", "rebuild"],
        ["store", "gc"],
        ["store", "map"],
        ["why", "x"],
    ],
    ids=" ".join,
)
def test_commands_do_not_create_a_missing_store(
    run: CommandLine, tmp_path: Path, argv: list[str]
) -> None:
    missing = run.at(tmp_path / "no where")
    error = missing.error(*argv)
    assert "there is no store" in error and "start the server first: mlx_lm.server " in error
    assert f"--kvpersist-dir '{missing.folder}';" in error
    assert not missing.folder.exists()
    other = run.at(tmp_path / "other")
    other.folder.mkdir()
    error = other.error(*argv)
    assert "holds no store" in error and f"--kvpersist-dir {other.folder};" in error
    assert list(other.folder.iterdir()) == []


def test_list_reports_a_missing_index(run: CommandLine) -> None:
    (run.folder / "index.sqlite").unlink()
    assert "store rebuild" in run.error("sessions", "list")
    assert not (run.folder / "index.sqlite").exists()


def test_commands_change_a_store_that_another_process_uses(run: CommandLine) -> None:
    program = f"""
import sys
from pathlib import Path
from tests.cli.conftest import LIMITS
from tests.store.conftest import chain, save_turn
from mlx_lm_kvpersist.store.block_store import BlockStore
store = BlockStore(Path({str(run.folder)!r}), LIMITS)
save_turn(store, chain([50], [51]), "other")
print("open", flush=True)
sys.stdin.readline()
nodes = chain([50], [51], [52])
save_turn(store, nodes, "other")
assert not [x.leaf for x in store.index.sessions() if x.name == "first"]
print(store._failures or "saved", flush=True)
sys.stdin.readline()
store.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "open\n"
        assert "other" in run.ids()
        assert run("sessions", "rm", "first") == 0
        assert run("sessions", "pin", "last") == 0
        assert run("sessions", "export", "last", run.folder.parent / "last.safetensors") == 0
        assert run.json("store", "verify")["ok"]
        assert run.json("store", "rebuild")["blocks"] == 7
        assert run.json("store", "gc", "--kvpersist-min-free", "0")["blocks"] == 0
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "saved\n"
        assert run.json("sessions", "show", "other")["blocks"] == 3
        assert run.json("store", "verify", "--fix")["ok"]
        print(file=other.stdin, flush=True)
    assert other.returncode == 0
    assert run.ids().keys() == {"last", None, "other"}
    assert run.json("store", "verify")["ok"]


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_command_works_with_a_closed_stream(run: CommandLine, closed: str) -> None:
    command = [sys.executable, "-m", "mlx_lm_kvpersist", "store", "verify", "--kvpersist-dir"]
    words = shlex.join([*command, str(run.folder)])
    done = subprocess.run(["sh", "-c", f"{words} {closed}"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed == "2>&-")


def test_the_module_runs_as_a_program(run: CommandLine) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "mlx_lm_kvpersist",
            "sessions", "list", "--kvpersist-dir", str(run.folder),
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "last" in done.stdout and done.stderr == ""


@pytest.mark.usefixtures("with_checkpoints")
def test_list_and_show_count_checkpoints(run: CommandLine) -> None:
    listed = {session["name"]: session for session in run.json("sessions", "list")["sessions"]}
    nodes = chain(HEAD, [30], [31], [32])
    checkpoints = [window(nodes[0]), state(nodes[3]), window(nodes[3])]
    size = sum(block_path(run.folder, node.key).stat().st_size for node in nodes)
    size += sum(
        checkpoint_path(run.folder, checkpoint.key).stat().st_size for checkpoint in checkpoints
    )
    assert (listed["last"]["blocks"], listed["last"]["checkpoints"]) == (4, 3)
    assert listed["last"]["bytes"] == size
    assert listed["first"]["checkpoints"] == listed[None]["checkpoints"] == 1
    shown = run.json("sessions", "show", "last")["chain"]
    assert [[checkpoint["kind"] for checkpoint in block["checkpoints"]] for block in shown] == [
        ["window-512"], [], [], ["state", "window-512"],
    ]  # fmt: skip
    assert [checkpoint["key"] for checkpoint in shown[3]["checkpoints"]] == [
        checkpoint.key.hex() for checkpoint in checkpoints[1:]
    ]
    assert [checkpoint["tokens"] for checkpoint in shown[0]["checkpoints"]] == [3]
    assert run("sessions", "show", "last") == 0
    assert re.search(r"checkpoints +3\b", run.out) and "state, window-512" in run.out


@pytest.mark.usefixtures("with_checkpoints")
def test_rm_removes_the_sessions_own_checkpoints(run: CommandLine) -> None:
    shared = window(chain(HEAD)[0])
    done = run.json("sessions", "rm", "last")
    assert (done["blocks"], done["checkpoints"]) == (3, 2)
    assert checkpoint_files(run.folder).keys() == {f"{shared.key.hex()}.safetensors"}
    assert run("sessions", "rm", "--all", "--yes") == 0 and "4 blocks, 1 checkpoint" in run.out
    assert checkpoint_files(run.folder) == {} and run.json("store", "verify")["ok"]


def test_rm_warns_of_text_kept_for_another_reader(run: CommandLine) -> None:
    """SQLite cannot overwrite pages that a reader may still need."""
    index = run.folder / "index.sqlite"
    text = b"<30>"
    assert text in index.read_bytes()
    with closing(sqlite3.connect(index)) as browser:
        browser.execute("BEGIN")
        browser.execute("SELECT count(*) FROM blocks").fetchall()
        assert run("sessions", "rm", "last") == 0
        assert text in index.read_bytes() and "another program" in run.out
    assert run("sessions", "rm", "first") == 0
    assert text not in index.read_bytes() and "another program" not in run.out
