"""docs/store.md names all commands, options, faults, fields and tables."""

from __future__ import annotations

import argparse
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.main import make_parser
from mlx_lm_kvpersist.store.files import metadata_of
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.verify import Fault
from tests.store.conftest import ROOT, chain, state

PAGE = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    action: Any = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(action.choices)


OF_ALL = {"-h", "--help", "--json", "--kvpersist-dir", "--kvpersist-encrypt"}
"""Options of all commands, which their rows do not repeat."""


@pytest.mark.parametrize("group", ["sessions", "store"])
def test_store_page_lists_every_command_and_option(group: str) -> None:
    rows = dict(re.findall(rf"^\| `{group} (\w+)[^`]*` \| (.*) \|$", PAGE, re.MULTILINE))
    commands = subcommands(subcommands(make_parser())[group])
    assert rows.keys() == commands.keys()
    for name, command in commands.items():
        options = {o for action in command._actions for o in action.option_strings}
        for option in options - OF_ALL:
            assert option in rows[name], f"{group} {name} {option}"


def test_pages_and_code_have_no_decimal_size_units() -> None:
    root = Path(__file__).parents[2]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("mlx_lm_kvpersist/**/*.py")]
    decimal = re.compile(r"\b\d*[KMGT]B\b|/ ?1e[69]\b")
    decimal_sizes = {
        f"{path.relative_to(root)}: {line.strip()}"
        for path in pages
        for line in path.read_text(encoding="utf-8").splitlines()
        if decimal.search(line)
    }
    assert len(pages) > 50 and decimal_sizes == set()


def test_store_page_lists_every_fault() -> None:
    page = PAGE[PAGE.index("`store verify` finds these faults:") :]
    assert re.findall(r"`(\w+)` \(", page) == [fault.value for fault in Fault]


def test_store_page_lists_every_field_of_a_block() -> None:
    assert fields_between("### A block's file", "### A checkpoint's file") == [
        *metadata_of(chain([1])[0], ROOT),
        "empty",
        "checksum",
    ]


def test_store_page_lists_every_field_of_a_checkpoint() -> None:
    assert fields_between("### A checkpoint's file", "### A session's file") == [
        *metadata_of(state(chain([1])[0]), ROOT),
        "empty",
        "checksum",
    ]


def fields_between(start: str, end: str) -> list[str]:
    section = PAGE[PAGE.index(start) : PAGE.index(end)]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_store_page_lists_every_table_of_the_index(tmp_path: Path) -> None:
    Index(tmp_path / "index.sqlite").close()
    db = sqlite3.connect(tmp_path / "index.sqlite")
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {t: [row[1] for row in db.execute(f"PRAGMA table_info({t})")] for t in tables}
    db.close()
    section = PAGE[PAGE.index("### The index") : PAGE.index("### An exported session")]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert {table: re.findall(r"`(\w+)`", description) for table, description in rows} == columns
