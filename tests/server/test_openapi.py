"""A running server conforms to the OpenAPI document: schemathesis makes the requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ServerProcess, StartServer
from tests.support.host import REPOSITORY

CONFIGURATION = """
[[operations]]
include-path-regex = "^/(v1/)?(kvpersist|metrics)"
phases.coverage.unexpected-methods = []
"""
"""On these paths stock answers unexpected methods with 404 or 501, as on its own paths."""
SHORT = ("--phases", "coverage")
LONG = ("--phases", "coverage,fuzzing,stateful", "--max-examples", "200", "--max-time", "200")


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model, "--max-tokens", "2")


@pytest.mark.parametrize(
    ("options", "n_least"),
    [(SHORT, 200), pytest.param(LONG, 400, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_server_conforms_to_the_openapi_document(
    server: ServerProcess, tmp_path: Path, options: tuple[str, ...], n_least: int
) -> None:
    url = f"http://127.0.0.1:{server.port}"
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run"),
        *(str(REPOSITORY / "docs" / "openapi.json"), "--url", url, "--checks", "all"),
        *("--seed", "1", "--no-shrink", "--no-color", "--warnings", "off"),
        *("--continue-on-failure", "--request-timeout", "60", "--max-response-time", "60"),
        *("--generation-database", "none", *options),
    ]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "tests.server.openapi_hooks",
        "PYTHONPATH": str(REPOSITORY),
        "AGENTS_URL": f"{url}/v1/agents",
    }
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    match = re.search(r"(\d+) generated", done.stdout)
    assert match and int(match[1]) >= n_least, done.stdout
    assert server.healthy() and "Traceback" not in server.log
