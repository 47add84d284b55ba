"""The plugin conforms to the hooks, and writes a line for each request."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest
from csvlog import COLUMNS, CSVLog

from mlx_lm_kvpersist.plugins import HOOKS, ClientRequest, ConfigError, Prompt, find_faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("log") / "requests.csv"
    return find_faults(CSVLog(), ["--csvlog", str(file)])


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_conforms(faults: dict[str, str], hook: str) -> None:
    assert hook not in faults, faults[hook]


def configured(file: Path) -> CSVLog:
    plugin = CSVLog()
    plugin.configure(Namespace(csvlog=file))
    return plugin


def serve(plugin: CSVLog, times_s: Sequence[float], client_gone: bool = False) -> None:
    """Call the hooks for one request, as the server does."""
    request = ClientRequest(SimpleNamespace(request_type="chat", prompt="", messages=[]))
    headers = Message()
    headers["X-Session-ID"] = "my chat"
    plugin.request_received(request, headers)
    plugin.prompt_rendered(request, Prompt(range(7), [range(7)], ["user"]))
    request.client_gone = client_gone
    plugin.reply_timed(request, times_s)


@pytest.mark.parametrize(
    ("times_s", "client_gone", "expected"),
    [
        ((0.25, 0.5), False, ["my chat", "7", "2", "0.250", "replied"]),
        ((0.25,), True, ["my chat", "7", "1", "0.250", "client left"]),
        ((), False, ["my chat", "7", "0", "", "failed"]),
    ],
)
def test_a_line_has_the_lengths_and_the_outcome(
    tmp_path: Path, times_s: Sequence[float], client_gone: bool, expected: list[str]
) -> None:
    file = tmp_path / "requests.csv"
    plugin = configured(file)
    serve(plugin, times_s, client_gone)
    plugin.shutdown()
    header, row = csv.reader(file.read_text(encoding="utf-8").splitlines())
    assert header == list(COLUMNS)
    assert row[1:] == expected


def test_a_restart_appends_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.csv"
    for _ in range(2):
        plugin = configured(file)
        serve(plugin, (0.25,))
        plugin.shutdown()
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3 and lines[0] == ",".join(COLUMNS)


@pytest.mark.parametrize("name", [None, "missing/requests.csv"])
def test_a_file_that_cannot_be_written_stops_the_server(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(ConfigError, match="--csvlog"):
        CSVLog().configure(Namespace(csvlog=None if name is None else tmp_path / name))
