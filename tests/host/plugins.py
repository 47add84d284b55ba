"""Plugins for the tests: one that records what it is asked, one that fails, one that misspells."""

from __future__ import annotations

import importlib
import json
import os
import time
from argparse import ArgumentParser, Namespace
from email.message import Message
from pathlib import Path
from threading import Lock
from typing import Any

from mlx_lm_kvpersist.errors import ConfigError
from mlx_lm_kvpersist.host.hookspecs import hookimpl
from mlx_lm_kvpersist.host.prompt import Prepared, Prompt
from mlx_lm_kvpersist.host.routes import Route


class Echo:
    """Records every hook with what identifies the request, in a file and at /echo."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.path: Path | None = None
        self._lock = Lock()

    def record(self, *call: Any) -> None:
        with self._lock:  # hooks of several threads write one file
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
        self.record("configure", args.plugin)

    @hookimpl
    def self_test(self) -> None:
        self.record("self_test")

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        self.record("model_loaded", provider.model_key[0])

    @hookimpl
    def make_prompt_cache(self, model: Any) -> list[Any]:
        return list(type(model).make_cache(model)) if hasattr(type(model), "make_cache") else []

    @hookimpl
    def request_received(self, request: Any, headers: Message, body: dict[str, Any]) -> None:
        self.record("request_received", headers.get("X-Session-ID"), body.get("stream", False))

    @hookimpl
    def prepare_messages(self, request: Any, args: Any, tokenizer: Any) -> None:
        self.record("prepare_messages", request.messages[-1]["content"])

    @hookimpl
    def take_request(self, request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prepared:
        self.record("take_request", len(prompt.ids))
        return Prepared(prompt, handle=str(request.messages[-1]["content"]))

    @hookimpl
    def insert_cache(
        self, handle: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str
    ) -> None:
        self.record("insert_cache", handle, len(tokens), cache_type)

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        return [("X-Echo", str(len(self.calls)))]

    @hookimpl
    def reply_sent(
        self, request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
    ) -> None:
        self.record("reply_sent", content)

    @hookimpl
    def reply_timed(self, request: Any, times_s: list[float]) -> None:
        self.record("reply_timed", len(times_s), 0 < times_s[0] and times_s == sorted(times_s))

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
    """Fails in the hook that FAIL_IN names, as FAIL_WITH says."""

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
            self.end_generation_at_a_stop_word()

    def end_generation_at_a_stop_word(self) -> None:
        """Make the generation thread raise where stock catches nothing, for stop=["die"]."""
        server = importlib.import_module("mlx_lm.server")
        stock = server.ResponseGenerator._make_state_machine

        def make(self: Any, model_key: Any, tokenizer: Any, stop_words: Any, *more: Any) -> Any:
            if stop_words == ["die"]:
                raise RuntimeError("ended by a test")
            return stock(self, model_key, tokenizer, stop_words, *more)

        server.ResponseGenerator._make_state_machine = make

    @hookimpl
    def self_test(self) -> None:
        self.fail("self_test")

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        self.fail("model_loaded")
        time.sleep(float(os.environ.get("SLOW_LOAD_S", "0")))


class Misspelt:
    """Implements a hook that does not exist."""

    @hookimpl
    def modle_loaded(self, provider: Any) -> None: ...


class WrongArguments:
    """Implements a hook with an argument that it does not have."""

    @hookimpl
    def configure(self, arguments: Namespace) -> None: ...
