"""The example plugin installs, passes its own test, and serves requests."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from tests.packaging.conftest import uv
from tests.support import ServerProcess, wait_until
from tests.support.host import PTH, REPOSITORY, Environment, make_environment

EXAMPLE = REPOSITORY / "examples" / "csvlog"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with this checkout, and the example from its own pyproject.toml."""
    folder = tmp_path_factory.mktemp("example")
    environment = make_environment(folder / "venv")
    (environment.site_packages / "_checkout.pth").write_text(f"{REPOSITORY}\n", encoding="utf-8")
    shutil.copy(PTH, environment.site_packages)
    copy = shutil.copytree(EXAMPLE, folder / "csvlog", ignore=shutil.ignore_patterns("__*"))
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, copy)
    return environment


def test_the_example_passes_its_own_test(installed: Environment, tmp_path: Path) -> None:
    """The example's source is not on the path, so the installed module is tested."""
    shutil.copy(EXAMPLE / "test_csvlog.py", tmp_path)
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_example_serves_together_with_kvpersist(
    installed: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "requests.csv"
    with ServerProcess(
        tiny_model,
        *("--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store")),
        *("--plugin", "csvlog", "--csvlog", str(file)),
        python=str(installed.python),
        log_path=tmp_path / "server.log",
    ) as server:
        question = [{"role": "user", "content": "How far is it?"}]
        replies = [server.chat(question, session="my chat", max_tokens=4) for _ in range(2)]
        assert replies[1].kvpersist["outcome"] == "EXACT"
        wait_until(lambda: len(file.read_text().splitlines()) == 3, "a line for each request")
        status, _, body = server.request("GET", "/csvlog")
    assert status == 200 and json.loads(body) == {"requests": 2}
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    assert [row["outcome"] for row in rows] == ["replied", "replied"]
    assert {row["session"] for row in rows} == {"my chat"}
    lengths = [(row["prompt_tokens"], row["reply_tokens"]) for row in rows]
    assert lengths == [(str(reply.prompt_tokens), "4") for reply in replies]


def test_the_example_does_not_start_without_its_file_option(installed: Environment) -> None:
    done = installed.run("mlx_lm.server", "--plugin", "csvlog", "--model", "none", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("add --csvlog FILE")
