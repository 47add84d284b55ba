"""The demo shows what it claims, on the real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_lm_kvpersist.cli import output
from mlx_lm_kvpersist.cli.demo_model import make_model
from mlx_lm_kvpersist.cli.demo_picture import draw, print_bars
from mlx_lm_kvpersist.cli.demo_server import DemoServer
from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.cli.story import document
from mlx_lm_kvpersist.errors import KVPersistError


@pytest.mark.slow
def test_demo_restores_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--chars", "6000"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "came from disk" in " ".join(printed.split())
    bars = [line for line in printed.splitlines() if "█" in line or "▏" in line]
    assert len(bars) >= 2 and "kvpersist, first request" in bars[0]


def test_demo_reports_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "/no/such/model", "--chars", "100"]) == 1
    assert "no model folder /no/such/model" in capsys.readouterr().err


TIMES = [("kvpersist", "first request", 8.0), ("kvpersist", "next turn", 2.0), ("stock", "it", 4)]


def test_bars_are_as_long_as_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    print_bars(TIMES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Time to the first token"
    assert [line.count("█") for line in lines[1:]] == [40, 10, 20]
    assert [line.split()[-2] for line in lines[1:]] == ["8.00", "2.00", "4.00"]


def test_the_png_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    file = tmp_path / "demo.png"
    assert draw(TIMES, file) is (find_spec("matplotlib") is not None) is file.exists()
    if file.exists():
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_png_without_a_folder_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--png", f"{tmp_path}/no/demo.png"]) == 1
    assert "there is no folder for" in capsys.readouterr().err


def test_what_takes_long_is_said_again_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output._BEAT_S == 5.0
    monkeypatch.setattr(output, "_BEAT_S", 0.05)
    with output.ongoing("a step"):
        assert capsys.readouterr().err == "a step …\n"
        time.sleep(0.3)
        assert "a step: 0 s\n" in capsys.readouterr().err
    time.sleep(0.1)
    assert len(capsys.readouterr().err.splitlines()) <= 1


def test_the_demo_model_says_printable_text_without_end(tmp_path: Path) -> None:
    model, tokenizer = load(str(make_model(tmp_path / "model")))
    asked = [{"role": "user", "content": document(300)}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert 70 < len(prompt) < 150, "about 3 characters a token"
    reply = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=40)]
    assert not set(reply) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(reply).isascii()


def test_a_demo_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(KVPersistError, match=r"(?s)did not start.*unrecognized arguments: --bad"):
        DemoServer("nothing", "--bad", log_path=tmp_path / "log")


@contextmanager
def answering(*events: Any) -> Iterator[DemoServer]:
    """Yield a demo's server that streams these events as its reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for event in events:
                data = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {data}\n\n".encode())

        def log_message(self, *args: Any) -> None: ...

    server = object.__new__(DemoServer)
    server._command, server._log_path = ["a server"], Path("/dev/null")
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        server._port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["reasoning", "tool_calls", "nothing"])
def test_a_reply_without_content_has_a_time_to_its_first_token(name: str) -> None:
    """A model that reasons says nothing else within the demo's few tokens."""
    usage = {"prompt_tokens": 12}
    with answering(
        {"choices": [{"delta": {name: "Hm"}}]}, {"choices": [], "usage": usage}, "[DONE]"
    ) as server:
        reply = server.chat([], "s", 8)
    assert reply.ttft_s > 0 and (reply.text, reply.prompt_tokens) == ("", 12)


@pytest.mark.parametrize("last", [[], [{"error": "the server ends"}]])
def test_a_reply_that_ends_early_is_an_error(last: list[Any]) -> None:
    expected = f"ended early{': the server ends' if last else ''}"
    with answering({"choices": [{"delta": {"content": "Hm"}}]}, *last) as server:
        with pytest.raises(KVPersistError, match=expected):
            server.chat([], "s", 8)
