"""Stock's chat completion as it is written, and its client, who is told of it in another form."""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from ..errors import RequestRefused
from .request_checks import discard_body

if TYPE_CHECKING:
    from .chat_api import ChatAPI, Events, Translated
    from .chat_tap import Tap

HEADERS_AFTER_S = 2.0
"""A stream's headers wait so long for the request's own status, and for the plugins' headers."""
BEAT_S = 10.0
"""Between two events that say that the server is at work: clients give up after 300 s of none."""
_LOOK_S = 0.5
"""Between two looks whether the client is still there."""

logger = logging.getLogger(__name__)


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


class ClientConnection(StockOutput):
    """The client: told in its own API what stock writes. HTTP thread, and the thread of its beat.

    A stream's headers are sent with stock's own, or before it has any.
    """

    request: Translated
    tap: Tap

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
            with self._lock:
                self._send([])

    def chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            status = getattr(self.inner.failure, "status", 500)
            raise RequestRefused(str(chunk["error"]), status)
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return
        choice, reply = chunk["choices"][0], self.request.reply
        delta = choice["delta"]
        if unread := self.tap.unread_calls():
            delta = {**delta, "content": (delta.get("content") or "") + unread}
        self._reasoning.append(delta.get("reasoning") or "")
        self._tool_calls += delta.get("tool_calls") or []
        with self._lock:
            events = reply.add(delta)
            if choice["finish_reason"] is not None:
                self._finish_reason = choice["finish_reason"]
                reasoning = "".join(self._reasoning)
                self.inner.tell_reply(reply.content, reasoning, self._tool_calls)
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
        with self._lock:
            self._done.set()  # no beat behind the end
            self._send(reply.end(self._finish_reason, self.tap.stop_word, self._usage))
        if not self.request.stream:
            self.send_json(200, reply.whole())

    def fail(self, error: Exception) -> None:
        """Tell the client why there is no reply, or why it ends early."""
        status = getattr(error, "status", 500)
        if status == 500:
            logger.exception("a reply failed")
        self._handler.close_connection = True
        if self._is_open:
            with self._lock:
                self._send(self.request.reply.fail(status, str(error)))
        else:
            self.send_json(status, self._api.error(status, str(error)))
            if status == 413:
                discard_body(self._handler)

    def send_json(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self._handler._set_completion_headers(status)
        self._send_headers([("Content-Length", str(len(payload)))])
        self._handler.wfile.write(payload)

    def _send(self, events: Events) -> None:
        """Send events, if the client streams. The caller has the lock: a beat is an event, too."""
        if not self.request.stream:
            return
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
                    self._send(self.request.reply.beat())
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
