"""Completions: headers, keepalives, errors, stop words and the count of reasoning tokens."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.api.responses import ResponsesAPI, ResponsesReply
from mlx_lm_kvpersist.apis import openai_error
from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.http import clients
from mlx_lm_kvpersist.host.http.completion import ChatReply, Completion
from tests.support import wait_until

from ..words import Keepalives, WordsServer, request

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")

CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}
TEXT = {"prompt": "x", "stream": True}
CHAT_AND_TEXT = pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
TOO_LONG = RequestRefused(
    "prompt is too long: 9 tokens > 8 maximum", code="context_length_exceeded"
)


@pytest.fixture
def words(patched_server: ModuleType) -> WordsServer:
    return WordsServer(patched_server)


@pytest.fixture
def keepalives(monkeypatch: pytest.MonkeyPatch) -> Keepalives:
    return Keepalives(monkeypatch)


def parts(body: str) -> list[str]:
    assert body.endswith("\n\n")
    return body.removesuffix("\n\n").split("\n\n")


def comments(body: str) -> list[str]:
    return [part for part in parts(body) if part.startswith(":")]


def stream_data(body: str) -> list[Any]:
    """Return the data of a stream's events without the final [DONE]."""
    events = [part.removeprefix("data: ") for part in parts(body) if not part.startswith(":")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@CHAT_AND_TEXT
def test_quick_reply_is_sent_without_keepalives(
    words: WordsServer, path: str, body: dict[str, Any]
) -> None:
    status, headers, answer = words.post(body, path)
    assert (status, headers["X-Words"]) == (200, "yes")
    assert comments(answer) == [] and len(stream_data(answer)) == 5
    status, headers, answer = words.post({**body, "stream": False}, path)
    assert (status, headers["X-Words"]) == (200, "yes")
    assert int(headers["Content-Length"]) == len(answer) and len(json.loads(answer)["choices"]) == 1


@CHAT_AND_TEXT
def test_waiting_request_gets_early_headers_and_keepalive_comments(
    words: WordsServer, keepalives: Keepalives, path: str, body: dict[str, Any]
) -> None:
    words.generator.wait = partial(keepalives.wait_for, 3)
    status, headers, answer = words.post(body, path)
    assert (status, headers["Content-type"]) == (200, "text/event-stream")
    assert "Access-Control-Allow-Origin" in headers and headers["X-Words"] == "soon"
    waiting = [comment for comment in comments(answer) if comment == ": waiting"]
    assert len(waiting) >= 3
    assert ": X-Words: yes" in comments(answer)  # too late for a header
    assert len(stream_data(answer)) == 5 and answer.count("HTTP/") == 0
    assert "clients" not in words.plugin.threads, "a slow plugin would stall all clients"


def test_failing_keepalives_do_not_break_the_stream(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
    monkeypatch.setattr(clients, "WATCH_S", 0.01)
    calls: list[int] = []

    def wait(reply: ChatReply) -> list[Any]:
        calls.append(1)
        return [{"no": object()}]

    monkeypatch.setattr(ChatReply, "wait", wait)
    words.generator.wait = partial(wait_until, lambda: bool(calls), "a keepalive")
    status, headers, answer = words.post(CHAT, "/v1/chat/completions")
    assert (status, headers["X-Words"], len(stream_data(answer))) == (200, "yes", 5)


def test_headers_are_sent_while_the_request_waits(
    words: WordsServer, keepalives: Keepalives
) -> None:
    has_arrived = threading.Event()
    words.generator.wait = partial(has_arrived.wait, 60)
    client_socket, thread = words.connect()
    with client_socket:
        client_socket.sendall(request(json.dumps(CHAT).encode(), path="/v1/chat/completions"))
        assert client_socket.recv(1 << 16).startswith(b"HTTP/1.0 200")
        has_arrived.set()
    thread.join(60)
    assert not thread.is_alive()


def test_comments_report_prefill_progress(words: WordsServer, keepalives: Keepalives) -> None:
    words.generator.progress = (4096, 31002)
    words.generator.pause = partial(keepalives.wait_for, 1)
    _, headers, answer = words.post(CHAT, "/v1/chat/completions")
    assert headers["X-Words"] == "yes"
    distinct = list(dict.fromkeys(comments(answer)))
    assert distinct == [
        ": prefill",
        ": keepalive 4096/31002",
        ": prefill 4,096 of 31,002",
        ": generating",
    ]
    assert len(stream_data(answer)) == 5


def test_request_without_streaming_gets_no_keepalives(
    words: WordsServer, keepalives: Keepalives
) -> None:
    words.generator.wait = partial(time.sleep, 0.2)
    status, headers, answer = words.post({**CHAT, "stream": False}, "/v1/chat/completions")
    assert (status, headers["X-Words"]) == (200, "yes") and json.loads(answer)
    words.generator.error = RequestRefused("no such agent", 409)
    status, _, answer = words.post({**CHAT, "stream": False}, "/v1/chat/completions")
    assert (status, json.loads(answer)) == (409, openai_error(409, "no such agent"))


@CHAT_AND_TEXT
@pytest.mark.parametrize("stream", [True, False])
def test_error_before_the_headers_sets_the_http_status(
    words: WordsServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    words.generator.error = RequestRefused("no such agent", 409)
    status, _, answer = words.post({**body, "stream": stream}, path)
    assert (status, json.loads(answer)) == (409, openai_error(409, "no such agent"))
    words.generator.error = TOO_LONG
    status, _, answer = words.post({**body, "stream": stream}, path)
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"] == "prompt is too long: 9 tokens > 8 maximum"
    assert error["type"] == "invalid_request_error"
    words.generator.error = RuntimeError("no such model")
    status, _, answer = words.post({**body, "stream": stream}, path)
    assert (status, json.loads(answer)) == (
        404,
        openai_error(404, "no such model"),
    )  # as in stock


@CHAT_AND_TEXT
def test_error_after_the_headers_is_a_stream_event(
    words: WordsServer, keepalives: Keepalives, path: str, body: dict[str, Any]
) -> None:
    words.generator.wait, words.generator.error = partial(keepalives.wait_for, 2), TOO_LONG
    status, _, answer = words.post(body, path)
    *earlier, last = parts(answer)
    assert status == 200 and set(earlier) == {": waiting"}
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    words.generator.error = RuntimeError("no such model")
    *_, last = parts(words.post(body, path)[2])
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "no such model"


def test_error_during_a_stream_is_an_error_object(words: WordsServer) -> None:
    words.generator.reply_error = RuntimeError("out of memory")
    *_, last = parts(words.post(CHAT, "/v1/chat/completions")[2])
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("out of memory", "server_error")


@CHAT_AND_TEXT
def test_error_in_a_whole_reply_is_a_500_without_plugin_headers(
    words: WordsServer, path: str, body: dict[str, Any]
) -> None:
    words.generator.reply_error = RuntimeError("out of memory")
    status, headers, answer = words.post({**body, "stream": False}, path)
    assert (status, json.loads(answer)) == (500, openai_error(500, "out of memory"))
    assert "X-Words" not in headers


def test_keepalive_after_a_disconnection_does_not_affect_later_requests(
    words: WordsServer, keepalives: Keepalives
) -> None:
    words.generator.wait = partial(time.sleep, 0.2)
    client_socket, thread = words.connect()
    client_socket.sendall(request(json.dumps(CHAT).encode(), path="/v1/chat/completions"))
    client_socket.close()
    thread.join(60)
    assert not thread.is_alive()
    words.generator.wait = lambda: None
    assert len(stream_data(words.post(CHAT, "/v1/chat/completions")[2])) == 5


@CHAT_AND_TEXT
@pytest.mark.parametrize("stream", [True, False])
def test_generation_is_not_read_after_a_stop_word(
    words: WordsServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    """After a stop, the server's generator produces nothing; another read would block forever."""
    words.generator.model_provider.tokenizer = SimpleNamespace()
    status, _, answer = words.post({**body, "stream": stream, "stop": "1"}, path)
    assert (status, words.generator.n_generated) == (200, 2)
    assert '"finish_reason": "stop"' in answer


def test_reasoning_is_counted_in_tokens() -> None:
    """Several tokens may form one character; their text then arrives with the last token."""
    reply = ResponsesReply({}, {}, is_kept=True)
    client = SimpleNamespace(lock=threading.RLock(), end_keepalives=lambda: None)
    completion = Completion(SimpleNamespace(client=client), ResponsesAPI(), reply)
    completion.request = SimpleNamespace(request_type="chat", messages=[], prompt="", tools=None)
    context = SimpleNamespace(tool_parser=None)
    texts = ["H", "m", "", "", "🦜", "", "Yes", ""]
    for n, text in enumerate(completion.responses(context, texts)):
        if text:
            completion.add(text if n > 5 else "", text if n < 5 else "", [], None)
    completion.add("", "", [], "stop")
    completion.end(3, len(texts), 0)
    assert reply.whole()["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
