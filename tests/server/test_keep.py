"""A request with `X-KVPersist-Keep: no` uses stored blocks and stores nothing."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support import Message, ServerProcess, StartServer, make_zoo_model, synthetic_text

from .stored import block_files, wait_for_reply, wait_for_writer

NO = {"X-KVPersist-Keep": "no"}
CHAT = "/v1/chat/completions"
SYSTEM: Message = {"role": "system", "content": synthetic_text(300, seed=21)}
ASK: Message = {"role": "user", "content": "What does the west tower see?"}


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model)


def stats(server: ServerProcess) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return answer


def rows(store: Path) -> dict[str, list[Any]]:
    """Return everything that the index has, except times of use."""
    with closing(sqlite3.connect(store / "index.sqlite", timeout=30)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE sql LIKE "
                                                 "'CREATE TABLE%'")]  # fmt: skip
        found = {}
        for table in tables:
            about = db.execute(f"PRAGMA table_info({table})")
            columns = [name for _, name, *_ in about if name != "used"]
            found[table] = db.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
        return found


def held(server: ServerProcess, store: Path) -> tuple[Any, ...]:
    """Return all that the server and its store have of requests, once the writer is at rest."""
    wait_for_writer(server)
    notes = {path.name: path.read_bytes() for path in (store / "sessions").glob("*")}
    found = stats(server)["store"]
    ram = found["tiers"]["ram"]
    del ram["reused_tokens"]  # of requests that keep nothing, too
    return rows(store), block_files(store), notes, ram, found["turns_saved"]


def test_it_uses_what_is_stored_and_stores_nothing(
    started: StartServer, server: ServerProcess
) -> None:
    first = server.chat([SYSTEM, ASK], "kept")
    wait_for_reply(server)
    before = held(server, started.store)
    assert before[0]["blocks"] and before[0]["sessions"] and before[1]
    # Not the reply's own text, so that a server without a store reads the same.
    answer: Message = {"role": "assistant", "content": "It sees the sea."}
    # Long enough that full blocks would be written before the reply has ended.
    more: Message = {"role": "user", "content": synthetic_text(900, seed=22)}
    talk = [SYSTEM, ASK, answer, more]
    replies = [
        server.chat(talk, "thrown away", headers=NO, stream=stream) for stream in (False, True)
    ]
    restored, again = replies
    assert restored.cached_tokens == first.prompt_tokens
    assert restored.kvpersist["outcome"] == "DIVERGE" and restored.kvpersist["kept"] == "no"
    # The second request finds nothing of the first, and neither changes the store.
    assert again.cached_tokens == restored.cached_tokens
    assert held(server, started.store) == before
    # It replied as a server that has nothing to restore.
    alone = server.chat(talk, headers={**NO, "X-KVPersist-Namespace": "alone"})
    assert (alone.cached_tokens, alone.text) == (0, restored.text) and restored.text == again.text
    (record,) = (
        each
        for each in json.loads(server.request("GET", "/v1/kvpersist/requests")[2])
        if each["id"] == restored.headers["x-kvpersist-request"]
    )
    assert record["kept"] is False and ", not kept, session" in record["sentence"]
    # A request that is stored finds nothing of it either, and is found itself.
    kept = server.chat(talk, "kept")
    assert kept.cached_tokens == restored.cached_tokens and kept.text == restored.text
    assert "kept" not in kept.kvpersist
    assert server.chat(talk, headers=NO).kvpersist["outcome"] == "EXACT"


def test_nothing_quotes_it(started: StartServer, server: ServerProcess) -> None:
    """Its text parts from a stored one: `why` says where, and quotes neither."""
    server.chat([SYSTEM, {"role": "user", "content": "At noon the lamps are lit."}])
    asked: Message = {"role": "user", "content": "At noon the heron sleeps."}
    reply = server.chat([SYSTEM, asked], headers=NO, max_tokens=4)
    assert reply.kvpersist["outcome"] == "DIVERGE"
    body = server.request("GET", "/v1/kvpersist/requests")[2]
    (record, *_) = json.loads(body)
    assert record["divergence"]["asked"] is None and record["divergence"]["message"] == 1
    wait_for_writer(server)
    files = [path for path in started.store.rglob("*") if path.is_file()]
    assert files and not any(b"heron" in path.read_bytes() for path in files)


def test_a_value_that_is_neither_yes_nor_no_is_refused(server: ServerProcess) -> None:
    body = {"messages": [ASK], "max_tokens": 1}
    status, _, answer = server.request("POST", CHAT, body, {"X-KVPersist-Keep": "maybe"})
    assert status == 400
    assert (
        "X-KVPersist-Keep is 'maybe', expected yes or no" in json.loads(answer)["error"]["message"]
    )


def test_the_stock_servers_own_cache_keeps_nothing_either(
    started: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """With a draft, a model with windows is not stored; stock's cache has what it served."""
    model = make_zoo_model(tmp_path / "model", "gemma3_text")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
    options = ("--draft-model", str(tiny_model), "--kvpersist-dir", str(tmp_path / "store"))
    server = started.with_plugin(model, *options)
    for n_cached in (0, 0):
        reply = server.chat([SYSTEM, ASK], headers=NO, max_tokens=4)
        assert (reply.kvpersist["outcome"], reply.cached_tokens) == ("STOCK", n_cached)
    server.chat([SYSTEM, ASK], max_tokens=4)
    assert server.chat([SYSTEM, ASK], max_tokens=4).cached_tokens > 0
