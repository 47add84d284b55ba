"""The command line: every subcommand exists, and an error of ours is one line."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist import __version__
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import StoreError


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command.name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mlx-lm-kvpersist {command.name} ")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(command.name in shown for command in cli.COMMANDS)
    assert " server " not in shown
    with pytest.raises(SystemExit):
        cli.main(["--help"], with_server=True)
    assert " server " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


def test_an_error_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: Any) -> int:
        raise StoreError("the store is gone")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=fail))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "mlx-lm-kvpersist doctor: the store is gone\n"


@pytest.mark.parametrize(
    ("argv", "served"),
    [
        (["--model", "m"], ["--plugin", "kvpersist", "--model", "m"]),
        (["--plugin", "echo"], ["--plugin", "echo"]),
    ],
)
def test_server_means_the_plugin(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], served: list[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(cli, "serve", seen.append)
    assert cli.main(["server", *argv], with_server=True) == 0
    assert seen == [served]
