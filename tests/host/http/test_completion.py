"""Completions before any text: headers, keepalives and errors."""

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
BOTH = pytest.mark.parametrize(
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


def said(body: str) -> list[Any]:
    """Return the data of a stream's events, except the last event, which only ends it."""
    found = [part.removeprefix("data: ") for part in parts(body) if not part.startswith(":")]
    assert found.pop() == "[DONE]"
    return [json.loads(each) for each in found]


@BOTH
def test_a_quick_reply_is_what_stock_sends(
    words: WordsServer, path: str, body: dict[str, Any]
) -> None:
    status, headers, answer = words.post(body, path)
    assert (status, headers["X-Words"]) == (200, "yes")
    assert comments(answer) == [] and len(said(answer)) == 5
    status, headers, answer = words.post({**body, "stream": False}, path)
    assert (status, headers["X-Words"]) == (200, "yes")
    assert int(headers["Content-Length"]) == len(answer) and len(json.loads(answer)["choices"]) == 1


@BOTH
def test_headers_and_comments_while_a_request_waits(
    words: WordsServer, keepalives: Keepalives, path: str, body: dict[str, Any]
) -> None:
    words.generator.wait = partial(keepalives.wait_for, 3)
    status, headers, answer = words.post(body, path)
    assert (status, headers["Content-type"]) == (200, "text/event-stream")
    assert "Access-Control-Allow-Origin" in headers and headers["X-Words"] == "soon"
    waiting = [each for each in comments(answer) if each == ": waiting"]
    assert len(waiting) >= 3
    assert ": X-Words: yes" in comments(answer)  # too late for a header
    assert len(said(answer)) == 5 and answer.count("HTTP/") == 0
    assert "clients" not in words.plugin.threads, "a slow plugin would stall all clients"


def test_a_stream_whose_keepalives_fail_begins_with_its_reply(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
    monkeypatch.setattr(clients, "WATCH_S", 0.01)
    asked: list[int] = []

    def wait(reply: ChatReply) -> list[Any]:
        asked.append(1)
        return [{"no": object()}]

    monkeypatch.setattr(ChatReply, "wait", wait)
    words.generator.wait = partial(wait_until, lambda: bool(asked), "a keepalive")
    status, headers, answer = words.post(CHAT, "/v1/chat/completions")
    assert (status, headers["X-Words"], len(said(answer))) == (200, "yes", 5)


def test_the_head_comes_while_the_request_waits(words: WordsServer, keepalives: Keepalives) -> None:
    has_come = threading.Event()
    words.generator.wait = partial(has_come.wait, 60)
    theirs, thread = words.connect()
    with theirs:
        theirs.sendall(request(json.dumps(CHAT).encode(), path="/v1/chat/completions"))
        assert theirs.recv(1 << 16).startswith(b"HTTP/1.0 200")
        has_come.set()
    thread.join(60)
    assert not thread.is_alive()


def test_comments_tell_how_far_a_prefill_is(words: WordsServer, keepalives: Keepalives) -> None:
    words.generator.progress = (4096, 31002)
    words.generator.pause = partial(keepalives.wait_for, 1)
    _, headers, answer = words.post(CHAT, "/v1/chat/completions")
    assert headers["X-Words"] == "yes"
    told = list(dict.fromkeys(comments(answer)))
    assert told == [
        ": prefill",
        ": keepalive 4096/31002",
        ": prefill 4,096 of 31,002",
        ": generating",
    ]
    assert len(said(answer)) == 5


def test_who_does_not_stream_gets_no_beat(words: WordsServer, keepalives: Keepalives) -> None:
    words.generator.wait = partial(time.sleep, 0.2)
    status, headers, answer = words.post({**CHAT, "stream": False}, "/v1/chat/completions")
    assert (status, headers["X-Words"]) == (200, "yes") and json.loads(answer)
    words.generator.error = RequestRefused("no such agent", 409)
    status, _, answer = words.post({**CHAT, "stream": False}, "/v1/chat/completions")
    assert (status, json.loads(answer)) == (409, openai_error(409, "no such agent"))


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_soon_has_its_status(
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
    )  # as stock has it


@BOTH
def test_a_late_error_stands_in_the_stream(
    words: WordsServer, keepalives: Keepalives, path: str, body: dict[str, Any]
) -> None:
    words.generator.wait, words.generator.error = partial(keepalives.wait_for, 2), TOO_LONG
    status, _, answer = words.post(body, path)
    *beats, last = parts(answer)
    assert status == 200 and set(beats) == {": waiting"}
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    words.generator.error = RuntimeError("no such model")
    *_, last = parts(words.post(body, path)[2])
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "no such model"


def test_an_error_in_the_reply_is_an_object(words: WordsServer) -> None:
    words.generator.breaks = RuntimeError("out of memory")
    *_, last = parts(words.post(CHAT, "/v1/chat/completions")[2])
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("out of memory", "server_error")


@BOTH
def test_an_error_in_a_reply_that_is_sent_whole_has_its_own_head_only(
    words: WordsServer, path: str, body: dict[str, Any]
) -> None:
    words.generator.breaks = RuntimeError("out of memory")
    status, headers, answer = words.post({**body, "stream": False}, path)
    assert (status, json.loads(answer)) == (500, openai_error(500, "out of memory"))
    assert "X-Words" not in headers


def test_a_beat_to_nobody_harms_nobody(words: WordsServer, keepalives: Keepalives) -> None:
    words.generator.wait = partial(time.sleep, 0.2)
    theirs, thread = words.connect()
    theirs.sendall(request(json.dumps(CHAT).encode(), path="/v1/chat/completions"))
    theirs.close()
    thread.join(60)
    assert not thread.is_alive()
    words.generator.wait = lambda: None
    assert len(said(words.post(CHAT, "/v1/chat/completions")[2])) == 5


@BOTH
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_read_after_a_stop_word(
    words: WordsServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    """After `stop` the server's generator says nothing: reading on would wait forever."""
    words.generator.model_provider.tokenizer = SimpleNamespace()
    status, _, answer = words.post({**body, "stream": stream, "stop": "1"}, path)
    assert (status, words.generator.n_said) == (200, 2)
    assert '"finish_reason": "stop"' in answer


def test_reasoning_is_counted_in_tokens() -> None:
    """Several tokens may make one character, and then come in one part."""
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
