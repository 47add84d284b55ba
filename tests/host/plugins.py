"""Plugins for the tests: they record calls, fail, edit arguments, or have a wrong hook."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.errors import ConfigError
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt, Route, TakenRequest, hookimpl
from mlx_lm_kvpersist.host.http import clients


class EchoRequest(TakenRequest):
    """Records the number of saved tokens, with the last message or the text of the request."""

    def __init__(self, echo: Echo, request: ClientRequest, prompt: Prompt) -> None:
        super().__init__(prompt)
        messages = request.messages
        self.echo, self.question = echo, messages[-1]["content"] if messages else request.prompt

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        self.echo.record("insert", self.question, len(tokens), cache_type)


class Echo:
    """Records every hook call in a file and at /echo.

    If DRAIN_S is set, replies may continue for this number of seconds after SIGTERM.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.path: Path | None = None
        self._lock = Lock()

    def record(self, *call: Any) -> None:
        with self._lock:  # hooks of several threads write the same file
            self.calls.append(list(call))
            if self.path is not None:
                self.path.write_text(json.dumps(self.calls), encoding="utf-8")

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("echo", "Records what it is asked.")
        group.add_argument("--echo-file", type=Path, help="where the record goes")

    @hookimpl
    def configure(self, args: Namespace) -> None:
        self.path = args.echo_file
        clients.DRAIN_S = float(os.environ.get("DRAIN_S", clients.DRAIN_S))
        self.record("configure", args.plugin)

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        self.record("model_loaded", provider.model_key[0])

    @hookimpl
    def request_received(
        self, request: ClientRequest, headers: Message, body: dict[str, Any]
    ) -> None:
        self.record("request_received", headers.get("X-Session-ID"), body.get("stream", False))

    @hookimpl
    def prepare_messages(self, messages: list[dict[str, Any]]) -> None:
        self.record("prepare_messages", messages[-1]["content"])

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Prompt) -> EchoRequest:
        self.record("take_request", len(prompt.ids))
        return EchoRequest(self, request, prompt)

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        return [("X-Echo", str(len(self.calls)))]

    @hookimpl
    def reply_sent(
        self, request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
    ) -> None:
        self.record("reply_sent", content)

    @hookimpl
    def reply_timed(self, request: ClientRequest, times_s: Sequence[float]) -> None:
        in_order = list(times_s) == sorted(times_s)
        self.record("reply_timed", len(times_s), 0 < times_s[0] and in_order)

    @hookimpl
    def routes(self) -> list[Route]:
        return [
            Route("GET", "/echo", self.answer),
            Route("DELETE", "/echo", self.forget),
            Route("GET", "/echo/broken", self.broken),
        ]

    def answer(self, handler: Any) -> None:
        body = json.dumps(self.calls).encode()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def forget(self, handler: Any) -> None:
        self.calls.clear()
        handler.send_response(204)
        handler.end_headers()

    def broken(self, handler: Any) -> None:
        raise RuntimeError("this path is broken")

    @hookimpl
    def shutdown(self) -> None:
        self.record("shutdown")


class Failing:
    """Raises in the hook that FAIL_IN names; FAIL_WITH selects the exception."""

    def __init__(self) -> None:
        self.fail("init")

    def fail(self, hook: str) -> None:
        if os.environ.get("FAIL_IN") != hook:
            return
        if os.environ.get("FAIL_WITH") == "config":
            raise ConfigError("found a bad option,\nexpected a good one")
        raise RuntimeError("a fault of the plugin")

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        self.fail("add_options")

    @hookimpl
    def configure(self, args: Namespace) -> None:
        self.fail("configure")
        if os.environ.get("FAIL_IN") == "generation":
            self.end_generation_at_top_k_13()
        elif os.environ.get("FAIL_IN") == "device":
            self.refuse_work_after_top_k_13()

    def refuse_work_after_top_k_13(self) -> None:
        """Make the device refuse all work after the first request with top_k=13."""
        server: Any = importlib.import_module("mlx_lm.server")
        stock = server._make_sampler

        def refuse(*arrays: Any) -> None:
            raise RuntimeError("[METAL] Command buffer execution failed: Submissions Ignored")

        def make(args: Any, tokenizer: Any) -> Any:
            if args.sampling.top_k == 13:
                mx.eval = mx.async_eval = refuse
            return stock(args, tokenizer)

        server._make_sampler = make

    def end_generation_at_top_k_13(self) -> None:
        """Make the generation thread raise, at top_k=13, an exception that stock does not catch."""
        server: Any = importlib.import_module("mlx_lm.server")
        stock = server._make_sampler

        def make(args: Any, tokenizer: Any) -> Any:
            if args.sampling.top_k == 13:
                raise RuntimeError("ended by a test")
            return stock(args, tokenizer)

        server._make_sampler = make

    @hookimpl
    def routes(self) -> None:
        self.fail("routes")

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        self.fail("model_loaded")
        time.sleep(float(os.environ.get("SLOW_LOAD_S", "0")))


class Misspelt:
    """Implements a hook that does not exist."""

    @hookimpl
    def modle_loaded(self, provider: Any) -> None: ...


class WrongArguments:
    """Implements a hook with an argument that the hook does not have."""

    @hookimpl
    def configure(self, arguments: Namespace) -> None: ...


class Editing:
    """Edits its arguments in place, and returns invalid values."""

    @hookimpl
    def model_loaded(self, provider: Any) -> None: ...

    @hookimpl
    def request_received(self, request: ClientRequest, headers: Message, body: Any) -> None:
        with contextlib.suppress(TypeError):
            body.clear()
        with contextlib.suppress(TypeError):
            del headers["X-Session-ID"]
        request.messages[0].clear()

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Any) -> Any:
        with contextlib.suppress(AttributeError):
            prompt.segments.clear()
        with contextlib.suppress(TypeError):
            prompt.messages[0]["content"] = "changed"
        return prompt.ids

    @hookimpl
    def response_headers(self) -> Any:
        return [("X-Broken", "a\r\nX-B: c")]

    @hookimpl
    def reply_sent(self, tool_calls: Any) -> None:
        tool_calls.append("call")

    @hookimpl
    def reply_timed(self, times_s: Any) -> None:
        times_s.clear()

    @hookimpl
    def idle(self) -> None:
        raise RuntimeError("a fault of the plugin")
