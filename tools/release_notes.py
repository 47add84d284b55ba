"""`python -m tools.release_notes`: print CHANGELOG.md's section about the package's version."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes_of(changelog: str, name: str) -> str:
    """Raises ValueError if the version's section is missing or empty."""
    pattern = rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## |\Z)"
    section = re.search(pattern, changelog, re.DOTALL | re.MULTILINE)
    if section is None or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section for {name}: write this section")
    return section[1].strip() + "\n"


def main() -> int:
    try:
        print(notes_of(CHANGELOG.read_text("utf-8"), version("mlx-lm-kvpersist")), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
