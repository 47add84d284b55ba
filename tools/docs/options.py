"""Tables of the server's options and of the commands, read from their parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist.cli.main import make_parser

_DEFAULT = re.compile(r"\s*\(default: (.*)\)$", re.DOTALL)


def server_options() -> str:
    sections = []
    for heading, options in config.GROUPS.items():
        parser = argparse.ArgumentParser(add_help=False)
        config.add_options(parser, *options)
        rows = [_row(parser, action) for action in parser._actions]
        table = ["| option | default | meaning |", "| --- | --- | --- |", *rows]
        sections.append(f"### {heading}\n\n" + "\n".join(table))
    return "\n\n".join(sections)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    told = parser._get_formatter()._expand_help(action)
    found = _DEFAULT.search(told)
    default = found[1] if found else "off" if action.nargs == 0 else "none"
    meaning = told[: found.start()] if found else told
    spelt = _spelt(action).replace("|", "\\|")
    return f"| `{spelt}` | {_cell(default)} | {_cell(meaning)} |"


def _spelt(action: argparse.Action) -> str:
    """Return an option, or a positional argument, as a user writes it."""
    value: Any = action.metavar
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        many = "…" if action.nargs == "*" else ""
        return f"{value or action.dest.upper()}{many}"
    if action.nargs == 0:
        return action.option_strings[0]
    return f"{action.option_strings[0]} {value or action.dest.upper().replace('_', '-')}"


def _cell(text: str) -> str:
    """Return a help text for a cell, with its options as code."""
    return re.sub(r"--[a-z][\w-]*", r"`\g<0>`", " ".join(text.split()).replace("|", "\\|"))


def commands() -> str:
    rows = ["| command | what it does |", "| --- | --- |"]
    for action in make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            rows += [
                f"| `{each.dest}` | {_cell(each.help or '')} |" for each in action._choices_actions
            ]
    return "\n".join(rows)


def leaves(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command that can be run, with its name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from leaves(command, f"{name} {word}".strip())
            return
    yield name, parser
