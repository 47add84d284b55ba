"""Messages between the processes that compute one model together.

All ranks must act in the same order: MLX's collectives carry no names, so a rank that acts
differently computes wrong numbers, or waits for ever. So rank 0 makes each decision that depends on
a clock, a disk, free memory or a client, and each rank sends its own values.

Generation thread: the model's collectives use this thread's default CPU stream, and MLX does not
order collectives on different streams.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, TypeVar
from zlib import crc32

import mlx.core as mx
import numpy as np

Decision = TypeVar("Decision")
logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<IIqq")
"""The fields of a message: the hash of its topic and noted values, its number, its value, and the
size of a decision in bytes."""
_INLINE = 104
"""The first message has this number of a decision's bytes; a second message has the rest."""
PATIENCE_S = 120.0
"""A rank ends after this number of seconds without a message. No step takes as long."""
LOADING_S = 1800.0
"""The same limit while a model is being loaded."""
_CONNECT_S = 10.0
_LOOK_S = 1.0
"""The seconds between two checks whether a rank's parent process still runs."""


class Ranks:
    """The processes of one model; `size` is 1 if this process is alone.

    All ranks call all methods in the same order, with the same `what`. Otherwise all ranks end.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank
        self.n_messages = 0
        self.patience_s = LOADING_S
        """Seconds without a message after which this rank ends; idle ranks also send messages."""
        self.is_ending = False
        """Whether all ranks have agreed to end."""
        self._spoke_s = time.monotonic()
        self._noted = 0

    @property
    def decides(self) -> bool:
        """Whether this rank decides: rank 0, which has the clients."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        return self.size > 1

    def all_of(self, value: int, what: str) -> list[int]:
        """Return each rank's value (int64), in the order of the ranks."""
        return self.first_and_all(lambda: None, value, what)[1]

    def least(self, value: int, what: str) -> int:
        return min(self.all_of(value, what))

    def agree(self, is_so: bool, what: str) -> bool:
        return bool(self.least(is_so, what))

    def first(self, decide: Callable[[], Decision], what: str) -> Decision:
        """Return rank 0's decision. Only rank 0 calls `decide`; all ranks raise its exception."""
        return self.first_and_all(decide, 0, what)[0]

    def first_and_all(
        self, decide: Callable[[], Decision], value: int, what: str
    ) -> tuple[Decision, list[int]]:
        """Return rank 0's decision, and the value of each rank, in int64. Raises like `first`."""
        if not self.are_several:
            return decide(), [value]
        payload = b""
        if self.decides:
            try:
                payload = pickle.dumps((True, decide()))
            except Exception as error:
                payload = _pickled(error)
        messages = self._exchange(value, payload, what)
        _, n_bytes, inline = messages[0]
        if (n_more := n_bytes - _INLINE) > 0:
            rest = payload[_INLINE:] if self.decides else bytes(n_more)
            inline += _bytes(mx.distributed.all_sum(_array(rest), stream=mx.cpu))
        is_decided, decision = pickle.loads(inline[:n_bytes])
        if not is_decided:
            raise decision
        return decision, [message[0] for message in messages]

    def told(self, value: Decision, what: str) -> Decision:
        """Return rank 0's `value`."""
        return self.first(lambda: value, what)

    def same(self, value: object, what: str) -> bool:
        return self.agree(self.told(value, what) == value, what)

    def note(self, value: int) -> None:
        """Compare `value` on all ranks with the next message; all ranks end if it differs."""
        self._noted = crc32(str(value).encode(), self._noted)

    def _exchange(self, value: int, payload: bytes, what: str) -> list[tuple[int, int, bytes]]:
        """Return each rank's value, and the size and first bytes of the rank's payload."""
        self.n_messages += 1
        topic = crc32(what.encode(), self._noted), self.n_messages & 0xFFFFFFFF
        sent = _HEAD.pack(*topic, value, len(payload)) + payload[:_INLINE].ljust(_INLINE, b"\0")
        gathered = _bytes(mx.distributed.all_gather(_array(sent), stream=mx.cpu))
        self._spoke_s = time.monotonic()
        messages = []
        for start in range(0, len(gathered), len(sent)):
            *other_topic, other_value, n_bytes = _HEAD.unpack_from(gathered, start)
            if tuple(other_topic) != topic:
                other_rank = start // len(sent)
                end(f"rank {other_rank} has ended, or is not where rank {self.rank} is ({what})")
            inline = gathered[start + _HEAD.size : start + len(sent)]
            messages.append((other_value, n_bytes, inline))
        return messages

    def watch(self) -> None:
        """End this process when its parent or another rank ends. Main thread.

        When MLX's launcher ends, the ranks continue, and MLX's ring may wait for a dead rank. So
        each rank connects to rank 0: the system closes the connection when either process ends.
        """
        if not self.are_several:
            return
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()
        try:
            lines = self._lines()
        except OSError as error:
            lines = []
            logger.info(
                "kvpersist: rank %d has no connection to the other ranks: %s", self.rank, error
            )
        for line in lines:
            threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    def _lines(self) -> list[socket.socket]:
        """Return the connection to rank 0; on rank 0, the connections to all other ranks."""
        address, listener, lines = _address_of_rank_0(), None, list[socket.socket]()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        if self.decides and address:
            with suppress(OSError):
                listener = socket.create_server((address, 0), family=family)
        port, key = self.told(
            (listener.getsockname()[1] if listener else 0, secrets.token_bytes(16)), "a port"
        )
        if not (address and port):
            return []
        if listener is None:
            line = socket.create_connection((address, port), _CONNECT_S)
            line.sendall(key)
            line.settimeout(None)
            return [line]
        with listener, suppress(TimeoutError):
            listener.settimeout(_CONNECT_S)
            while len(lines) < self.size - 1:
                line, _ = listener.accept()
                line.settimeout(_CONNECT_S)
                with suppress(OSError):
                    if line.recv(len(key), socket.MSG_WAITALL) == key:
                        line.settimeout(None)
                        lines.append(line)
        return lines

    def _listen(self, line: socket.socket) -> None:
        with suppress(OSError):
            line.recv(1)  # no rank sends a byte: this returns when the connection closes
        if not self.is_ending:
            end(f"rank {self.rank} ends: another rank has ended")

    def wait_for(self, seconds: float) -> None:
        self.progressed()
        self.patience_s = seconds

    def progressed(self) -> None:
        """Record that all ranks have computed a step together."""
        self._spoke_s = time.monotonic()

    def _watch(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
            if time.monotonic() - self._spoke_s > self.patience_s and not self.is_ending:
                end(f"rank {self.rank} got no message from other ranks for {self.patience_s:g} s")
        end("the process that started this rank has ended")


ALONE = Ranks(1, 0)
_current: Ranks | None = None


def ranks() -> Ranks:
    """Return the processes of the model that this process serves."""
    global _current
    if _current is None:
        group = mx.distributed.init()
        _current = Ranks(group.size(), group.rank())
    return _current


@contextmanager
def alone() -> Iterator[None]:
    """Make `ranks` return a single process inside the block. Not for a running server."""
    global _current
    previous, _current = ranks(), ALONE
    init, group = mx.distributed.init, SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    mx.distributed.init = lambda *args, **kwargs: group  # type: ignore[assignment]
    try:
        yield
    finally:
        mx.distributed.init, _current = init, previous


def end(why: str) -> NoReturn:
    """End this process immediately, with one line; the processes of the other ranks end with it."""
    with suppress(OSError):  # the reader of stderr may have ended
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"kvpersist: {why}\n".encode())
    os._exit(1)


def _address_of_rank_0() -> str:
    """Return rank 0's address, from MLX's launcher, or ""."""
    named = os.environ.get("MLX_JACCL_COORDINATOR") or os.environ.get("NCCL_HOST_IP", "")
    with suppress(OSError, ValueError, LookupError, TypeError):
        named = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))[0][0]
    address, _, port = named.rpartition(":")
    return (address if port.isdecimal() else named).strip("[]")


def _array(message: bytes) -> mx.array:
    return mx.array(np.frombuffer(message, np.uint8))


def _bytes(array: mx.array) -> bytes:
    return np.asarray(array).tobytes()


def _pickled(error: Exception) -> bytes:
    try:
        payload = pickle.dumps((False, error))
        pickle.loads(payload)
    except Exception:
        payload = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return payload
