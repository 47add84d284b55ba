"""The examples of the pages run against a real server."""

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


def with_port_of(text: str, server: ServerProcess) -> str:
    return text.replace(ADDRESS, f"http://127.0.0.1:{server.port}")


def test_every_sdk_has_an_example() -> None:
    names = {re.search(r"from (\w+)", block.text)[1] for block in SDKS}  # type: ignore[index]
    assert names == {"openai", "anthropic", "langchain_anthropic"}


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_second_run_of_an_sdk_example_reuses_tokens(
    sdk: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """tests/server/test_other_clients.py runs the LangChain example."""
    (block,) = (block for block in SDKS if f"from {sdk} import" in block.text)
    code = compile(with_port_of(block.text, server), block.page, "exec")
    for _ in range(2):
        exec(code, {})
    output = capsys.readouterr().out
    _, n_reused = re.findall(r"(\d+) tokens were not computed again", output)
    assert int(n_reused) > 10


def test_curl_examples_succeed_with_json_replies(server: ServerProcess, tmp_path: Path) -> None:
    """Each reply is JSON with a status of success. One example names its session."""
    assert shutil.which("curl") is not None, "the pages use curl: install it"
    ran = 0
    for block in CURLS:
        for command in re.findall(
            r"^curl (?:.*\\\n)*.*$", with_port_of(block.text, server), re.MULTILINE
        ):
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
