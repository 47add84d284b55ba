"""Commands for the folders of several ranks of one model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.store.conftest import chain

from .conftest import HEAD, CommandLine, fill


@pytest.fixture
def ranks(run: CommandLine, tmp_path: Path) -> CommandLine:
    """Two ranks with the same three sessions; rank 1 also has the session "more"."""
    parent = tmp_path / "ranks"
    for rank in range(2):
        shutil.copytree(run.folder, parent / f"rank-{rank}-of-2")
    fill(parent / "rank-1-of-2", {"more": chain(HEAD, [40])})
    return run.at(parent)


def test_list_and_verify_report_each_rank(ranks: CommandLine) -> None:
    assert ranks("sessions", "list") == 0
    first, _, second = ranks.out.partition("rank-1-of-2:")
    assert "rank-0-of-2:" in first and "more" not in first and "more" in second
    reports = ranks.json("sessions", "list")
    assert {name: len(report["sessions"]) for name, report in reports.items()} == {
        "rank-0-of-2": 3,
        "rank-1-of-2": 4,
    }
    assert ranks.json("store", "verify").keys() == reports.keys()


def test_rm_removes_a_session_of_each_rank(ranks: CommandLine) -> None:
    assert ranks("sessions", "rm", "first") == 0
    assert ranks("sessions", "rm", "more") == 0  # only rank 1 has this session
    assert "rank-0-of-2: no session has the name or the title more, " in ranks.err
    for report in ranks.json("sessions", "list").values():
        assert [session["name"] for session in report["sessions"]] == ["last", None]
    assert ranks("sessions", "rm", "nobody") == 1
    assert "no session has the name or the title nobody, " in ranks.err


def test_export_requires_the_folder_of_one_rank(ranks: CommandLine, tmp_path: Path) -> None:
    assert ranks("sessions", "export", "last", tmp_path / "file") == 1
    assert "rank-0-of-2" in ranks.err and not (tmp_path / "file").exists()
    rank_1 = ranks.at(ranks.folder / "rank-1-of-2")
    assert rank_1("sessions", "export", "more", tmp_path / "file") == 0


def test_verify_fails_if_a_file_of_one_rank_is_damaged(ranks: CommandLine) -> None:
    path = next((ranks.folder / "rank-1-of-2" / "blocks").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert ranks("store", "verify") == 1


def test_list_includes_a_store_in_the_parent_folder(ranks: CommandLine) -> None:
    fill(ranks.folder, {"alone": chain([7])})
    names = list(ranks.json("sessions", "list"))
    assert names == ["ranks", "rank-0-of-2", "rank-1-of-2"]
