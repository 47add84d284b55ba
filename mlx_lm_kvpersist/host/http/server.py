"""The server's HTTP side: plugins see requests and replies, add headers and answer paths."""

from __future__ import annotations

import copy
import inspect
import io
import json
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import datetime, timezone
from email.message import Message
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from huggingface_hub.constants import HF_HUB_CACHE

from ...error_forms import openai_error
from ...errors import ConfigError, GenerationStopped, KVPersistError, RequestRefused
from ...fields import require_text
from .. import manager
from ..answers import ClientRequest, FrozenHeaders, Route, frozen
from ..attachments import fit_attachments
from ..run import uninterrupted
from ..scheduling.model_provider import loaded_name, own_names
from ..scheduling.reply import ARRIVING
from ..stopping import stop
from . import request_checks
from .client import ClientSocket
from .completion_output import CompletionOutput
from .stop_words import StopWords

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer as StockServer

    from mlx_lm.server import APIHandler as Stock
else:
    Stock = StockServer = object

CLIENT_TIMEOUT_S = 300.0
"""How long a client may send nothing of its request, or take nothing of its reply."""
RETRY_AFTER_S = 5
DRAIN_S = 5.0
"""How long replies may go on after SIGTERM."""
BACKLOG = 128
"""Connections that wait to be accepted. Stock has 5, and clients begin more at once."""
_UNSAID = {400: "Request should be a JSON dictionary", 411: "Content-Length header is required"}
"""Stock's messages for errors that it answers without an exception."""

logger = logging.getLogger(__name__)


class ObservedGenerator:
    """The server's response generator, as the handler of one completion sees it. HTTP thread.

    Whatever a handler generates passes here, whichever path the server has it for: plugins see the
    request before it is queued, the handler's output sees how far the prompt is, and the reply ends
    at a stop word.
    """

    def __init__(self, handler: PluginAPIHandler, generator: Any) -> None:
        self._handler, self._generator = handler, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(
        self,
        request: Any,
        args: Any,
        progress_callback: Callable[[int, int], None] = lambda n_done, n_all: None,
    ) -> tuple[Any, Iterator[Any]]:
        output = self._handler.output

        def on_progress(n_done: int, n_all: int) -> None:
            output.doing = f"prefill {n_done:,} of {n_all:,}"
            progress_callback(n_done, n_all)

        self._handler.receive(request)
        if output.counts:
            output.n_prompt = self._generator.count_tokens(request, args)
            raise RequestRefused("counted, not generated")
        context, responses = self._generator.generate(request, args, progress_callback=on_progress)
        if output.is_translated:
            output.read_calls(context, self.model_provider)
        if self._handler.stops is not None:
            responses = self._handler.until_stopped(context, responses)
        return context, responses


class PluginAPIHandler(Stock):  # type: ignore[misc]
    """Answers as stock does, between the plugins' hooks. One object a connection, on its thread.

    Stock closes a connection after one request. Kept open, one can carry several, and only some are
    completions: the state of a request is reset when the next one begins.
    """

    timeout = CLIENT_TIMEOUT_S
    plugin_routes: Mapping[tuple[str, str], Route]
    # http.server can refuse a request before it is parsed, and before `_begin_request`.
    requested_model: str
    path: str
    wfile: Any
    client: ClientSocket
    close_connection = True
    generator: Any
    """The server's response generator, not observed."""
    output: Any = None
    """Where a completion goes: a CompletionOutput."""
    stream = False
    stops: StopWords | None = None
    _completion: Any = None
    _status = 0

    @property
    def body(self) -> Any:
        """The request's body. Stock sets it, then reads its fields."""
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

    def _begin_request(self) -> None:
        self._completion = None
        self._status = 0
        self._has_replied = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._tokens: list[Any] = []
        """Stock's responses, where the whole reply is put together here."""

    def setup(self) -> None:
        super().setup()
        self.wfile = self.client = ClientSocket(self.connection, self.protocol_version)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # socketserver would print a traceback
            if getattr(self, "command", None):
                path = self.path.partition("?")[0]
                logger.info("the client of %s %s left before its answer's end", self.command, path)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        finally:
            ARRIVING.pop(threading.get_ident(), None)

    def parse_request(self) -> bool:
        self._begin_request()
        self.body = {}
        self.stops = None
        parsed: bool = super().parse_request()
        if parsed and self.command == "POST":
            ARRIVING[threading.get_ident()] = time.perf_counter()
        # http.server looks up do_GET and the like on this object, then on its class.
        if parsed and (route := self._route()) is not None:
            self.__dict__[f"do_{self.command}"] = partial(self._answer, route)
        elif parsed:
            self.__dict__.pop(f"do_{self.command}", None)
        return parsed

    def _route(self) -> Route | None:
        asked = self.command, self.path.partition("?")[0]
        exact = self.plugin_routes.get(asked)
        routes = self.plugin_routes.values()
        return exact or next((route for route in routes if route.matches(*asked)), None)

    def _answer(self, route: Route) -> None:
        try:
            route.handle(self)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            is_own = isinstance(error, KVPersistError)
            logger.error("%s %s failed: %s", route.method, route.path, error, exc_info=not is_own)
            self.close_connection = True
            if not self._has_replied:
                self.send_error(500)

    def do_POST(self) -> None:
        if self.output is None or not self.output.is_translated:
            self.output = CompletionOutput(self)
        client = self.wfile
        self.path = self.path.partition("?")[0]
        try:
            request_checks.check_body_length(self.headers.get("Content-Length"))
            super().do_POST()
        except ConnectionError:
            raise
        except TimeoutError:
            if self._has_replied:
                raise
            self._fail(request_checks.late_body(self))
        except Exception as error:
            # Stock catches only json's own error while it reads a body.
            is_unread = isinstance(error, RecursionError | ValueError) and not self.body
            if is_unread and not isinstance(error, RequestRefused):
                error = RequestRefused(f"the body is no JSON that can be read: {error}")
            self._fail(error)
        finally:
            self.wfile, self.output = client, None  # which holds this handler

    def _fail(self, error: Exception) -> None:
        self.close_connection = True
        self._completion = None
        self._headers_buffer: list[bytes] = []  # of a reply that did not come
        self.output.fail(error)

    def answer_json(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        super()._set_completion_headers(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def validate_model_parameters(self) -> None:
        request_checks.check_bias(self.logit_bias)
        try:
            super().validate_model_parameters()
        except ValueError as error:  # 0.31.3 catches nothing here
            message = str(error).replace("requested_model", "model")
            raise RequestRefused(message) from error
        request_checks.check_parameters(self.body, self)
        if self.requested_model != "default_model":
            provider = self.response_generator.model_provider
            own, loaded = own_names(provider.cli_args), loaded_name(provider)
            if is_alias(self.requested_model) and (own or loaded):
                self.requested_model = "default_model" if own else str(loaded)
            else:
                request_checks.check_model(self.requested_model, own, loaded)
        draft, adapter = self.requested_draft_model, self.adapter
        request_checks.check_beside_model(draft, adapter, self.response_generator.cli_args)
        if isinstance(self.stream_options, dict):
            # Stock reads it without a default when the stream ends.
            self.stream_options.setdefault("include_usage", False)

    def handle_health_check(self) -> None:
        healthy = self.response_generator.is_healthy
        status = "ok" if healthy else "unavailable"
        self._set_completion_headers(200 if healthy else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"status": status}).encode())

    def handle_models_request(self) -> None:
        """List the server's own model, what stock lists, and a name for Claude Code.

        Routers take the first; Claude Code offers only names that begin with "claude". A path that
        names a model is answered with that model alone.
        """
        provider = self.response_generator.model_provider
        loaded = loaded_name(provider) or provider.cli_args.model
        name = str(Path(loaded).resolve()) if loaded and Path(loaded).exists() else loaded
        served = getattr(provider.cli_args, "served_name", None)
        ours = [
            {"id": own, "object": "model", "created": self.created} for own in (served, name) if own
        ]
        models: list[dict[str, Any]] = []
        if Path(HF_HUB_CACHE).is_dir():
            inner = copy.copy(self)
            inner.path, inner.wfile = "/v1/models", io.BytesIO()
            for method in ("_set_completion_headers", "end_headers"):
                setattr(inner, method, lambda *args: None)
            super(PluginAPIHandler, inner).handle_models_request()
            models = json.loads(inner.wfile.getvalue())["data"]
        models = [*ours, *(model for model in models if model["id"] not in (served, name))]
        if name:
            models.append(alias_of(name, self.created))
            if provider.max_context:
                models[-1]["max_model_len"] = provider.max_context
        asked = unquote(self.path.partition("?")[0]).removeprefix("/v1/models").strip("/")
        if not asked:
            self.answer_json(200, {"object": "list", "data": models, "has_more": False})
            return
        found = next((model for model in models if model["id"].strip("/") == asked), None)
        why_not = f"there is no model {asked} here; GET /v1/models lists those that are"
        refusal = openai_error(404, why_not, "model_not_found")
        self.answer_json(200 if found else 404, found or refusal)

    def handle_chat_completions(self) -> Any:
        request_checks.check_chat(self.body)
        continues = request_checks.is_continued(self.body, self.output.places)
        reads_images = self.response_generator.reads_images(self.requested_model)
        if reads_images is not None:  # else it is known once the model is loaded
            self.body["messages"] = fit_attachments(self.body["messages"], reads_images)
        if self.body.get("tool_choice") == "none":
            self.body.pop("tools", None)
        request = super().handle_chat_completions()
        seen = ClientRequest.of(request)
        seen.continues, seen.places = continues, self.output.places
        return request

    def handle_text_completions(self) -> Any:
        require_text("prompt", self.body.get("prompt"))
        return super().handle_text_completions()

    def receive(self, request: Any) -> None:
        """Let plugins see a request before it is queued. They may refuse it."""
        self._begin_request()
        self._completion = request
        self.client.begin_reply()
        request.client = self.client
        manager.ask(
            "request_received",
            request=ClientRequest.of(request),
            headers=FrozenHeaders(self.headers),
            body=frozen(self.body),
        )

    def handle_completion(
        self, request: Any, stop_words: Iterable[str], *args: Any, **kwargs: Any
    ) -> None:
        """Generate a reply. Stock looks for the tokens of stop words, and is given none."""
        output, client = self.output, self.wfile
        output.streams = output.streams or (self.stream and not output.is_translated)
        self.stops = StopWords(stop_words) if stop_words else None
        if self.stops is not None and not self.stream:
            # A stream shows each part of the reply here; the client gets it whole.
            self.stream, self.stream_options = True, {"include_usage": True}
        self.wfile = output if self.stream else client
        with output.beating() if output.streams else nullcontext():
            super().handle_completion(request, [], *args, **kwargs)
        if self.stream and not output.streams:
            self.wfile, self.stream = client, False
            if output.is_translated:
                output.finish(self)
            else:
                self.answer_json(200, self._whole())

    def until_stopped(self, context: Any, responses: Iterable[Any]) -> Iterator[Any]:
        """Yield a reply's tokens until a stop word was found in its text; then none is made."""
        for response in responses:
            if self.stream and not self.output.streams:
                self._tokens.append(response)
            yield response
            if self.stops is not None and self.stops.found is not None:
                context.stop()
                return  # stock ends the reply as at its last token

    def _whole(self) -> dict[str, Any]:
        """Return a reply that stock streamed as it would have sent it whole."""
        for call in self._tool_calls:
            del call["index"]
        tokens = self._tokens
        reasoning = "".join(self._reasoning)
        response: dict[str, Any] = super().generate_response(
            "".join(self._content),
            self._finish_reason,
            *self._counts,
            token_logprobs=[token.logprob for token in tokens] if self.logprobs else [],
            top_tokens=[token.top_tokens for token in tokens] if self.top_logprobs > 0 else [],
            tokens=[token.token for token in tokens],
            tool_calls=self._tool_calls,
            reasoning_text=reasoning,
        )
        if reasoning:
            name_reasoning(response)
        return response

    def _set_completion_headers(self, status_code: int = 200) -> None:
        """Begin an answer. An error of stock's is raised instead: one place sends all errors."""
        error = sys.exc_info()[1]
        if isinstance(error, RequestRefused | GenerationStopped | ConnectionError):
            raise error
        if error is not None:
            # Stock answers 404 to whatever `generate` raises.
            is_json = not isinstance(error, json.JSONDecodeError)
            message = f"{'' if is_json else 'Invalid JSON in request body: '}{error}"
            raise RequestRefused(message, status_code) from error
        if status_code in _UNSAID:
            raise RequestRefused(_UNSAID[status_code], status_code)
        super()._set_completion_headers(status_code)

    def _set_stream_headers(self, status_code: int = 200) -> None:
        if self.output.streams:
            super()._set_stream_headers(status_code)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        self._status = code
        if code == 503:
            self.send_header("Retry-After", str(RETRY_AFTER_S))

    def end_headers(self) -> None:
        """Add the plugins' headers as late as possible: without streaming, the reply is known."""
        if self._completion is not None and self._status == 0:
            return  # the head of a stream that is not sent as one
        is_reply = self._completion is not None and self._status == 200
        headers: list[tuple[str, str]] = []
        if is_reply:
            seen = ClientRequest.of(self._completion)
            for answer in manager.ask("response_headers", request=seen):
                headers += answer
        self._has_replied = True
        if is_reply and self.stream:
            head, self._headers_buffer = b"".join(self._headers_buffer), []
            self.output.begin(head, headers)
            return
        for name, value in headers:
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
        """Return a part of the reply, or the whole, for stock to send; {} if it is translated."""
        calls, reasoning = tool_calls or [], reasoning_text or ""
        if self.stops is not None:
            text = self.stops.cut(text)
            if finish_reason or calls or reasoning:
                text += self.stops.rest()
            if finish_reason == "length" and self.stops.found is not None:
                finish_reason = "stop"
        self._content.append(text)
        self._reasoning.append(reasoning)
        self._tool_calls += calls
        self.output.doing = "generating"
        response: dict[str, Any] = {}
        if self.output.is_translated:
            self.output.add(text, reasoning, calls)
        elif not self.stream or self.output.streams:
            given = {**kwargs, "tool_calls": calls, "reasoning_text": reasoning}
            response = super().generate_response(text, finish_reason, *args, **given)
            if reasoning:
                name_reasoning(response)
        if finish_reason is not None:
            self._finish_reason = finish_reason
            content = self.output.content if self.output.is_translated else "".join(self._content)
            manager.ask(
                "reply_sent",
                request=ClientRequest.of(self._completion),
                content=content,
                reasoning="".join(self._reasoning),
                tool_calls=frozen(self._tool_calls),
            )
        return response

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the last chunk of a stream; stock calls it a `chat.completion`."""
        response: dict[str, Any] = super().completion_usage_response(*args, **kwargs)
        if self.output.is_translated:
            found = self.stops.found if self.stops is not None else None
            self.output.end(self._finish_reason, found, *args)
            return {}
        self._counts = args
        return {**response, "object": self.object_type}


def name_reasoning(response: dict[str, Any]) -> None:
    """Give a reply's reasoning a second name, which half of the clients read."""
    choice = response["choices"][0]
    message = choice.get("delta") or choice.get("message")
    if message is not None:  # a text completion has none
        message["reasoning_content"] = message["reasoning"]


def is_alias(model: str) -> bool:
    """Tell whether a request names a model of Anthropic's: it means the server's own."""
    return model.startswith(("claude", "anthropic")) and "/" not in model


def alias_of(model: str, created: int) -> dict[str, Any]:
    """Return the server's own model under another name, in the forms of OpenAI and Anthropic."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(model).name)
    when = datetime.fromtimestamp(created, timezone.utc).isoformat()
    openai = {"id": f"claude-{name}", "object": "model", "created": created}
    return {**openai, "type": "model", "display_name": name, "created_at": when}


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
    """Return the stock handler class with the methods of PluginAPIHandler before its own."""
    bases = (PluginAPIHandler, stock)
    return type(PluginAPIHandler.__name__, bases, {"plugin_routes": dict(routes)})


def serve_ourselves(handler_class: type[Any], generator: Any, work: Callable[[Any], None]) -> None:
    """Call `work` with a handler that has no client, and headers of its own to set."""

    class NoClient(handler_class):  # type: ignore[misc]
        def handle(self) -> None:
            self.headers = Message()
            self.command, self.requestline, self.request_version = "POST", "", "HTTP/1.1"
            work(self)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        NoClient(generator, ours, ("", 0), None)


class PluginHTTPServer(StockServer):
    """Listens as stock's server does; after SIGTERM until the replies that have begun have ended.

    New requests get 503 meanwhile.
    """

    request_queue_size = BACKLOG
    generator: Any

    def serve_forever(self, *args: Any) -> None:
        try:
            super().serve_forever(*args)
        except KeyboardInterrupt as asked:
            if signal.SIGTERM in asked.args and len(self.generator.open_requests):
                stopped = GenerationStopped("the server ends; ask again when it runs")
                self.generator.requests.refuse(stopped)
                threading.Thread(target=self._end_after_replies, daemon=True).start()
                super().serve_forever(*args)
            raise

    def _end_after_replies(self) -> None:
        if not self.generator.open_requests.wait_for_none(DRAIN_S):
            logger.info("some replies have not ended within %g s; they are cut off", DRAIN_S)
        self.shutdown()

    def _handle_request_noblock(self) -> None:
        """Accept a connection. Interrupted here, socketserver would close it unanswered."""
        with uninterrupted():
            super()._handle_request_noblock()  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a connection failed, in place of socketserver's traceback on stderr.

        At the end of the server a connection can be closed before its thread has begun to read it.
        """
        if isinstance(sys.exc_info()[1], OSError):
            logger.info("a connection was closed before its request was read")
        else:
            logger.exception("a connection failed")


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
            generator = call.arguments["response_generator"]
            try:
                handler = handler_with(call.arguments["handler_class"], plugin_routes())
                manager.ask("started", serve=partial(serve_ourselves, handler, generator))
            except Exception as error:
                stop(error)
            call.arguments["handler_class"] = handler
            server_class = call.arguments["server_class"]
            bases = (PluginHTTPServer, server_class)
            ours = type(server_class.__name__, bases, {"generator": generator})
            call.arguments["server_class"] = ours
            stock(*call.args, **call.kwargs)
        except BaseException:
            # A port in use, a signal before the server listens: stock would leave the generation
            # thread running, and the process would never end.
            call.arguments["response_generator"].stop_and_join()
            raise

    return run_http_server
