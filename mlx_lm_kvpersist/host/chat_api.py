"""Other APIs over stock's chat completions: a body is translated, and the stream that stock writes.

Stock's own handler serves the translated request, on the same HTTP thread, and always streams. So
batching, sessions, checks and logging are those of a chat completion. Here its output is read and
the client is told what its own API has for it. `api/` has the translations.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any, Protocol

from ..errors import RequestRefused
from .request_checks import check_body_length

CHAT_PATH = "/v1/chat/completions"
HEADERS_AFTER_S = 2.0
"""A stream's headers wait so long for the request's own status, and for the plugins' headers."""
BEAT_S = 10.0
"""Between two events that say that the server is at work: clients give up after 300 s of none."""
_LOOK_S = 0.5
"""Between two looks whether the client is still there."""

logger = logging.getLogger(__name__)

Events = list[dict[str, Any]]
"""Server-sent events. Each has its name as `type`."""


class Reply(Protocol):
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
    def reply(self) -> Reply: ...


class ChatAPI(Protocol):
    """An API that is served as chat completions are."""

    def translate(self, body: dict[str, Any]) -> Translated:
        """Translate a request; raises RequestRefused with a sentence for the client."""
        ...

    def error(self, status: int, message: str) -> dict[str, Any]:
        """Return an error in the API's own form."""
        ...


def serve(handler: Any, api: ChatAPI) -> None:
    """Answer a request to another API."""
    with _errors_to_client(handler, api) as connection:
        request = api.translate(_read_body(handler))
        tap = _Tap(handler.response_generator, request.tools, connection)
        connection.request, connection.tap = request, tap
        with connection.beating():
            _run_stock(handler, request.chat_body, tap, connection)
            connection.finish()


def count_tokens(handler: Any, api: ChatAPI) -> None:
    """Answer how many tokens a request's prompt has. Nothing waits for the generation thread."""
    with _errors_to_client(handler, api) as connection:
        request = api.translate(_read_body(handler))
        tap = _Counter(handler.response_generator)
        output = StockOutput()
        _run_stock(handler, request.chat_body, tap, output)
        if tap.n_tokens is None:
            raise RequestRefused(output.error, output.status)
        connection.send_json(200, {"input_tokens": tap.n_tokens})


def _read_body(handler: Any) -> dict[str, Any]:
    """Read a JSON object; raises RequestRefused for anything else."""
    length = handler.headers.get("Content-Length")
    if length is None:
        raise RequestRefused("the header Content-Length is missing, expected the body's size", 411)
    if not length.strip().lstrip("-").isdecimal() or not length.isascii():
        raise RequestRefused(f"Content-Length is {length!r}, expected a number of bytes")
    check_body_length(length)
    n_bytes, parts = int(length), []
    until_s = time.monotonic() + handler.timeout
    n_left = n_bytes
    try:
        while n_left:
            part = handler.rfile.read1(min(n_left, 1 << 20))
            if not part:
                raise RequestRefused(
                    f"the body ended after {n_bytes - n_left:,} of {n_bytes:,} bytes"
                )
            if time.monotonic() > until_s:
                raise TimeoutError
            parts.append(part)
            n_left -= len(part)
    except TimeoutError:
        raise RequestRefused(
            f"{n_left:,} of the body's {n_bytes:,} bytes did not come within "
            f"{handler.timeout:.0f} seconds",
            408,
        ) from None
    try:
        body = json.loads(b"".join(parts).decode())
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is no JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body is no JSON object")
    return body


class _Tap:
    """The server's response generator, as one request sees it: remembers how its prompt went."""

    def __init__(
        self, generator: Any, tools: list[dict[str, Any]], connection: _Connection
    ) -> None:
        self._generator, self._tools, self._connection = generator, tools, connection
        self._context: Any = None
        self.stop_word: str | None = None
        self._unread: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    @property
    def n_prompt(self) -> int:
        return len(self._context.prompt) if self._context is not None else 0

    @property
    def n_cached(self) -> int:
        return max(0, self._context.prompt_cache_count) if self._context is not None else 0

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        context, responses = self._generator.generate(
            request, args, progress_callback=progress_callback
        )
        self._context = context
        if context.tool_parser is not None:
            context.tool_parser = self._reading_calls(context.tool_parser)
        return context, self._watched(responses, args.stop_words)

    def _reading_calls(self, parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        """Let the parser know deferred tools, and keep what it cannot read: stock drops that."""
        tokenizer = self.model_provider.tokenizer

        def read(text: str, tools: Any) -> Any:
            try:
                calls = parse(text, self._tools or None)
                for call in calls if isinstance(calls, list) else [calls]:
                    if not isinstance(call["name"], str) or "arguments" not in call:
                        raise ValueError("a call needs a name and arguments")
            except Exception as error:
                end = tokenizer.tool_call_end or ""
                self._unread.append(f"{tokenizer.tool_call_start}{text}{end}")
                raise ValueError(f"no tool call: {error!r}") from error
            return calls

        return read

    def unread_calls(self) -> str:
        """Return the text of calls that could not be read since this was last asked."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _watched(self, responses: Iterator[Any], stop_words: list[str]) -> Iterator[Any]:
        """Pass the tokens on; note which stop word ended them, and stop when the client went."""
        ids: list[int] = []
        for response in responses:
            self._connection.check()
            ids.append(response.token)
            if response.finish_reason == "stop" and stop_words:
                self.stop_word = self._stop_word(ids, stop_words)
            yield response

    def _stop_word(self, ids: list[int], stop_words: list[str]) -> str | None:
        """Return the stop word whose tokens end a reply, as stock compares them."""
        tokenizer = self.model_provider.tokenizer
        if ids[-1] in tokenizer.eos_token_ids:
            return None
        spelled = {word: tokenizer.encode(word, add_special_tokens=False) for word in stop_words}
        found = [word for word, own in spelled.items() if own and ids[-len(own) :] == own]
        return max(found, key=len, default=None)


class _Counter:
    """Stands where a request's response generator stands, and counts its prompt instead."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.n_tokens: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        self.n_tokens = self._generator.count_tokens(request, args)
        raise RequestRefused("counted, not generated")


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


class StockOutput:
    """Where stock writes its reply: reads the status, and the chunks of its stream."""

    inner: Any
    """Stock's handler, which writes here."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.unread = b""

    def write(self, written: bytes) -> int:
        self.unread += written
        if self.status == 0:
            head, end, rest = self.unread.partition(b"\r\n\r\n")
            if not end:
                return len(written)
            status, *lines = head.decode("latin-1").split("\r\n")
            self.status, self.unread = int(status.split()[1]), rest
            self.headers = [(name, text) for name, _, text in (n.partition(": ") for n in lines)]
            self.began()
        while self.status == 200 and b"\n\n" in self.unread:
            event, _, self.unread = self.unread.partition(b"\n\n")
            kind, _, content = event.partition(b": ")
            if kind == b"data" and content != b"[DONE]":
                self.chunk(json.loads(content))
        return len(written)

    def flush(self) -> None: ...

    def began(self) -> None:
        """Stock has sent its status and headers."""

    def chunk(self, chunk: dict[str, Any]) -> None:
        """Stock has sent a chunk of its stream."""

    @property
    def error(self) -> str:
        """The sentence of a reply that is an error."""
        try:
            return str(json.loads(self.unread)["error"])
        except (ValueError, KeyError, TypeError):
            return self.unread.decode(errors="replace") or "the server gave no reason"


class _Connection(StockOutput):
    """The client: told in its own API what stock writes. HTTP thread, and the thread of its beat.

    A stream's headers are sent with stock's own, or before it has any.
    """

    request: Translated
    tap: _Tap

    def __init__(self, handler: Any, api: ChatAPI) -> None:
        super().__init__()
        self._handler, self._api = handler, api
        self._lock = Lock()
        self._done = Event()
        self._is_open = self._is_gone = False
        self._looked_s = 0.0
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []

    # Stock's side.

    def write(self, written: bytes) -> int:
        self.check()
        return super().write(written)

    def began(self) -> None:
        if self.status == 200:
            self._send([])

    def chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise RequestRefused(str(chunk["error"]), 500)
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return
        choice, reply = chunk["choices"][0], self.request.reply
        delta = choice["delta"]
        if unread := self.tap.unread_calls():
            delta = {**delta, "content": (delta.get("content") or "") + unread}
        events = reply.add(delta)
        self._reasoning.append(delta.get("reasoning") or "")
        self._tool_calls += delta.get("tool_calls") or []
        if choice["finish_reason"] is not None:
            self._finish_reason = choice["finish_reason"]
            self.inner.tell_reply(reply.content, "".join(self._reasoning), self._tool_calls)
        self._send(events)

    # The client's side.

    def check(self) -> None:
        """Raise ConnectionAbortedError if the client went away, so that stock stops."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            self._is_gone = self._is_gone or _has_closed(self._handler.connection)
        if self._is_gone:
            raise ConnectionAbortedError("the client went away")

    def finish(self) -> None:
        """Send the end of the reply, or of a client that does not stream, the whole."""
        if self.status != 200:
            raise RequestRefused(self.error, self.status)
        if self._finish_reason is None:
            raise RuntimeError("the reply has no end")
        reply = self.request.reply
        events = reply.end(self._finish_reason, self.tap.stop_word, self._usage)
        if self.request.stream:
            self._send(events)
        else:
            self.send_json(200, reply.whole())

    def fail(self, error: Exception) -> None:
        """Tell the client why there is no reply, or why it ends early."""
        status = getattr(error, "status", 500)
        if status == 500:
            logger.exception("a reply failed")
        self._handler.close_connection = True
        if self._is_open:
            self._send(self.request.reply.fail(status, str(error)))
        else:
            self.send_json(status, self._api.error(status, str(error)))

    def send_json(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self._handler._set_completion_headers(status)
        self._send_headers([("Content-Length", str(len(payload)))])
        self._handler.wfile.write(payload)

    def _send(self, events: Events) -> None:
        if not self.request.stream:
            return
        with self._lock:
            self._send_locked(events)

    def _send_locked(self, events: Events) -> None:
        if not self._is_open:
            self._is_open = True
            self._handler._set_stream_headers(200)
            self._send_headers()
            events = self.request.reply.begin(self.tap.n_prompt, self.tap.n_cached) + events
        written = (f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
        self._handler.wfile.write("".join(written).encode())
        self._handler.wfile.flush()

    def _send_headers(self, more: Iterable[tuple[str, str]] = ()) -> None:
        """Send the headers that plugins gave to stock's reply, after the connection's own."""
        of_plugins = [each for each in self.headers if not _is_own_header(each[0])]
        for name, value in (*of_plugins, *more):
            self._handler.send_header(name, value)
        self._handler.end_headers()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send a stream's headers soon, and events while nothing else is sent."""
        if self.request.stream:
            Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._done.set()

    def _beat(self) -> None:
        wait_s = HEADERS_AFTER_S
        while not self._done.wait(wait_s):
            wait_s = BEAT_S
            with self._lock:
                if self._done.is_set():
                    return
                try:
                    self._send_locked(self.request.reply.beat())
                except OSError:
                    self._is_gone = True
                    return


def _is_own_header(name: str) -> bool:
    """Tell whether stock's handler sends a header with every reply, or this one's form decides."""
    name = name.lower()
    return name.startswith(("access-control-", "content-", "cache-control")) or name in (
        "server",
        "date",
        "vary",
        "retry-after",
    )


def _has_closed(connection: Any) -> bool:
    """Tell whether a client has closed its connection."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


@contextmanager
def _errors_to_client(handler: Any, api: ChatAPI) -> Iterator[_Connection]:
    connection = _Connection(handler, api)
    try:
        yield connection
    except (ConnectionError, TimeoutError):
        raise  # nobody is there to be told
    except Exception as error:
        connection.fail(error)
