"""The doctor finds causes that keep --plugin from working, and gives advice."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import doctor
from mlx_lm_kvpersist.host.patching import versions
from tests.support.host import PTH, Environment, place_of_transformers

from .test_permissions import as_nobody


@pytest.fixture(scope="module")
def environment(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return replace(environment, path=place_of_transformers(tmp_path_factory.mktemp("first")))


def findings_by_name(done: Any) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def run_doctor(environment: Environment, *options: str) -> Any:
    return environment.run("python", *options, "-m", "mlx_lm_kvpersist", "doctor", "--json")


def test_all_findings_pass_in_a_working_environment(environment: Environment) -> None:
    by_name = findings_by_name(run_doctor(environment))
    by_name.pop("mlx-lm-kvpersist")  # a checkout on the path, not an installation
    assert [name for name, finding in by_name.items() if not finding["passed"]] == []
    assert by_name["mlx_lm.server on PATH"]["found"].startswith(f"{environment.bin}/mlx_lm.server")
    assert by_name["mlx"]["found"].startswith("computes on Device(")


def test_an_ascii_terminal_gets_replacement_characters(environment: Environment) -> None:
    """The advice ends with an ellipsis, and folder names can have any character."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": ""}
    done = environment.run("python", "-m", "mlx_lm_kvpersist", "doctor", env=locale)
    assert "UnicodeEncodeError" not in done.stderr
    assert "-m mlx_lm server ?" in done.stdout


def test_a_missing_pth_file_is_reported_with_a_workaround(environment: Environment) -> None:
    (pth := environment.site_packages / PTH.name).rename(pth.with_suffix(".off"))
    try:
        done = run_doctor(environment)
    finally:
        pth.with_suffix(".off").rename(pth)
    assert done.returncode == 1
    assert json.loads(done.stdout)["works"] is False
    by_name = findings_by_name(done)
    assert str(environment.site_packages) in by_name[".pth file"]["found"]
    assert "mlx-lm-kvpersist server" in by_name[".pth file"]["advice"]
    for name in ("activation in this Python", "mlx_lm.server on PATH"):
        assert "does not know --plugin" in by_name[name]["found"]


def test_a_server_script_of_another_environment_is_reported(
    stock_environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(stock_environment.bin))
    finding = doctor.script()
    command = f"{stock_environment.bin}/mlx_lm.server"
    assert not finding.passed and finding.found.startswith(f"{command} does not know --plugin")
    assert "pip install mlx-lm-kvpersist" in finding.advice


def test_without_a_server_script_the_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    finding = doctor.script()
    assert finding.passed
    assert finding.found == f"none; start it as {sys.executable} -m mlx_lm server …"


def test_a_hidden_pth_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PTH.name).write_text(PTH.read_text())
    assert doctor.pth_file([str(tmp_path)]).passed
    real_stat = Path.stat

    def hidden_stat(path: Path, **options: Any) -> Any:
        result = real_stat(path, **options)
        if path.name != PTH.name:
            return result
        return SimpleNamespace(st_mode=result.st_mode, st_flags=stat.UF_HIDDEN)

    monkeypatch.setattr(Path, "stat", hidden_stat)
    finding = doctor.pth_file([str(tmp_path)])
    assert not finding.passed
    assert f"chflags nohidden {tmp_path / PTH.name}" in finding.advice


def test_an_empty_pth_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / PTH.name).write_text("")
    assert "does not start the plugin" in doctor.pth_file([str(tmp_path)]).found


def test_a_failing_server_script_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "mlx_lm.server"
    script.write_text("#!/bin/sh\necho no such Python >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.script().found == f"{script} failed: no such Python"


def test_an_unsupported_mlx_lm_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: "0.30.0")
    finding = doctor.mlx_lm()
    assert finding.found.startswith("found mlx-lm 0.30.0, supported are 0.31.3 up to")
    assert finding.advice == "install one: pip install 'mlx-lm>=0.31.3,<0.33.0'"


def test_an_mlx_without_a_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MACHINE", "no.such.backend")
    finding = doctor.mlx()
    assert finding.found.startswith("does not compute: ") and "no.such" in finding.found
    assert "pip install 'mlx[cpu]'" in finding.advice


def test_mlx_check_ignores_other_output_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.mlx().found.startswith("computes on Device(")
    monkeypatch.setattr(doctor, "MACHINE", "timeit")
    assert doctor.mlx().found.startswith("says 'hello\\n")


def test_report_ends_with_the_first_failed_finding_and_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = doctor.Finding("mlx", False, "does not compute", "install [cpu]")
    later = doctor.Finding("plugin", False, "none", "install it")
    args = argparse.Namespace(json=False)
    assert doctor.report([broken, later], "the server", "start it").tell(args) == 1
    *_, cause, advice = capsys.readouterr().out.strip().splitlines()
    assert cause.endswith("does not work here: mlx: does not compute")
    assert advice == "Next: install [cpu]"
    fine = doctor.Finding("mlx", True, "computes")
    assert doctor.report([fine], "the server", "start it").tell(args) == 0
    finding_line, result_line, next_line = capsys.readouterr().out.splitlines()
    assert (finding_line, result_line) == ("ok    mlx: computes", "the server works here.")
    assert next_line == "Next: start it"


def test_store_finding_for_whole_damaged_missing_and_foreign_folders(
    folder: Path, tmp_path: Path
) -> None:
    """The server makes a missing store or index, and refuses a folder with other files."""
    finding = doctor.store(folder)
    assert finding.passed and finding.found.startswith(f"{folder}: 3 sessions, ")
    (folder / "index.sqlite").write_bytes(bytes(5000))
    finding = doctor.store(folder)
    assert finding.passed and "is damaged" in finding.found and "rebuilds it" in finding.found
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    finding = doctor.store(folder)
    assert finding.passed and "is missing; the server rebuilds it" in finding.found
    for new in (tmp_path / "none" / "yet", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert doctor.store(new) == doctor.Finding(
            "store", True, f"none yet; the server makes it in {new}"
        )
    (tmp_path / "empty" / "letter.txt").touch()
    finding = doctor.store(tmp_path / "empty")
    assert not finding.passed and "holds no store" in finding.found
    assert "--kvpersist-dir" in finding.advice


def test_the_store_of_each_rank_is_reported(folder: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(folder, tmp_path / "ranks" / f"rank-{rank}-of-2")
    finding = doctor.store(tmp_path / "ranks")
    assert finding.passed
    for rank in range(2):
        assert f"{tmp_path}/ranks/rank-{rank}-of-2: 3 sessions, " in finding.found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_without_permission_is_reported() -> None:
    with TemporaryDirectory() as mine, as_nobody():
        finding = doctor.store(Path(mine) / "store")
    assert not finding.passed and mine in finding.found and "--kvpersist-dir" in finding.advice


class FakeServerHandler(BaseHTTPRequestHandler):
    """A server without the plugin, or with the plugin if `model` is set."""

    model: str | None = None

    def do_GET(self) -> None:
        self.send_response(404 if self.model is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"model": self.model}).encode())


def test_next_command_depends_on_the_server_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), FakeServerHandler) as server:
        port = server.server_port
        monkeypatch.setattr(doctor, "PORT", port)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        finding, next_command = doctor.running("start it")
        assert finding.passed and "taken: " in finding.found and "answered 404" in finding.found
        assert next_command.endswith(f" --port {port + 1}") and next_command.startswith("start it ")
        monkeypatch.setattr(FakeServerHandler, "model", "tiny")
        finding, next_command = doctor.running("start it")
        assert "runs there, with tiny" in finding.found
        assert next_command == "mlx-lm-kvpersist connect claude --write"
        server.shutdown()
    finding, next_command = doctor.running("start it")
    assert finding.found == "free for the server" and next_command.startswith("start it --model ")
