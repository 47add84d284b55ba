"""ServerProcess: streamed and whole replies, restarts, ports, and failed starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.client import RemoteDisconnected
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.host.patching.versions import parse
from tests.support import ServerError, ServerProcess, StartServer, parse_outcome, wait_until
from tests.support import server_process as ports_module
from tests.support.zygote import Forked

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How high is the bridge? 🙂"},
]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log_path = tmp_path_factory.mktemp("stock") / "server.log"
    with ServerProcess(tiny_model, log_path=log_path) as process:
        yield process


def test_stream_and_whole_reply_agree(server: ServerProcess) -> None:
    messages = [*MESSAGES, {"role": "user", "content": "Twice?"}]  # no other test sends this prompt
    whole = server.chat(messages, max_tokens=24)
    stream = server.chat(messages, stream=True, max_tokens=24)
    assert whole.text
    assert (stream.text, stream.finish_reason) == (whole.text, whole.finish_reason)
    assert stream.finish_reason == "length"
    assert (stream.prompt_tokens, stream.completion_tokens) == (whole.prompt_tokens, 24)
    assert 0 < stream.ttft_s <= stream.total_s
    assert stream.headers["content-type"] == "text/event-stream"
    assert len(stream.chunks) > 2
    assert stream.times_s == sorted(stream.times_s)
    assert (stream.times_s[0], whole.times_s) == (stream.ttft_s, [])
    assert 16 < len(stream.times_s) <= 24, "about one text a token"
    # The second request finds the first in the stock server's own cache.
    assert whole.cached_tokens < whole.prompt_tokens - 1 == stream.cached_tokens


def test_stream_and_whole_text_completion_agree(server: ServerProcess) -> None:
    whole = server.complete("The harbour master", max_tokens=8)
    assert whole.text == server.complete("The harbour master", stream=True, max_tokens=8).text
    assert whole.usage["total_tokens"] == whole.prompt_tokens + 8


def test_logit_bias_ends_a_reply(server: ServerProcess) -> None:
    im_end = 2
    reply = server.chat(MESSAGES, logit_bias={im_end: 200.0})
    assert (reply.text, reply.finish_reason) == ("", "stop")


def test_request_returns_error_replies_and_chat_raises(server: ServerProcess) -> None:
    status, headers, body = server.request("GET", "/no/such/path")
    assert (status, body) == (404, b"Not Found")
    assert "content-type" in headers
    # mlx-lm 0.31.3 sends no answer to refused requests.
    with pytest.raises((ServerError, RemoteDisconnected), match=r"answered 400|without response"):
        server.chat(MESSAGES, temperature=-1.0)


def test_restart_after_kill9_keeps_the_port(tiny_model: Path, start_server: StartServer) -> None:
    server = start_server(tiny_model)
    first, port = server.pid, server.port
    before = server._process
    assert isinstance(before, Forked) is (sys.platform == "linux")
    text = server.chat(MESSAGES, max_tokens=8).text
    assert server.kill9() == -9
    assert not server.alive
    assert not server.healthy()
    server.restart()
    after = server._process
    if isinstance(before, Forked) and isinstance(after, Forked):
        assert after._zygote is not before._zygote, "a zygote with other string hashes"
    assert (server.pid != first, server.port) == (True, port)
    assert server.chat(MESSAGES, max_tokens=8).text == text


@pytest.mark.parametrize("plugin", [False, True])
def test_start_fails_if_another_server_has_the_port(
    server: ServerProcess, tiny_model: Path, start_server: StartServer, plugin: bool
) -> None:
    start = start_server.with_plugin if plugin else start_server
    with pytest.raises(
        ServerError, match=f"port {server.port} belongs to another process"
    ) as error:
        start(tiny_model, port=server.port)
    assert str(server.port) in str(error.value)
    assert server.healthy(), "the other was left alone"


def test_start_chooses_another_port_if_the_first_was_taken(
    server: ServerProcess, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """free_port() returns a port that another process takes before the server does."""
    ports = iter([server.port, ports_module.free_port()])
    monkeypatch.setattr("tests.support.server_process.free_port", lambda: next(ports))
    with ServerProcess(tiny_model) as own:
        assert own.port != server.port
        assert own.chat(MESSAGES, max_tokens=4).text == server.chat(MESSAGES, max_tokens=4).text
        assert own.pid != server.pid and server.healthy()


def test_an_ended_server_is_not_healthy_if_its_port_answers(
    server: ServerProcess, tiny_model: Path
) -> None:
    own = ServerProcess(tiny_model)
    own.start()
    own.kill9()
    own.port = server.port
    assert not own.healthy()
    own.stop()


def test_failed_start_shows_the_log(tiny_model: Path, tmp_path: Path) -> None:
    server = ServerProcess(tiny_model, "--no-such-option", log_path=tmp_path / "log")
    with pytest.raises(ServerError, match="unrecognized arguments: --no-such-option"):
        server.start()
    assert not server.alive


def test_a_stream_that_ends_early_shows_the_log(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_nothing(*args: Any) -> None:
        raise ServerError("the stream ended before [DONE]")

    monkeypatch.setattr("tests.support.server_process.read_reply", read_nothing)
    with pytest.raises(ServerError, match=r"ended before \[DONE\]") as error:
        server.chat(MESSAGES, stream=True, max_tokens=4)
    assert f"--- {server.log_path}\n" in str(error.value)


LISTENS_LATE = """\
from mlx_lm import server
listen = server._run_http_server
def listen_late(host, port, response_generator):
    response_generator.join()
    listen(host, port, response_generator)
server._run_http_server = listen_late
server.main()
"""


def test_model_that_does_not_load_fails_at_once(tmp_path: Path) -> None:
    """Stock's /health reports success until its thread fails, so this server listens later."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LISTENS_LATE, encoding="utf-8")
    server = ServerProcess(tmp_path, launcher=(str(launcher),), log_path=tmp_path / "log")
    if parse(version("mlx-lm")) >= (0, 32, 0):
        with pytest.raises(ServerError, match=r"config\.json"), server:
            pass
        assert not server.alive
    else:
        # /health of this server reports success, but the server never replies.
        with server:
            wait_until(lambda: "config.json" in server.log, "the traceback")


def test_parse_outcome_reads_the_fields_of_the_header() -> None:
    header = "outcome=EXTEND; tier=disk; reused=1234; restore_ms=12.3"
    parsed = {"outcome": "EXTEND", "tier": "disk", "reused": "1234", "restore_ms": "12.3"}
    assert parse_outcome(header) == parsed
    assert parse_outcome("") == {}
