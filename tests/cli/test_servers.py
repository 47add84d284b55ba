"""A server that a command starts: how it fails, and how its replies are read."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlx_lm_kvpersist.cli.servers import StartedServer, answer, ask, temporary_folder
from mlx_lm_kvpersist.errors import KVPersistError


def test_a_failed_start_raises_an_error_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(KVPersistError, match=r"(?s)did not start.*unrecognized arguments: --bad"):
        StartedServer("nothing", "--bad", log_path=tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_cleanup(number: signal.Signals) -> None:
    ended_servers: list[str] = []
    former = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt) as interrupt, temporary_folder("test-") as folder:
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)
                ended_servers.append("a server")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, former)
    assert interrupt.value.args == (number,)
    assert ended_servers and not folder.exists()


def test_an_ignored_hangup_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with temporary_folder("test-"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)


@contextmanager
def server_streaming(*events: Any) -> Iterator[StartedServer]:
    """Yield a server that streams these events as its reply."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("X-Sent", str(self.headers["Authorization"]))
            self.end_headers()
            for event in events:
                data = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(f"data: {data}\n\n".encode())

        def log_message(self, *args: Any) -> None: ...

    server = object.__new__(StartedServer)
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
def test_replies_without_content_have_a_time_to_first_token(name: str) -> None:
    """A reasoning model may write no other text within the demo's few tokens."""
    usage = {"prompt_tokens": 12}
    with server_streaming(
        {"choices": [{"delta": {name: "Hm"}}]}, {"choices": [], "usage": usage}, "[DONE]"
    ) as server:
        reply = server.chat([], "s", 8)
    assert reply.ttft_s > 0 and (reply.text, reply.prompt_tokens) == ("", 12)


@pytest.mark.parametrize("last_events", [[], [{"error": "the server ends"}]])
def test_a_stream_that_ends_early_is_an_error(last_events: list[Any]) -> None:
    expected = f"ended early{': the server ends' if last_events else ''}"
    with server_streaming({"choices": [{"delta": {"content": "Hm"}}]}, *last_events) as server:
        with pytest.raises(KVPersistError, match=expected):
            server.chat([], "s", 8)


def test_api_key_is_sent_stripped_and_in_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, key in (("schlüssel\n", "schlüssel"), (" ключ ", "ключ"), (" ", None)):
        monkeypatch.setenv("KVPERSIST_API_KEY", variable)
        with server_streaming("[DONE]") as server, answer(server.url, "/", {}) as reply:
            sent = reply.headers["X-Sent"]
        assert sent == (f"Bearer {key}".encode().decode("latin-1") if key else "None")


def test_the_no_answer_error_names_no_option() -> None:
    """Each command has other options for the server's address."""
    with pytest.raises(KVPersistError, match="no answer from") as missing:
        ask("127.0.0.1:1", "/")
    assert "--" not in str(missing.value)


def test_caller_errors_are_not_reported_as_server_errors() -> None:
    with server_streaming("[DONE]") as server:
        with pytest.raises(OSError, match="the disk is full"), answer(server.url, "/", {}):
            raise OSError("the disk is full")
        with pytest.raises(KVPersistError, match="no answer from"):
            ask(server.url, "/", {})
    with (
        server_streaming("{") as server,
        pytest.raises(KVPersistError, match="the server failed: "),
    ):
        server.chat([], "s", 8)


def test_a_signal_while_a_server_ends_leaves_no_process() -> None:
    server = object.__new__(StartedServer)
    server._process = process = Mock()
    process.wait.side_effect = [KeyboardInterrupt, 0]
    with pytest.raises(KeyboardInterrupt), server:
        pass
    process.terminate.assert_called_once()
    process.kill.assert_called_once()
