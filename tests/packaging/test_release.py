"""The notes of a release are the section of its version in CHANGELOG.md."""

from __future__ import annotations

import re

import pytest

from tests.support.host import REPOSITORY
from tools.release_notes import CHANGELOG, notes_of


def test_release_notes_are_the_versions_changelog_section() -> None:
    changelog = (
        "# Changelog\n\n## [2.0.0] - 2027-01-01\n\nNew.\n\n## [1.0.0] - 2026-01-01\n\nOld.\n"
    )
    assert notes_of(changelog, "2.0.0") == "New.\n"
    assert notes_of(changelog, "1.0.0") == "Old.\n"


@pytest.mark.parametrize(
    "changelog", ["# Changelog\n", "## [2.0.0] - x\n\n## [1.0.0] - y\n\nOld.\n"]
)
def test_a_version_without_notes_is_refused(changelog: str) -> None:
    with pytest.raises(ValueError, match=r"2\.0\.0: write this section"):
        notes_of(changelog, "2.0.0")


def test_the_changelog_has_the_version_of_the_package() -> None:
    (version,) = re.findall(
        r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M
    )
    assert notes_of(CHANGELOG.read_text("utf-8"), version)
