"""The newest opencode, aider and LangChain, without a screen: turns, kill -9 before the last.

They are installed from npm and PyPI, have their own home folders, and can reach only this server.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.main import main
from tests.support import StartServer
from tests.support.bucket import install
from tests.support.host import REPOSITORY
from tests.support.scripted import ScriptedServer, call

from .alone import run_alone
from .stored import wait_for_writer
from .test_real_clients import Agent, make_server, requests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = REPOSITORY / "docs" / "clients.md"


class OpenCode(Agent):
    package = "opencode-ai"
    client = "opencode"
    settings = (
        ".config/opencode/opencode.json",
        '{\r\n\t"provider" : {"other": {"npm": "@ai-sdk/openai-compatible", "options": '
        '{"baseURL": "http://127.0.0.1:9/v1"}, "models": {"m": {}}}},\r\n\r\n "username":"ü"}',
    )

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        super().__init__(folder, server)
        script = folder / "node_modules" / self.package / "postinstall.mjs"
        subprocess.run(["node", script], check=True, cwd=script.parent, timeout=300)

    def ask(self, question: str, *, again: bool) -> str:
        more = ("--continue",) if again else ()
        printed = self.run(
            *("opencode", "run", "--model", "kvpersist/default_model", "--format", "json"),
            *(*more, question),
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )
        events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        return str([e["part"]["text"] for e in events if e["type"] == "text"][-1]).strip()

    def read_note(self) -> str:
        return call("read", filePath=str(self.work / "note.txt"))


def restart(server: ScriptedServer) -> list[dict[str, Any]]:
    """Return the server's records of its requests; kill it, and start it again."""
    records = requests(server)
    wait_for_writer(server.process)
    server.process.restart(kill=True)
    return records


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_opencode_turns_are_reused_after_a_kill(start_server: StartServer, tmp_path: Path) -> None:
    server = make_server(start_server, tmp_path)
    agent = OpenCode(tmp_path / "agent", server)
    server.say("A title.", "Hello there.")
    agent.ask("Hi. What can you do?", again=False)
    server.say(agent.read_note(), "It says swordfish.")
    agent.ask("Read note.txt", again=True)
    records = restart(server)
    server.say("Again.")
    assert agent.ask("And after a restart?", again=True) == "Again."
    title, first, *others = records + requests(server)
    assert len(others) == 3 and title["prompt_tokens"] < first["prompt_tokens"]
    assert len({record["session"] for record in (title, first, *others)}) == 1
    for record in others:
        assert record["reused_tokens"] >= 0.95 * record["prompt_tokens"], record["sentence"]
    agent.disconnect()


def test_aider_turns_are_reused_after_a_kill(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aider sends its rules again after the history, so the rules are computed each time.

    Reuse ends with the last whole block before the rules: at most 255 tokens earlier.
    """
    server = make_server(start_server, tmp_path)
    programs = install(tmp_path, "aider-chat")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert main(["connect", "aider", "--write", "--port", server.url.rpartition(":")[2]]) == 0
    options = [
        "--config",
        str(home / ".aider.kvpersist.json"),
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
    ]
    options += ["--analytics-disable", "--no-show-release-notes", "--restore-chat-history"]

    def ask(question: str) -> str:
        return run_alone(home, home, [programs / "aider", *options, "--message", question])

    server.say("Hello there.")
    assert "Hello there." in ask("Hi. What can you do?")
    server.say("Indeed.")
    assert "Indeed." in ask("Sure?")
    records = restart(server)
    server.say("Again.")
    assert "Again." in ask("And after a restart?")
    first, *others = records + requests(server)
    assert len(others) == 2 and first["reused_tokens"] == 0
    for record in others:
        assert record["reused_tokens"] + 255 >= 0.5 * record["prompt_tokens"], record["sentence"]
    assert "from disk" in others[-1]["sentence"]
    assert main(["connect", "aider", "--undo"]) == 0
    assert not [path.name for path in home.iterdir() if "kvpersist" in path.name]


def test_langchain_example_of_the_docs_is_reused_after_a_kill(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Runs the Python block of docs/clients.md."""
    server = make_server(start_server, tmp_path)
    programs = install(tmp_path, "langchain-openai", "langchain-anthropic")
    (block,) = re.findall(r"```python\n(from langchain.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(block.replace("http://127.0.0.1:8080", server.url), encoding="utf-8")
    counts = []
    for _ in range(2):
        server.say("Because.", "Because.")
        lines = run_alone(tmp_path, tmp_path, [programs / "python", script]).splitlines()
        assert [line.partition(" ")[0] for line in lines] == ["Because."] * 2
        counts += [int(n) for n in re.findall(r"'cache_read': (\d+)", "\n".join(lines))]
        records = restart(server)
    n_tokens = records[0]["prompt_tokens"]
    assert counts == [0, n_tokens - 1, n_tokens - 1, n_tokens - 1]
