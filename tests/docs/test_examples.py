"""The examples of the pages, against a real server: what a reader would run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ServerProcess, StartServer, wait_until

from .blocks import blocks

ADDRESS = "http://127.0.0.1:8080"
SDKS = [block for block in blocks("python") if "127.0.0.1" in block.text]
CURLS = [block for block in blocks("sh") if re.search(r"^curl ", block.text, re.MULTILINE)]


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model, "--max-tokens", "16")


def here(text: str, server: ServerProcess) -> str:
    return text.replace(ADDRESS, f"http://127.0.0.1:{server.port}")


def test_every_sdk_has_an_example() -> None:
    names = {re.search(r"from (\w+)", block.text)[1] for block in SDKS}  # type: ignore[index]
    assert names == {"openai", "anthropic", "langchain_anthropic"}


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_sdks(sdk: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """LangChain's is run in tests/server/test_other_clients.py."""
    (block,) = (block for block in SDKS if f"from {sdk} import" in block.text)
    code = compile(here(block.text, server), block.page, "exec")
    for _ in range(2):
        exec(code, {})
    said = capsys.readouterr().out
    _, again = re.findall(r"(\d+) tokens were not computed again", said)
    assert int(again) > 10


def test_curl(server: ServerProcess, tmp_path: Path) -> None:
    """Each answers with JSON, and with a status of success. One names its session."""
    assert shutil.which("curl") is not None, "the pages use curl: install it"
    ran = 0
    for block in CURLS:
        for command in re.findall(r"^curl (?:.*\\\n)*.*$", here(block.text, server), re.MULTILINE):
            quiet = command.replace("curl -i ", "curl ").replace("curl ", "curl -sS --fail ", 1)
            done = subprocess.run(
                ["sh", "-c", quiet], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)
            ran += 1
    assert ran >= 4

    def names() -> set[str]:
        stored = json.loads(server.request("GET", "/v1/kvpersist/sessions")[2])["sessions"]
        return {session["name"] for session in stored}

    wait_until(lambda: "my chat" in names(), "the session that an example names")
