"""Output of the commands: tables for people, JSON for programs, progress of long work.

Names and texts come from clients. They are shown escaped and shortened, never as markup.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..cache.geometry.precision import layout_in_words
from ..store.records import Session, Totals
from ..units import show_bytes

_PIPE_WIDTH = 200
"""The width of the output if stdout is not a terminal."""
_GAP = 2
"""Blanks between the columns of a table."""
_LEAST_WIDTH = 8
_NAME_CHARS = 160
_IS_ID = re.compile("[0-9a-f]{8}-?[0-9a-f]{4}|^digest-", re.IGNORECASE)
"""Matches a session's name that is an id, e.g. a UUID."""
_UNITS_S = {"d": 86_400, "h": 3600, "min": 60}


class Report:
    """The output of a command, and its exit status.

    content: printed as JSON with --json. texts: printed without --json, for people.
    """

    def __init__(self, content: Any, *texts: str | Table, status: int = 0) -> None:
        self.content, self.texts, self.status = content, texts, status

    def tell(self, args: argparse.Namespace) -> int:
        if args.json:
            print(json.dumps(self.content, indent=2))
        else:
            for text in self.texts:
                console().print(text)
        return self.status


def shown(text: str, max_chars: int = 40, *, is_end: bool = False) -> str:
    """Return a client's text in one line of printable characters, at most `max_chars` of them.

    If the text is longer, the result is its beginning or, with `is_end`, its end.
    """
    escaped = "".join(
        char
        if char.isprintable() and char != "\\"
        else char.encode("unicode_escape", "surrogatepass").decode()
        for char in (text[-max_chars - 1 :] if is_end else text[: max_chars + 1])
    )
    if len(escaped) <= max_chars:
        return escaped
    return f"…{escaped[1 - max_chars :]}" if is_end else f"{escaped[: max_chars - 1]}…"


def fitted(text: str, width: int) -> str:
    """Return a text in at most `width` columns, but not less than 8.

    If the text is longer, it has an ellipsis in the middle.
    """
    width = max(width, _LEAST_WIDTH)
    if cell_len(text) <= width:
        return text
    n_end = (width - 1) // 2
    end = set_cell_size(text[::-1], n_end)[::-1]
    return f"{set_cell_size(text, width - 1 - n_end)}…{end}"


def called(name: str | None, note: Mapping[str, str]) -> str:
    """Return a session's title, otherwise its name, otherwise the conversation's first words.

    If the name looks like an id, the first words come before it. Returns "" if all are missing.
    """
    name, words = name or "", note.get("words", "")
    text = note.get("title") or (words if words and _IS_ID.search(name) else name or words)
    return shown(text, _NAME_CHARS)


def by_id(ids: Sequence[str], wanted: str) -> list[str]:
    """Return the id that equals `wanted`, otherwise all ids that begin or end with it."""
    if wanted in ids:
        return [wanted]
    return [one for one in ids if wanted and (one.startswith(wanted) or one.endswith(wanted))]


def age(seconds: float) -> str:
    """Return a time in its largest unit, such as "3 d"; "now" if it is under a minute."""
    for unit, unit_s in _UNITS_S.items():
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return "now"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, such as "1 block" or "1,054 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def counts(totals: Totals) -> dict[str, int]:
    return {"blocks": totals.n_blocks, "checkpoints": totals.n_checkpoints}


def amount(totals: Totals) -> str:
    """Return the counts as text, such as "2 blocks, 1 checkpoint"."""
    return ", ".join(counted(number, kind[:-1]) for kind, number in counts(totals).items())


def named(session: Session, note: Mapping[str, str]) -> str:
    return f"{session.id}  {called(session.name, note) or '-'}"


def local_time(time_s: float) -> str:
    """Return seconds since the epoch as local date and time, to the minute."""
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def utc_time(time_s: float) -> str:
    """Return seconds since the epoch in the form for JSON, such as "2026-01-31T12:00:00+00:00"."""
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")


def print_tsv(sessions: Iterable[Mapping[str, Any]], *columns: str) -> None:
    """Print a line of field names, and a line for each session. Sizes are bytes, times UTC."""
    print(*columns, sep="\t")
    for row in sessions:
        fields = {**row, "precision": layout_in_words(row["precision"] or "")}
        values = ("" if fields[name] is None else fields[name] for name in columns)
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        print(*(shown(text, _NAME_CHARS) for text in texts), sep="\t")


def terminal_width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 80


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # Rich would end the process with status 1


def console() -> Console:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return _Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: str = "", shortened: str = ""
) -> Table:
    """Return a table; `right` names the columns of numbers, separated by blanks.

    shortened: the column whose cells are cut to fit the terminal; at least 8 characters stay.
    """
    rows = list(rows)
    if shortened:
        place = columns.index(shortened)
        widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
        rest = sum(widths) - widths[place] + _GAP * (len(columns) - 1)
        left = terminal_width() - rest
        rows = [[*row[:place], fitted(row[place], left), *row[place + 1 :]] for row in rows]
    grid = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        align: Any = "right" if column in right.split() else "left"
        grid.add_column(Text(column), justify=align, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def record(fields: Mapping[str, Any]) -> Table:
    return table(["", ""], [(_label(name), _cell(name, fields[name], 200)) for name in fields])


def records(rows: Sequence[Mapping[str, Any]], *columns: str) -> Table:
    """Return a table of JSON objects, with the fields that `columns` names."""
    numbers = {name for row in rows for name in columns if type(row.get(name)) is int}
    cells = ([_cell(name, row.get(name), 60) for name in columns] for row in rows)
    return table([*map(_label, columns)], cells, " ".join(map(_label, numbers)))


def _label(name: str) -> str:
    return name.replace("_", " ").replace("bytes", "size")


def _cell(name: str, value: Any, max_chars: int) -> str:
    """Return a field's value for people; its name says whether it is a size or a time."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return show_bytes(value) if "bytes" in name else f"{value:,}"
    if name in ("created", "used"):
        return local_time(datetime.fromisoformat(value).timestamp())
    if name == "precision":
        value = layout_in_words(value)
    return shown(str(value), max_chars, is_end=name == "text_end")


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr, if that is a terminal. The yielded function takes (done, total)."""
    with _progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def ongoing(what: str) -> Iterator[Callable[[str], None]]:
    """Print steps to stderr; in a terminal, show a clock. The yielded function begins a step."""
    with _progress(TimeElapsedColumn()) as clock:
        task = clock.add_task("", total=None)

        def say(what: str) -> None:
            if not sys.stderr.isatty():
                print(f"{what} …", file=sys.stderr, flush=True)
            clock.update(task, description=what)

        say(what)
        yield say


def _progress(*columns: ProgressColumn) -> Progress:
    described = TextColumn("{task.description}", markup=False)
    console, is_seen = Console(stderr=True), sys.stderr.isatty()
    return Progress(described, *columns, console=console, transient=True, disable=not is_seen)
