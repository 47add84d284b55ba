"""On a real server one client learns nothing about another client."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support import Reply, ServerProcess, StartServer, synthetic_text

from .stored import wait_for_commit

SYSTEM = {"role": "system", "content": synthetic_text(120, seed=8)}
REQUESTS = "/v1/kvpersist/requests"
EVICT = "/v1/kvpersist/sessions/evict"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """The server of all tests that need no options."""
    return started.with_plugin(tiny_model)


def n_total(reply: Reply) -> int:
    return reply.prompt_tokens + reply.completion_tokens


def newest(server: ServerProcess) -> dict[str, Any]:
    records: list[dict[str, Any]] = json.loads(server.request("GET", REQUESTS)[2])
    return records[0]


def stored_bytes(store: Path) -> int:
    """Return the size of all block files."""
    return sum(path.stat().st_size for path in (store / "blocks").rglob("*.safetensors"))


def test_displayed_namespace_gives_no_access_to_another_keys_blocks(
    start_server: StartServer, tiny_model: Path
) -> None:
    server = start_server.with_plugin(tiny_model, "--kvpersist-namespace-by-key")
    talk = [SYSTEM, {"role": "user", "content": "What did I store?"}]
    own = {"Authorization": "Bearer one"}
    first = server.chat(talk, "mine", headers=own, max_tokens=5)
    wait_for_commit(start_server.store, "mine", n_total(first))
    shown = newest(server)["namespace"]
    for key in ({"Authorization": "Bearer two"}, {}, own):
        reply = server.chat(talk, headers={**key, "X-KVPersist-Namespace": shown}, max_tokens=5)
        assert (reply.cached_tokens, newest(server)["namespace"] != shown) == (0, True)
    assert server.chat(talk, headers=own, max_tokens=5).cached_tokens == first.prompt_tokens - 1
    # Two keys that name the same namespace do not share it.
    named = {"X-KVPersist-Namespace": "team"}
    for name in ("three", "four"):
        reply = server.chat(talk, headers={"x-api-key": name, **named}, max_tokens=5)
        assert reply.cached_tokens == 0


def test_isolated_anonymous_requests_reuse_and_write_nothing(
    start_server: StartServer, tiny_model: Path
) -> None:
    server = start_server.with_plugin(tiny_model, "--kvpersist-isolation", "session")
    talk = [SYSTEM, {"role": "user", "content": "Who else asks?"}]
    named = server.chat(talk, "named", max_tokens=5)
    wait_for_commit(start_server.store, "named", n_total(named))
    size = stored_bytes(start_server.store)
    for _ in range(3):
        assert server.chat(talk, max_tokens=5).cached_tokens == 0
    # Blocks that no later request could reuse are not written.
    assert server.chat(talk, "named", max_tokens=5).cached_tokens == named.prompt_tokens - 1
    assert server.chat(talk, "other", max_tokens=5).cached_tokens == 0
    server.terminate()
    assert stored_bytes(start_server.store) < 3 * size


def test_names_in_records_are_short_and_logs_are_escaped(
    started: StartServer, server: ServerProcess
) -> None:
    talk = [SYSTEM, {"role": "user", "content": "How long is my name?"}]
    for session, sent in (
        ("\x1b[2J\x9b31m", {"X-KVPersist-Namespace": "\x1b]0;title\x07"}),
        ("n" * 5_000, {"X-KVPersist-Namespace": "m" * 5_000}),
    ):
        server.chat(talk, session, headers=sent, max_tokens=2)
        record = newest(server)
        assert len(record["session"]) <= 256 and len(record["namespace"]) <= 256
    reply = server.chat(talk, max_tokens=2, session_id="\ud800" * 100_000)
    wait_for_commit(started.store, newest(server)["session"], n_total(reply))
    assert newest(server)["session"].startswith("digest-")
    # Stock logs an invalid JSON body unchanged, and the path of every request.
    body = "\x1b[3J\r\x9b31m\x7f".encode()
    for request in (
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
        b"GET /\x1b[4J\x9b31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port or 0), timeout=60) as connection:
            connection.sendall(request)
            assert connection.recv(12).split()[1] in (b"400", b"404")
    assert all(sent in server.log for sent in ("u001b[2J", r"\x1b[3J\x0d\x9b31m\x7f", r"\x1b[4J"))
    assert [line for line in server.log.split("\n") if CONTROL.search(line)] == []
    assert "Traceback" not in server.log


def test_operator_routes_need_this_machine_or_the_api_key(
    start_server: StartServer, server: ServerProcess, tiny_model: Path
) -> None:
    locked = start_server.with_plugin(tiny_model, env={"KVPERSIST_API_KEY": "secret"})
    right = {"Host": "public.example", "Authorization": "Bearer secret"}
    for path in (REQUESTS, "/v1/kvpersist/stats", "/v1/kvpersist/spec", "/metrics"):
        assert server.request("GET", path)[0] == 200
        for sent in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Via": "1.1 p"}):
            status, _, body = server.request("GET", path, headers=sent)
            assert status == 403 and "only for programs" in json.loads(body)["error"]["message"]
        assert locked.request("GET", path)[0] == 403
        assert locked.request("GET", path, headers=right)[0] == 200
    own = f"http://127.0.0.1:{server.port}"
    for page in (
        {"Origin": "http://evil.example"},
        {"Via": "1.1 p"},
        {"Origin": "http://127.0.0.1:1"},  # another server's page on this machine
        {"Origin": own, "Sec-Fetch-Site": "same-site"},
    ):
        assert server.request("POST", EVICT, headers=page)[0] == 403
    assert locked.request("POST", EVICT)[0] == 403
