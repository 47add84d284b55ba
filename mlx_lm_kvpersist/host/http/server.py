"""The server's HTTP side: plugins see requests and replies, add headers and answer paths."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from email.message import Message
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from huggingface_hub.constants import HF_HUB_CACHE

from ...apis import API, Request, openai_error, require_text
from ...errors import GenerationStopped, KVPersistError, RequestRefused
from .. import manager
from ..attachments import fit_attachments
from ..hooks import ClientRequest, FrozenHeaders, Route, frozen
from ..scheduling.model_provider import loaded_name, own_names
from ..scheduling.waiting import ARRIVING
from ..stopping import stop
from . import request_checks
from .clients import RESET_S, ClientConnection, Clients, PluginHTTPServer
from .completion import ChatReply, Completion, ObservedGenerator, StopWords

if TYPE_CHECKING:
    from mlx_lm.server import APIHandler as Stock
else:
    Stock = object

RETRY_AFTER_S = 5
DEFAULT_MODEL = "default_model"
"""mlx-lm's name for the model of `--model`."""
LAST_ANSWERS_S = 5.0
"""How long the process waits until clients of interrupted replies have got their errors."""
_UNSAID = {400: "Request should be a JSON dictionary", 411: "Content-Length header is required"}
"""mlx-lm's messages for errors that it sends without an exception."""

logger = logging.getLogger(__name__)


class PluginAPIHandler(Stock):  # type: ignore[misc]
    """Answers as mlx-lm does, and calls the hooks. Each connection has its own handler and thread.

    A connection may carry several requests, so each request resets the handler's state. mlx-lm's
    `do_POST` parses requests to mlx-lm's own paths, and an `API` parses its own requests. mlx-lm's
    loop (`handle_completion`) then always streams, and passes each part of the reply to a
    `Completion`. The bytes that the loop itself writes are discarded.
    """

    timeout = 300.0
    """How many seconds a client may pause while it sends its request or receives its reply."""
    plugin_routes: Mapping[tuple[str, str], Route]
    pattern_routes: Sequence[Route]
    clients: Clients
    path: str
    wfile: Any
    requested_model: str
    places: Sequence[str]
    """The name of each message in the body of an API other than mlx-lm's."""
    close_connection = True  # http.server can refuse a request before it sets this
    generator: Any
    """The server's response generator, not an ObservedGenerator."""
    completion: Any = None
    """The `Completion` of the request while its reply is generated, else None."""
    stock_response: Callable[..., dict[str, Any]]
    """mlx-lm's `generate_response`: it makes a chunk of a reply, or the whole reply."""

    @property
    def body(self) -> Any:
        """The body, tidied when mlx-lm sets it: mlx-lm then reads its fields."""
        return self._body

    @body.setter
    def body(self, body: Any) -> None:
        self._body = request_checks.tidy(body)

    @property
    def response_generator(self) -> Any:
        return ObservedGenerator(self, self.generator)

    @response_generator.setter
    def response_generator(self, generator: Any) -> None:
        self.generator = generator

    def setup(self) -> None:
        super().setup()
        self.wfile = self.client = ClientConnection(self.connection, self.protocol_version)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # socketserver would print a traceback
            if method := getattr(self, "command", None):
                path = self.path.partition("?")[0]
                logger.info(
                    "kvpersist: the client of %s %s left before the end of the answer", method, path
                )

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        finally:
            self.clients.end(self.client)
            ARRIVING.pop(threading.get_ident(), None)

    def parse_request(self) -> bool:
        self.completion, self._body, self.places = None, {}, ()
        self._status, self._has_replied = 0, False
        parsed: bool = super().parse_request()
        if parsed and self.command == "POST":
            ARRIVING[threading.get_ident()] = time.perf_counter()
        # http.server looks up do_GET and the like on this object, then on its class.
        if parsed and (route := self._route()) is not None:
            self.__dict__[f"do_{self.command}"] = partial(self._answer, route)
        return parsed

    def _route(self) -> Route | None:
        method, path = self.command, self.path.partition("?")[0]
        exact = self.plugin_routes.get((method, path))
        routes = (route for route in self.pattern_routes if route.method == method)
        return exact or next((route for route in routes if route.pattern.fullmatch(path)), None)

    def _answer(self, route: Route) -> None:
        del self.__dict__[f"do_{self.command}"]  # otherwise a reference cycle
        try:
            route.handle(self)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self.close_connection = True
            if isinstance(error, RequestRefused) and not self._has_replied:
                self.answer_json(error.status, openai_error(error.status, str(error), error.code))
                return
            is_own = isinstance(error, KVPersistError)
            logger.error(
                "kvpersist: %s %s failed: %s", route.method, route.path, error, exc_info=not is_own
            )
            if not self._has_replied:
                self.send_error(500)

    def do_POST(self) -> None:
        self.path = self.path.partition("?")[0]
        with self.failures_told(None):
            request_checks.check_body_length(self.headers.get("Content-Length"))
            try:
                super().do_POST()
            except ValueError as error:
                # While stock reads a body, it catches only json's JSONDecodeError.
                if self.body or isinstance(error, RequestRefused):
                    raise
                raise RequestRefused(f"the body is not valid JSON: {error}") from error

    @contextmanager
    def failures_told(self, api: API | None) -> Iterator[None]:
        """Send an error of the block to the client, in its API's form."""
        try:
            yield
        except ConnectionError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and self._has_replied:
                raise
            self.close_connection = True
            completion, self.completion = self.completion, None
            self._headers_buffer: list[bytes] = []  # the headers are for a reply that did not come
            refusal = request_checks.refusal_of(error, self.timeout)
            fail = (completion or Completion(self, api)).fail
            fail(refusal.status, str(refusal), refusal.code)

    def answer_json(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        super()._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> dict[str, Any]:
        """Return the request's JSON object, {} if it has no body; raises RequestRefused."""
        is_chunked = "Transfer-Encoding" in self.headers  # a body without a length
        if not is_chunked and self.headers.get("Content-Length", "0") == "0":
            return {}
        return self.read_json()

    def read_json(self) -> dict[str, Any]:
        """Return the request's JSON object; raises RequestRefused for anything else."""
        if (length := self.headers.get("Content-Length")) is None:
            why = "the header Content-Length is missing, expected the body's size"
            raise RequestRefused(why, 411)
        n_bytes = request_checks.check_body_length(length)
        try:
            read = self.rfile.read(n_bytes)
        except TimeoutError:
            raise request_checks.late_body(self.timeout) from None
        if len(read) < n_bytes:
            raise RequestRefused(f"the body ended after {len(read):,} of {n_bytes:,} bytes")
        try:
            body = json.loads(read.decode())
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestRefused("the body is not a JSON object")
        return body

    def serve(self, api: API) -> None:
        with self.failures_told(api):
            self.complete(self._parsed(api), api)

    def serve_count(self, api: API) -> None:
        """Answer how many tokens a request's prompt has, without the generation thread."""
        with self.failures_told(api):
            self._begin(self._parsed(api))
            completion = self.handle_chat_completions()
            self._show_plugins(completion)
            model = SimpleNamespace(model=self.requested_model)
            args = SimpleNamespace(model=model, chat_template_kwargs=self.chat_template_kwargs)
            self.answer_json(200, {"input_tokens": self.generator.count_tokens(completion, args)})

    def _parsed(self, api: API) -> Request:
        return api.parse(request_checks.tidy(self.read_json()), self.headers)

    def serve_chat(self, chat_body: dict[str, Any]) -> None:
        """Answer with the reply to a chat completion's body, or with its error."""
        with self.failures_told(None):
            fields = request_checks.tidy(chat_body)
            self.complete(Request(fields, fields.get("stream", False), ChatReply(self)), None)

    def prefill(self, chat_body: dict[str, Any]) -> tuple[int, int]:
        """Compute a prompt and one token; return the numbers of prompt tokens and of cached tokens.

        Raises RequestRefused. Nothing is sent to the client.
        """
        fields = {**request_checks.tidy(chat_body), "max_tokens": 1}
        try:
            self.complete(Request(fields, False, ChatReply(self)), None, is_sent=False)
            usage = self.completion.usage
            return usage.n_prompt, usage.n_cached
        except Exception as error:
            raise request_checks.refusal_of(error, self.timeout) from error
        finally:
            self.completion = None

    def complete(self, request: Request, api: API | None, *, is_sent: bool = True) -> None:
        """Generate and send a reply. Raises the errors of generation. api: None for mlx-lm's."""
        self._begin(request)
        self.completion = Completion(self, api, request.reply, self.stream, request.tools)
        self.completion.is_sent = is_sent
        stop_words = self.body.get("stop") or []
        stop_words = [stop_words] if isinstance(stop_words, str) else stop_words
        self.handle_completion(self.handle_chat_completions(), stop_words)

    def _begin(self, request: Request) -> None:
        self._body, self.places = request.fields, request.places
        self.__dict__ |= request_checks.parameters(request.fields, self.generator.cli_args)
        self.stream = request.stream
        self.validate_model_parameters()

    def validate_model_parameters(self) -> None:
        request_checks.check_bias(self.logit_bias)
        try:
            super().validate_model_parameters()
        except ValueError as error:  # mlx-lm 0.31.3 does not catch it
            message = str(error).replace("requested_model", "model")
            raise RequestRefused(message) from error
        request_checks.check_parameters(self.body, self)
        arguments = self.generator.cli_args
        if self.requested_model != DEFAULT_MODEL:
            provider = self.generator.model_provider
            own, loaded = own_names(provider.cli_args), loaded_name(provider)
            if is_alias(self.requested_model) and (own or loaded):
                self.requested_model = DEFAULT_MODEL if own else str(loaded)
            else:
                request_checks.check_model(self.requested_model, own, loaded)
        elif arguments.model is None:
            message = "this server has no model; name one in the request, or start it with --model"
            raise RequestRefused(message, 404, "model_not_found")
        request_checks.check_beside_model(self.requested_draft_model, self.adapter, arguments)

    def handle_health_check(self) -> None:
        is_healthy = self.generator.is_healthy
        self._set_completion_headers(200 if is_healthy else 503)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}' if is_healthy else b'{"status": "unavailable"}')

    def handle_models_request(self) -> None:
        """List the server's model, mlx-lm's list, and two further names of the server's model.

        Routers take the first name. Claude Code offers only names that begin with "claude". Some
        clients are configured with `default_model`.
        """
        provider = self.response_generator.model_provider
        loaded = loaded_name(provider) or provider.cli_args.model
        name = str(Path(loaded).resolve()) if loaded and Path(loaded).exists() else loaded
        served = getattr(provider.cli_args, "served_name", None)
        models = [self._listed(own) for own in (served, name) if own]
        if Path(HF_HUB_CACHE).is_dir():
            inner = copy.copy(self)
            inner.path, inner.wfile = "/v1/models", io.BytesIO()
            for method in ("_set_completion_headers", "end_headers"):
                setattr(inner, method, lambda *args: None)
            super(PluginAPIHandler, inner).handle_models_request()
            downloaded = json.loads(inner.wfile.getvalue())["data"]
            models += [model for model in downloaded if model["id"] not in (served, name)]
        if name:
            models.append(alias_of(name, self.created))
            if provider.max_context:
                models[-1]["max_model_len"] = provider.max_context
        if provider.cli_args.model and DEFAULT_MODEL not in (served, name):
            models.append(self._listed(DEFAULT_MODEL))
        asked_name = unquote(self.path.partition("?")[0]).removeprefix("/v1/models").strip("/")
        if not asked_name:
            self.answer_json(200, {"object": "list", "data": models, "has_more": False})
            return
        named = [model for model in models if model["id"].strip("/") == asked_name]
        why_not = f"there is no model {asked_name} here; GET /v1/models lists the names"
        refusal = openai_error(404, why_not, "model_not_found")
        self.answer_json(200 if named else 404, named[0] if named else refusal)

    def _listed(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created}

    def handle_chat_completions(self) -> Any:
        request_checks.check_chat(self.body)
        continues = request_checks.is_continued(self.body, self.places)
        reads_images = self.response_generator.reads_images(self.requested_model)
        if reads_images is not None:  # None while the model is not loaded
            self.body["messages"] = fit_attachments(self.body["messages"], reads_images)
        if self.body.get("tool_choice") == "none":
            self.body.pop("tools", None)
        request = super().handle_chat_completions()
        client_request = ClientRequest.of(request)
        client_request.continues, client_request.places = continues, self.places
        return request

    def handle_text_completions(self) -> Any:
        require_text("prompt", self.body.get("prompt"))
        return super().handle_text_completions()

    def receive(self, request: Any) -> None:
        """Show a request to plugins before it is queued. A plugin may refuse it."""
        self._status, self._has_replied = 0, False
        self.client.begin_reply()
        if self.clients.look():  # this client may have just left an earlier request
            time.sleep(RESET_S)
            self.clients.look()
        self._show_plugins(request)
        self.completion.received(request)
        self.clients.begin(self.client, ClientRequest.of(request))

    def _show_plugins(self, request: Any) -> None:
        seen = ClientRequest.of(request)
        body = {**self.body, "messages": seen.messages} if seen.messages else self.body
        headers = FrozenHeaders(self.headers)
        manager.ask("request_received", request=seen, headers=headers, body=frozen(body))

    def handle_completion(
        self, request: Any, stop_words: Iterable[str], *args: Any, **kwargs: Any
    ) -> None:
        """Generate a reply. mlx-lm gets no stop words: it would compare tokens, not text."""
        if self.completion is None:  # for one of stock's own paths
            self.completion = Completion(self, None, ChatReply(self), self.stream)
        completion = self.completion
        completion.stop_words = StopWords(stop_words)
        self.stream, self.stream_options = True, {"include_usage": True}
        self.wfile = io.BytesIO()
        try:
            super().handle_completion(request, [], *args, **kwargs)
        except BaseException:
            # If the headers cannot be sent, stock would not stop the reply.
            ClientRequest.of(request).client_gone = True
            raise
        finally:
            self.wfile = self.client
            self.client.end_keepalives()
        if completion.is_sent and not completion.streams:
            self.answer_json(200, completion.reply.whole())

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """Begin an answer. mlx-lm's errors are raised instead: all errors are sent in one place."""
        error = sys.exc_info()[1] if status_code >= 400 else None  # stock passes no error
        if isinstance(error, RequestRefused | GenerationStopped | ConnectionError):
            raise error
        if error is not None:  # stock answers 404 to all errors of `generate`
            is_of_json = isinstance(error, json.JSONDecodeError)
            what = "Invalid JSON in request body: " if is_of_json else ""
            raise RequestRefused(f"{what}{error}", status_code) from error
        if status_code in _UNSAID:
            raise RequestRefused(_UNSAID[status_code], status_code)
        super()._set_completion_headers(status_code)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        completion = self.completion
        if completion is None or completion.reply is None or completion.streams:
            super()._set_stream_headers(status_code)

    def log_request(self, *args: Any) -> None:
        """Log an answer, except to a health check: supervisors ask every few seconds."""
        if not self.requestline.startswith("GET /health "):
            super().log_request(*args)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        self._status = code
        if code == 503:
            self.send_header("Retry-After", str(RETRY_AFTER_S))

    def end_headers(self) -> None:
        """Add the plugins' headers last: a reply that is not a stream is complete by then."""
        completion = self.completion
        if completion is not None and self._status == 0:
            return  # a stream's headers, but the reply is not a stream
        self._has_replied = True
        if completion is None or completion.request is None or self._status != 200:
            super().end_headers()
            return
        if completion.streams:
            head, self._headers_buffer = b"".join(self._headers_buffer), []
            completion.begin(head)
            return
        for name, value in completion.plugin_headers():
            self.send_header(name, value)
        super().end_headers()

    def generate_response(
        self,
        text: str,
        finish_reason: str | None,
        *args: Any,
        tool_calls: list[dict[str, Any]] | None = None,
        reasoning_text: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Pass a part of the reply to the Completion."""
        if self.completion.reply is None:
            fields = {**kwargs, "tool_calls": tool_calls, "reasoning_text": reasoning_text}
            return self.stock_response(text, finish_reason, *args, **fields)
        self.completion.add(text, reasoning_text or "", tool_calls or [], finish_reason)
        return {}

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.completion.reply is None:
            return self.stock_usage(*args, **kwargs)
        self.completion.end(*args, **kwargs)
        return {}

    def stock_usage(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the last chunk of a stream, with the right type: mlx-lm's is `chat.completion`."""
        response: dict[str, Any] = super().completion_usage_response(*args, **kwargs)
        return {**response, "object": self.object_type}


def is_alias(model: str) -> bool:
    """Tell whether a request names an Anthropic model; the server's model then replies."""
    return model.startswith(("claude", "anthropic")) and "/" not in model


def alias_of(model: str, created: int) -> dict[str, Any]:
    """Return the server's own model under another name, in the forms of OpenAI and Anthropic."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(model).name)
    when = datetime.fromtimestamp(created, timezone.utc).isoformat()
    openai = {"id": f"claude-{name}", "object": "model", "created": created}
    return {**openai, "type": "model", "display_name": name, "created_at": when}


def handler_with(
    stock: type[Any], routes: Mapping[tuple[str, str], Route], clients: Clients
) -> type[Any]:
    attributes = {
        "plugin_routes": dict(routes),
        "pattern_routes": [route for route in routes.values() if "{" in route.path],
        "clients": clients,
        "stock_response": stock.generate_response,
    }
    return type(PluginAPIHandler.__name__, (PluginAPIHandler, stock), attributes)


def serve_ourselves(handler_class: type[Any], generator: Any, work: Callable[[Any], None]) -> None:
    """Call `work` with a request handler that has no client; `work` may set its empty headers."""

    class NoClient(handler_class):  # type: ignore[misc]
        def handle(self) -> None:
            self.headers = Message()
            self.command, self.requestline, self.request_version = "POST", "", "HTTP/1.1"
            try:
                work(self)
            finally:
                self.clients.end(self.client)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        NoClient(generator, ours, ("", 0), None)


def plugin_run_http_server(stock: Callable[..., None]) -> Callable[..., None]:
    """Return `_run_http_server` with our classes of server and handler.

    `run` ignores its handler_class. `_run_http_server` has mlx-lm's class as a default argument, so
    replacing the name APIHandler would change nothing.
    """
    signature = inspect.signature(stock)

    @wraps(stock)
    def run_http_server(*args: Any, **kwargs: Any) -> None:
        clients = Clients()
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        generator, server_class = given["response_generator"], given["server_class"]
        clients.watch()
        try:
            try:
                handler = handler_with(given["handler_class"], manager.plugin_routes(), clients)
                manager.ask("started", serve=partial(serve_ourselves, handler, generator))
            except Exception as error:
                stop(error)
            bases = (PluginHTTPServer, server_class)
            attributes = {"generator": generator, "clients": clients}
            given["server_class"] = type(server_class.__name__, bases, attributes)
            given["handler_class"] = handler
            stock(*call.args, **call.kwargs)
        except BaseException:
            # Stock would leave the generation thread running, and the process would never end.
            generator.stop_and_join()
            raise
        finally:
            clients.wait_for_none(LAST_ANSWERS_S)  # clients of interrupted replies get an error
            clients.is_closed = True

    return run_http_server
