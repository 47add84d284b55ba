"""Commands for the folders of several ranks of one model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.store.conftest import chain

from .conftest import HEAD, CommandLine, fill


@pytest.fixture
def of_ranks(run: CommandLine, tmp_path: Path) -> CommandLine:
    """The store of three sessions for two ranks; rank 1 has another one, "more"."""
    parent = tmp_path / "ranks"
    for rank in range(2):
        shutil.copytree(run.folder, parent / f"rank-{rank}-of-2")
    fill(parent / "rank-1-of-2", {"more": chain(HEAD, [40])})
    return run.at(parent)


def test_what_is_said_of_each_rank(of_ranks: CommandLine) -> None:
    assert of_ranks("sessions", "list") == 0
    first, _, second = of_ranks.out.partition("rank-1-of-2:")
    assert "rank-0-of-2:" in first and "more" not in first and "more" in second
    found = of_ranks.json("sessions", "list")
    assert {name: len(its["sessions"]) for name, its in found.items()} == {
        "rank-0-of-2": 3,
        "rank-1-of-2": 4,
    }
    assert of_ranks.json("store", "verify").keys() == found.keys()


def test_changes_are_made_for_each_rank(of_ranks: CommandLine) -> None:
    assert of_ranks("sessions", "rm", "first") == 0
    assert of_ranks("sessions", "rm", "more") == 0  # rank 1 alone has it
    assert "rank-0-of-2: no session has the name or the title more, " in of_ranks.err
    for its in of_ranks.json("sessions", "list").values():
        assert [one["name"] for one in its["sessions"]] == ["last", None]
    assert of_ranks("sessions", "rm", "nobody") == 1
    assert "no session has the name or the title nobody, " in of_ranks.err


def test_what_is_for_one_store_asks_which(of_ranks: CommandLine, tmp_path: Path) -> None:
    assert of_ranks("sessions", "export", "last", tmp_path / "file") == 1
    assert "rank-0-of-2" in of_ranks.err and not (tmp_path / "file").exists()
    one = of_ranks.at(of_ranks.folder / "rank-1-of-2")
    assert one("sessions", "export", "more", tmp_path / "file") == 0


def test_a_bad_file_of_one_rank_is_the_status_of_all(of_ranks: CommandLine) -> None:
    path = next((of_ranks.folder / "rank-1-of-2" / "blocks").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert of_ranks("store", "verify") == 1


def test_a_store_beside_them_is_one_of_them(of_ranks: CommandLine) -> None:
    fill(of_ranks.folder, {"alone": chain([7])})
    names = list(of_ranks.json("sessions", "list"))
    assert names == ["ranks", "rank-0-of-2", "rank-1-of-2"]
