"""What a release needs: notes of its version, and a job that publishes with pinned actions only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.host import REPOSITORY
from tools.release_notes import CHANGELOG, notes_of

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def test_the_notes_of_a_version_are_its_section() -> None:
    changelog = (
        "# Changelog\n\n## [2.0.0] - 2027-01-01\n\nNew.\n\n## [1.0.0] - 2026-01-01\n\nOld.\n"
    )
    assert notes_of(changelog, "2.0.0") == "New.\n"
    assert notes_of(changelog, "1.0.0") == "Old.\n"


@pytest.mark.parametrize(
    "changelog", ["# Changelog\n", "## [2.0.0] - x\n\n## [1.0.0] - y\n\nOld.\n"]
)
def test_a_version_without_notes_is_refused(changelog: str) -> None:
    with pytest.raises(ValueError, match=r"2\.0\.0: write one"):
        notes_of(changelog, "2.0.0")


def test_the_changelog_has_the_version_of_the_package() -> None:
    (version,) = re.findall(
        r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M
    )
    assert notes_of(CHANGELOG.read_text("utf-8"), version)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_that_may_write_uses_actions_by_hash(path: Path) -> None:
    """`docs` publishes a site and no package: GitHub's own actions by version."""
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        if "permissions" not in job or name == "deploy":
            continue
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), name


def test_superseded_runs_are_cancelled() -> None:
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text("utf-8"))
        if path.stem != "release":
            assert workflow["concurrency"]["cancel-in-progress"] is True, path.name
