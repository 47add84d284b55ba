"""The server's HTTP side: plugins see requests and replies, add headers and answer paths."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.constants import HF_HUB_CACHE

from ..error_forms import openai_error
from ..errors import ConfigError, RequestRefused
from ..fields import require_text
from . import manager
from .chat_output import StockOutput
from .completion_output import CompletionOutput
from .model_provider import loaded_name
from .request_checks import (
    check_bias,
    check_body_length,
    check_chat,
    check_parameters,
    discard_body,
)
from .routes import Route
from .run import finishing_replies

if TYPE_CHECKING:
    from mlx_lm.server import APIHandler as Stock
else:
    Stock = object

CLIENT_TIMEOUT_S = 300.0
"""How long a client may send nothing of its request, or take nothing of its reply."""
RETRY_AFTER_S = 5
BACKLOG = 128
"""Connections that wait to be accepted. Stock has 5, and clients begin more at once."""

logger = logging.getLogger(__name__)


class AskingGenerator:
    """The server's response generator as one handler sees it: plugins see each request before it.

    Whatever a handler generates passes here, whichever path the server has it for.
    """

    def __init__(self, handler: PluginAPIHandler, generator: Any) -> None:
        self._handler, self._generator = handler, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._handler.receive(request)
        return self._generator.generate(request, *args, **kwargs)


class PluginAPIHandler(Stock):  # type: ignore[misc]
    """Answers as stock does, and tells the plugins. One object a connection, on its own thread.

    Stock closes a connection after one request. Kept open, one can carry several, and only some are
    completions: the state of a request is reset when the next one begins.
    """

    timeout = CLIENT_TIMEOUT_S
    plugin_routes: Mapping[tuple[str, str], Route]
    # http.server can refuse a request before it is parsed, and before `_begin_request`.
    requested_model: str
    wfile: Any
    _completion: Any = None
    _is_ok = _is_too_large = False
    generator: Any
    """What generates for this handler, without its plugins being asked."""
    failure: Exception | None = None
    """Why there is no reply, or why it ended early."""
    beats = True
    """Whether a stream shows that it lives while nothing else is sent."""
    tells_reply = True
    """Whether the reply of a chat completion is what the client sees; see `chat_api`."""

    @property
    def response_generator(self) -> Any:
        return AskingGenerator(self, self.generator)

    @response_generator.setter
    def response_generator(self, generator: Any) -> None:
        self.generator = generator

    def _begin_request(self) -> None:
        self._completion = self.failure = None
        self._is_ok = False
        self._has_replied = False
        self._reply_is_whole = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            logger.debug("a client went away")  # socketserver would print a traceback

    def finish(self) -> None:
        if self._is_too_large:
            discard_body(self)
        super().finish()

    def parse_request(self) -> bool:
        self._begin_request()
        self.body: Any = {}
        parsed: bool = super().parse_request()
        # http.server looks up do_GET and the like on this object, then on its class.
        if parsed and self._route() is not None:
            self.__dict__[f"do_{self.command}"] = self._answer_route
        elif parsed:
            self.__dict__.pop(f"do_{self.command}", None)
        return parsed

    def _route(self) -> Route | None:
        asked = self.command, self.path.partition("?")[0]
        exact = self.plugin_routes.get(asked)
        routes = self.plugin_routes.values()
        return exact or next((route for route in routes if route.matches(*asked)), None)

    def _answer_route(self) -> None:
        route = self._route()
        assert route is not None
        try:
            route.handle(self)
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            logger.exception("%s %s failed", route.method, route.path)
            self.close_connection = True
            if not self._has_replied:
                self.send_error(500)

    def do_POST(self) -> None:
        client = self.wfile
        try:
            check_body_length(self.headers.get("Content-Length"))
            super().do_POST()
        except ConnectionError:
            raise
        except TimeoutError:
            if self._has_replied:
                raise
            self._fail(RequestRefused(f"the body did not come within {self.timeout:.0f} s", 408))
        except (RecursionError, UnicodeDecodeError) as error:
            # Stock catches only json's own error while it reads a body.
            self._fail(RequestRefused(f"the body is no JSON that can be read: {error}"))
        except Exception as error:
            self._fail(error)
        finally:
            self.wfile = client

    def _fail(self, error: Exception) -> None:
        """Tell the client why there is no reply, or why it ends early. Stock closes silently."""
        self.failure = error
        status = getattr(error, "status", 500)
        if status == 500:
            logger.exception("a reply failed")
        self.close_connection = True
        if self._has_replied:
            if self._completion is not None and self.stream:
                body = openai_error(status, str(error), getattr(error, "code", None))
                self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
            return
        self._headers_buffer: list[bytes] = []  # of a reply that did not come
        self._answer_json(status, {"error": str(error)})

    def _answer_json(self, status: int, content: Any) -> None:
        self._set_completion_headers(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def validate_model_parameters(self) -> None:
        check_bias(self.logit_bias)
        try:
            super().validate_model_parameters()
        except ValueError as error:  # 0.31.3 catches nothing here
            raise RequestRefused(str(error)) from error
        check_parameters(self.body, self)
        if is_alias(self.requested_model):
            provider = self.response_generator.model_provider
            own = "default_model" if provider.cli_args.model else loaded_name(provider)
            self.requested_model = own or self.requested_model
        if isinstance(self.stream_options, dict):
            # Stock reads it without a default when the stream ends.
            self.stream_options.setdefault("include_usage", False)

    def handle_health_check(self) -> None:
        healthy = self.response_generator.is_healthy
        status = "ok" if healthy else "unavailable"
        self._answer_json(200 if healthy else 503, {"status": status})

    def handle_models_request(self) -> None:
        """List what stock lists, and the server's own model, also under a name for Claude Code.

        Claude Code offers only names that begin with "claude".
        """
        provider = self.response_generator.model_provider
        loaded = loaded_name(provider) or provider.cli_args.model
        name = str(Path(loaded).resolve()) if loaded and Path(loaded).exists() else loaded
        models = []
        if Path(HF_HUB_CACHE).is_dir():
            inner, output = copy.copy(self), StockOutput()
            inner.wfile, inner.log_request = output, lambda *args: None
            super(PluginAPIHandler, inner).handle_models_request()
            models = json.loads(output.unread)["data"]
        elif name:
            models = [{"id": name, "object": "model", "created": self.created}]
        alias = alias_of(name, self.created) if name else {"id": ""}
        asked = self.path.partition("?")[0].removeprefix("/v1/models").strip("/")
        if asked and asked == alias["id"]:
            self._answer_json(200, alias)
            return
        if name and not asked:
            models.append(alias)
        self._answer_json(200, {"object": "list", "data": models, "has_more": False})

    def handle_chat_completions(self) -> Any:
        check_chat(self.body)
        if self.body.get("tool_choice") == "none":
            self.body.pop("tools", None)
        return super().handle_chat_completions()

    def handle_text_completions(self) -> Any:
        require_text("prompt", self.body.get("prompt"))
        return super().handle_text_completions()

    def receive(self, request: Any) -> None:
        """Let plugins see a request before it is queued. They may refuse it."""
        self._begin_request()
        self._completion = request
        request.connection = self.connection
        given = {"request": request, "headers": self.headers, "body": self.body}
        manager.ask_all("request_received", passed_on=(RequestRefused,), **given)

    def handle_completion(self, *args: Any, **kwargs: Any) -> None:
        self.wfile = output = CompletionOutput(self)
        with output.beating() if self.stream and self.beats else nullcontext():
            super().handle_completion(*args, **kwargs)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        error = sys.exc_info()[1]
        if status_code == 404 and isinstance(error, Exception):
            # Stock answers 404 to whatever `generate` raises, from within its `except`.
            self.failure, status_code = error, getattr(error, "status", 404)
        super()._set_completion_headers(status_code)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        self._is_ok = code == 200
        if code == 503:
            self.send_header("Retry-After", str(RETRY_AFTER_S))
        elif code == 413:
            self._is_too_large = self.close_connection = True

    def end_headers(self) -> None:
        """Add the plugins' headers as late as possible: without streaming, the reply is known."""
        if self._completion is not None and self._is_ok:
            answers = manager.ask_all("response_headers", request=self._completion)
            for name, value in (header for answer in answers for header in answer):
                if is_header(name, value):
                    self.send_header(name, value)
                else:
                    logger.error("header %r: %r cannot be sent", name, value)
        self._has_replied = True
        super().end_headers()

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        response: dict[str, Any] = super().generate_response(*args, **kwargs)
        choice = response["choices"][0]
        message = choice.get("delta") or choice.get("message") or {}
        self._content.append(message.get("content") or choice.get("text") or "")
        if "reasoning" in message:
            message["reasoning_content"] = message["reasoning"]  # half of the clients read this
        self._reasoning.append(message.get("reasoning") or "")
        self._tool_calls += message.get("tool_calls") or []
        if choice["finish_reason"] is not None and self.tells_reply:
            self.tell_reply("".join(self._content), "".join(self._reasoning), self._tool_calls)
        return response

    def tell_reply(self, content: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> None:
        """Tell the plugins, once, what the client is sent as the reply."""
        if self._completion is not None and not self._reply_is_whole:
            self._reply_is_whole = True
            manager.ask_all(
                "reply_sent",
                request=self._completion,
                content=content,
                reasoning=reasoning,
                tool_calls=tool_calls,
            )

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the last chunk of a stream; stock calls it a `chat.completion`."""
        response: dict[str, Any] = super().completion_usage_response(*args, **kwargs)
        return {**response, "object": self.object_type}


def is_alias(model: str) -> bool:
    """Tell whether a request names a model of Anthropic's: it means the server's own."""
    return model.startswith(("claude", "anthropic")) and "/" not in model


def alias_of(model: str, created: int) -> dict[str, Any]:
    """Return the server's own model under another name, in the forms of OpenAI and Anthropic."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(model).name)
    when = datetime.fromtimestamp(created, timezone.utc).isoformat()
    openai = {"id": f"claude-{name}", "object": "model", "created": created}
    return {**openai, "type": "model", "display_name": name, "created_at": when}


def is_header(name: str, value: str) -> bool:
    """Tell whether a header is printable ASCII, so that it cannot add another header."""
    is_plain = all(text.isascii() and text.isprintable() for text in (name, value))
    return is_plain and bool(name) and not set(name) & set(" :")


def plugin_routes() -> dict[tuple[str, str], Route]:
    """Return the plugins' routes by method and path; raises ConfigError if two have the same."""
    routes: dict[tuple[str, str], Route] = {}
    for answer in manager.ask("routes"):
        for route in answer:
            if (route.method, route.path) in routes:
                raise ConfigError(
                    f"two plugins answer {route.method} {route.path}; leave one of them out"
                )
            routes[route.method, route.path] = route
    return routes


def handler_with(stock: type[Any], routes: Mapping[tuple[str, str], Route]) -> type[Any]:
    """Return a handler class that is `stock` and tells the plugins."""
    bases = (PluginAPIHandler, stock)
    return type(PluginAPIHandler.__name__, bases, {"plugin_routes": dict(routes)})


def plugin_run_http_server(stock: Callable[..., None]) -> Callable[..., None]:
    """Return `_run_http_server` with our handler class.

    `run` ignores its handler_class, and `_run_http_server` holds stock's as a default argument:
    replacing the name APIHandler would change nothing.
    """
    signature = inspect.signature(stock)

    @wraps(stock)
    def run_http_server(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        try:
            handler = handler_with(call.arguments["handler_class"], plugin_routes())
            call.arguments["handler_class"] = handler
            server_class = call.arguments["server_class"]
            call.arguments["server_class"] = type(
                server_class.__name__, (server_class,), {"request_queue_size": BACKLOG}
            )
            with finishing_replies(call.arguments["response_generator"]):
                stock(*call.args, **call.kwargs)
        except BaseException:
            # A port in use, a signal before the server listens: stock would leave the generation
            # thread running, and the process would never end.
            call.arguments["response_generator"].stop_and_join()
            raise

    return run_http_server
