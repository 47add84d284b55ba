"""The matrix's results, and the files that are written from them.

`supported.json` has the outcomes. The table of docs/compatibility.md and the bounds in
pyproject.toml and `host/patching/versions.py` are written from it, between marks.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .matrix import REPOSITORY, Outcome

PATH = Path(__file__).with_name("supported.json")
Version = tuple[int, ...]


def save(outcomes: Sequence[Outcome], path: Path = PATH) -> None:
    found = {
        "measured": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "platform": f"{platform.system()} {platform.machine()}",
        "rows": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read(path: Path = PATH) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def pairs(found: dict[str, Any]) -> dict[Version, list[Version]]:
    """Return the mlx versions with which each mlx-lm served, the oldest first."""
    served: dict[Version, list[Version]] = {}
    for row in found["rows"]:
        if row["expect"] == row["result"] == "serves":
            served.setdefault(version(row["mlx_lm"]), []).append(version(row["mlx"]))
    return {mlx_lm: sorted(served[mlx_lm]) for mlx_lm in sorted(served)}


def version(text: str) -> Version:
    return tuple(map(int, text.split(".")))


def text(version: Version) -> str:
    return ".".join(map(str, version))


def ceiling(found: dict[str, Any]) -> Version:
    """Return the first mlx-lm that is refused: the minor version after the newest that served."""
    major, minor, *_ = max(pairs(found))
    return major, minor + 1, 0


def constants(found: dict[str, Any]) -> str:
    """Return the bounds for `host/patching/versions.py`."""
    served = pairs(found)
    newest = max(mlx for each in served.values() for mlx in each)
    lines = [
        f"FLOOR: Version = {min(served)}",
        f"CEILING: Version = {ceiling(found)}",
        '"""The first mlx-lm that is refused."""',
        f"NEWEST_MLX: Version = {newest}",
    ]
    return "\n".join(lines)


def known_pairs(found: dict[str, Any]) -> str:
    """Return the table of pairs for `host/patching/versions.py`."""
    newest = max(mlx for each in pairs(found).values() for mlx in each)
    lines = []
    for mlx_lm, each in pairs(found).items():
        last = "" if each[-1] == newest else f", newest_mlx={each[-1]}"
        lines.append(f"    Pair({mlx_lm}, oldest_mlx={each[0]}{last}),")
    return "\n".join(["PAIRS = (", *lines, ")"])


def table(found: dict[str, Any]) -> str:
    lines = [
        f"Run on {found['measured']}, {found['platform']}.",
        "",
        "| mlx-lm | mlx | Python | result | reused after `kill -9` |",
        "|---|---|---|---|---|",
    ]
    tried = [row for row in found["rows"] if row["result"] != "none"]
    for row in tried:
        reused = f"{row['cached_after_kill']:,} of {row['prompt_tokens']:,} tokens"
        cells = [row["mlx_lm"], row["mlx"], row["python"], row["result"]]
        lines.append(f"| {' | '.join(cells)} | {reused if row['prompt_tokens'] else '-'} |")
    lines += ["", "The server refuses these versions with one line:", ""]
    lines += [f"- mlx-lm {row['mlx_lm']}: `{row['says']}`" for row in tried if row["says"]]
    if len(tried) < len(found["rows"]):
        lines += ["", "PyPI had no mlx-lm newer than these, and no pre-release."]
    return "\n".join(lines)


def marked(page: str, mark: str, content: str) -> str:
    """Return a page with new content between two lines with `begin MARK` and `end MARK`."""
    pattern = re.compile(
        rf"(^[^\n]*begin {re.escape(mark)}\b[^\n]*\n).*?(^[^\n]*end {re.escape(mark)}\b)",
        re.DOTALL | re.MULTILINE,
    )
    page, n_found = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", page)
    if n_found != 1:
        raise ValueError(f"found the mark {mark!r} {n_found} times, expected once")
    return page


def with_constants(source: str, found: dict[str, Any]) -> str:
    source = marked(source, "bounds", constants(found))
    return marked(source, "pairs", known_pairs(found))


def with_table(page: str, found: dict[str, Any]) -> str:
    return marked(page, "matrix", f"\n{table(found)}\n")


def with_requirements(project: str, found: dict[str, Any]) -> str:
    served = pairs(found)
    major, minor, _ = ceiling(found)
    oldest = text(min(mlx for each in served.values() for mlx in each))
    project = re.sub(r'"mlx-lm>=[^"]*"', f'"mlx-lm>={text(min(served))},<{major}.{minor}"', project)
    return re.sub(
        r'"mlx(\[cpu\])?>=[^";]*"', lambda match: f'"mlx{match[1] or ""}>={oldest}"', project
    )


WRITTEN: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "mlx_lm_kvpersist/host/patching/versions.py": with_constants,
    "docs/compatibility.md": with_table,
    "pyproject.toml": with_requirements,
}
"""The files that are written from `supported.json`, each by its function."""


def write(found: dict[str, Any]) -> None:
    for name, renewed in WRITTEN.items():
        path = REPOSITORY / name
        path.write_text(renewed(path.read_text(encoding="utf-8"), found), encoding="utf-8")
