"""The newest Claude Code and Codex, without a screen: four turns, a tool, kill -9 before the last.

They are installed with npm, have their own home folders, and can reach only this server. The
command `connect` configures them, and `--undo` restores every byte of their settings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from tests.support import StartServer
from tests.support.scripted import ScriptedServer, call, make_thinking_model

from .alone import run_alone
from .stored import wait_for_writer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
    pytest.mark.timeout(900),
]

NOTE = "The password is swordfish.\n"


class Agent(ABC):
    """A command-line client with its own home folder and working folder.

    package: the npm package. client: the name for `connect`. settings: the file in the home folder
    with the addresses of other servers, and its content before `connect`.
    """

    package: str
    client: str
    settings: tuple[str, str]

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        self.bin = folder / "node_modules" / ".bin"
        self.home, self.work = folder / "home", folder / "work"
        self.work.mkdir(parents=True)
        (self.work / "note.txt").write_text(NOTE, encoding="utf-8")
        name, content = self.settings
        self._settings = self.home / name
        self._settings.parent.mkdir(parents=True)
        self._settings.write_bytes(content.encode())
        self._settings.chmod(0o640)
        self.env: dict[str, str] = {}
        # `@latest`: without a version npm installs a package that supports the local Node.
        package = f"{self.package}@latest"
        install = ("npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), package)
        subprocess.run(install, check=True, timeout=600, capture_output=True)
        post_install = folder / "node_modules" / self.package / "install.cjs"
        if post_install.exists():  # npm may not have run the package's script
            subprocess.run(["node", post_install], check=True, cwd=post_install.parent, timeout=120)
        self._before = self._files()
        self._connect("--write", "--port", server.url.rpartition(":")[2])
        assert self._files().keys() - {name} > self._before.keys() - {name}

    def disconnect(self) -> None:
        """Undo `connect`, and check that the home has its earlier settings, and none of ours."""
        self._connect("--undo")
        files = self._files()
        assert {name: files.get(name) for name in self._before} == self._before
        assert not [name for name in files if "kvpersist" in name]

    def _connect(self, *options: str) -> None:
        command = Path(sys.executable).with_name("mlx-lm-kvpersist")
        run_alone(self.home, self.work, [command, "connect", self.client, *options])

    def _files(self) -> dict[str, tuple[int, bytes]]:
        """Return the mode and the bytes of each file in the home."""
        files = (path for path in self.home.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.home)): (path.stat().st_mode, path.read_bytes())
            for path in files
        }

    def run(self, *command: str, **env: str) -> str:
        """Run the client in its home; return its output."""
        program = [str(self.bin / command[0]), *command[1:]]
        return run_alone(self.home, self.work, program, **self.env, **env)

    @abstractmethod
    def ask(self, question: str, *, again: bool) -> str:
        """Ask a question, in the last conversation if `again`; return the answer."""

    @abstractmethod
    def read_note(self) -> str:
        """Return the model's call that reads the note."""


class ClaudeCode(Agent):
    package = "@anthropic-ai/claude-code"
    client = "claude"
    settings = (
        ".claude/settings.json",
        '{\r\n\t"env" : {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9"},\r\n\r\n  "model":"sonnet"}',
    )

    def ask(self, question: str, *, again: bool) -> str:
        printed = self.run(
            *(
                "claude",
                "--settings",
                str(self.home / ".claude" / "kvpersist.json"),
                "-p",
                question,
            ),
            *("--output-format", "json", "--allowedTools", "Read"),
            *(("--continue",) if again else ()),
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )
        answer: dict[str, Any] = json.loads(printed)
        assert not answer["is_error"] and answer["stop_reason"] == "end_turn"
        return str(answer["result"])

    def read_note(self) -> str:
        return call("Read", file_path=str(self.work / "note.txt"))


class Codex(Agent):
    package = "@openai/codex"
    client = "codex"
    settings = (
        ".codex/config.toml",
        '# mine\r\nmodel="gpt-5"  # why\r\nmodel_provider = "other"\r\n[model_providers.other]\r\n'
        'name = "other"\r\nbase_url = "http://127.0.0.1:9/v1"',
    )

    def ask(self, question: str, *, again: bool) -> str:
        resume = ("resume", "--last") if again else ()
        command = ("exec", "--profile", "kvpersist", "--json", "--skip-git-repo-check", *resume)
        printed = self.run("codex", *command, question)
        events = [json.loads(line) for line in printed.splitlines()]
        assert events[-1]["type"] == "turn.completed", printed
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        return str([item["text"] for item in items if item["type"] == "agent_message"][-1])

    def read_note(self) -> str:
        return call("exec_command", cmd="cat note.txt")


def make_server(start: StartServer, folder: Path) -> ScriptedServer:
    """Start a server that reads tens of thousands of tokens in a few seconds."""
    size = {"vocab_size": 3000, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1}
    return ScriptedServer(start, make_thinking_model(folder / "model", **size), folder)


@pytest.mark.parametrize("kind", [ClaudeCode, Codex])
def test_every_later_turn_reuses_the_stored_conversation(
    kind: type[Agent], start_server: StartServer, tmp_path: Path
) -> None:
    server = make_server(start_server, tmp_path)
    agent = kind(tmp_path / "agent", server)
    server.say("Hello there.")
    assert agent.ask("Hi. What can you do?", again=False) == "Hello there."
    server.say(f"<think>\nI read it.\n</think>\n\n{agent.read_note()}", "It says swordfish.")
    assert agent.ask("Read note.txt", again=True) == "It says swordfish."
    server.say("Indeed.")
    assert agent.ask("Sure?", again=True) == "Indeed."
    records = requests(server)
    wait_for_writer(server.process)
    server.process.restart(kill=True)
    server.say("Again.")
    assert agent.ask("And after a restart?", again=True) == "Again."
    records += requests(server)
    assert len(records) == 5
    assert len({record["session"] for record in records}) == 1
    for record in records[1:]:
        assert record["reused_tokens"] >= 0.95 * record["prompt_tokens"], record["sentence"]
    assert "Traceback" not in server.process.log
    agent.disconnect()


def test_conversation_continues_after_claude_code_reads_an_image(
    start_server: StartServer, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    server = make_server(start_server, tmp_path)
    agent = ClaudeCode(tmp_path / "agent", server)
    picture = agent.work / "ship.png"
    image.new("RGB", (64, 64), "red").save(picture)
    server.say(call("Read", file_path=str(picture)), "I cannot see it.")
    assert agent.ask("Read ship.png", again=False) == "I cannot see it."
    with pytest.raises(AssertionError, match="the newest message has image/png"):
        agent.ask("What is in @ship.png ?", again=True)
    for question, answer in (("Sure?", "Indeed."), ("And now?", "Still so.")):
        server.say(answer)
        assert agent.ask(question, again=True) == answer
    first, *others = requests(server)
    assert len(others) == 3
    for before, record in zip((first, *others), others, strict=False):
        assert record["reused_tokens"] >= 0.95 * before["prompt_tokens"], record["sentence"]


def test_tool_found_by_search_extends_the_prompt(start_server: StartServer, tmp_path: Path) -> None:
    server = make_server(start_server, tmp_path)
    agent = ClaudeCode(tmp_path / "agent", server)
    agent.env = {"ENABLE_TOOL_SEARCH": "true"}
    server.say(call("ToolSearch", query="select:WebFetch", max_results=1), "Found.")
    assert agent.ask("Find a tool.", again=False) == "Found."
    server.say("Indeed.")
    assert agent.ask("Sure?", again=True) == "Indeed."
    first, *others = requests(server)
    assert len(others) == 2 and others[0]["prompt_tokens"] > first["prompt_tokens"] + 300
    for before, record in zip((first, *others), others, strict=False):
        assert record["reused_tokens"] >= before["prompt_tokens"], record["sentence"]


def requests(server: ScriptedServer) -> list[dict[str, Any]]:
    """Return the running server's records of its requests, the oldest first."""
    _, _, answer = server.process.request("GET", "/v1/kvpersist/requests")
    records: list[dict[str, Any]] = json.loads(answer)
    return records[::-1]
