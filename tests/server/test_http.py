"""The HTTP side of a real server: the list of models, streams, and clients that misbehave."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import ServerProcess, StartServer, wait_until
from tests.support.pairs import every_pair

from .stored import wait_for_writer

USER = [{"role": "user", "content": "Hello?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    no_cache = started.store.with_name("no-such-cache")
    return started.with_plugin(tiny_model, env={"HF_HUB_CACHE": str(no_cache)})


def test_loaded_model_is_listed_without_a_download_cache(
    server: ServerProcess, tiny_model: Path
) -> None:
    own, alias = str(tiny_model.resolve()), f"claude-{tiny_model.name}"
    status, _, body = server.request("GET", "/v1/models")
    assert (status, [model["id"] for model in json.loads(body)["data"]]) == (
        200,
        [own, alias, "default_model"],
    )
    status, _, body = server.request("GET", "/v1/models/default_model")
    assert (status, json.loads(body)["object"]) == (200, "model")
    status, _, body = server.request("GET", f"/v1/models/{tiny_model}")
    assert (status, json.loads(body)["id"]) == (200, own)
    status, _, body = server.request("GET", "/v1/models/gpt-5")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    assert "there is no model gpt-5 here" in json.loads(body)["error"]["message"]
    status, _, body = server.request("GET", f"/v1/models/{alias}?beta=true")
    assert (status, json.loads(body)["id"]) == (200, alias)
    assert server.chat(USER, model=alias, max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        (CHAT, {"messages": USER}, "chat.completion.chunk"),
        ("/v1/completions", {"prompt": "Hello?"}, "text_completion"),
    ],
)
def test_all_chunks_of_a_stream_have_the_same_type(
    server: ServerProcess, path: str, fields: dict[str, object], kind: str
) -> None:
    body = {**fields, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [json.loads(data) for _, data in server.events(path, body) if data != "[DONE]"]
    assert {chunk["object"] for chunk in chunks} == {kind}
    assert "usage" in chunks[-1]


ASKS: dict[str, dict[str, object]] = {
    CHAT: {"messages": USER},
    "/v1/completions": {"prompt": "Hello?"},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/v1/responses": {"input": "Hello?"},
}


@every_pair(
    stream=[True, False], model=["gpt-5", "no/such-model", "/no/such folder"], path=list(ASKS)
)
def test_error_for_a_missing_model_names_the_loaded_model(
    server: ServerProcess, path: str, model: str, stream: bool
) -> None:
    n_loaded = server.log.count("kvpersist: the store")
    status, _, body = server.request("POST", path, {**ASKS[path], "model": model, "stream": stream})
    assert (status, json.loads(body)["error"]["message"]) == (
        404,
        f"there is no model {model}; this server has {server.model}; ask for default_model",
    )
    assert server.chat(USER, max_tokens=1).completion_tokens == 1
    assert server.log.count("kvpersist: the store") == n_loaded  # the model was not loaded again


def name_of(path: Path) -> str:
    """Return the name of a descriptor or a thread in /proc."""
    try:
        is_descriptor = path.parent.name == "fd"
        return os.readlink(path) if is_descriptor else (path / "comm").read_text().strip()
    except OSError:
        return "closed meanwhile"


def open_resources(server: ServerProcess) -> dict[str, list[str]]:
    """Return the server process's open files ("fd") and threads ("task"); nothing without /proc."""
    process = Path("/proc") / str(server.pid)
    if not process.is_dir():
        return {}
    return {kind: [name_of(path) for path in process.glob(f"{kind}/*")] for kind in ("fd", "task")}


def wait_for_release(server: ServerProcess, kind: str, before: list[str]) -> None:
    """Wait until the server has no more of a kind than before; if not, fail with the surplus."""
    try:
        wait_until(lambda: len(open_resources(server)[kind]) <= len(before), kind, 90)
    except AssertionError:
        more = Counter(open_resources(server)[kind])
        more.subtract(before)
        raise AssertionError(f"{kind}: {len(before)} before, now more of {+more}") from None


def send(server: ServerProcess, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port or 0), timeout=60)
    connection.sendall(sent)
    return connection


def post(body: bytes, length: int | None = None) -> bytes:
    n = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), n, body)


def test_polls_and_broken_connections_leak_no_threads_or_files(server: ServerProcess) -> None:
    paths = ("/health", "/v1/kvpersist/stats", "/v1/kvpersist/requests", "/v1/models", "/nothing")
    streamed = json.dumps({"messages": USER, "max_tokens": 50, "stream": True}).encode()

    def poll(n: int) -> None:
        server.request("GET", paths[n % len(paths)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(poll, range(20)))
    server.chat(USER, max_tokens=2)
    wait_for_writer(server)
    before = open_resources(server)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(poll, range(300)))
    half_sent = (
        b"",
        b"GET /health",
        b"GET /health HTTP/1.1\r\nX-A: b",
        post(b'{"messages"', 1000),
        post(streamed),
        post(b"{}"),
        post(b"\xff\xfe"),
        b"GET /health HTTP/1.1\r\n" + b"X-A: %s\r\n" % (b"b" * 100_000),
        b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000 + b"\r\n",
        b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/kvpersist/stats HTTP/1.1\r\n\r\n",
    )
    for n in range(120):
        try:
            connection = send(server, half_sent[n % len(half_sent)])
        except ConnectionError:
            continue  # the server has seen enough of an oversized header
        if n % 3 == 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    for kind, names_before in before.items():
        wait_for_release(server, kind, names_before)
    assert server.chat(USER, max_tokens=2).completion_tokens > 0
    assert "Traceback" not in server.log


def test_idle_and_incomplete_requests_time_out(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    launcher = tmp_path / "impatient.py"
    launcher.write_text(
        "import sys\n"
        "from mlx_lm_kvpersist.host.http import server\n"
        "server.PluginAPIHandler.timeout = 1.0\n"
        "from mlx_lm_kvpersist._startup import serve\n"
        "serve(sys.argv[1:])\n",
        encoding="utf-8",
    )
    impatient = start_server.with_plugin(tiny_model, launcher=(str(launcher),))
    refusal = b"HTTP/1.0 408"
    cases = ((b"", b""), (b"GET /hea", b""), (post(b'{"messages"', 1000), refusal))
    for sent, begins in cases:
        with send(impatient, sent) as connection:
            assert connection.recv(12) == begins
    assert impatient.chat(USER, max_tokens=2).completion_tokens > 0
