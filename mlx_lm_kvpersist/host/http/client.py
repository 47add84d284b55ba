"""A client's connection: what is written to it, and whether the client is still there."""

from __future__ import annotations

import io
import select
import socket
import time
from threading import Lock
from typing import Any

PROBE_AGAIN_S = 1.0
"""The pause between the first two probes of a reply; each later pause is twice as long."""
_COMMENT = b":\n\n"


class ClientSocket(io.BufferedIOBase):
    """Writes to the connection in place of http.server's writer. HTTP threads; `has_left`: any.

    A client that closes its connection sends a FIN, and so does a client that has nothing more to
    send and waits for its reply. Only the first answers what is then written with a reset. So after
    a FIN, `has_left` writes bytes that change no reply: before the head the first bytes of its
    version, one at a time, and later comments, if the reply is a stream of events.

    version: of the protocol, with which the head of every reply begins, such as "HTTP/1.0".
    """

    def __init__(self, connection: socket.socket, version: str) -> None:
        self._connection = connection
        self._begins = version.encode()
        self._lock = Lock()
        self.begin_reply()

    def begin_reply(self) -> None:
        """Say that the next bytes are the head of a reply, in one piece."""
        with self._lock:
            self._has_head = self._is_stream = False
            self._n_probes, self._probe_at_s = 0, 0.0

    def write(self, written: Any) -> int:
        """Send bytes. In a stream these are whole events."""
        with self._lock:
            rest = written
            if not self._has_head:
                self._has_head = True
                self._is_stream = b"text/event-stream" in written
                rest = written.removeprefix(self._begins[: self._n_probes])
            self._connection.sendall(rest)
        return len(written)

    def has_left(self) -> bool:
        """Tell whether the client is known to have left. What it sent is left unread."""
        try:
            if _is_ready(self._connection, select.POLLIN):
                if self._connection.recv(1, socket.MSG_PEEK):
                    return False
                self._probe()
            return self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except (OSError, ValueError):
            return True  # reset, or closed by the thread that served it

    def _probe(self) -> None:
        """Write something that a client which has left answers with a reset; never wait."""
        now_s = time.monotonic()
        if now_s < self._probe_at_s or not self._lock.acquire(blocking=False):
            return  # the reply itself is being written
        try:
            n = self._n_probes
            probe = _COMMENT if self._is_stream else self._begins[n : n + 1]
            if (self._has_head and not self._is_stream) or not probe:
                return
            if _is_ready(self._connection, select.POLLOUT):
                self._connection.sendall(probe)
                self._n_probes += 1
                self._probe_at_s = now_s + PROBE_AGAIN_S * 2**n
        finally:
            self._lock.release()


def _is_ready(connection: socket.socket, event: int) -> bool:
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(0))
