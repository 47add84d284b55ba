"""Files that are written from the matrix agree with its results."""

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
def results() -> dict[str, Any]:
    return copy.deepcopy(supported.read())


@pytest.mark.parametrize("name", supported.WRITTEN)
def test_written_files_are_up_to_date(name: str, results: dict[str, Any]) -> None:
    """`python -m patches_check --matrix write` updates the files."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    assert supported.WRITTEN[name](text, results) == text


def test_every_row_was_run_with_the_expected_result(results: dict[str, Any]) -> None:
    outcomes = [(row["expect"], row["result"]) for row in results["rows"]]
    assert all(expect in (result, "reported") for expect, result in outcomes)
    run = [row for row in results["rows"] if row["expect"] != "reported"]
    written = [row for row in rows() if row.mlx_lm != NEXT]
    assert len(run) == len(written)
    for row, was_run in zip(written, run, strict=True):
        assert (row.mlx_lm, row.expect) == (was_run["mlx_lm"], was_run["expect"])
        assert row.mlx in (was_run["mlx"], "newest")
        assert f"{was_run['python']}.".startswith(f"{row.python}.")


def test_serving_rows_reuse_tokens_and_refused_rows_have_a_reason(
    results: dict[str, Any],
) -> None:
    for row in results["rows"]:
        if row["result"] == "serves":
            assert row["n_patches"] == len(PATCHES)
            assert row["cached_after_kill"] > row["prompt_tokens"] // 2
        if row["result"] == "refused":
            assert f"found mlx-lm {row['mlx_lm']}, supported are" in row["says"]


def test_package_pairs_and_bounds_match_the_rows_that_served(results: dict[str, Any]) -> None:
    known = {pair.mlx_lm: (pair.oldest_mlx, pair.newest_mlx) for pair in versions.PAIRS}
    served = supported.pairs(results)
    assert known == {mlx_lm: (each[0], each[-1]) for mlx_lm, each in served.items()}
    assert min(served) == versions.FLOOR
    assert supported.ceiling(results) == versions.CEILING


def test_a_row_that_fails_changes_the_bounds(results: dict[str, Any]) -> None:
    """The oldest mlx-lm fails, and the newest mlx-lm fails with the newest mlx."""
    for row in results["rows"]:
        if row["mlx_lm"] == "0.31.3" or (row["mlx_lm"], row["mlx"]) == ("0.32.2", "0.32.4"):
            row["result"] = "fails"
    source = (REPOSITORY / "mlx_lm_kvpersist/host/patching/versions.py").read_text(encoding="utf-8")
    written = supported.with_constants(source, results)
    assert "FLOOR: Version = (0, 32, 0)" in written
    assert "Pair((0, 31, 3)" not in written
    assert "Pair((0, 32, 2), oldest_mlx=(0, 32, 2), newest_mlx=(0, 32, 2))" in written
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '"mlx-lm>=0.32.0,<0.33"' in supported.with_requirements(project, results)


def test_a_newer_minor_version_that_serves_raises_the_ceiling(results: dict[str, Any]) -> None:
    results["rows"].append({**results["rows"][-1], "mlx_lm": "0.34.1", "mlx": "0.35.0",
                          "expect": "serves", "result": "serves"})  # fmt: skip
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert '"mlx-lm>=0.31.3,<0.35"' in supported.with_requirements(project, results)
    assert "CEILING: Version = (0, 35, 0)" in supported.constants(results)
    assert "NEWEST_MLX: Version = (0, 35, 0)" in supported.constants(results)


@pytest.mark.parametrize("page", ["no mark", "begin x\nend x\nbegin x\nend x\n"])
def test_a_page_without_exactly_one_pair_of_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="mark 'x'"):
        supported.marked(page, "x", "new")
    assert supported.marked("a\n# begin x\nold\n# end x\nb\n", "x", "new") == (
        "a\n# begin x\nnew\n# end x\nb\n"
    )
