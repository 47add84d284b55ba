"""A test API whose replies are words, and the server's own handler with a fake generator."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.api.admin import answering
from mlx_lm_kvpersist.apis import Request, Usage
from mlx_lm_kvpersist.host.hooks import Route, hookimpl
from mlx_lm_kvpersist.host.http import clients
from mlx_lm_kvpersist.host.http.completion import Completion
from mlx_lm_kvpersist.host.patching.probes import ARGS
from tests.support import wait_until
from tests.support.host import plugged


class WordsReply:
    """An API whose events and replies are single words."""

    def __init__(self) -> None:
        self.content = ""

    def begin(self, n_prompt: int, n_cached: int) -> list[dict[str, Any]]:
        return [{"type": "begin", "prompt": n_prompt}]

    def add(self, text: str, reasoning: str, tool_calls: Any) -> list[dict[str, Any]]:
        self.content += text
        return [{"type": "word", "word": text}] if text else []

    def end(self, finish_reason: str, stop_word: Any, usage: Usage) -> list[dict[str, Any]]:
        return [{"type": "end", "why": finish_reason, "tokens": usage.n_prompt}]

    def wait(self) -> list[dict[str, Any]]:
        return [{"type": "beat"}]

    def fail(self, status: int, message: str, code: str | None) -> list[dict[str, Any]]:
        return [{"type": "failed", "status": status, "why": message, "code": code}]

    def whole(self) -> dict[str, Any]:
        return {"words": self.content}


class WordsAPI:
    refuses_in_stream = True

    def parse(self, body: dict[str, Any], headers: Any) -> Request:
        fields = {"messages": [{"role": "user", "content": body["say"]}]}
        return Request(fields, body.get("stream", False), WordsReply(), [])

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return {"oh": message, "status": status, "code": code}


class WordsPlugin:
    """Serves the API, and adds a header to every completion."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.threads: set[str] = set()
        """Names of the threads that called `response_headers`."""

    @hookimpl
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/words", lambda handler: handler.serve(WordsAPI())),
            Route("POST", "/read", answering(lambda handler: handler.read_body())),
        ]

    @hookimpl
    def response_headers(self, request: Any, is_early: bool) -> list[tuple[str, str]]:
        self.threads.add(threading.current_thread().name)
        return [("X-Words", "soon" if is_early else "yes")]

    @hookimpl
    def reply_sent(self, request: Any, content: str, reasoning: str, tool_calls: Any) -> None:
        self.sent.append(content)


class WordsGenerator:
    """A fake of the server's generator: it generates words, or raises."""

    def __init__(self, server: ModuleType) -> None:
        self.cli_args, self.is_healthy = ARGS, True
        self.model_provider: Any = SimpleNamespace(model_key=("m",), cli_args=ARGS)
        self._states = getattr(server, "TextStateMachine", lambda states: None)({"normal": []})
        self.wait: Callable[[], object] = lambda: None
        """Called before a reply begins."""
        self.pause: Callable[[], object] = lambda: None
        """Called before each word, and before the report of the prompt's progress."""
        self.progress: tuple[int, int] | None = None
        self.error: Exception | None = None
        self.reply_error: Exception | None = None
        self.n_generated = 0

    def stop_and_join(self) -> None: ...

    def reads_images(self, model: str) -> bool | None:
        return None

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        self.wait()
        if self.error is not None:
            raise self.error
        context = SimpleNamespace(
            prompt=[1, 2, 3], prompt_cache_count=1, text_sm=self._states, tool_parser=None
        )
        context.has_tool_calling = context.has_thinking = False
        context.initial_state, context.stop = "normal", lambda: None
        return context, self._generated(args.max_tokens, progress_callback)

    def _generated(self, n: int, progress_callback: Any) -> Iterator[Any]:
        for i in range(n):
            if self.progress is not None and i == 0:
                self.pause()
                progress_callback(*self.progress)
            self.pause()
            if self.reply_error is not None and i == 1:
                raise self.reply_error
            self.n_generated += 1
            response = SimpleNamespace(text=f"{i} ", token=i, logprob=0.0, finish_reason=None)
            response.top_tokens, response.state, response.match = (), "normal", None
            response.finish_reason = "length" if i == n - 1 else None
            yield response


class Keepalives:
    """The keepalives of all streams, with a short interval."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._n_made = 0
        monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
        monkeypatch.setattr(clients, "KEEPALIVE_S", 0.0)
        monkeypatch.setattr(clients, "WATCH_S", 0.01)
        make = Completion.keepalive

        def keepalive(completion: Completion) -> bytes:
            made = make(completion)
            self._n_made += 1
            return made

        monkeypatch.setattr(Completion, "keepalive", keepalive)

    def wait_for(self, n: int) -> None:
        """Wait until `n` more keepalives have been made."""
        n_before = self._n_made
        wait_until(lambda: self._n_made >= n_before + n, "keepalives")


class WordsServer:
    """The server's own handler on a real socket pair, with a fake generator."""

    def __init__(self, server: ModuleType) -> None:
        self.server = server
        self.generator = WordsGenerator(server)
        self.plugin = WordsPlugin()

    def connect(self) -> tuple[socket.socket, Thread]:
        client_socket, server_socket = socket.socketpair()
        client_socket.settimeout(20)

        class OneConnection:
            def __init__(self, address: Any, make_handler: Any) -> None:
                self.make_handler = make_handler

            def serve_forever(self) -> None:
                with server_socket, contextlib.suppress(ConnectionError):  # as socketserver does
                    self.make_handler(server_socket, ("127.0.0.1", 0), self)

        def serve() -> None:
            self.server._run_http_server("127.0.0.1", 0, self.generator, OneConnection)

        thread = Thread(target=serve)
        thread.start()
        return client_socket, thread

    def ask(self, sent: bytes, *, end: bool = False) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of the answer to a request."""
        with plugged(self.plugin):
            client_socket, thread = self.connect()
            with client_socket:
                client_socket.sendall(sent)
                if end:
                    client_socket.shutdown(socket.SHUT_WR)
                answer = b""
                while part := client_socket.recv(1 << 16):
                    answer += part
            thread.join(60)
        head, _, body = answer.decode().partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        assert len(headers) == len(lines), lines
        return int(status.split()[1]), headers, body

    def post(self, body: Any, path: str = "/words?a=b") -> tuple[int, dict[str, str], str]:
        return self.ask(request(json.dumps(body).encode(), path=path))


def request(payload: bytes, length: Any = None, path: str = "/words?a=b") -> bytes:
    n_bytes = len(payload) if length is None else length
    return f"POST {path} HTTP/1.1\r\nContent-Length: {n_bytes}\r\n\r\n".encode() + payload


def events(body: str) -> list[dict[str, Any]]:
    read = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        name, content = lines
        read.append(json.loads(content.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read
