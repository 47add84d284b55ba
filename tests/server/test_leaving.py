"""A disconnect is one log line at INFO, on every API and in every stage of a request."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import ServerProcess, StartServer, synthetic_text, wait_until

from .stored import n_computed

USER = [{"role": "user", "content": "Hello?"}]
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4000},
    "/v1/completions": {"prompt": "Hello?", "max_tokens": 4000},
    "/v1/messages": {"model": "claude-local", "messages": USER, "max_tokens": 4000},
    "/v1/responses": {"model": "default_model", "input": "Hello?", "max_output_tokens": 4000},
}
STREAMS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model)


@contextmanager
def expect_disconnect_lines(server: ServerProcess, n_leaving: int) -> Iterator[None]:
    """Check the log of the block: one line for each disconnected client, and no warnings."""
    start = len(server.log)

    def lines() -> list[str]:
        return re.findall(r" - INFO - kvpersist: the client .*left", server.log[start:])

    yield
    wait_until(lambda: len(lines()) >= n_leaving, f"{n_leaving} lines of the log")
    time.sleep(0.1)  # a second line would be logged now
    added = server.log[start:]
    assert len(lines()) == n_leaving, added
    assert not re.search(r" - (WARNING|ERROR|CRITICAL) - |Traceback|Exception", added), added
    for path in APIS:
        assert sum(f"POST {path} left" in line for line in lines()) == n_leaving // len(APIS)


def send(server: ServerProcess, path: str, **changes: Any) -> socket.socket:
    body = json.dumps({**APIS[path], **changes}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port or 0), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@STREAMS
def test_disconnect_during_a_reply_logs_one_line(server: ServerProcess, stream: bool) -> None:
    start = len(server.log)
    with expect_disconnect_lines(server, len(APIS)):
        clients = [send(server, path, stream=stream) for path in APIS]
        wait_until(lambda: n_computed(server, start) == len(APIS), "replies")
        for client in clients:
            assert not stream or client.recv(100).startswith(b"HTTP/1.0 200")
            client.close()


@STREAMS
def test_disconnect_in_the_queue_logs_one_line(server: ServerProcess, stream: bool) -> None:
    """A request with a seed is served alone, and other requests wait for its end."""
    with expect_disconnect_lines(server, len(APIS)), ThreadPoolExecutor(1) as pool:
        start = len(server.log)
        alone = pool.submit(server.chat, USER, seed=1, max_tokens=500)
        wait_until(lambda: n_computed(server, start) == 1, "the reply that is served alone")
        clients = [send(server, path, stream=stream) for path in APIS]
        for client in clients:
            client.close()
        assert alone.result().completion_tokens > 0


def long(path: str, seed: int, n_chars: int = 20_000) -> dict[str, Any]:
    """Return a field of a request, with a long prompt."""
    text = synthetic_text(n_chars, seed=seed)
    (name,) = {"messages", "prompt", "input"} & set(APIS[path])
    return {name: [{"role": "user", "content": text}] if name == "messages" else text}


@STREAMS
def test_disconnect_during_prefill_logs_one_line(server: ServerProcess, stream: bool) -> None:
    start = len(server.log)
    with expect_disconnect_lines(server, len(APIS)):
        clients = [
            send(server, path, stream=stream, **long(path, 2 * n + stream))
            for n, path in enumerate(APIS)
        ]
        wait_until(lambda: "Prompt processing progress" in server.log[start:], "a part of a prompt")
        for client in clients:
            client.close()
    assert n_computed(server, start) < len(APIS)


SLOW = """
import sys, time

from mlx_lm_kvpersist.request.lookup import Lookup

join = Lookup._joined


def slow(*args):
    print("a restore begins", flush=True)
    for _ in range(100):
        time.sleep(0.05)
        yield
    return (yield from join(*args))


Lookup._joined = slow
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""
"""A server that takes five seconds to restore a prompt."""


@STREAMS
def test_disconnect_during_a_restore_logs_one_line(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, stream: bool
) -> None:
    (launcher := tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    server = start_server.with_plugin(tiny_model, launcher=(str(launcher),))
    asks = {path: long(path, 100 + n, 3000) for n, path in enumerate(APIS)}
    for path, ask in asks.items():
        limit = {"max_output_tokens" if "input" in ask else "max_tokens": 1}
        assert server.request("POST", path, {**APIS[path], **ask, **limit})[0] == 200
    server.restart()
    server.warm_up()

    def leave(path: str, ask: dict[str, Any]) -> None:
        before = len(server.log)
        client = send(server, path, stream=stream, **ask)
        wait_until(lambda: "a restore begins" in server.log[before:], "a restore")
        client.close()

    start = len(server.log)
    with expect_disconnect_lines(server, len(APIS)):
        for path, ask in asks.items():
            leave(path, ask)
    assert n_computed(server, start) == 0


def test_disconnect_before_the_request_is_complete_logs_no_warning(server: ServerProcess) -> None:
    start = len(server.log)
    for sent in (b"", b"GET /hea", b"POST /v1/messages HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
        client = socket.create_connection(("127.0.0.1", server.port or 0), timeout=30)
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()  # with a reset
    time.sleep(0.5)
    assert not re.search(r"- (WARNING|ERROR) -|Traceback|Exception", server.log[start:])
