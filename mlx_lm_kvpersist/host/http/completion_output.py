"""A completion on its way to its client: a stream has headers early, and comments while it waits.

Stock sends nothing before a request's prompt is about to be computed, and then a comment for each
chunk of it. A request can wait for others before that, or for what is restored, and one chunk can
take long. Clients and proxies give up where nothing comes.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from ...error_forms import openai_error
from .. import manager
from ..answers import ClientRequest

HEADERS_AFTER_S = 2.0
"""How long a stream's headers wait for the request's own status, and for the plugins' headers."""
BEAT_S = 10.0
"""How long a stream may be silent: clients give up after 300 s."""

logger = logging.getLogger(__name__)


class CompletionOutput:
    """Sends one completion as stock writes it. HTTP thread, and the thread of its beats.

    Stock's handler has this as its `wfile` while it streams.
    """

    is_translated = False
    """Whether the client gets the reply in the form of another API than chat completions."""
    counts = False
    """Whether the prompt is only counted."""
    streams = False
    """Whether the client gets its reply as a stream."""
    places: Sequence[str] = ()
    """The name of each message in the body of another API."""
    doing = "waiting"
    """What the server is at, for the reader of a stream."""

    def __init__(self, handler: Any) -> None:
        self._handler, self._client = handler, handler.wfile
        self._lock = Lock()
        self._done = Event()
        self._is_open = False
        """Whether a head was sent: stock's, or one that says that a stream begins."""
        self._due_s = 0.0

    def write(self, written: bytes) -> int:
        """Send a part of the stream, if the client wants one. HTTP thread."""
        if not self.streams:
            return len(written)
        with self._lock:
            self._due_s = time.monotonic() + BEAT_S
            self._client.write(written)
        return len(written)

    def flush(self) -> None:
        self._client.flush()

    def begin(self, head: bytes, headers: Iterable[tuple[str, str]]) -> None:
        """Send the head of a stream; `headers` are those of plugins. HTTP thread."""
        with self._lock:
            self._due_s = time.monotonic() + BEAT_S
            self.doing = "prefill"
            lines = [f"{name}: {text}" for name, text in headers]
            if self._is_open:  # too late for headers, but a reader can still see them
                self._client.write("".join(f": {line}\n\n" for line in lines).encode())
            else:
                self._is_open = True
                self._client.write(head + "\r\n".join([*lines, "\r\n"]).encode())

    def fail(self, error: Exception) -> None:
        """Tell the client why there is no reply, or why it ends early. Stock closes silently."""
        status, code = getattr(error, "status", 500), getattr(error, "code", None)
        if status == 500:
            logger.exception("a reply failed", exc_info=error)
        self._refuse(status, str(error), code)

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        body = openai_error(status, message, code)
        if self._is_open:
            self.write(f"data: {json.dumps(body)}\n\n".encode())
        else:
            self._handler.answer_json(status, body)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show while the block runs that the server is at work."""
        self._due_s = time.monotonic() + HEADERS_AFTER_S
        Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._done.set()

    def _beat(self) -> None:
        while not self._done.wait(max(0.0, self._due_s - time.monotonic())):
            with self._lock:
                if self._done.is_set():
                    return
                if time.monotonic() < self._due_s:
                    continue
                self._due_s = time.monotonic() + BEAT_S
                try:
                    if not self._is_open:
                        self._is_open = True
                        self._client.write(self._early_head())
                    self._client.write(self._sign_of_life())
                except OSError:
                    return  # the HTTP thread will meet it, too

    def _sign_of_life(self) -> bytes:
        return f": {self.doing}\n\n".encode()

    def _early_head(self) -> bytes:
        """Return what the handler sends before a stream whose request still waits."""
        inner, written = copy.copy(self._handler), io.BytesIO()
        inner.output, inner.wfile, inner._headers_buffer = self, written, []
        inner._completion = None
        inner.log_request = lambda *args: None  # the request is logged with stock's own head
        inner._set_stream_headers(200)
        if (request := self._handler._completion) is not None:
            for answer in manager.ask("early_headers", request=ClientRequest.of(request)):
                for name, value in answer:
                    inner.send_header(name, value)
        inner.end_headers()
        return written.getvalue()
