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
        rows_by_table = {}
        for table in tables:
            table_info = db.execute(f"PRAGMA table_info({table})")
            columns = [name for _, name, *_ in table_info if name != "used"]
            rows_by_table[table] = db.execute(
                f"SELECT {', '.join(columns)} FROM {table}"
            ).fetchall()
        return rows_by_table


def recorded_state(server: ServerProcess, store: Path) -> tuple[Any, ...]:
    """Wait for the writer; return the data of requests in the server and its store."""
    wait_for_writer(server)
    notes = {path.name: path.read_bytes() for path in (store / "sessions").glob("*")}
    store_stats = stats(server)["store"]
    ram = store_stats["tiers"]["ram"]
    del ram["reused_tokens"]  # also counts requests that are not kept
    return rows(store), block_files(store), notes, ram, store_stats["turns_saved"]


def test_unkept_request_uses_stored_blocks_and_stores_nothing(
    started: StartServer, server: ServerProcess
) -> None:
    first = server.chat([SYSTEM, ASK], "kept")
    wait_for_reply(server)
    before = recorded_state(server, started.store)
    assert before[0]["blocks"] and before[0]["sessions"] and before[1]
    # Another text than the reply's, so that a server without a store reads the same ids.
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
    # The second request reuses nothing of the first, and neither request changes the store.
    assert again.cached_tokens == restored.cached_tokens
    assert recorded_state(server, started.store) == before
    # The reply equals that of a namespace with nothing to restore.
    alone = server.chat(talk, headers={**NO, "X-KVPersist-Namespace": "alone"})
    assert (alone.cached_tokens, alone.text) == (0, restored.text) and restored.text == again.text
    (record,) = (
        entry
        for entry in json.loads(server.request("GET", "/v1/kvpersist/requests")[2])
        if entry["id"] == restored.headers["x-kvpersist-request"]
    )
    assert record["kept"] is False and ", not kept, session" in record["sentence"]
    # A kept request also reuses nothing of the others, and is itself reused.
    kept = server.chat(talk, "kept")
    assert kept.cached_tokens == restored.cached_tokens and kept.text == restored.text
    assert "kept" not in kept.kvpersist
    assert server.chat(talk, headers=NO).kvpersist["outcome"] == "EXACT"


def test_text_of_an_unkept_request_is_neither_stored_nor_quoted(
    started: StartServer, server: ServerProcess
) -> None:
    """The record has the position of the divergence, but not the text of the prompt."""
    server.chat([SYSTEM, {"role": "user", "content": "At noon the lamps are lit."}])
    question: Message = {"role": "user", "content": "At noon the heron sleeps."}
    reply = server.chat([SYSTEM, question], headers=NO, max_tokens=4)
    assert reply.kvpersist["outcome"] == "DIVERGE"
    body = server.request("GET", "/v1/kvpersist/requests")[2]
    (record, *_) = json.loads(body)
    assert record["divergence"]["asked"] is None and record["divergence"]["message"] == 1
    wait_for_writer(server)
    files = [path for path in started.store.rglob("*") if path.is_file()]
    assert files and not any(b"heron" in path.read_bytes() for path in files)


def test_invalid_keep_header_is_refused(server: ServerProcess) -> None:
    body = {"messages": [ASK], "max_tokens": 1}
    status, _, answer = server.request("POST", CHAT, body, {"X-KVPersist-Keep": "maybe"})
    assert status == 400
    assert (
        "X-KVPersist-Keep is 'maybe', expected yes or no" in json.loads(answer)["error"]["message"]
    )


def test_unkept_request_is_not_stored_in_stocks_prompt_cache(
    started: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """A model with windows and a draft model uses only stock's prompt cache."""
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
