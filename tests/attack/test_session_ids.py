"""A session id can be any text from a client; it names a conversation, never a file."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
from pathlib import Path

from mlx_lm_kvpersist.api.session_keys import short_name
from tests.server.stored import wait_for_commit
from tests.support import Message, ServerProcess, StartServer

SYSTEM: Message = {"role": "system", "content": "You answer.\n"}
IDS = {
    "path": b"../../etc/passwd",
    "absolute": b"/etc/passwd",
    "home": b"~root/.ssh/authorized_keys",
    "long": b"longest-" * 1280,  # 10 KB
    "emoji": "grüße-🎉".encode(),
    "not-utf-8": b"caf\xe9-\xff\xfe",
    "quotes": b"x'; DROP TABLE sessions; --",
    "percent": b"%00%2e%2e%2f-percent",
    "wildcard": b"*.safetensors",
    "device": b"CON:nul.txt",
    "tab": b"a\tb-tabbed",
    "controls": b"ctrl-\x01\x1b[31m\x7f\x85-end",
}


def post(server: ServerProcess, messages: list[Message], header: bytes | None) -> bytes:
    """Send a chat completion with exactly these bytes as its session; return the raw answer."""
    body = json.dumps({"messages": messages, "max_tokens": 6, "temperature": 0.0}).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    ]
    if header is not None:
        lines.append(b"X-Session-ID: " + header)
    assert server.port is not None
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def reply_of(answer: bytes) -> tuple[str, int, int]:
    """Return a reply's text, its cached tokens and all its tokens."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")), head[:500]
    content = json.loads(body)
    usage = content["usage"]
    text: str = content["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens_details"]["cached_tokens"], usage["total_tokens"]


def two_turns(server: ServerProcess, name: str, header: bytes | None) -> int:
    """Send two turns; check that the second reuses the first. Return the total tokens."""
    messages = [SYSTEM, {"role": "user", "content": f"{name}: hello?"}]
    text, _, total = reply_of(post(server, messages, header))
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    _, cached, total_after = reply_of(post(server, messages, header))
    assert cached >= total - 1, name
    return total_after


def parts_of(session: bytes) -> set[str]:
    """Return the parts of a session id that could appear in a path."""
    text = session.decode("latin-1")
    parts = set(re.split(r"[/\\]", text)) | {text, session.decode("utf-8", "replace")}
    parts |= {part.partition(".")[0] for part in parts}
    return {part.lower() for part in parts if len(part) >= 3 and part not in ("sessions",)}


def paths_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_session_ids_never_appear_in_paths(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    cwd = tmp_path / "a" / "b" / "cwd"
    cwd.mkdir(parents=True)
    server = start_server.with_plugin(tiny_model, cwd=cwd)
    store = start_server.store
    etc = paths_of_etc()
    outside = {path for path in paths_below(tmp_path) if not path.startswith("store")}
    for name, session in IDS.items():
        total = two_turns(server, name, session)
        wait_for_commit(store, kept_name(session), total)
    paths = paths_below(store)
    assert len([path for path in paths if path.startswith("sessions/")]) == len(IDS)
    for name, session in IDS.items():
        for path in paths:
            allowed = "safetensors" if name == "wildcard" else ""
            leaked = [
                part for part in parts_of(session) if part in path.lower() and part != allowed
            ]
            assert not leaked, f"{name}: {leaked} in {path}"
    now = {path for path in paths_below(tmp_path) if not path.startswith("store")}
    assert now - outside == set() and paths_of_etc() == etc
    assert "Traceback" not in server.log
    # Session names and stored turns survive a kill.
    server.restart(kill=True)
    for name in IDS:
        again = server.chat([SYSTEM, {"role": "user", "content": f"{name}: hello?"}], max_tokens=1)
        assert again.kvpersist["tier"] in ("disk", "ram")
        assert again.cached_tokens == again.prompt_tokens - 1, name
    with sqlite3.connect(store / "index.sqlite") as db:
        names = {name for (name,) in db.execute("SELECT name FROM sessions")}
    db.close()
    assert {kept_name(session) for session in IDS.values()} == names - {None}


def kept_name(session: bytes) -> str:
    return short_name(session.decode("latin-1").strip())


def paths_of_etc() -> set[Path]:
    return set(Path("/etc").iterdir())


def test_server_survives_session_ids_that_http_cannot_carry(
    start_server: StartServer, tiny_model: Path
) -> None:
    """The server may refuse NUL, line breaks and 70 KB, but must continue."""
    server = start_server.with_plugin(tiny_model)
    two_turns(server, "none", None)
    two_turns(server, "empty", b"")
    two_turns(server, "blank", b"   ")
    odd = {
        "nul": b"nul-\0-byte",
        "line feed": b"first\n second",
        "carriage return": b"first\rX-Other: second",
        "new header": b"first\r\nX-KVPersist-Namespace: second",
        "end of headers": b"first\r\n\r\nGET / HTTP/1.1",
        "70 KB": b"y" * 70_000,
    }
    messages = [SYSTEM, {"role": "user", "content": "Odd?"}]
    for name, session in odd.items():
        try:
            answer = post(server, messages, session)
        except ConnectionError:
            answer = b""
        assert server.healthy(), name
        if name in ("nul", "line feed"):
            assert b" 200 " in answer[:20], name
    two_turns(server, "afterwards", b"a-plain-name")
    server.terminate()  # the server first writes its queue
    assert all(len(path.name) < 80 for path in start_server.store.rglob("*"))
    with sqlite3.connect(start_server.store / "index.sqlite") as db:
        names = [name for (name,) in db.execute("SELECT name FROM sessions")]
    db.close()
    assert "" not in names and "a-plain-name" in names
