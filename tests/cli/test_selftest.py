"""The self-test on demand: the whole start, in this process, leaving nothing behind."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import selftest
from mlx_lm_kvpersist.cli.main import main as command
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from tests.support.host import Environment


def test_all_checks_pass_without_a_plugin(server: ModuleType) -> None:
    before, argv = _attributes(server), list(sys.argv)
    log = logging.root.handlers[:], logging.root.level
    report = selftest.run_selftest([])
    assert report.passed, report
    names = ["versions", *(f"patch {patch.name}" for patch in PATCHES), "startup"]
    assert [result.name for result in report.results] == names
    assert (report.mlx_lm, report.known) == (versions.installed("mlx-lm"), True)
    assert _attributes(server) == before
    assert (sys.argv, (logging.root.handlers, logging.root.level)) == (argv, log)


def _attributes(module: ModuleType) -> dict[str, Any]:
    """Return what a module holds; Python itself notes there which warnings it has shown."""
    return {name: value for name, value in vars(module).items() if name != "__warningregistry__"}


def test_a_plugin_that_is_not_installed_fails_the_start(server: ModuleType) -> None:
    report = selftest.run_selftest(["nothing"])
    assert not report.passed
    assert report.results[-1].error.startswith("no plugin named 'nothing'")


def test_a_wrong_server_option_fails_the_start(server: ModuleType) -> None:
    report = selftest.run_selftest([], ["--no-such-option"])
    assert "unrecognized arguments: --no-such-option" in report.results[-1].error


def test_it_prints_json_and_exits_with_the_result(
    server: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["selftest", "--no-plugin", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and len(report["results"]) == len(PATCHES) + 2
    assert command(["selftest", "--plugin", "nothing"]) == 1
    assert "failed" in capsys.readouterr().out


def test_the_users_own_store_is_left_alone(environment: Environment, tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = environment.run("python", "-m", "patches_check", "--json", env=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*kvpersist*")) == []


def test_nothing_of_the_table_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/long/path" * 12
    result = selftest.Result("patch response_generator", False, 0.01, f"{path} is missing")
    monkeypatch.setenv("COLUMNS", "50")
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        selftest.print_report(selftest.Report("0.32.0", "0.32.4", False, [result]))
        out = capsys.readouterr().out
        assert "mlx 0.32.4 (not measured)" in out
        table = out[out.index("check ") :]
        assert "…" not in table and table.count("/") == path.count("/")


@pytest.mark.parametrize("hook", ["init", "add_options", "configure", "self_test"])
def test_what_fails_in_a_plugin_fails_the_start(environment: Environment, hook: str) -> None:
    selftest = ("python", "-m", "mlx_lm_kvpersist", "selftest", "--json", "--plugin", "failing")
    done = environment.run(*selftest, env={"FAIL_IN": hook})
    assert done.returncode == 1
    result = json.loads(done.stdout)["results"][-1]
    assert result["name"] == "startup"
    assert result["error"] == "RuntimeError: a fault of the plugin"


def test_the_plugin_is_started_and_shut_down(environment: Environment) -> None:
    record = environment.folder / "selftest.json"
    done = environment.run(
        *("python", "-m", "mlx_lm_kvpersist", "selftest", "--plugin", "echo"),
        *("--", "--echo-file", record),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout and "failed" not in done.stdout
    calls = json.loads(record.read_text())
    assert calls == [["configure", ["echo"]], ["self_test"], ["shutdown"]]
