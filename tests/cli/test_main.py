"""The command line: its parser, a start without MLX, and errors in one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist import __version__
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import StoreError
from mlx_lm_kvpersist.host.patching import versions

ROOT = Path(__file__).parents[2]


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of each command; groups are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from leaves(command)
            return
    yield parser


COMMANDS = {command.prog.removeprefix("mlx-lm-kvpersist "): command
            for command in leaves(cli.make_parser())}  # fmt: skip


def test_parser_has_exactly_these_commands() -> None:
    assert list(COMMANDS) == [
        "doctor", "server", "connect", "why",
        "sessions list", "sessions show", "sessions rm", "sessions pin", "sessions unpin",
        "sessions rename", "sessions export", "sessions import", "warm",
        "store stats", "store gc", "store map", "store verify", "store rebuild", "store prune",
        "key", "bench", "demo", "quality", "spec", "selftest",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "unrecognized"),
    [
        (["show", "Cakes", "for", "Anna"], "for Anna; a name with blanks needs quotes\n"),
        (["show", "Cakes", "--color"], "--color\n"),
        (
            ["show", "A", "--kvpersist-dri", "x"],
            "--kvpersist-dri x; did you mean --kvpersist-dir?\n",
        ),
    ],
)
def test_unknown_arguments_are_named_after_the_usage(
    argv: list[str], unrecognized: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["sessions", *argv])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith("usage: mlx-lm-kvpersist sessions show ")
    assert error.endswith(f"error: unrecognized arguments: {unrecognized}")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "server"])
def test_every_command_has_help_and_an_importable_function(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*name.split(), "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: mlx-lm-kvpersist {name} ")
    options = {o for action in COMMANDS[name]._actions for o in action.option_strings}
    assert all(re.search(rf"{re.escape(option)}\b", shown) for option in options)
    module, _, function = COMMANDS[name].get_default("run").partition(":")
    assert callable(getattr(importlib.import_module(f"mlx_lm_kvpersist.cli.{module}"), function))


@pytest.mark.parametrize("name", ["store gc", "sessions import"])
def test_help_warns_that_the_default_budgets_may_delete_conversations(name: str) -> None:
    description = COMMANDS[name].description or ""
    assert "Give the server's --kvpersist-disk and --kvpersist-min-free" in description
    assert "conversations above the default budgets are deleted" in description


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {name.split()[0]} " in shown for name in COMMANDS)


@pytest.mark.parametrize("group", [[], ["sessions"], ["store"]])
def test_a_group_without_a_command_lists_its_commands(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(group) == 0
    shown = capsys.readouterr().out
    prefix = " ".join([*group, ""])
    group_commands = {
        name.removeprefix(prefix).split()[0] for name in COMMANDS if name.startswith(prefix)
    }
    assert all(f"    {name} " in shown for name in group_commands)


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("prune", "store prune"),
        ("list", "sessions list"),
        ("stor", "store"),
        ("sesions", "sessions"),
        ("sesions list", "sessions list"),
        ("stor verfy --fix", "store verify"),
        ("sessions lst --json", "sessions list"),
        ("sessions prune", "store prune"),
        ("store list", "sessions list"),
        ("conect claude", "connect"),
        ("verfy", "store verify"),
    ],
)
def test_an_unknown_command_suggests_the_most_similar(
    typed: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(typed.split())
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(f"did you mean `{suggested}`?\n") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "group"), [("xyzzy", ""), ("store xyzzy", " store"), ("sessions \n", " sessions")]
)
def test_a_command_similar_to_no_other_refers_to_the_help(
    typed: str, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(typed.split(" "))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.endswith(f"; type `mlx-lm-kvpersist{group} --help`\n") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("--json doctor", "write --json after the command"),
        ("--kvpersist-dir x sessions list", "write --kvpersist-dir after the command"),
        ("sessions --kvpersist-dir x list", "write --kvpersist-dir after the command"),
        ("--limit=5 sessions list", "write --limit=5 after the command"),
        ("--verison", "unrecognized arguments: --verison; did you mean --version?"),
        ("sessions --hlep", "unrecognized arguments: --hlep; did you mean --help?"),
        ("-V", "unrecognized arguments: -V"),
        ("--version=1", "argument --version: ignored explicit argument '1'"),
    ],
)
def test_an_option_before_its_command_is_refused_with_advice_if_a_command_has_it(
    typed: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(typed.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f": {error}\n")


@pytest.mark.parametrize(
    ("typed", "status"), [("connect", 2), ("warm", 2), ("sessions", 0), ("store", 0), ("", 0)]
)
def test_a_command_without_arguments_prints_a_valid_example(
    typed: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(typed.split()) == status
    except SystemExit as end:
        assert end.code == status
    *_, last = "".join(capsys.readouterr()).splitlines()
    label, _, example = last.partition(": mlx-lm-kvpersist ")
    assert label == "For example" and example.startswith(typed)
    cli.make_parser().parse_args(example.split())


def test_version_option_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["sessions", "rm", "--help"], ["doctor", "--json"]])
def test_help_and_doctor_need_no_mlx(tmp_path: Path, argv: list[str]) -> None:
    for name in ("mlx", "mlx_lm"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken')")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from mlx_lm_kvpersist.cli.main import main
try:
    status = main({argv!r})
finally:
    print(sorted(sys.modules.keys() & {{"mlx", "mlx_lm", "numpy"}}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stderr == "[]\n" and len(done.stdout) > 100


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StoreError("the store is gone"), "the store is gone"),
        (
            PermissionError(13, "Permission denied", "/a/b"),
            "no permission for /a/b; run the command as the owner of the folder",
        ),
        (OSError(5, "Input/output error", "/a/b"), "/a/b: Input/output error"),
        (
            OSError(errno.EROFS, "Read-only file system", "/a/b"),
            "/a/b: Read-only file system; mount the volume for writing, or choose another folder",
        ),
        (OSError("no route"), "no route"),
    ],
)
def test_an_error_is_printed_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("mlx_lm_kvpersist.cli.doctor.run", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == f"mlx-lm-kvpersist doctor: {message}\n"


@pytest.mark.parametrize("command", ["doctor", "store stats"])
@pytest.mark.parametrize("option", ["--json", ""])
def test_a_closed_pipe_ends_a_command_without_an_error_message(
    command: str, option: str, tmp_path: Path
) -> None:
    program = f"""
import sys
from mlx_lm_kvpersist.cli import doctor, main as cli, output, store
doctor.run = store.stats = lambda args: output.Report("all", "is well")
sys.exit(cli.main("{command} --kvpersist-dir x {option}".split()))
"""
    reader, pipe = os.pipe()
    os.close(reader)
    # If stdout were unbuffered, the first line would fail.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=pipe,
        stderr=subprocess.PIPE,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model", "m", "--", "x"], ["--plugin", "kvpersist", "--model", "m", "--", "x"]),
        (["--plugin", "echo", "--help"], ["--plugin", "echo", "--help"]),
        (["--version"], ["--plugin", "kvpersist", "--version"]),
        ([], ["--plugin", "kvpersist"]),
    ],
)  # fmt: skip
def test_server_command_passes_arguments_and_adds_the_plugin_option(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], expected: list[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(cli, "serve", calls.append)
    assert cli.main(["server", *argv]) == 0
    assert calls == [expected]


def test_a_count_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--chars=-5"])
    assert "'-5' is not a count; write for example 20" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nope", "./nope"])
def test_a_missing_model_is_reported_before_mlx_lm_is_imported(name: str) -> None:
    code = (
        "import sys; from mlx_lm_kvpersist.cli import main; "
        f"status = main.main(['spec', '--model', {name!r}]); print(status, 'mlx_lm' in sys.modules)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ended.stdout == "1 False\n", ended.stderr


@pytest.mark.parametrize("command", ["spec", "bench", "quality", "demo"])
def test_a_missing_model_is_reported_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main([command, "--model", "nope"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == (
        f"mlx-lm-kvpersist {command}: --model nope cannot be loaded (no such folder, not "
        "downloaded before, and the hub cannot be reached); expected a folder with an MLX model, "
        "or a repository of Hugging Face\n"
    )


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_sigterm_ends_a_download_at_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = []

    def fetched(model: str) -> Path:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise StoreError("no model")

    monkeypatch.setattr("mlx_lm_kvpersist.cli.bench.fetched", fetched)
    assert cli.main([command, "--model", "someone/large"]) == 1
    assert handlers == [signal.SIG_DFL]


@pytest.mark.parametrize("command", ["spec", "bench", "quality", "demo"])
def test_an_unsupported_mlx_lm_is_reported_before_a_download(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", {"mlx-lm": "0.31.2", "mlx": "0.32.4"}.get)
    monkeypatch.setattr("mlx_lm_kvpersist.cli.bench.fetched", lambda model: pytest.fail("fetched"))
    assert cli.main([command, "--model", "someone/large"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"mlx-lm-kvpersist {command}: found mlx-lm 0.31.2, supported are ")
