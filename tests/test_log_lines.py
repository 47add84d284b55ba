"""Every log line of the package begins with the plugin's name."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_lm_kvpersist
from mlx_lm_kvpersist.errors import Failures

PACKAGE = Path(mlx_lm_kvpersist.__file__).parent
_METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log"}


def log_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of `logging` and of all names for loggers."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _METHODS
            and "logg" in ast.unparse(node.func.value)
        ):
            yield node


def starts_with_name(call: ast.Call) -> bool:
    assert isinstance(call.func, ast.Attribute)
    message = call.args[call.func.attr == "log"]
    if isinstance(message, ast.JoinedStr):
        message = message.values[0]
    return isinstance(message, ast.Constant) and str(message.value).startswith("kvpersist: ")


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        ("logger.info('kvpersist: %s', x)", True),
        ("self._logger.log(level, f'kvpersist: {x}')", True),
        ("logger.info('it works')", False),
        ("logger.info(message)", False),
        ("logging.getLogger('x').error(f'{x}: kvpersist: ')", False),
        ("logging.log(10, 'it works')", False),
    ],
)
def test_log_calls_with_and_without_the_prefix_are_recognised(line: str, is_right: bool) -> None:
    (call,) = log_calls(ast.parse(line))
    assert starts_with_name(call) is is_right


def test_every_log_line_begins_with_the_name_of_the_plugin() -> None:
    n_lines, wrong = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        for call in log_calls(ast.parse(path.read_text(encoding="utf-8"))):
            n_lines += 1
            if not starts_with_name(call):
                wrong.append(f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}")
    assert n_lines > 40 and wrong == []


def test_every_logger_variable_has_logg_in_its_name() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value):
                assert all("logg" in ast.unparse(target) for target in node.targets), path


def test_log_lines_of_failures_begin_with_the_name(caplog: pytest.LogCaptureFixture) -> None:
    Failures(logging.getLogger("x")).add("%s is gone", "it")
    assert caplog.messages == ["kvpersist: it is gone"]
