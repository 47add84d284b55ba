"""Every message that users can see, read from the source: errors, refusals, lines of the log.

A message stands there as a whole string, or as one with values in it; these are shown as "…".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx_lm_kvpersist
from mlx_lm_kvpersist import errors

from .notes import NOTES

PACKAGE = Path(mlx_lm_kvpersist.__file__).parent
_LOGS = ("warning", "error", "exception")
_OPTION = "ArgumentTypeError"
_STOPS = (
    "ConfigError",
    "PluginNotFound",
    "UnsupportedVersion",
    "TargetMissing",
    "SignatureChanged",
    "PatchNotEffective",
    "SelfTestFailed",
)
SECTIONS = {
    "The server does not start": "One line, and exit status 1. Wrong options have status 2.",
    "The server's log": "Warnings and errors after which the server goes on.",
    "A request is refused": "An error in the form of the client's API, with this status.",
    "A model is not kept": "It is served as the stock server does. The log, `spec` and `why` say "
    "so.",
    "The store, and a file of it": "At the start, in the log, or from a command. A damaged file "
    "goes to quarantine, and its tokens are computed again.",
    "Commands": "One line, and exit status 1.",
}
DYNAMIC = {
    ("cache/geometry/architectures.py", "facts.refused"),
    ("cli/servers.py", "why"),
    ("cli/spec.py", "str(error)"),
    ("host/http/request_checks.py", "str(error)"),
    ("host/http/server.py", "_UNSAID[status_code]"),
    ("host/http/server.py", "message"),
    ("store/disk.py", "str(error)"),
}
"""What is raised with words from elsewhere: such as stock's own."""


@dataclass(frozen=True)
class Said:
    """One message: where users meet it, its HTTP status if it has one, and its text."""

    section: str
    text: str
    status: int | None = None


@cache
def found() -> list[Said]:
    """Return all messages, in the order of the source. Raises ValueError for one without words."""
    return [
        said
        for path in sorted(PACKAGE.rglob("*.py"))
        for said in _in_file(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))
    ]


def _in_file(name: str, source: str) -> Iterator[Said]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        function = ast.unparse(call.func)
        is_counted = function.endswith("failures.add")
        if is_counted or (function.startswith("logger.") and function[7:] in _LOGS):
            section: str | None = "The server's log"
        elif isinstance(node, ast.Raise) or function == "ConfigError":
            section = _section(name, function)
        else:
            continue
        if section is None:
            continue
        text = _words(call.args[0], tree)
        if text is None:
            if (name, ast.unparse(call.args[0])) in DYNAMIC:
                continue
            raise ValueError(f"{name}:{call.lineno}: {ast.unparse(call)} has no words of its own")
        yield Said(section, text, _status(call) if section == "A request is refused" else None)


def _section(name: str, function: str) -> str | None:
    if function == "ModelNotSupported":
        return "A model is not kept"
    if function == "RequestRefused":
        return "A request is refused"
    if function == "GenerationStopped":
        return "A request is refused"
    if function in (_OPTION, *_STOPS) and not name.startswith("cli/"):
        return "The server does not start"
    kind = getattr(errors, function, None)
    if name.startswith("cli/") and (kind is not None or function == _OPTION):
        return "Commands"
    if isinstance(kind, type) and issubclass(kind, errors.StoreError):
        return "The store, and a file of it"
    return None


def _status(call: ast.Call) -> int:
    if ast.unparse(call.func) == "GenerationStopped":
        return errors.GenerationStopped.status
    given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "status")]
    values = [value.value for value in given if isinstance(value, ast.Constant)]
    return next((value for value in values if isinstance(value, int)), 400)


def _words(node: ast.expr, tree: ast.Module) -> str | None:
    """Return a string's text with "…" for values; None for what is no string here."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%\.?[\d]*[a-z]", "…", node.value).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else _value(v, tree) for v in node.values)
        return re.sub("…+", "…", "".join(map(str, parts)))
    if isinstance(node, ast.Name):
        assigned = [
            other.value
            for other in ast.walk(tree)
            if isinstance(other, ast.Assign) and ast.unparse(other.targets[0]) == node.id
        ]
        return _words(assigned[0], tree) if len(assigned) == 1 else None
    return None


def _value(node: ast.expr, tree: ast.Module) -> str:
    """Return what stands for a value in a message: a string that has one name, or "…"."""
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return _words(node.value, tree) or "…"
    return "…"


def lists() -> str:
    """Return the messages of each section. Raises ValueError for a line of the log without a note.

    Also for a note whose message is gone.
    """
    messages = [said for said in dict.fromkeys(found()) if re.search(r"[a-z]{2}", said.text)]
    texts = {said.text for said in messages}
    unknown = [text for text in NOTES if text not in texts]
    silent = [s.text for s in messages if s.section == "The server's log" and s.text not in NOTES]
    if unknown or silent:
        raise ValueError(f"notes without a message: {unknown}; messages without a note: {silent}")
    parts = []
    for section, what in SECTIONS.items():
        rows = [_row(said) for said in messages if said.section == section]
        parts.append(f"### {section}\n\n{what}\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _row(said: Said) -> str:
    status = f" ({said.status})" if said.status else ""
    note = NOTES.get(said.text)
    return f"- `{said.text.strip()}`{status}" + (f"  \n  {note}" if note else "")
