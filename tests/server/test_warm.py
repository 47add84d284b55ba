"""Prompts that are computed and pinned before the first request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.main import main
from tests.support import Message, ServerProcess, StartServer, synthetic_text, wait_until

SYSTEM: Message = {"role": "system", "content": synthetic_text(1500, seed=61)}
ASK: Message = {"role": "user", "content": "Who is first?"}


@pytest.fixture(scope="module")
def server(
    started: StartServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> ServerProcess:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "Frühstück.json").write_text(json.dumps([SYSTEM]))
    (folder / "odd.json").write_text('{"prompt": "x"}')
    files = (str(folder / name) for name in ("odd.json", "Frühstück.json"))
    options = (part for file in files for part in ("--kvpersist-warm", file))
    return started.with_plugin(tiny_model, *options)


def sessions(started: StartServer, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["sessions", "list", "--json", "--kvpersist-dir", str(started.store)]) == 0
    listed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["sessions"]
    return listed


def test_warm_file_is_computed_and_pinned_at_the_start(
    started: StartServer, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: "is computed and pinned" in server.log, "a warm server")
    assert "odd.json is not warmed: the prompt is an object, expected messages" in server.log
    (session,) = sessions(started, capsys)
    assert (session["name"], session["pinned"]) == ("warm Fr-hst-ck", True)
    first = server.chat([SYSTEM, ASK], max_tokens=2)
    assert first.kvpersist["outcome"] == "DIVERGE"
    # All of the session except the template's text after the system prompt.
    assert first.cached_tokens > session["tokens"] - 12 > 256


def test_warm_command_pins_only_the_newest_request_of_a_file(
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
        assert main(["warm", str(file), *url, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["name"] == "warm agent" and result["pinned"]
    entries = [entry for entry in sessions(started, capsys) if entry["name"] == "warm agent"]
    assert [entry["id"] for entry in entries if entry["pinned"]] == [result["id"]] and len(
        entries
    ) == 2
    status, headers, _ = server.request(
        "POST", "/v1/messages", {**body, "stream": False, "max_tokens": 2}
    )
    assert status == 200 and "outcome=EXACT" in headers["x-kvpersist"]


def test_warm_command_prints_a_refusal_as_one_line(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps([ASK, 5]))
    url = f"http://127.0.0.1:{server.port}"
    assert main(["warm", str(file), "--url", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"mlx-lm-kvpersist warm: {url} refused: ") and err.count("\n") == 1
