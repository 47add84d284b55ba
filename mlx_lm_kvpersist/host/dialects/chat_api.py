"""Other APIs over stock's chat completions: a body is translated, and each part of the reply.

Stock's own handler serves the translated request, on the same HTTP thread, and always streams. So
batching, sessions, checks and logging are those of a chat completion. Parts of the reply are taken
before stock makes bytes of them. `api/` has the translations.
"""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Iterable
from email.message import Message
from typing import Any, Protocol

from ...errors import RequestRefused
from ..http import completion_output
from ..http.completion_output import CompletionOutput
from ..http.request_checks import read_json, tidy

CHAT_PATH = "/v1/chat/completions"
Events = list[dict[str, Any]]
"""Server-sent events. Each has its name as `type`."""


class ReplyTranslation(Protocol):
    """A reply on its way from a chat completion's chunks to another API's events.

    Events are made on the HTTP thread and on that of the beats, one at a time.
    """

    @property
    def content(self) -> str:
        """The text that the client was shown so far."""

    def begin(self, n_prompt: int, n_cached: int) -> Events:
        """Return the first events; both counts are 0 if they are not known yet."""

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> Events:
        """Return the events for a part of the reply; the calls are those of a chat completion."""

    def end(
        self, finish_reason: str, stop_word: str | None, n_prompt: int, n_cached: int, n_new: int
    ) -> Events:
        """Return the last events. `finish_reason` is a chat completion's."""

    def beat(self) -> Events:
        """Return events that only say that the server is at work."""

    def fail(self, status: int, message: str, code: str | None) -> Events:
        """Return the last events of a reply that ends early; `code` is RequestRefused's."""

    def whole(self) -> dict[str, Any]:
        """Return the reply as one object, for a client that does not stream."""


class ChatAPI(Protocol):
    """An API that is served as chat completions are.

    refuses_in_stream: whether clients that stream look for an error with a code in the stream, and
    heed no status.
    """

    refuses_in_stream: bool

    def translate(self, body: dict[str, Any], headers: Message) -> Any:
        """Translate a request; raises RequestRefused with a sentence for the client.

        Returns an object with `chat_body`, the body of a chat completion; `tools`, all that may be
        called, for the parser of calls; `stream`, whether the client wants events; and `reply`, a
        `ReplyTranslation`. It may have `places`, where each message stands in the client's body.
        """

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error in the API's own form."""


class TranslatedOutput(CompletionOutput):
    """Sends a chat completion in the form of another API, as that API's events or as one object.

    Stock's handler always streams; the bytes that it writes are dropped.
    """

    is_translated = True
    reply: ReplyTranslation
    tools: list[dict[str, Any]] | None = None
    """Those that may be called, for the parser of calls. None: every call is text."""
    _context: Any = None

    def __init__(self, handler: Any, api: ChatAPI) -> None:
        super().__init__(handler)
        self._api = api
        self._unread: list[str] = []
        """The text of calls that could not be read."""

    def write(self, written: bytes) -> int:
        return len(written)

    def read_calls(self, context: Any, provider: Any) -> None:
        """Let the parser of calls know deferred tools, and keep text that stock would drop.

        context: stock's, of the reply that begins.
        """
        self._context, parse = context, context.tool_parser

        def read(text: str, tools: Any) -> Any:
            try:
                if self.tools is None:
                    raise ValueError("no call is wanted")
                return parse(text, self.tools or None)
            except ValueError:
                start, end = provider.tokenizer.tool_call_start, provider.tokenizer.tool_call_end
                self._unread.append(f"{start}{text}{end or ''}")
                raise

        if parse is not None:
            context.tool_parser = read

    def begin(self, head: bytes, headers: Iterable[tuple[str, str]]) -> None:
        was_open = self._is_open
        super().begin(head, headers)
        if not was_open:
            n_prompt, n_cached = len(self._context.prompt), self._context.prompt_cache_count
            with self._lock:
                self._send(self.reply.begin(n_prompt, max(0, n_cached)))

    @property
    def content(self) -> str:
        """The text that was sent so far."""
        return self.reply.content

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> None:
        """Send a part of the reply."""
        text += "".join(self._unread)
        self._unread.clear()
        with self._lock:
            self._send(self.reply.add(text, reasoning, tool_calls))

    def end(
        self, finish_reason: str, stop_word: str | None, n_prompt: int, n_new: int, n_cached: int
    ) -> None:
        """Send the end of the reply. The counts are stock's, in stock's order."""
        with self._lock:
            counts = n_prompt, max(0, n_cached), n_new
            self._send(self.reply.end(finish_reason, stop_word, *counts))

    def finish(self, handler: Any) -> None:
        """Send the whole reply to a client that does not stream."""
        handler.answer_json(200, self.reply.whole())

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        in_stream = code and status == 400 and self._api.refuses_in_stream and self.streams
        if in_stream and not self._is_open:
            self._is_open = True
            self._client.write(self._early_head())
        if self._is_open:
            self._send(self.reply.fail(status, message, code))
        else:
            self._handler.answer_json(status, self._api.error(status, message, code))

    def _early_head(self) -> bytes:
        return super()._early_head() + _as_bytes(self.reply.begin(0, 0))

    def _sign_of_life(self) -> bytes:
        """Return a comment, and an event for clients that do not count a comment."""
        return f": {self.doing}\n".encode() + _as_bytes(self.reply.beat())

    def _send(self, events: Events) -> None:
        if events and self.streams:
            self._due_s = time.monotonic() + completion_output.BEAT_S
            self._client.write(_as_bytes(events))


class HiddenOutput(CompletionOutput):
    """A completion of which nothing is sent. Raises RequestRefused for an error.

    counts: the prompt is only counted, which ends the request with an error.
    """

    is_translated = True
    content = ""
    n_prompt = n_cached = 0

    def __init__(self, handler: Any, *, counts: bool = False) -> None:
        super().__init__(handler)
        self.counts = counts

    def read_calls(self, context: Any, provider: Any) -> None: ...

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> None: ...

    def end(
        self, finish_reason: str, stop_word: str | None, n_prompt: int, n_new: int, n_cached: int
    ) -> None:
        self.n_prompt, self.n_cached = n_prompt, max(0, n_cached)

    def finish(self, handler: Any) -> None: ...

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        raise RequestRefused(message, status, code)


def _as_bytes(events: Events) -> bytes:
    written = (f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
    return "".join(written).encode()


def serve(handler: Any, api: ChatAPI) -> None:
    """Answer a request to another API."""
    output = TranslatedOutput(handler, api)
    try:
        request = api.translate(_read(handler), handler.headers)
    except RequestRefused as error:
        handler.close_connection = True
        output.fail(error)
        return
    if request.chat_body.get("tool_choice") != "none":
        output.tools = request.tools
    output.reply, output.streams = request.reply, request.stream
    output.places = getattr(request, "places", ())
    _run_stock(handler, request.chat_body, output)


def count_tokens(handler: Any, api: ChatAPI) -> None:
    """Answer how many tokens a request's prompt has, without the generation thread."""
    output = HiddenOutput(handler, counts=True)
    try:
        request = api.translate(_read(handler), handler.headers)
        output.places = getattr(request, "places", ())
        _run_stock(handler, request.chat_body, output)
    except RequestRefused as error:
        if not output.n_prompt:
            handler.close_connection = True
            TranslatedOutput(handler, api).fail(error)
            return
    handler.answer_json(200, {"input_tokens": output.n_prompt})


def _read(handler: Any) -> dict[str, Any]:
    try:
        body: dict[str, Any] = tidy(read_json(handler))
    except RecursionError as error:
        raise RequestRefused(f"the body is no JSON that can be read: {error}") from error
    return body


def read_body(handler: Any) -> dict[str, Any]:
    """Read a request's JSON object, {} if it has no body; raises RequestRefused."""
    if handler.headers.get("Content-Length", "0") == "0":
        return {}
    return read_json(handler)


def answer(handler: Any, chat_body: dict[str, Any]) -> None:
    """Answer with a chat completion as it is, or with its error."""
    _run_stock(handler, chat_body, CompletionOutput(handler))


def prefill(handler: Any, chat_body: dict[str, Any]) -> tuple[int, int]:
    """Compute a prompt, and one token; return the prompt's tokens, and how many were cached.

    Raises RequestRefused. Nothing is sent to the client.
    """
    output = HiddenOutput(handler)
    _run_stock(handler, {**chat_body, "max_tokens": 1}, output)
    return output.n_prompt, output.n_cached


def _run_stock(handler: Any, chat_body: dict[str, Any], output: CompletionOutput) -> None:
    """Have stock's handler serve a chat completion to `output`, as a stream if that translates."""
    if output.is_translated:
        chat_body = {**chat_body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(chat_body).encode()
    inner = copy.copy(handler)
    inner.__dict__.pop("do_POST", None)  # the route that led here
    inner.path, inner.rfile = CHAT_PATH, io.BytesIO(payload)
    inner.headers = copy.deepcopy(handler.headers)
    del inner.headers["Content-Length"]
    inner.headers["Content-Length"] = str(len(payload))
    inner.output, inner._headers_buffer = output, []
    inner.do_POST()
    handler.close_connection = inner.close_connection
