"""Pages with generated parts, between `<!-- made: NAME -->` and `<!-- end of NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from . import disk, options, results

DOCS = Path(__file__).parents[2] / "docs"
_WRITTEN = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
PAGES = [path for path in _WRITTEN if "<!-- made: " in path.read_text("utf-8")]
PARTS: dict[str, Callable[[], str]] = {
    "options": options.server_options,
    "commands": options.commands,
    "disk": disk.table,
    "macs": disk.macs_table,
    "turns": disk.turns_table,
    "in short": results.in_short,
    "conditions": results.conditions,
    "first token": results.first_token,
    "decode": results.decode,
    "together": results.together,
    "break even": disk.break_even,
}
_PART = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


@cache
def made(name: str) -> str:
    """Raises KeyError if no part has this name."""
    return PARTS[name]()


def remade(page: str) -> str:
    return _PART.sub(lambda part: f"{part[1]}\n{made(part[2])}\n\n{part[3]}", page)


def parts(page: str) -> dict[str, str]:
    return {part[2]: part[0] for part in _PART.finditer(page)}
