"""A stock server and a server with the plugin answer the same bytes equally.

The table of docs/api.md lists the intended differences and their reasons.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import FULL_PRECISION, ServerProcess, StartServer
from tests.support.stock import answers_wrong_fields

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TABLE = Path(__file__).parents[2] / "docs" / "api.md"
WRONG_FIELDS = pytest.mark.skipif(not answers_wrong_fields(), reason="stock fails")
CLOSED = "closes the connection"
"""The table's words for a server that sends no answer."""
HALF_CLOSE = None
"""A step of a conversation: the client closes its sending side."""
Step = bytes | float | None
"""A client's next action: it sends bytes, waits for seconds, or closes its sending side."""


def chat(**fields: object) -> bytes:
    body = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


def request(
    body: bytes, *headers: str, target: str = f"POST {CHAT}", version: str = "1.1", **length: object
) -> bytes:
    """Return a request with a body; `length` is its Content-Length; None omits the header."""
    stated = length.get("length", len(body))
    lines = [f"{target} HTTP/{version}", "Host: localhost", *headers]
    if stated is not None:
        lines.append(f"Content-Length: {stated}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def ask(target: str, *headers: str, version: str = "1.1") -> bytes:
    return request(b"", *headers, target=target, version=version, length=None)


def chunks(body: bytes) -> bytes:
    return b"9\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:9], len(body) - 9, body[9:])


def dripped(body: bytes) -> list[Step]:
    parts = [body[i : i + 20] for i in range(0, len(body), 20)]
    return [request(b"", length=len(body)), *(step for part in parts for step in (0.02, part))]


ONE, STREAM = chat(), chat(stream=True)
LONG, LONG_STREAM = chat(max_tokens=200), chat(max_tokens=200, stream=True)
LONG_TEXT = json.dumps({"prompt": "Hello?", "max_tokens": 200}).encode()
ELSEWHERE = chat(model="no/such-model")
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
EXPECT = request(ONE, "Expect: 100-continue")

ALIKE: dict[str, list[Step]] = {
    "a reply": [request(ONE)],
    "a stream": [request(STREAM)],
    "a text completion": [request(LONG_TEXT, target=f"POST {TEXT}")],
    "an origin": [request(ONE, "Origin: http://example.org")],
    # The sending side is closed.
    "half-closed": [request(LONG), HALF_CLOSE],
    "half-closed stream": [request(LONG_STREAM), HALF_CLOSE],
    "half-closed text completion": [request(LONG_TEXT, target=f"POST {TEXT}"), HALF_CLOSE],
    "half-closed stream of text": [
        request(LONG_TEXT[:-1] + b', "stream": true}', target=f"POST {TEXT}"),
        HALF_CLOSE,
    ],
    "half-closed during the reply": [request(LONG_STREAM), 0.3, HALF_CLOSE],
    "half-closed GET": [ask("GET /health"), HALF_CLOSE],
    "half-closed in a header": [b"GET /health HTTP/1.1\r\nX-A: b", HALF_CLOSE],
    "half-closed before anything": [HALF_CLOSE],
    # Connections.
    "pipelined": [request(ONE) + request(STREAM)],
    "pipelined GETs": [ask("GET /health") + ask("GET /health")],
    "HTTP/1.0": [request(ONE, version="1.0")],
    "HTTP/1.0, stream": [request(STREAM, version="1.0")],
    "HTTP/1.0, keep-alive": [request(ONE, "Connection: keep-alive", version="1.0")],
    "HTTP/0.9": [b"GET /health\r\n\r\n"],
    "HTTP/0.9 POST": [b"POST /health\r\n\r\n"],
    "HTTP/2.0": [ask("GET /health", version="2.0")],
    "HTTP/x": [ask("GET /health", version="x")],
    "close": [request(ONE, "Connection: close")],
    "keep-alive, used again": [
        request(ONE, "Connection: keep-alive"),
        0.5,
        request(ONE, "Connection: keep-alive"),
    ],
    "Expect": [EXPECT[: -len(ONE)], 0.1, ONE],
    "Expect, and the body at once": [EXPECT],
    "Expect, stream": [request(STREAM, "Expect: 100-continue")],
    "Expect, HTTP/1.0": [request(ONE, "Expect: 100-continue", version="1.0")],
    "another Expect": [request(ONE, "Expect: a miracle")],
    "another protocol": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
    # Bodies.
    "chunked": [request(chunks(ONE), "Transfer-Encoding: chunked", length=None)],
    "chunked, with a length": [request(chunks(ONE), "Transfer-Encoding: chunked")],
    "dripped": dripped(ONE),
    "dripped stream": dripped(STREAM),
    "length too small": [request(ONE, length=len(ONE) - 5)],
    "length too large": [request(ONE, length=len(ONE) + 5), HALF_CLOSE],
    "part of a body": [request(ONE[:-9], length=len(ONE)), HALF_CLOSE],
    "no length": [request(ONE, length=None)],
    "length with a sign": [request(ONE, length=f"+{len(ONE)}")],
    "two lengths": [request(ONE, f"Content-Length: {len(ONE) - 5}")],
    "no body": [request(b"")],
    "no JSON": [request(b'{"messages": [}')],
    "a list": [request(b"[]")],
    "null": [request(b"null")],
    "byte order mark": [request(b"\xef\xbb\xbf" + ONE)],
    "more than the body": [request(ONE) + b"\r\n"],
    # Methods and paths.
    **{
        method: [request(ONE, target=f"{method} {CHAT}")]
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "FOO", "post", "GET", "HEAD")
    },
    "HEAD /health": [ask("HEAD /health")],
    "OPTIONS *": [ask("OPTIONS *")],
    "preflight": [ask(f"OPTIONS {CHAT}", "Origin: http://example.org")],
    "unknown path": [request(ONE, target="POST /v1/nothing")],
    "unknown path, GET": [ask("GET /nothing")],
    "slash": [request(ONE, target=f"POST {CHAT}/")],
    "two slashes": [request(ONE, target=f"POST /{CHAT}")],
    "short path": [request(ONE, target="POST /chat/completions")],
    "absolute": [request(ONE, target=f"POST http://127.0.0.1{CHAT}")],
    "absolute GET": [ask("GET http://127.0.0.1/health")],
    "health": [ask("GET /health")],
    "health with a query": [ask("GET /health?a=b")],
    # Headers.
    "long header": [ask("GET /health", "X-A: " + "b" * 60_000)],
    "header too long": [ask("GET /health", "X-A: " + "b" * 70_000)],
    "too many headers": [ask("GET /health", *["X-A: b"] * 150)],
    "path too long": [ask("GET /" + "a" * 70_000)],
    "header without a colon": [ask("GET /health", "no colon")],
    "folded header": [ask("GET /health", "X-A: b\r\n c")],
    "line feeds only": [ask("GET /health").replace(b"\r\n", b"\n")],
    "empty line first": [b"\r\n" + ask("GET /health")],
}

FIELDS: dict[str, list[Step]] = {
    "temperature": [request(chat(temperature=-1))],
    "max_tokens": [request(chat(max_tokens=0))],
    "stream of a wrong type": [request(chat(stream="yes"))],
    "bias": [request(chat(logit_bias={"a": 1}))],
}
"""Requests with a field of a wrong type or range; these answers are the same, too."""

DIFFERENT: dict[str, dict[str, list[Step]]] = {
    "a query after the path": {"query": [request(ONE, target=f"POST {CHAT}?api-version=2024")]},
    "a field of null": {
        "temperature of null": [request(chat(temperature=None))],
        "stream of null": [request(chat(stream=None, model=None))],
    },
    "an integer of more than 4,300 digits": {
        "digits": [request(ONE[:-1] + b', "seed": ' + b"9" * 5000 + b"}")]
    },
    "a history that the template refuses": {
        "half a pair": [request(chat(messages=[{"role": "user", "content": "\ud800"}]))]
    },
    "a stream with `include_usage`": {
        "usage": [request(chat(stream=True, stream_options={"include_usage": True}))]
    },
    "a `Content-Length` that is not a number": {
        "empty length": [request(ONE, length="")],
        "length in words": [request(ONE, length="all")],
    },
    "`Content-Length` below 0": {"negative": [request(ONE, length=-5), HALF_CLOSE]},
    "`Content-Length` above 256 MiB": {"huge": [request(ONE, length=10**15), HALF_CLOSE]},
    "a body that is not UTF-8, or nested too deeply": {
        "not UTF-8": [request(b"\xff\xfe{}")],
        "deep": [request(b"[" * 200_000)],
    },
    "`messages` or `prompt` of a wrong form": {
        "no messages": [request(b"{}")],
        "messages are text": [request(b'{"messages": "Hello?"}')],
        "messages are not a number": [request(b'{"messages": NaN}')],
        "no prompt": [request(b"{}", target=f"POST {TEXT}")],
    },
    "a model that does not exist": {
        "another model": [request(ELSEWHERE)],
        "another model, stream": [request(chat(model="no/such-model", stream=True))],
        "half-closed, another model": [request(ELSEWHERE), HALF_CLOSE],
    },
    "`stop` within a token, or over several tokens": {
        "stop in a token": [request(chat(stop=[*"bcdfghjklmnprstw"], max_tokens=200))]
    },
    "`GET /`": {"root": [ask("GET /")]},
    "`tools` or `chat_template_kwargs` of a wrong form, or an empty list of messages": {
        "tools": [request(chat(tools="look"))],
        "arguments of the template": [request(chat(chat_template_kwargs=[1]))],
        "no message": [request(chat(messages=[]))],
    },
    "a number that stock accepts but cannot use, such as a `seed` below 0": {
        "seed": [request(chat(seed=-1))]
    },
    "`stream_options` without `include_usage`": {
        "stream options": [request(chat(stream=True, stream_options={}))]
    },
    "a message with the role `developer`": {
        "developer": [request(chat(messages=[{"role": "developer", "content": "Hello?"}]))]
    },
    "an image for a model that reads text only": {"image": [request(chat(messages=PICTURE))]},
    "`HEAD /`, `HEAD /api/hello`": {
        "HEAD /": [ask("HEAD /")],
        "HEAD /api/hello": [ask("HEAD /api/hello")],
    },
    "`GET /v1/models/…`": {"another model's": [ask("GET /v1/models/gpt-5")]},
    "`GET /v1/models`": {"models": [ask("GET /v1/models")]},
    # The last row, because stock's generation thread ends.
    "`stop` of a wrong form": {"stop": [request(chat(stop=5))]},
}
"""The rows of the table, by their first column."""


@pytest.fixture(scope="module")
def servers(started: StartServer, tiny_model: Path) -> Iterator[list[ServerProcess]]:
    """A stock server, and a server with the plugin in stock's precision."""
    starts = (
        lambda: started(tiny_model),
        lambda: started.with_plugin(tiny_model, *FULL_PRECISION),
    )
    with ThreadPoolExecutor(2) as pool:
        servers = [future.result() for future in [pool.submit(start) for start in starts]]
    for server in servers:
        server.warm_up()
    yield servers


def answer(server: ServerProcess, steps: list[Step]) -> str:
    """Return all text that a server sends, without parts that differ between equal requests.

    An error object is reduced to its message, because stock sends only the message.
    """
    with socket.create_connection(("127.0.0.1", server.port or 0), timeout=30) as connection:
        try:
            for step in steps:
                if step is HALF_CLOSE:
                    connection.shutdown(socket.SHUT_WR)
                elif isinstance(step, float):
                    time.sleep(step)
                else:
                    connection.sendall(step)
        except ConnectionError:
            pass  # the server has stopped reading
        received = b""
        try:
            while part := connection.recv(1 << 16):
                received += part
        except ConnectionError:
            pass  # the server closed the connection before it read all bytes
    text = received.decode("utf-8", "backslashreplace")
    text = re.sub(r"\r\nDate: [^\r]*", r"\r\nDate: …", text)
    text = re.sub(r"\r\nContent-Length: [^\r]*", "", text)
    error = r'\{"error": \{"message": ("(?:[^"\\]|\\.)*"), "type": [^}]*\}\}'
    text = re.sub(error, r'{"error": \1}', text)
    text = re.sub(r"\r\nX-KVPersist[^\r]*", "", text)
    text = re.sub(r"(?m)^:.*\n\n", "", text)  # comments of a stream
    text = re.sub(r'"(id|system_fingerprint)": "[^"]*"', r'"\1": "…"', text)
    return re.sub(r'"(created|cached_tokens)": \d+', r'"\1": 0', text)


def status(answered: str) -> str:
    return answered.split(" ", 2)[1] if answered else CLOSED


def table() -> dict[str, list[str]]:
    """Return the rows of the docs' table by their first column: both answers and the reason."""
    section = TABLE.read_text("utf-8").partition("## Differences from the stock server")[2]
    lines = section[section.index("\n| ") :].split("\n\n")[0].strip().splitlines()[2:]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines]
    return {first: rest for first, *rest in rows}


@pytest.mark.parametrize("steps", ALIKE.values(), ids=ALIKE)
def test_answer_equals_stocks(servers: list[ServerProcess], steps: list[Step]) -> None:
    stock, ours = (answer(server, steps) for server in servers)
    assert ours == stock


@WRONG_FIELDS
@pytest.mark.parametrize("steps", FIELDS.values(), ids=FIELDS)
def test_answer_to_a_wrong_field_equals_stocks(
    servers: list[ServerProcess], steps: list[Step]
) -> None:
    stock, ours = (answer(server, steps) for server in servers)
    assert ours == stock


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=WRONG_FIELDS if "form" in row else ()) for row in DIFFERENT]
)
def test_answers_differ_as_documented(servers: list[ServerProcess], row: str) -> None:
    documented_stock, documented_ours, reason = table()[row]
    assert reason
    for steps in DIFFERENT[row].values():
        stock, ours = (answer(server, steps) for server in servers)
        assert stock != ours, "the docs name a difference that does not exist"
        fails = status(stock) == CLOSED and not answers_wrong_fields()
        assert (fails or status(stock) in documented_stock) and status(ours) in documented_ours


def test_documented_and_tested_differences_are_the_same() -> None:
    assert set(table()) == set(DIFFERENT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 200}),
    ],
)
def test_client_that_closes_its_sending_side_gets_its_reply(
    servers: list[ServerProcess], path: str, fields: dict[str, object], stream: bool
) -> None:
    body = json.dumps({"model": "default_model", "stream": stream, **fields}).encode()
    sent = request(body, target=f"POST {path}")
    whole, half_closed = answer(servers[1], [sent]), answer(servers[1], [sent, HALF_CLOSE])
    texts = re.findall(r'"(?:text|delta)": [^}]*', whole)
    assert texts and texts == re.findall(r'"(?:text|delta)": [^}]*', half_closed)
