"""A completion on its way to its client: a stream shows soon, and goes on showing, that it lives.

Stock sends nothing before a request's prompt is about to be computed, and then a comment for each
chunk of it. A request can wait for others before that, or for what is restored, and one chunk can
take long. Clients and proxies give up where nothing comes.
"""

from __future__ import annotations

import copy
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Any

from ..error_forms import openai_error

HEADERS_AFTER_S = 2.0
"""A stream's headers wait so long for the request's own status, and for the plugins' headers."""
BEAT_S = 10.0
"""Between two signs of life: clients give up after 300 s of none."""
_KEEPALIVE = b": keepalive "
"""How stock's comments begin; tokens computed and tokens to compute follow."""


class CompletionOutput:
    """Stands before the connection for the time of one completion. HTTP thread, and its beat.

    Stock writes its head in one piece, and so each event.
    """

    def __init__(self, handler: Any) -> None:
        self._handler, self._client = handler, handler.wfile
        self._lock = Lock()
        self._done = Event()
        self._status = 0
        """Stock's, 0 until it is known."""
        self._is_open = False
        """Whether a head was sent: stock's, or one that says that a stream begins."""
        self._doing = "waiting"
        self._due_s = time.monotonic() + HEADERS_AFTER_S

    def write(self, written: bytes) -> int:
        with self._lock:
            if self._status == 0:
                self._write_head(written)
            elif self._status != 200:
                self._write_error(written)
            else:
                self._note(written)
                self._client.write(written)
        return len(written)

    def flush(self) -> None:
        with self._lock:
            self._client.flush()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show while the block runs that the server is at work."""
        Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._done.set()

    def _write_head(self, head: bytes) -> None:
        self._status = int(head.split(b" ", 2)[1])
        if not self._is_open:
            self._is_open = self._status == 200
            self._client.write(head)
        elif self._status == 200:
            # Too late for headers. What plugins have to say is still of use to a reader.
            for line in head.decode("latin-1").split("\r\n")[1:]:
                name, _, text = line.partition(": ")
                if name and not is_own_header(name):
                    self._client.write(f": {name}: {text}\n\n".encode("latin-1"))
        self._doing = "prefill"
        self._due_s = time.monotonic() + BEAT_S

    def _write_error(self, body: bytes) -> None:
        """Send an error; a code that clients act upon is missing in stock's form."""
        error = self._handler.failure
        code = getattr(error, "code", None)
        if error is None or not (code or self._is_open):
            self._client.write(body)
            return
        body = json.dumps(openai_error(self._status, str(error), code)).encode()
        self._client.write(b"data: %b\n\n" % body if self._is_open else body)

    def _note(self, written: bytes) -> None:
        """Note what stock is at, from what it tells the client."""
        if written.startswith(_KEEPALIVE):
            n_done, _, n_all = written.removeprefix(_KEEPALIVE).strip().partition(b"/")
            self._doing = f"prefill {int(n_done):,} of {int(n_all):,}"
        else:
            self._doing = "generating"
            self._due_s = time.monotonic() + BEAT_S

    def _beat(self) -> None:
        while not self._done.wait(max(0.0, self._due_s - time.monotonic())):
            with self._lock:
                if self._done.is_set() or self._status not in (0, 200):
                    return
                if time.monotonic() < self._due_s:
                    continue
                self._due_s = time.monotonic() + BEAT_S
                try:
                    if not self._is_open:
                        self._is_open = True
                        self._client.write(self._stream_head())
                    self._client.write(f": {self._doing}\n\n".encode())
                    self._client.flush()
                except OSError:
                    return  # stock will meet it, too

    def _stream_head(self) -> bytes:
        """Return what the handler sends before a stream, without the plugins' headers."""
        inner, written = copy.copy(self._handler), io.BytesIO()
        inner.wfile, inner._headers_buffer, inner._completion = written, [], None
        inner.log_request = lambda *args: None  # the request is logged with stock's own head
        inner._set_stream_headers(200)
        inner.end_headers()
        return written.getvalue()


def is_own_header(name: str) -> bool:
    """Tell whether stock's handler sends a header with every reply, or this one's form decides."""
    name = name.lower()
    return name.startswith(("access-control-", "content-", "cache-control")) or name in (
        "server",
        "date",
        "vary",
        "retry-after",
    )
