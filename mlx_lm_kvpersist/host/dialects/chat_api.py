"""Other APIs over stock's chat completions: a body is translated, and each part of the reply.

Stock's own handler serves the translated request, on the same HTTP thread, and always streams. So
batching, sessions, checks and logging are those of a chat completion. Parts of the reply are taken
before stock makes bytes of them. `api/` has the translations.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping
from email.message import Message
from typing import Any, Protocol

from ...errors import RequestRefused
from ..http.completion_output import CompletionOutput
from ..http.request_checks import read_json
from .translated_output import HiddenOutput, TranslatedOutput

CHAT_PATH = "/v1/chat/completions"
Events = list[dict[str, Any]]
"""Server-sent events. Each has its name as `type`."""


class ReplyTranslation(Protocol):
    """A reply on its way from a chat completion's chunks to another API's events."""

    @property
    def content(self) -> str:
        """The text that the client was shown so far."""
        ...

    def begin(self, n_prompt: int, n_cached: int) -> Events:
        """Return the first events; both counts are 0 if they are not known yet."""
        ...

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> Events:
        """Return the events for a part of the reply; the calls are those of a chat completion."""
        ...

    def end(self, finish_reason: str, stop_word: str | None, usage: Mapping[str, Any]) -> Events:
        """Return the last events. `usage` is a chat completion's."""
        ...

    def beat(self) -> Events:
        """Return events that only say that the server is at work."""
        ...

    def fail(self, status: int, message: str, code: str | None) -> Events:
        """Return the last events of a reply that ends early; `code` is RequestRefused's."""
        ...

    def whole(self) -> dict[str, Any]:
        """Return the reply as one object, for a client that does not stream."""
        ...


class Translated(Protocol):
    """A request to another API, as a chat completion. `tools` has all, for the parser of calls."""

    @property
    def chat_body(self) -> dict[str, Any]: ...

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    @property
    def stream(self) -> bool: ...

    @property
    def reply(self) -> ReplyTranslation: ...


class ChatAPI(Protocol):
    """An API that is served as chat completions are.

    refuses_in_stream: whether clients that stream look for an error with a code in the stream, and
    heed no status.
    """

    refuses_in_stream: bool

    def translate(self, body: dict[str, Any], headers: Message) -> Translated:
        """Translate a request; raises RequestRefused with a sentence for the client."""
        ...

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error in the API's own form."""
        ...


def serve(handler: Any, api: ChatAPI) -> None:
    """Answer a request to another API."""
    output = TranslatedOutput(handler, api)
    try:
        request = api.translate(read_json(handler), handler.headers)
    except RequestRefused as error:
        handler.close_connection = True
        output.fail(error)
        return
    if request.chat_body.get("tool_choice") != "none":
        output.tools = request.tools
    output.reply, output.streams = request.reply, request.stream
    _run_stock(handler, request.chat_body, output)


def count_tokens(handler: Any, api: ChatAPI) -> None:
    """Answer how many tokens a request's prompt has, without the generation thread."""
    counter = _Counter(handler.generator)
    try:
        request = api.translate(read_json(handler), handler.headers)
        try:
            _run_stock(handler, request.chat_body, HiddenOutput(handler), counter)
        except RequestRefused:
            if counter.n_tokens is None:
                raise
    except RequestRefused as error:
        handler.close_connection = True
        TranslatedOutput(handler, api).fail(error)
    else:
        handler.answer_json(200, {"input_tokens": counter.n_tokens})


def read_body(handler: Any) -> dict[str, Any]:
    """Read a request's JSON object, {} if it has no body; raises RequestRefused."""
    if handler.headers.get("Content-Length", "0") == "0":
        return {}
    return read_json(handler)


def answer(handler: Any, chat_body: dict[str, Any]) -> None:
    """Answer with a chat completion as it is, or with its error."""
    inner = _stock(handler, chat_body)
    inner.do_POST()
    handler.close_connection = inner.close_connection


def prefill(handler: Any, chat_body: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt, and one token; return the chat completion's usage.

    Raises RequestRefused. Nothing is sent to the client.
    """
    output = HiddenOutput(handler)
    _run_stock(handler, {**chat_body, "max_tokens": 1}, output)
    return output.usage


class _Counter:
    """Takes the place of a request's response generator and counts the prompt's tokens."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.n_tokens: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        self.n_tokens = self._generator.count_tokens(request, args)
        raise RequestRefused("counted, not generated")


def _run_stock(
    handler: Any, chat_body: dict[str, Any], output: CompletionOutput, generator: Any = None
) -> None:
    """Have stock's handler serve a chat completion as a stream to `output`."""
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    inner = _stock(handler, {**chat_body, **streaming})
    inner.output = output
    inner.generator = generator or handler.generator
    inner.do_POST()
    handler.close_connection = inner.close_connection


def _stock(handler: Any, chat_body: dict[str, Any]) -> Any:
    """Return stock's handler of a chat completion, about to serve it."""
    payload = json.dumps(chat_body).encode()
    inner = copy.copy(handler)
    inner.__dict__.pop("do_POST", None)  # the route that led here
    inner.path, inner.rfile = CHAT_PATH, io.BytesIO(payload)
    inner.headers = copy.deepcopy(handler.headers)
    del inner.headers["Content-Length"]
    inner.headers["Content-Length"] = str(len(payload))
    inner._headers_buffer = []
    return inner
