"""The files that are written from the matrix agree with its results."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from patches_check import supported
from patches_check.matrix import NEXT, rows
from tests.support.host import REPOSITORY


@pytest.fixture
def found() -> dict[str, Any]:
    return copy.deepcopy(supported.read())


@pytest.mark.parametrize("name", supported.WRITTEN)
def test_files_are_as_the_matrix_writes_them(name: str, found: dict[str, Any]) -> None:
    """After a run: `python -m patches_check --matrix write`."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert supported.WRITTEN[name](text, found) == text


def test_every_row_was_run_and_came_out_as_expected(found: dict[str, Any]) -> None:
    said = [(row["expect"], row["result"]) for row in found["rows"]]
    assert all(expect in (result, "reported") for expect, result in said)
    run = [row for row in found["rows"] if row["expect"] != "reported"]
    written = [row for row in rows() if row.mlx_lm != NEXT]
    assert len(run) == len(written)
    for row, was_run in zip(written, run, strict=True):
        assert (row.mlx_lm, row.expect) == (was_run["mlx_lm"], was_run["expect"])
        assert row.mlx in (was_run["mlx"], "newest")
        assert f"{was_run['python']}.".startswith(f"{row.python}.")


def test_rows_that_serve_kept_a_conversation_and_refused_ones_say_why(
    found: dict[str, Any],
) -> None:
    for row in found["rows"]:
        if row["result"] == "serves":
            assert row["n_patches"] == len(PATCHES)
            assert row["cached_after_kill"] > row["prompt_tokens"] // 2
        if row["result"] == "refused":
            assert f"found mlx-lm {row['mlx_lm']}, supported are" in row["says"]


def test_the_package_knows_the_pairs_that_served(found: dict[str, Any]) -> None:
    known = {pair.mlx_lm: (pair.oldest_mlx, pair.newest_mlx) for pair in versions.PAIRS}
    served = supported.pairs(found)
    assert known == {mlx_lm: (each[0], each[-1]) for mlx_lm, each in served.items()}
    assert min(served) == versions.FLOOR
    assert supported.ceiling(found) == versions.CEILING


def test_a_row_that_fails_changes_the_bounds(found: dict[str, Any]) -> None:
    """The oldest mlx-lm out, and the newest only with an older mlx."""
    for row in found["rows"]:
        if row["mlx_lm"] == "0.31.3" or (row["mlx_lm"], row["mlx"]) == ("0.32.2", "0.32.4"):
            row["result"] = "fails"
    source = (REPOSITORY / "mlx_lm_kvpersist/host/patching/versions.py").read_text(encoding="utf-8")
    written = supported.with_constants(source, found)
    assert "FLOOR: Version = (0, 32, 0)" in written
    assert "Pair((0, 31, 3)" not in written
    assert "Pair((0, 32, 2), oldest_mlx=(0, 32, 2), newest_mlx=(0, 32, 2))" in written
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '"mlx-lm>=0.32.0,<0.33"' in supported.with_requirements(project, found)


def test_a_newer_minor_version_that_serves_moves_the_end(found: dict[str, Any]) -> None:
    found["rows"].append({**found["rows"][-1], "mlx_lm": "0.34.1", "mlx": "0.35.0",
                          "expect": "serves", "result": "serves"})  # fmt: skip
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '"mlx-lm>=0.31.3,<0.35"' in supported.with_requirements(project, found)
    assert "CEILING: Version = (0, 35, 0)" in supported.constants(found)
    assert "NEWEST_MLX: Version = (0, 35, 0)" in supported.constants(found)


@pytest.mark.parametrize("page", ["no mark", "begin x\nend x\nbegin x\nend x\n"])
def test_a_page_without_its_marks_is_named(page: str) -> None:
    with pytest.raises(ValueError, match="mark 'x'"):
        supported.marked(page, "x", "new")
    assert supported.marked("a\n# begin x\nold\n# end x\nb\n", "x", "new") == (
        "a\n# begin x\nnew\n# end x\nb\n"
    )
