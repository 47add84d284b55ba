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
    with _errors_to_client(handler, api) as connection:
        request = api.translate(read_json(handler), handler.headers)
        tools = None if request.chat_body.get("tool_choice") == "none" else request.tools
        tap = Tap(handler.generator, tools)
        connection.request, connection.tap = request, tap
        _run_stock(handler, request.chat_body, tap, connection, beats=request.stream)
        connection.finish()


def count_tokens(handler: Any, api: ChatAPI) -> None:
    """Answer how many tokens a request's prompt has. Nothing waits for the generation thread."""
    with _errors_to_client(handler, api) as connection:
        request = api.translate(read_json(handler), handler.headers)
        tap = Counter(handler.generator)
        output = StockOutput()
        _run_stock(handler, request.chat_body, tap, output)
        if tap.n_tokens is None:
            raise output.refusal()
        connection.send_json(200, {"input_tokens": tap.n_tokens})


def read_body(handler: Any) -> dict[str, Any]:
    """Read a request's JSON object, {} if it has no body; raises RequestRefused."""
    if handler.headers.get("Content-Length", "0") == "0":
        return {}
    return read_json(handler)


def answer(handler: Any, chat_body: dict[str, Any]) -> None:
    """Answer with a chat completion as it is. Raises RequestRefused instead of sending an error."""
    output = _Unchanged(handler.wfile)
    inner = _stock(handler, chat_body, output)
    inner.do_POST()
    handler.close_connection = inner.close_connection
    if output.status != 200:
        raise output.refusal()


def prefill(handler: Any, chat_body: dict[str, Any]) -> dict[str, Any]:
    """Compute a prompt, and one token; return the chat completion's usage.

    Raises RequestRefused. The client is told nothing.
    """
    output = _Usage()
    _run_stock(handler, {**chat_body, "max_tokens": 1}, handler.generator, output)
    if output.status != 200:
        raise output.refusal()
    return output.usage


class _Unchanged(StockOutput):
    """Passes a reply on, and keeps an error."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self._client = client

    def write(self, written: bytes) -> int:
        if self.status == 0 and written.split(b" ", 2)[1] == b"200":
            self.status = 200
        if self.status != 200:
            return super().write(written)
        self._client.write(written)
        return len(written)

    def flush(self) -> None:
        if self.status == 200:
            self._client.flush()


class _Usage(StockOutput):
    """Reads a stream to its end. Raises RequestRefused for an error in it."""

    def __init__(self) -> None:
        super().__init__()
        self.usage: dict[str, Any] = {}

    def chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise self.refusal_in_stream()
        self.usage = chunk.get("usage") or self.usage


def _run_stock(
    handler: Any,
    chat_body: dict[str, Any],
    generator: Any,
    output: StockOutput,
    *,
    beats: bool = False,
) -> None:
    """Have stock's handler stream a chat completion to `output`."""
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    inner = _stock(handler, {**chat_body, **streaming}, output)
    inner.response_generator = generator
    inner.log_request = lambda *args: None  # the reply that the client gets is logged
    inner.tells_reply, inner.beats = False, beats
    inner.do_POST()


def _stock(handler: Any, chat_body: dict[str, Any], output: Any) -> Any:
    """Return stock's handler of a chat completion, with its own `wfile`, about to serve it."""
    payload = json.dumps(chat_body).encode()
    inner = copy.copy(handler)
    inner.__dict__.pop("do_POST", None)  # the route that led here
    inner.path, inner.rfile, inner.wfile = CHAT_PATH, io.BytesIO(payload), output
    inner.headers = copy.deepcopy(handler.headers)
    del inner.headers["Content-Length"]
    inner.headers["Content-Length"] = str(len(payload))
    inner._headers_buffer = []
    output.inner = inner
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
