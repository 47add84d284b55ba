"""Other APIs over stock's chat completions: a body is translated, and the stream that stock writes.

Stock's own handler serves the translated request, on the same HTTP thread, and always streams. So
batching, sessions, checks and logging are those of a chat completion. Here its output is read and
the client is told what its own API has for it. `api/` has the translations.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from typing import Any, Protocol

from ..errors import RequestRefused
from .chat_output import ClientConnection, StockOutput
from .chat_tap import Counter, Tap
from .request_checks import read_json

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

    def add(self, delta: Mapping[str, Any]) -> Events:
        """Return the events for the `delta` of a chunk."""
        ...

    def end(self, finish_reason: str, stop_word: str | None, usage: Mapping[str, Any]) -> Events:
        """Return the last events. `usage` is a chat completion's."""
        ...

    def beat(self) -> Events:
        """Return events that only say that the server is at work."""
        ...

    def fail(self, status: int, message: str) -> Events:
        """Return the last events of a reply that ends early."""
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
    """An API that is served as chat completions are."""

    def translate(self, body: dict[str, Any], headers: Message) -> Translated:
        """Translate a request; raises RequestRefused with a sentence for the client."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """Return an error in the API's own form."""
        ...


def serve(handler: Any, api: ChatAPI) -> None:
    """Answer a request to another API."""
    with _errors_to_client(handler, api) as connection:
        request = api.translate(read_json(handler), handler.headers)
        tap = Tap(handler.response_generator, request.tools, connection)
        connection.request, connection.tap = request, tap
        with connection.beating():
            try:
                _run_stock(handler, request.chat_body, tap, connection)
                connection.finish()
            finally:
                tap.stop()


def count_tokens(handler: Any, api: ChatAPI) -> None:
    """Answer how many tokens a request's prompt has. Nothing waits for the generation thread."""
    with _errors_to_client(handler, api) as connection:
        request = api.translate(read_json(handler), handler.headers)
        tap = Counter(handler.response_generator)
        output = StockOutput()
        _run_stock(handler, request.chat_body, tap, output)
        if tap.n_tokens is None:
            raise RequestRefused(output.error, output.status)
        connection.send_json(200, {"input_tokens": tap.n_tokens})


def _run_stock(handler: Any, chat_body: dict[str, Any], generator: Any, output: Any) -> Any:
    """Have stock's handler serve a chat completion, with its own `wfile`; return that handler."""
    payload = json.dumps(
        {**chat_body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    inner = copy.copy(handler)
    inner.__dict__.pop("do_POST", None)  # the route that led here
    inner.path, inner.rfile, inner.wfile = CHAT_PATH, io.BytesIO(payload), output
    inner.headers = copy.deepcopy(handler.headers)
    del inner.headers["Content-Length"]
    inner.headers["Content-Length"] = str(len(payload))
    inner.response_generator = generator
    inner.log_request = lambda *args: None  # the reply that the client gets is logged
    inner.tells_reply = False
    inner._headers_buffer = []
    output.inner = inner
    inner.do_POST()
    return inner


@contextmanager
def _errors_to_client(handler: Any, api: ChatAPI) -> Iterator[ClientConnection]:
    connection = ClientConnection(handler, api)
    try:
        yield connection
    except (ConnectionError, TimeoutError):
        raise  # nobody is there to be told
    except Exception as error:
        connection.fail(error)
