"""The connections of clients, the thread that watches them, and the server that accepts them."""

from __future__ import annotations

import io
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...errors import GenerationStopped
from ..hooks import ClientRequest
from ..run import uninterrupted

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer as StockServer
else:
    StockServer = object

WATCH_S = 0.1
"""The seconds between two checks of the connections of waiting clients."""
POLL_S = 0.01
"""Seconds between two checks whether the last reply has ended, when the server ends."""
PROBE_AGAIN_S = 1.0
"""The pause between the first two probes of a reply. The pause doubles after each probe."""
HEADERS_AFTER_S = 2.0
"""Seconds after which a stream gets its headers early: until then, an error can set the status."""
KEEPALIVE_S = 10.0
"""How long a stream may be silent: clients give up after 300 s."""
DRAIN_S = 5.0
"""How long replies may continue after SIGTERM or SIGHUP."""
RESET_S = 0.01
"""If a client has sent a FIN, a new request waits this long for the client's reset."""
_COMMENT = b":\n\n"

logger = logging.getLogger(__name__)


class ClientConnection(io.BufferedIOBase):
    """Writes to a client, instead of http.server's writer. HTTP thread; `has_left`: any thread.

    A client that waits for its reply may have sent a FIN, like a client that has left. Only a
    client that has left answers later bytes with a reset. So after a FIN, `has_left` sends probes,
    which do not change the reply. Before the headers, a probe is the next byte of `version`, with
    which every reply begins. In a stream of events, it is a comment.

    version: the protocol version, such as "HTTP/1.0". `may_have_left`: whether a FIN was seen.
    """

    def __init__(self, connection: socket.socket, version: str) -> None:
        self._connection = connection
        self._version = version.encode()
        self.lock = threading.RLock()
        """Held while a piece of a reply is made and written, so that pieces keep their order."""
        self.begin_reply()

    def begin_reply(self) -> None:
        """Prepare for the next reply. Its headers must be written first, in one piece."""
        self.may_have_left = False
        with self.lock:
            self._has_head = self._is_stream = False
            self._unsent = b""
            self._n_probes, self._probe_at_s = 0, 0.0
            self._make_keepalive: Callable[[], bytes] | None = None
            self._keepalive_at_s = 0.0

    def begin_keepalives(self, make_keepalive: Callable[[], bytes]) -> None:
        with self.lock:
            self._make_keepalive = make_keepalive
            self._keepalive_at_s = time.monotonic() + HEADERS_AFTER_S

    def end_keepalives(self) -> None:
        with self.lock:
            self._make_keepalive = None

    def write(self, written: Any) -> int:
        """Send bytes. In a stream these are whole events."""
        with self.lock:
            self._keepalive_at_s = time.monotonic() + KEEPALIVE_S
            rest, self._unsent = self._unsent + self._without_probes(written), b""
            try:  # one system call: sendall would first poll
                n_sent = os.write(self._connection.fileno(), rest)
            except BlockingIOError:
                n_sent = 0
            if n_sent < len(rest):
                self._connection.sendall(rest[n_sent:])
        return len(written)

    def _without_probes(self, written: bytes) -> bytes:
        """Return the bytes of a reply without the beginning that probes have sent."""
        if self._has_head:
            return written
        self._has_head = True
        self._is_stream = b"text/event-stream" in written
        return written.removeprefix(self._version[: self._n_probes])

    def has_left(self) -> bool:
        """Return whether the client is known to have left. No byte of the client is read."""
        try:
            if _is_ready(self._connection, select.POLLIN):
                if self._connection.recv(1, socket.MSG_PEEK):
                    return False
                self.may_have_left = True
                self._send_if_idle(self._probe)
            return self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except (OSError, ValueError):
            return True  # reset, or closed by its HTTP thread

    def keep_alive(self) -> None:
        """Send a keepalive if the reply is a stream that has been silent for long."""
        with suppress(OSError, ValueError):  # the HTTP thread will get the error, too
            self._send_if_idle(self._keepalive)

    def _send_if_idle(self, make: Callable[[], bytes]) -> None:
        """Send bytes; wait neither for the client nor for a thread that writes to the client."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if _is_ready(self._connection, select.POLLOUT) and (written := make()):
                n_sent = self._connection.send(self._unsent + written, socket.MSG_DONTWAIT)
                self._unsent = (self._unsent + written)[n_sent:]
        finally:
            self.lock.release()

    def _probe(self) -> bytes:
        """Return a probe that a closed client answers with a reset; b"" if none is due."""
        now_s, n_probes = time.monotonic(), self._n_probes
        if now_s < self._probe_at_s or (self._has_head and not self._is_stream):
            return b""
        self._n_probes += 1
        self._probe_at_s = now_s + PROBE_AGAIN_S * 2**n_probes
        return _COMMENT if self._is_stream else self._version[n_probes : n_probes + 1]

    def _keepalive(self) -> bytes:
        now_s = time.monotonic()
        if self._make_keepalive is None or now_s < self._keepalive_at_s:
            return b""
        self._keepalive_at_s = now_s + KEEPALIVE_S
        try:
            return self._without_probes(self._make_keepalive())
        except Exception:  # of a plugin
            logger.exception("kvpersist: a keepalive failed; its client gets no further keepalive")
            self._make_keepalive = None
            return b""


def _is_ready(connection: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(0))


class Clients:
    """The clients that wait for replies. One thread watches them until the server ends.

    Single operations of a dict need no lock.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._waiting: dict[ClientConnection, ClientRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, client: ClientConnection, request: ClientRequest) -> None:
        self._waiting[client] = request

    def end(self, client: ClientConnection) -> None:
        self._waiting.pop(client, None)

    def wait_for_none(self, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while self._waiting and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return not self._waiting

    def look(self) -> bool:
        """Mark requests whose clients left; return whether more may have left. Any thread."""
        for client, request in self._waiting.copy().items():
            if client.has_left():
                request.client_gone = True
                self.end(client)  # its thread may have ended without calling `end`
        return any(client.may_have_left for client in self._waiting.copy())

    def watch(self) -> None:
        threading.Thread(target=self._watch, name="clients", daemon=True).start()

    def _watch(self) -> None:
        while not self.is_closed:
            time.sleep(WATCH_S)
            self.look()
            for client in self._waiting.copy():
                client.keep_alive()


class PluginHTTPServer(StockServer):
    """Lets the running replies end after SIGTERM or SIGHUP. New requests then get 503."""

    request_queue_size = 128
    """Connections that wait to be accepted. mlx-lm allows 5; clients open more at the same time."""
    generator: Any
    clients: Clients

    def serve_forever(self, *args: Any) -> None:
        try:
            super().serve_forever(*args)
        except KeyboardInterrupt as asked:
            if {signal.SIGTERM, signal.SIGHUP}.intersection(asked.args) and len(self.clients):
                stopped = GenerationStopped("the server ends; ask again when it runs")
                self.generator.requests.refusal = stopped
                threading.Thread(target=self._end_after_replies, daemon=True).start()
                super().serve_forever(*args)
            raise

    def _end_after_replies(self) -> None:
        if not self.clients.wait_for_none(DRAIN_S):
            logger.info(
                "kvpersist: some replies have not ended within %g s; they are cut off", DRAIN_S
            )
        self.shutdown()

    def _handle_request_noblock(self) -> None:
        """Accept a connection. Signals wait: an interrupt would close the connection."""
        with uninterrupted():
            super()._handle_request_noblock()  # type: ignore[misc]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a connection failed, in place of socketserver's traceback on stderr."""
        if isinstance(sys.exc_info()[1], OSError):
            logger.info("kvpersist: a connection was closed before its request was read")
        else:
            logger.exception("kvpersist: a connection failed")
