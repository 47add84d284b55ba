"""Beginnings that are computed and pinned before anybody asks."""

from __future__ import annotations

import json
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mlx_lm_kvpersist.api import warming
from mlx_lm_kvpersist.api.warming import warm_at_start
from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.cli.warm import request_of
from mlx_lm_kvpersist.errors import ConfigError
from tests.support import Message, ServerProcess, StartServer, synthetic_text, wait_until

from .stored import wait_for_reply, wait_for_writer

SYSTEM: Message = {"role": "system", "content": synthetic_text(1500, seed=61)}
ASK: Message = {"role": "user", "content": "Who is first?"}


@pytest.fixture(scope="module")
def server(
    started: StartServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> ServerProcess:
    file = tmp_path_factory.mktemp("warm") / "Frühstück.json"
    file.write_text(json.dumps([SYSTEM]))
    options = ("--kvpersist-pin-system", "--kvpersist-warm", str(file))
    return started.with_plugin(tiny_model, *options)


def sessions(started: StartServer, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["sessions", "list", "--json", "--kvpersist-dir", str(started.store)]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["sessions"]
    return found


def test_at_the_start(
    started: StartServer, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: "is computed and pinned" in server.log, "a warm server")
    (session,) = sessions(started, capsys)
    assert (session["name"], session["pinned"]) == ("warm Fr-hst-ck", True)
    first = server.chat([SYSTEM, ASK], max_tokens=2)
    assert first.kvpersist["outcome"] == "DIVERGE"
    # All of it but the words of the template that follow.
    assert first.cached_tokens > session["tokens"] - 12 > 256


@pytest.mark.parametrize(("path", "status"), [("/v1/", 404), ("/health", 500), ("/", 503)])
def test_another_servers_port_is_not_asked_for_ever(
    path: str, status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path.startswith(path) else 200)
            self.end_headers()

    monkeypatch.setattr(warming, "_WAIT_S", 1.0)
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_port
        warm_at_start([Path("never-read")], "127.0.0.1", port, Path("no-store"), None)
        wait_until(lambda: "nothing is warmed" in caplog.text, "a line in the log")
        other.shutdown()
    assert f"127.0.0.1:{port} answers {status} to /" in caplog.text
    assert len(caplog.records) == 1


def test_a_server_that_never_listens(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_WAIT_S", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = "127.0.0.1", unused.getsockname()[1]
        warm_at_start([Path("never-read")], *where, Path("no-store"), None)
        wait_until(lambda: "was not ready within" in caplog.text, "a line in the log")


def test_a_request_that_a_client_has_sent(
    started: StartServer, server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agent.json"
    body = {
        "model": "claude-elsewhere",
        "system": [{"type": "text", "text": synthetic_text(900, seed=62)}],
        "messages": [{"role": "user", "content": "Which tools are there?"}],
        "tools": [{"name": "wave", "input_schema": {"type": "object", "properties": {}}}],
        "max_tokens": 32_000,
        "stream": True,
    }
    url = ["--url", f"http://127.0.0.1:{server.port}"]
    for question in ("Which tools are there?", "And which files?", "And which files?"):
        body["messages"] = [{"role": "user", "content": question}]
        file.write_text(json.dumps(body))
        assert main(["sessions", "warm", str(file), *url, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["name"] == "warm agent" and told["pinned"]
    named = [each for each in sessions(started, capsys) if each["name"] == "warm agent"]
    assert [each["id"] for each in named if each["pinned"]] == [told["id"]] and len(named) == 2
    status, headers, _ = server.request(
        "POST", "/v1/messages", {**body, "stream": False, "max_tokens": 2}
    )
    assert status == 200 and "outcome=EXACT" in headers["x-kvpersist"]


def test_system_prompts_that_conversations_share(
    started: StartServer, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def pinned() -> list[dict[str, Any]]:
        wait_for_writer(server)
        found = [each for each in sessions(started, capsys) if each["name"] == "system prompt"]
        return [each for each in found if each["id"] not in before]

    before: list[str] = []
    before = [each["id"] for each in pinned()]  # of other tests
    shared: Message = {"role": "system", "content": synthetic_text(1500, seed=63)}
    alone: Message = {"role": "system", "content": synthetic_text(1500, seed=64)}
    first = server.chat([shared, ASK], max_tokens=2)
    talk = [shared, ASK, {"role": "assistant", "content": first.text}, ASK]
    server.chat(talk, max_tokens=2)  # one conversation, however long
    server.chat([alone, ASK], max_tokens=2)
    wait_for_reply(server)
    assert pinned() == []
    for question in ("Who is last?", "Who is in the middle?"):
        reply = server.chat([shared, {"role": "user", "content": question}], max_tokens=2)
        wait_for_reply(server)
        (session,) = pinned()
        assert session["pinned"] and session["tokens"] % 256 == 0
        assert reply.cached_tokens >= session["tokens"] > reply.prompt_tokens - 256 - 40
    store = ["--kvpersist-dir", str(started.store)]
    assert main(["sessions", "unpin", *store, session["id"]]) == 0
    capsys.readouterr()
    server.chat([shared, {"role": "user", "content": "And now?"}], max_tokens=2)
    wait_for_reply(server)
    assert [each["pinned"] for each in pinned()] == [False]


def test_what_the_server_refuses(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps([ASK, 5]))
    url = f"http://127.0.0.1:{server.port}"
    assert main(["sessions", "warm", str(file), "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"mlx-lm-kvpersist sessions: {url} refused: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "path", "limit"),
    [
        ([ASK], "/v1/chat/completions", "max_tokens"),
        (
            {"messages": [ASK], "tools": [{"type": "function"}]},
            "/v1/chat/completions",
            "max_tokens",
        ),
        ({"messages": [ASK], "system": "s"}, "/v1/messages", "max_tokens"),
        ({"messages": [ASK], "tools": [{"input_schema": {}}]}, "/v1/messages", "max_tokens"),
        ({"input": "x", "tools": []}, "/v1/responses", "max_output_tokens"),
        ({"prompt": "x", "stream": True}, "/v1/completions", "max_tokens"),
    ],
)
def test_where_a_file_is_sent(content: Any, path: str, limit: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(json.dumps(content))
    sent_to, body = request_of(file)
    assert sent_to == path and (body[limit], body["model"]) == (1, "default_model")
    assert "stream" not in body


@pytest.mark.parametrize("content", ["{", "5", "{}", None])
def test_files_without_a_prompt(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json (cannot be read|holds no messages)"):
        request_of(file)
