"""Clients that close their connection, or only its sending side, on real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.host.hooks import ClientRequest
from mlx_lm_kvpersist.host.http import clients
from mlx_lm_kvpersist.host.http.clients import ClientConnection, Clients
from tests.support import wait_until
from tests.support.clock import Clock

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: %b\r\n\r\n"
STREAM, JSON = HEAD % b"text/event-stream", HEAD % b"application/json"
EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]


@contextmanager
def connected() -> Iterator[tuple[ClientConnection, socket.socket]]:
    """Yield the server's view of a client that waits for a reply, and the client's socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client_socket = socket.create_connection(listening.getsockname(), timeout=10)
        server_socket, _ = listening.accept()
    with server_socket, client_socket:
        client = ClientConnection(server_socket, "HTTP/1.0")
        client.begin_reply()
        yield client, client_socket


def received(client: ClientConnection, client_socket: socket.socket) -> bytes:
    """Close the server's side, and return all bytes that the client received."""
    client._connection.shutdown(socket.SHUT_WR)
    return b"".join(iter(lambda: client_socket.recv(4096), b""))


def test_has_left_consumes_and_sends_no_bytes_of_a_connected_client() -> None:
    with connected() as (client, client_socket):
        assert not client.has_left()
        client_socket.sendall(b"more")
        assert not client.has_left()
        assert client._connection.recv(9) == b"more"
        client_socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            client_socket.recv(1)  # the checks sent no bytes


def test_slow_reader_gets_all_of_a_reply_larger_than_the_buffers() -> None:
    with connected() as (client, client_socket):
        client.write(JSON)
        client._connection.setblocking(False)
        n_filled = 0
        with suppress(BlockingIOError):
            while True:
                n_filled += client._connection.send(b"0" * 65536)
        client._connection.settimeout(10)  # as http.server does
        sent, received_parts = [bytes([n]) * (4 << 20) for n in range(3)], list[bytes]()

        def read() -> None:
            received_parts.extend(iter(lambda: client_socket.recv(1 << 16), b""))

        reader = threading.Timer(0.05, read)
        reader.start()
        for written in sent:
            assert client.write(written) == len(written)
        client._connection.shutdown(socket.SHUT_WR)
        reader.join()
        assert b"".join(received_parts) == JSON + b"0" * n_filled + b"".join(sent)


@pytest.mark.parametrize("head", [STREAM, JSON])
def test_client_that_closes_its_sending_side_gets_the_whole_reply(head: bytes) -> None:
    with connected() as (client, client_socket):
        client_socket.shutdown(socket.SHUT_WR)
        assert not client.has_left()
        for written in (head, *EVENTS):
            client.write(written)
            assert not client.has_left()
        reply = received(client, client_socket)
        assert reply.replace(b":\n\n", b"") == head + b"".join(EVENTS)


@pytest.mark.parametrize("sent", [[], [STREAM], [STREAM, *EVENTS]])
def test_closed_connection_is_detected_and_makes_writes_fail(sent: list[bytes]) -> None:
    with connected() as (client, client_socket):
        for written in sent:
            client.write(written)
        client_socket.recv(4096) if sent else None
        assert not client.has_left()
        client_socket.close()
        wait_until(client.has_left, "the client that left")
        with pytest.raises(ConnectionError):
            for _ in range(9):
                client.write(b"data: 3\n\n")


def test_connection_reset_is_detected_without_a_write() -> None:
    with connected() as (client, client_socket):
        client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client_socket.close()
        wait_until(client.has_left, "the client that left")


def test_disconnection_checks_add_nothing_to_a_json_reply() -> None:
    with connected() as (client, client_socket):
        client.write(JSON)
        client_socket.shutdown(socket.SHUT_WR)
        for _ in range(3):
            assert not client.has_left()
        client.write(b"{}")
        assert received(client, client_socket) == JSON + b"{}"


def test_has_left_does_not_block_if_the_client_reads_nothing() -> None:
    with connected() as (client, client_socket):
        client.write(STREAM)
        client_socket.shutdown(socket.SHUT_WR)
        client._connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                client._connection.send(bytes(1 << 16))
        client._connection.settimeout(300)
        assert not client.has_left()


def test_connection_closed_by_the_server_counts_as_left() -> None:
    with connected() as (client, _):
        client._connection.close()
        assert client.has_left()


def test_keepalives_of_a_silent_stream_stop_at_end_keepalives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first keepalive sends the headers, without the byte that `has_left` has sent."""
    monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
    monkeypatch.setattr(clients, "KEEPALIVE_S", 0.0)
    with connected() as (client, client_socket):
        client_socket.shutdown(socket.SHUT_WR)
        assert not client.has_left()
        keepalives = iter([STREAM + b": waiting\n\n", b": prefill\n\n"])
        client.begin_keepalives(lambda: next(keepalives))
        client.keep_alive()
        client.keep_alive()
        client.write(EVENTS[0])
        client.end_keepalives()
        client.keep_alive()
        sent = b": waiting\n\n: prefill\n\n" + EVENTS[0]
        assert received(client, client_socket) == STREAM + sent


def test_keepalive_is_sent_only_after_a_silent_interval(clock: Clock) -> None:
    made: list[str] = []

    def n_made() -> int:
        client.keep_alive()
        return len(made)

    def make() -> bytes:
        made.append("keepalive")
        return STREAM if len(made) == 1 else b": waiting\n\n"

    with connected() as (client, _):
        client.begin_keepalives(make)
        clock.advance(clients.HEADERS_AFTER_S - 0.1)
        assert n_made() == 0
        clock.advance(0.2)
        assert n_made() == n_made() == 1
        clock.advance(clients.KEEPALIVE_S - 0.1)
        client.write(EVENTS[0])
        clock.advance(0.2)
        assert n_made() == 1
        clock.advance(clients.KEEPALIVE_S)
        assert n_made() == n_made() == 2


def test_keepalive_blocks_neither_on_the_lock_nor_on_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that writes to the client holds the lock; a client may stop reading."""
    monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
    large = b": " + bytes(1 << 24) + b"\n\n"
    with connected() as (client, client_socket):
        client.write(STREAM)
        client.begin_keepalives(lambda: large)
        with client.lock:
            other = threading.Thread(target=client.keep_alive)
            other.start()
            other.join(60)
            assert not other.is_alive()
        assert client._unsent == b""
        client.keep_alive()
        n_unsent = len(client._unsent)
        assert 0 < n_unsent < len(large)
        writer = threading.Thread(target=client.write, args=(EVENTS[0],))
        writer.start()
        read = b""
        while len(read) < len(STREAM + large + EVENTS[0]):
            read += client_socket.recv(1 << 20)
        writer.join(60)
        assert read == STREAM + large + EVENTS[0]


def test_failing_keepalive_does_not_affect_other_clients(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clients, "HEADERS_AFTER_S", 0.0)
    monkeypatch.setattr(clients, "KEEPALIVE_S", 0.0)
    monkeypatch.setattr(clients, "WATCH_S", 0.01)
    waiting, gone = Clients(), client_request()
    with connected() as (failing, _), connected() as (leaving, client_socket):
        failing.begin_keepalives(lambda: json.dumps(object()).encode())
        waiting.begin(failing, client_request())
        waiting.begin(leaving, gone)
        waiting.watch()
        wait_until(lambda: "a keepalive failed" in caplog.text, "the failure")
        client_socket.close()
        wait_until(lambda: gone.client_gone, "the client that left")
        assert len(waiting) == 1 and caplog.text.count("a keepalive failed") == 1
        waiting.is_closed = True


class Client(SimpleNamespace):
    """The part of a connection that `Clients` uses."""

    may_have_left = False
    __hash__ = object.__hash__  # type: ignore[assignment]


def client_request() -> ClientRequest:
    return ClientRequest(SimpleNamespace(request_type="", prompt="", messages=[]))


def test_watch_thread_marks_clients_that_left_until_it_is_closed() -> None:
    waiting = Clients()
    assert waiting.wait_for_none(0)
    before = set(threading.enumerate())
    waiting.watch()
    (watching,) = set(threading.enumerate()) - before
    assert watching.daemon, "the process would not end before the reply"
    for _ in range(2):
        kept: list[int] = []
        left = threading.Event()
        requests = client_request(), client_request()
        stays: Any = Client(has_left=lambda: False, keep_alive=partial(kept.append, 1))
        leaves: Any = Client(has_left=left.is_set, keep_alive=lambda: None)
        waiting.begin(stays, requests[0])
        waiting.begin(leaves, requests[1])
        wait_until(partial(bool, kept), "a look at the clients")
        assert len(waiting) == 2 and not waiting.wait_for_none(0)
        assert not requests[1].client_gone
        left.set()
        wait_until(lambda: len(waiting) == 1, "the client that left")
        assert requests[1].client_gone and not requests[0].client_gone
        waiting.end(stays)
        waiting.end(stays)
        assert waiting.wait_for_none(60)
    waiting.is_closed = True
    watching.join(60)
    assert not watching.is_alive()


def test_look_reports_clients_that_closed_their_sending_side() -> None:
    waiting = Clients()
    with connected() as (client, client_socket):
        waiting.begin(client, client_request())
        assert not waiting.look()
        client_socket.shutdown(socket.SHUT_WR)  # the client still waits for its reply
        assert waiting.look() and len(waiting) == 1
        client.begin_reply()
        assert not client.may_have_left


def test_wait_for_none_returns_when_the_last_reply_ends() -> None:
    waiting = Clients()
    client: Any = Client(has_left=lambda: False, keep_alive=lambda: None)
    waiting.begin(client, client_request())
    timer = threading.Timer(0.2, waiting.end, (client,))
    timer.start()
    assert waiting.wait_for_none(60)
    timer.join()


def test_begin_reply_resets_the_state_of_the_previous_reply() -> None:
    with connected() as (client, client_socket):
        client_socket.shutdown(socket.SHUT_WR)
        for _ in range(2):
            client.begin_reply()
            assert not client.has_left()
            client.write(JSON)
            client.write(b"{}")
        assert received(client, client_socket) == 2 * (JSON + b"{}")
