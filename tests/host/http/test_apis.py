"""An API of a plugin, served by chat completions: requests, streams, errors, disconnections."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from functools import partial
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import GenerationStopped, RequestRefused
from mlx_lm_kvpersist.host.hooks import hookimpl
from mlx_lm_kvpersist.host.http import server as http_server
from mlx_lm_kvpersist.host.http.request_checks import parameters
from mlx_lm_kvpersist.host.patching.probes import ARGS
from tests.support import wait_until
from tests.support.host import plugged
from tests.support.stock import answers_wrong_fields

from ..words import Keepalives, WordsServer, events, request

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")


@pytest.fixture
def words(patched_server: ModuleType) -> WordsServer:
    return WordsServer(patched_server)


def test_stream_and_whole_reply_use_the_apis_format(
    words: WordsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words.generator.progress = (5, 9)
    status, headers, body = words.post({"say": "x", "stream": True})
    assert (status, headers["Content-type"]) == (200, "text/event-stream")
    assert headers["X-Words"] == "yes" and "keepalive" not in body
    assert [event["type"] for event in events(body)] == ["begin", *["word"] * 4, "end"]
    assert events(body)[0]["prompt"] == events(body)[-1]["tokens"] == 3
    status, headers, body = words.post({"say": "x"})
    assert (status, json.loads(body)) == (200, {"words": "0 1 2 3 "})
    assert headers["X-Words"] == "yes" and int(headers["Content-Length"]) == len(body)
    assert words.plugin.sent == ["0 1 2 3 "] * 2
    assert capsys.readouterr().err.count('"POST ') == 2  # both requests are logged


@pytest.mark.parametrize(
    ("sent", "status", "expected_message"),
    [
        (request(b"{bad"), 400, "the body is not valid JSON"),
        (request(b"\xff"), 400, "the body is not valid JSON"),
        (request(b"[" * 100_000), 400, "the body is not valid JSON"),
        (request(b"[1]"), 400, "the body is not a JSON object"),
        (request(b"{}", -1), 400, "Content-Length is -1, expected 0 or more"),
        (request(b"{}", "two"), 400, "Content-Length is 'two', expected a number of bytes"),
        (request(b"{}", "x" * 21), 400, f"Content-Length is '{'x' * 19}…', expected a number"),
        (request(b"{}", "--5"), 400, "Content-Length is '--5', expected a number of bytes"),
        (request(b"{}", "9" * 5000), 400, "expected a number of bytes"),
        (request(b"{}", 1 << 40), 413, "expected at most 256 MiB"),
        (request(b"{}", 100), 400, "the body ended after 2 of 100 bytes"),
        (b"POST /words HTTP/1.1\r\n\r\n", 411, "Content-Length is missing"),
    ],
)
def test_malformed_requests_get_errors_in_the_apis_format(
    words: WordsServer, sent: bytes, status: int, expected_message: str
) -> None:
    answered, _, body = words.ask(sent, end=True)
    assert answered == status, body
    assert json.loads(body)["status"] == status
    assert expected_message in json.loads(body)["oh"]


def test_chunked_body_is_refused_where_a_body_is_optional(words: WordsServer) -> None:
    sent = b"POST /read HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    status, _, body = words.ask(sent, end=True)
    assert (status, json.loads(body)["error"]["message"]) == (
        411,
        "the header Content-Length is missing, expected the body's size",
    )
    assert words.ask(b"POST /read HTTP/1.1\r\n\r\n", end=True)[::2] == (200, "{}")


def test_body_that_times_out_is_answered_with_408(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server.PluginAPIHandler, "timeout", 0.2)
    status, _, body = words.ask(request(b'{"say"', 100))
    assert (status, json.loads(body)["status"]) == (408, 408)
    assert "the body did not come within 0 s" in json.loads(body)["oh"]


@pytest.mark.parametrize("stream", [True, False])
def test_error_before_the_reply_sets_the_http_status(words: WordsServer, stream: bool) -> None:
    words.generator.error = RequestRefused("no such agent", 413)
    status, headers, body = words.post({"say": "x", "stream": stream})
    assert (status, json.loads(body)) == (
        413,
        {"oh": "no such agent", "status": 413, "code": None},
    )
    assert "X-Words" not in headers
    words.generator.error = RuntimeError("no such model")
    assert words.post({"say": "x", "stream": stream})[0] == 404  # as in stock


def test_error_with_a_code_is_a_stream_event_or_a_400(words: WordsServer) -> None:
    words.generator.error = RequestRefused("too long", code="context_length_exceeded")
    status, _, body = words.post({"say": "x", "stream": True})
    *_, failed = events(body)
    assert (status, failed["type"], failed["code"]) == (200, "failed", "context_length_exceeded")
    status, _, body = words.post({"say": "x", "stream": False})
    assert (status, json.loads(body)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("stream", [True, False])
def test_error_during_generation_ends_the_stream_or_sets_the_status(
    words: WordsServer, stream: bool
) -> None:
    words.generator.reply_error = RuntimeError("out of memory")
    status, _, body = words.post({"say": "x", "stream": stream})
    if stream:
        assert status == 200
        assert [event["type"] for event in events(body)] == ["begin", "word", "failed"]
        assert events(body)[-1]["why"] == "out of memory"
    else:
        assert (status, json.loads(body)["oh"]) == (500, "out of memory")
        words.generator.reply_error = GenerationStopped("the server ends")
        status, headers, _ = words.post({"say": "x"})
        assert status == 503 and "Retry-After" in headers
    assert words.plugin.sent == []


def test_waiting_stream_gets_early_headers_and_keepalive_events(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words.generator.wait = partial(Keepalives(monkeypatch).wait_for, 3)
    _, headers, body = words.post({"say": "x", "stream": True})
    kinds = [event["type"] for event in events(body)]
    assert kinds[0] == "begin" and kinds[-5:] == [*["word"] * 4, "end"]
    assert kinds.count("beat") >= 3
    assert events(body)[0]["prompt"] == 0 and headers["X-Words"] == "soon"
    words.generator.error = RequestRefused("no such agent")
    status, _, body = words.post({"say": "x", "stream": True})
    assert (status, events(body)[-1]) == (
        200,
        {"type": "failed", "status": 400, "why": "no such agent", "code": None},
    )


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_model_unloaded_during_a_request_causes_no_error(words: WordsServer, path: str) -> None:
    class Provider:
        """A provider whose model is unloaded after the first read of `model_key`."""

        cli_args = Namespace(**{**vars(ARGS), "model": None})
        keys = iter([("m",)])
        max_context = None

        @property
        def model_key(self) -> Any:
            return next(self.keys, None)

    words.generator.model_provider = Provider()
    if path == "/v1/models":
        status, _, body = words.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")
        assert "claude-m" in [model["id"] for model in json.loads(body)["data"]]
    else:
        message = {"role": "user", "content": "x"}
        status, _, body = words.post({"model": "claude-x", "messages": [message]}, path)
        assert json.loads(body)["model"] == "m"
    assert status == 200


def test_generation_stops_when_the_client_disconnects(words: WordsServer) -> None:
    """If nothing is sent before the end, the server's own generator notices the disconnection."""
    words.generator.pause = partial(time.sleep, 0.02)
    payload = {"say": "x", "stream": True}
    with plugged(words.plugin):
        words.generator.cli_args = Namespace(**{**vars(ARGS), "max_tokens": 500})
        client_socket, thread = words.connect()
        client_socket.sendall(request(json.dumps(payload).encode()))
        wait_until(lambda: words.generator.n_generated > 2, "some words")
        client_socket.close()
        thread.join(60)
        assert not thread.is_alive()
    assert words.generator.n_generated < 500
    assert words.plugin.sent == []


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "m", "max_tokens": 7, "max_completion_tokens": 9, "adapters": "a", "top_k": 3},
        {"temperature": 0.5, "logit_bias": {"1": 2}, "seed": 4, "chat_template_kwargs": {"a": 1}},
    ],
)
def test_parameters_equal_those_of_stocks_handler(
    server: ModuleType, fields: dict[str, Any]
) -> None:
    """Otherwise other APIs would lack a parameter that a new version of stock reads."""

    class Stock(server.APIHandler):  # type: ignore[misc, name-defined]
        def __init__(self, body: bytes) -> None:
            self.path, self.rfile, self.wfile = "/v1/chat/completions", BytesIO(body), BytesIO()
            self.headers = {"Content-Length": str(len(body))}
            self.response_generator = SimpleNamespace(cli_args=ARGS)

        def validate_model_parameters(self) -> None: ...

        def handle_completion(self, request: Any, stop_words: Any) -> None: ...

    handler = Stock(json.dumps({"messages": [], **fields}).encode())
    before = set(vars(handler))
    handler.do_POST()
    read_by_stock = {name: value for name, value in vars(handler).items() if name not in before}
    for name in ("body", "stream", "request_id", "object_type"):
        read_by_stock.pop(name)
    parsed = parameters(fields, ARGS)
    if not answers_wrong_fields():  # 0.31.3 has another default for a sampler that is off
        parsed["xtc_threshold"] = read_by_stock["xtc_threshold"]
    assert parsed == read_by_stock


def test_disconnect_before_the_headers_marks_the_client_as_gone(words: WordsServer) -> None:
    """Stock stops a reply only after it has sent the headers."""
    requests: list[Any] = []

    class Recording:
        @hookimpl
        def request_received(self, request: Any) -> None:
            requests.append(request)

        @hookimpl
        def response_headers(self) -> list[tuple[str, str]]:
            client_socket.close()
            return []

    with plugged(words.plugin, Recording()):
        client_socket, thread = words.connect()
        client_socket.sendall(request(json.dumps({"say": "x", "stream": True}).encode()))
        thread.join(60)
    assert not thread.is_alive() and [received.client_gone for received in requests] == [True]
