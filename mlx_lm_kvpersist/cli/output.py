"""Output of the commands: tables for people, JSON for programs, progress of long work.

Names and texts come from clients. They are shown escaped and shortened, never as markup.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200
"""Columns where there is no terminal to ask."""
_LONG_S = 2.0


def shown(text: str, max_chars: int = 40) -> str:
    """Return a client's text in one line of printable characters, at most `max_chars` of them."""
    escaped = "".join(
        char
        if char.isprintable() and char != "\\"
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text[: max_chars + 1]
    )
    return escaped if len(escaped) <= max_chars else escaped[: max_chars - 1] + "…"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, such as "1 block" or "1,054 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def local_time(time_s: float) -> str:
    """Return seconds since the epoch as local date and time, to the minute."""
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def utc_time(time_s: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def tell(args: argparse.Namespace, content: Any, *lines: str) -> None:
    """Print `content` as JSON where --json asks for it, else the lines."""
    if args.json:
        print_json(content)
        return
    for line in lines:
        console().print(line)


def console() -> Console:
    """Return the console for a command's results."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> None:
    """Print a table; `right` names the columns of numbers, separated by blanks.

    Cells that are too long for the terminal go on in the next line; none is cut.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        align: Any = "right" if column in right.split() else "left"
        table.add_column(Text(column), justify=align, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: a bar in a terminal, else a line for every 5% of what takes long.

    The yielded function takes (done, total).
    """
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Callable[[int, int], None]:
    printed, started_s = 0, time.monotonic()

    def on_progress(done: int, total: int) -> None:
        nonlocal printed
        percent = 100 * done // max(1, total) // 5 * 5
        if percent > printed and time.monotonic() - started_s >= _LONG_S:
            printed = percent
            print(f"{what}: {percent}%", file=sys.stderr, flush=True)

    return on_progress


@contextmanager
def ongoing(what: str) -> Iterator[None]:
    """Say on stderr what is being done: with a clock in a terminal, else in one line."""
    if not sys.stderr.isatty():
        print(f"{what} …", file=sys.stderr, flush=True)
        yield
        return
    columns = (TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as clock:
        clock.add_task(what, total=None)
        yield
