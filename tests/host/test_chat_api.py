"""Another API over chat completions: bodies, errors before and in a stream, beats, and the end."""

from __future__ import annotations

import json
import socket
import time
from argparse import Namespace
from collections.abc import Iterator
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import GenerationStopped, RequestRefused
from mlx_lm_kvpersist.host import chat_api, chat_output, http_server, request_checks
from mlx_lm_kvpersist.host.hookspecs import hookimpl
from mlx_lm_kvpersist.host.probes import ARGS
from mlx_lm_kvpersist.host.routes import Route
from tests.support.host import plugged

pytestmark = pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")


class WordsReply:
    """An API that has a word for everything."""

    def __init__(self) -> None:
        self.content = ""

    def begin(self, n_prompt: int, n_cached: int) -> list[dict[str, Any]]:
        return [{"type": "begin", "prompt": n_prompt}]

    def add(self, delta: Any) -> list[dict[str, Any]]:
        self.content += delta.get("content") or ""
        return [{"type": "word", "word": delta["content"]}] if delta.get("content") else []

    def end(self, finish_reason: str, stop_word: Any, usage: Any) -> list[dict[str, Any]]:
        return [{"type": "end", "why": finish_reason, "tokens": usage["prompt_tokens"]}]

    def beat(self) -> list[dict[str, Any]]:
        return [{"type": "beat"}]

    def fail(self, status: int, message: str) -> list[dict[str, Any]]:
        return [{"type": "failed", "status": status, "why": message}]

    def whole(self) -> dict[str, Any]:
        return {"words": self.content}


class WordsAPI:
    def translate(self, body: dict[str, Any], headers: Any) -> Any:
        chat = {"messages": [{"role": "user", "content": body["say"]}]}
        return SimpleNamespace(
            chat_body=chat, tools=[], stream=body.get("stream", False), reply=WordsReply()
        )

    def error(self, status: int, message: str) -> dict[str, Any]:
        return {"oh": message, "status": status}


class WordsPlugin:
    """Serves the API, and adds a header to every completion."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    @hookimpl
    def routes(self) -> list[Route]:
        return [Route("POST", "/words", lambda handler: chat_api.serve(handler, WordsAPI()))]

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        return [("X-Words", "yes")]

    @hookimpl
    def reply_sent(self, request: Any, content: str, reasoning: str, tool_calls: Any) -> None:
        self.sent.append(content)


class WordsGenerator:
    """The part of the server's generator that its handler uses: says words, or fails."""

    def __init__(self, server: ModuleType) -> None:
        self.cli_args, self.is_healthy = ARGS, True
        self.model_provider = SimpleNamespace(model_key=("m",), cli_args=ARGS)
        self._states = getattr(server, "TextStateMachine", lambda states: None)({"normal": []})
        self.wait_s = self.pause_s = 0.0
        self.error: Exception | None = None
        self.breaks: Exception | None = None
        self.n_said = 0

    def stop_and_join(self) -> None: ...

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        time.sleep(self.wait_s)
        if self.error is not None:
            raise self.error
        context = SimpleNamespace(
            prompt=[1, 2, 3], prompt_cache_count=1, text_sm=self._states, tool_parser=None
        )
        context.has_tool_calling = context.has_thinking = False
        context.initial_state, context.stop = "normal", lambda: None
        return context, self._say(args.max_tokens)

    def _say(self, n: int) -> Iterator[Any]:
        for i in range(n):
            time.sleep(self.pause_s)
            if self.breaks is not None and i == 1:
                raise self.breaks
            self.n_said += 1
            said = SimpleNamespace(text=f"{i} ", token=i, logprob=0.0, finish_reason=None)
            said.top_tokens, said.state, said.match = (), "normal", None
            said.finish_reason = "length" if i == n - 1 else None
            yield said


class WordsServer:
    """The server's own handler on a real socket pair, with a generator of ours."""

    def __init__(self, server: ModuleType) -> None:
        self.server = server
        self.generator = WordsGenerator(server)
        self.plugin = WordsPlugin()

    def connect(self) -> tuple[socket.socket, Thread]:
        theirs, ours = socket.socketpair()
        theirs.settimeout(20)

        class OneConnection:
            def __init__(self, address: Any, make_handler: Any) -> None:
                self.make_handler = make_handler

            def serve_forever(self) -> None:
                try:
                    self.make_handler(ours, ("127.0.0.1", 0), self)
                finally:
                    ours.close()

        def serve() -> None:
            self.server._run_http_server("127.0.0.1", 0, self.generator, OneConnection)

        thread = Thread(target=serve)
        thread.start()
        return theirs, thread

    def ask(self, sent: bytes, *, end: bool = False) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of the answer to what is sent."""
        with plugged(self.plugin):
            theirs, thread = self.connect()
            with theirs:
                theirs.sendall(sent)
                if end:
                    theirs.shutdown(socket.SHUT_WR)
                answer = b""
                while part := theirs.recv(1 << 16):
                    answer += part
            thread.join(20)
        head, _, body = answer.decode().partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, body

    def post(self, body: Any) -> tuple[int, dict[str, str], str]:
        return self.ask(request(json.dumps(body).encode()))


def request(payload: bytes, length: Any = None) -> bytes:
    n_bytes = len(payload) if length is None else length
    return f"POST /words?a=b HTTP/1.1\r\nContent-Length: {n_bytes}\r\n\r\n".encode() + payload


def events(body: str) -> list[dict[str, Any]]:
    read = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, content = event.split("\n")
        read.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


@pytest.fixture
def words(patched_server: ModuleType) -> WordsServer:
    return WordsServer(patched_server)


def test_a_stream_and_a_whole_reply(words: WordsServer) -> None:
    status, headers, body = words.post({"say": "x", "stream": True})
    assert (status, headers["Content-type"]) == (200, "text/event-stream")
    assert headers["X-Words"] == "yes"
    assert [event["type"] for event in events(body)] == ["begin", *["word"] * 4, "end"]
    assert events(body)[0]["prompt"] == events(body)[-1]["tokens"] == 3
    status, headers, body = words.post({"say": "x"})
    assert (status, json.loads(body)) == (200, {"words": "0 1 2 3 "})
    assert headers["X-Words"] == "yes" and int(headers["Content-Length"]) == len(body)
    assert words.plugin.sent == ["0 1 2 3 "] * 2


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (request(b"{bad"), 400, "the body is no JSON that can be read"),
        (request(b"\xff"), 400, "the body is no JSON that can be read"),
        (request(b"[" * 100_000), 400, "the body is no JSON that can be read"),
        (request(b"[1]"), 400, "the body is no JSON object"),
        (request(b"{}", -1), 400, "Content-Length is -1, expected 0 or more"),
        (request(b"{}", "two"), 400, "Content-Length is 'two', expected a number of bytes"),
        (request(b"{}", "--5"), 400, "Content-Length is '--5', expected a number of bytes"),
        (request(b"{}", "9" * 5000), 400, "expected a number of bytes"),
        (request(b"{}", 1 << 40), 413, "expected at most 256 MiB"),
        (request(b"{}", 100), 400, "the body ended after 2 of 100 bytes"),
        (b"POST /words HTTP/1.1\r\n\r\n", 411, "Content-Length is missing"),
    ],
)
def test_bad_requests(words: WordsServer, sent: bytes, status: int, says: str) -> None:
    found, _, body = words.ask(sent, end=True)
    assert found == status, body
    assert json.loads(body)["status"] == status
    assert says in json.loads(body)["oh"]


@pytest.mark.parametrize("path", ["/words", "/v1/chat/completions"])
def test_a_client_that_sends_too_much_reads_why(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It sends everything before it reads."""
    monkeypatch.setattr(request_checks, "MAX_BODY_BYTES", 2 << 20)
    sent = request(b"x" * (20 << 20)).replace(b"/words", path.encode())
    status, _, body = words.ask(sent)
    assert status == 413 and "expected at most 2 MiB" in body


def test_a_slow_body_gets_an_answer(words: WordsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.PluginAPIHandler, "timeout", 0.2)
    status, _, body = words.ask(request(b'{"say"', 100))
    assert (status, json.loads(body)["status"]) == (408, 408)
    assert "94 of the body's 100 bytes did not come within" in json.loads(body)["oh"]


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_reply_has_its_status(words: WordsServer, stream: bool) -> None:
    words.generator.error = RequestRefused("no such agent", 413)
    status, headers, body = words.post({"say": "x", "stream": stream})
    assert (status, json.loads(body)) == (413, {"oh": "no such agent", "status": 413})
    assert "X-Words" not in headers
    words.generator.error = RuntimeError("no such model")
    assert words.post({"say": "x", "stream": stream})[0] == 404  # as stock has it


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_in_the_reply(words: WordsServer, stream: bool) -> None:
    words.generator.breaks = RuntimeError("out of memory")
    status, _, body = words.post({"say": "x", "stream": stream})
    if stream:
        assert status == 200
        assert [event["type"] for event in events(body)] == ["begin", "word", "failed"]
        assert events(body)[-1]["why"] == "out of memory"
    else:
        assert (status, json.loads(body)["oh"]) == (500, "out of memory")
        words.generator.breaks = GenerationStopped("the server ends")
        status, headers, _ = words.post({"say": "x"})
        assert status == 503 and "Retry-After" in headers
    assert words.plugin.sent == []


def test_headers_and_beats_while_nothing_comes(
    words: WordsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_output, "HEADERS_AFTER_S", 0.1)
    monkeypatch.setattr(chat_output, "BEAT_S", 0.2)
    words.generator.wait_s = 0.8
    _, headers, body = words.post({"say": "x", "stream": True})
    kinds = [event["type"] for event in events(body)]
    assert kinds[0] == "begin" and kinds[-5:] == [*["word"] * 4, "end"]
    assert 2 <= kinds.count("beat") <= 6
    assert events(body)[0]["prompt"] == 0 and "X-Words" not in headers
    words.generator.error = RequestRefused("no such agent")
    status, _, body = words.post({"say": "x", "stream": True})
    assert (status, events(body)[-1]) == (
        200,
        {"type": "failed", "status": 400, "why": "no such agent"},
    )


@pytest.mark.parametrize("stream", [True, False])
def test_nobody_is_told_the_rest(words: WordsServer, stream: bool) -> None:
    """A client that has gone away stops its generation, within a second."""
    words.generator.pause_s = 0.02
    payload = {"say": "x", "stream": stream}
    with plugged(words.plugin):
        words.generator.cli_args = Namespace(**{**vars(ARGS), "max_tokens": 500})
        theirs, thread = words.connect()
        theirs.sendall(request(json.dumps(payload).encode()))
        time.sleep(0.2)
        theirs.close()
        thread.join(5)
        assert not thread.is_alive()
    assert words.generator.n_said < 100
    assert words.plugin.sent == []
