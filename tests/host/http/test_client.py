"""Clients that close their connection, or their own side of it, on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_lm_kvpersist.host.http.client import ClientSocket
from tests.support import wait_until

HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: %b\r\n\r\n"
STREAM, JSON = HEAD % b"text/event-stream", HEAD % b"application/json"
EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]


@contextmanager
def connected() -> Iterator[tuple[ClientSocket, socket.socket]]:
    """A client as the server sees it, about to be sent a reply, and its own end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), timeout=10)
        ours, _ = listening.accept()
    with ours, theirs:
        client = ClientSocket(ours, "HTTP/1.0")
        client.begin_reply()
        yield client, theirs


def received(client: ClientSocket, theirs: socket.socket) -> bytes:
    """Return all that came, once the server has closed its side."""
    client._connection.shutdown(socket.SHUT_WR)
    return b"".join(iter(lambda: theirs.recv(4096), b""))


def test_what_came_from_a_client_is_left_to_be_read() -> None:
    with connected() as (client, theirs):
        assert not client.has_left()
        theirs.sendall(b"more")
        assert not client.has_left()
        assert client._connection.recv(9) == b"more"
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)  # nothing was sent to a client that is there


@pytest.mark.parametrize("head", [STREAM, JSON])
def test_a_client_that_only_stops_sending_gets_its_whole_reply(head: bytes) -> None:
    with connected() as (client, theirs):
        theirs.shutdown(socket.SHUT_WR)
        assert not client.has_left()
        for written in (head, *EVENTS):
            client.write(written)
            assert not client.has_left()
        reply = received(client, theirs)
        assert reply.replace(b":\n\n", b"") == head + b"".join(EVENTS)


@pytest.mark.parametrize("sent", [[], [STREAM], [STREAM, *EVENTS]])
def test_a_client_that_closed_its_connection_is_noticed_by_a_write(sent: list[bytes]) -> None:
    with connected() as (client, theirs):
        for written in sent:
            client.write(written)
        theirs.recv(4096) if sent else None
        assert not client.has_left()
        theirs.close()
        wait_until(client.has_left, "the client that left", 10)
        with pytest.raises(ConnectionError):
            for _ in range(9):
                client.write(b"data: 3\n\n")


def test_a_reset_connection_is_noticed_without_a_write() -> None:
    with connected() as (client, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        theirs.close()
        wait_until(client.has_left, "the client that left", 10)


def test_the_body_of_a_reply_that_is_no_stream_is_not_disturbed() -> None:
    with connected() as (client, theirs):
        client.write(JSON)
        theirs.shutdown(socket.SHUT_WR)
        for _ in range(3):
            assert not client.has_left()
        client.write(b"{}")
        assert received(client, theirs) == JSON + b"{}"


def test_a_client_that_reads_nothing_is_not_waited_for() -> None:
    with connected() as (client, theirs):
        client.write(STREAM)
        theirs.shutdown(socket.SHUT_WR)
        client._connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                client._connection.send(bytes(1 << 16))
        client._connection.settimeout(300)
        assert not client.has_left()


def test_a_connection_that_its_thread_has_closed_counts_as_left() -> None:
    with connected() as (client, _):
        client._connection.close()
        assert client.has_left()


def test_each_reply_of_a_connection_begins_anew() -> None:
    with connected() as (client, theirs):
        theirs.shutdown(socket.SHUT_WR)
        for _ in range(2):
            client.begin_reply()
            assert not client.has_left()
            client.write(JSON)
            client.write(b"{}")
        assert received(client, theirs) == 2 * (JSON + b"{}")
