"""Stock's chat completion as it is written, and its client, who is told of it in another form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..error_forms import message_of
from ..errors import RequestRefused
from .completion_output import is_own_header

if TYPE_CHECKING:
    from .chat_api import ChatAPI, Events, Translated
    from .chat_tap import Tap

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
            elif kind == b"" and not content.startswith(b"keepalive "):
                self.comment(content)
        return len(written)

    def flush(self) -> None: ...

    def began(self) -> None:
        """Stock has sent its status and headers."""

    def chunk(self, chunk: dict[str, Any]) -> None:
        """Stock has sent a chunk of its stream."""

    def comment(self, comment: bytes) -> None:
        """The stream shows that the server is at work, and at what."""

    def refusal(self) -> RequestRefused:
        """Return why the reply is an error."""
        code = getattr(self.inner.failure, "code", None)
        said = message_of(self.unread) or self.unread.decode(errors="replace")
        said = said or "the server gave no reason"
        return RequestRefused(said, self.status, code)

    def refusal_in_stream(self) -> RequestRefused:
        """Return why a reply that had begun is an error."""
        error = self.inner.failure
        status, code = getattr(error, "status", 500), getattr(error, "code", None)
        return RequestRefused(str(error), status, code)


class ClientConnection(StockOutput):
    """The client: told in its own API what stock writes. See `CompletionOutput` for the threads."""

    request: Translated
    tap: Tap

    def __init__(self, handler: Any, api: ChatAPI) -> None:
        super().__init__()
        self._handler, self._api = handler, api
        self._is_open = False
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []

    # Stock's side.

    def began(self) -> None:
        if self.status == 200:
            self._send([])

    def comment(self, comment: bytes) -> None:
        """Pass a sign of life on. Clients that do not count a comment as one get an event, too."""
        if self.request.stream:
            self._handler.wfile.write(b": %b\n" % comment)
            self._send(self.request.reply.beat())

    def chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise self.refusal_in_stream()
        self._usage = chunk.get("usage") or self._usage
        if not chunk["choices"]:
            return
        choice, reply = chunk["choices"][0], self.request.reply
        delta = choice["delta"]
        if unread := self.tap.unread_calls():
            delta = {**delta, "content": (delta.get("content") or "") + unread}
        self._reasoning.append(delta.get("reasoning") or "")
        self._tool_calls += delta.get("tool_calls") or []
        events = reply.add(delta)
        if choice["finish_reason"] is not None:
            self._finish_reason = choice["finish_reason"]
            reasoning = "".join(self._reasoning)
            self.inner.tell_reply(reply.content, reasoning, self._tool_calls)
        self._send(events)

    # The client's side.

    def finish(self) -> None:
        """Send the end of the reply, or of a client that does not stream, the whole."""
        if self.status != 200:
            raise self.refusal()
        if self._finish_reason is None:
            raise RuntimeError("the reply has no end")
        reply = self.request.reply
        self._send(reply.end(self._finish_reason, self.tap.stop_word, self._usage))
        if not self.request.stream:
            self.send_json(200, reply.whole())

    def fail(self, error: Exception) -> None:
        """Tell the client why there is no reply, or why it ends early."""
        status, code = getattr(error, "status", 500), getattr(error, "code", None)
        if status == 500:
            logger.exception("a reply failed")
        self._handler.close_connection = True
        if self._is_open or (code and self._api.refuses_in_stream and self.request.stream):
            self._send(self.request.reply.fail(status, str(error), code))
        else:
            self.send_json(status, self._api.error(status, str(error), code))

    def send_json(self, status: int, content: dict[str, Any]) -> None:
        payload = json.dumps(content).encode()
        self._handler._set_completion_headers(status)
        self._send_headers([("Content-Length", str(len(payload)))])
        self._handler.wfile.write(payload)

    def _send(self, events: Events) -> None:
        """Send events, if the client streams."""
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
        of_plugins = [each for each in self.headers if not is_own_header(each[0])]
        for name, value in (*of_plugins, *more):
            self._handler.send_header(name, value)
        self._handler.end_headers()
