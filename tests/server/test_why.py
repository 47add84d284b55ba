"""A reason for every miss, from a real server."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.cli.output import utc_time
from tests.support import (
    Message,
    ServerProcess,
    StartServer,
    make_tiny_model,
    synthetic_text,
    wait_until,
)

from .stored import wait_for_writer

SYSTEM: Message = {"role": "system", "content": synthetic_text(300)}
QUESTION: Message = {"role": "user", "content": "What does the north tower see at noon?"}


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """The server of all tests that need no options."""
    return started.with_plugin(tiny_model, "--kvpersist-show-text")


def records(server: ServerProcess) -> list[dict[str, Any]]:
    status, _, body = server.request("GET", "/v1/kvpersist/requests")
    assert status == 200
    answer: list[dict[str, Any]] = json.loads(body)
    return answer


def printed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a server's record as commands print it: times are in ISO 8601."""
    return {**record, "received": utc_time(record["received"])}


def without_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a server's record as in the store: without the session's title and words."""
    return {name: value for name, value in record.items() if name not in ("title", "words")}


def unquoted(record: dict[str, Any]) -> dict[str, Any]:
    divergence = record["divergence"]
    return {**record, "divergence": divergence and {**divergence, "stored": None, "asked": None}}


def test_record_and_why_show_where_a_prompt_diverges(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    system: Message = {"role": "system", "content": synthetic_text(300, seed=7)}
    reply = server.chat([system, QUESTION], "s")
    edited: Message = {"role": "user", "content": "What does the north gate see at noon?"}
    other = server.chat([system, edited], "s")
    newest, oldest = records(server)[:2]
    assert oldest["id"] == reply.headers["x-kvpersist-request"]
    why = "no stored prompt begins like it"
    assert (oldest["outcome"], oldest["reason"]) == ("MISS", why)
    assert newest["id"] == other.headers["x-kvpersist-request"]
    assert (newest["outcome"], newest["session"]) == ("DIVERGE", "s")
    assert newest["reused_tokens"] == other.cached_tokens
    divergence = newest["divergence"]
    assert (divergence["message"], divergence["role"], divergence["message_char"]) == (
        1,
        "user",
        20,
    )
    assert divergence["stored"].startswith("tower see at noon?")
    assert divergence["asked"].startswith("gate see at noon?")
    # The command prints the same.
    options = ["--url", f"http://127.0.0.1:{server.port}"]
    assert main(["why", *options, newest["id"]]) == 0
    output = capsys.readouterr().out
    assert "in message 1 (user), at its character 20" in output and "asked:  gate see" in output
    assert main(["why", *options]) == 0
    assert newest["id"] in capsys.readouterr().out
    assert main(["why", *options, "--json", newest["id"]]) == 0
    printed_record = without_names(
        json.loads(capsys.readouterr().out)
    )  # names are set when a turn is written
    assert printed_record == printed(without_names(newest))
    assert main(["why", *options, "no-such-id"]) == 1
    assert "no request 'no-such-id'" in capsys.readouterr().err


def test_why_reads_records_without_a_running_server(
    start_server: StartServer, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server.with_plugin(tiny_model)
    server.chat([SYSTEM, QUESTION], "first")
    server.chat([SYSTEM, {"role": "user", "content": "What does the north gate see?"}], "s")
    wait_until(
        lambda: all(entry["first_token_s"] for entry in records(server)), "their first tokens"
    )
    expected = [*map(without_names, records(server))]
    server.terminate()
    store = ["--kvpersist-dir", str(start_server.store)]
    assert main(["why", *store, "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert [*map(unquoted, stored)] == [
        *map(printed, expected)
    ]  # the server's records have no quotes
    assert stored[0]["divergence"]["asked"].startswith("gate see?")
    assert main(["why", *store]) == 0
    out = capsys.readouterr().out
    assert all(record["id"] in out and record["sentence"] in out for record in expected)
    assert f"Of {sum(entry['prompt_tokens'] for entry in expected):,} tokens" in out
    assert re.search(r"^Written in the last hour: [1-9][\d.]* KiB$", out, re.MULTILINE)
    assert main(["why", *store, expected[0]["id"]]) == 0
    out = capsys.readouterr().out
    assert expected[0]["sentence"] in out and "asked:  gate see?" in out
    assert f"First token after {expected[0]['first_token_s']:.2f} s" in out
    # A restarted server adds its records.
    again = start_server.with_plugin(tiny_model)
    again.chat([SYSTEM, QUESTION])
    again.terminate()
    assert main(["why", *store, "--json"]) == 0
    all_records = json.loads(capsys.readouterr().out)
    assert all_records[1:] == stored and all_records[0]["outcome"] in ("EXACT", "EXTEND", "DIVERGE")
    # Deleting a session deletes its records, and its quotes in other records.
    assert main(["sessions", "rm", *store, "s"]) == 0
    capsys.readouterr()
    assert main(["why", *store, "--json"]) == 0
    remaining = json.loads(capsys.readouterr().out)
    assert remaining == [unquoted(entry) for entry in all_records if entry["session"] != "s"] != []
    assert not any(b"gate see" in path.read_bytes()
                   for path in start_server.store.rglob("*") if path.is_file())  # fmt: skip


def test_with_no_text_option_prompt_text_is_not_stored(
    start_server: StartServer, tiny_model: Path
) -> None:
    server = start_server.with_plugin(tiny_model, "--kvpersist-no-text")
    server.chat([SYSTEM, QUESTION])
    server.chat([SYSTEM, {"role": "user", "content": "What else?"}])
    assert "north tower" not in json.dumps(records(server))
    assert records(server)[0]["outcome"] == "DIVERGE"
    server.terminate()  # everything is then written, and no file is removed while it is read
    files = [path for path in start_server.store.rglob("*") if path.is_file()]
    assert files and not any(b"north tower" in path.read_bytes() for path in files)


def test_stats_and_spec_describe_the_running_server(
    server: ServerProcess, tiny_model: Path
) -> None:
    server.chat([SYSTEM, QUESTION])
    status, _, body = server.request("GET", "/v1/kvpersist/stats?x=1")
    stats = json.loads(body)
    assert status == 200
    assert stats["model"] == str(tiny_model)
    assert stats["store"]["tiers"]["ram"]["blocks"] >= 1
    spec = json.loads(server.request("GET", "/v1/kvpersist/spec")[2])
    assert (spec["model"], spec["kept"]) == (str(tiny_model), True)
    assert spec["bytes_per_token"] > 0
    plans = {n: plan["rules"] for n, plan in spec["attention"].items()}
    assert set(plans) == {group["name"] for group in spec["groups"]}
    rules = [rule for plan in plans.values() for rule in plan]
    assert all(set(rule) == {"strategy", "most_queries", "least_rows"} for rule in rules)


def test_why_prints_one_line_if_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert main(["why", "--url", f"127.0.0.1:{port}"]) == 1
    err = capsys.readouterr().err
    assert f"no answer from http://127.0.0.1:{port} ([Errno " in err and err.count("\n") == 1
    for url in ("no such thing", "http://", "ftp://127.0.0.1"):
        assert main(["why", "--url", url]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_reason_says_another_namespace_model_or_precision(
    start_server: StartServer, tiny_model: Path, models_dir: Path
) -> None:
    """The same text is stored for another model, namespace or precision."""
    other_model = make_tiny_model(models_dir / "other-weights", seed=9)
    server = start_server.with_plugin(tiny_model)
    server.chat([SYSTEM, QUESTION])
    wait_for_writer(server)
    elsewhere = server.chat([SYSTEM, QUESTION], headers={"X-KVPersist-Namespace": "team"})
    assert elsewhere.cached_tokens == 0
    assert records(server)[0]["reason"] == "stored in another namespace or session"
    server.chat([SYSTEM, QUESTION], model=str(other_model))
    assert records(server)[0]["reason"] == "stored for another model"
    server.terminate()
    coarse = start_server.with_plugin(tiny_model, "--kvpersist-kv-bits", "8")
    assert coarse.chat([SYSTEM, QUESTION]).cached_tokens == 0
    record = records(coarse)[0]
    assert record["reason"] == "stored in another KV precision"
    assert record["detail"] == (
        "stored in another KV precision: keys 8 bits, values 4, rotated; "
        "now keys 8 bits, values 8, rotated"
    )
    assert record["detail"] in record["sentence"]
    assert coarse.chat([SYSTEM, QUESTION]).cached_tokens > 0


def test_reason_and_stats_report_evicted_tokens(
    start_server: StartServer, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server.with_plugin(
        tiny_model, "--kvpersist-disk", "1400K", "--kvpersist-ram", "0"
    )
    talks = [[{"role": "user", "content": synthetic_text(2400, seed=n)}] for n in range(4)]
    for talk in talks:
        server.chat(talk, max_tokens=8)
    wait_until(lambda: is_idle(server), "a writer at rest")
    again = server.chat(talks[0], max_tokens=8)
    assert again.cached_tokens == 0
    assert records(server)[0]["reason"] == "evicted to stay within the budget"
    # The conversation is written again, so its eviction was useless.
    wait_until(lambda: n_asked_again(server) > 256, "tokens that were asked for again")
    wait_until(lambda: is_idle(server), "a writer at rest")
    assert main(["why", "--url", f"http://127.0.0.1:{server.port}"]) == 0
    out = capsys.readouterr().out
    assert "\nOf " in out and " a turn since the server's start\n" in out
    assert f"Evicted from disk and asked for again: {n_asked_again(server):,} tokens\n" in out
    assert re.search(r"^Memory: .* of .*records 32\.\d MiB", out, re.MULTILINE)


def n_asked_again(server: ServerProcess) -> int:
    stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return int(stats["store"]["tiers"]["disk"]["asked_again_tokens"])


def is_idle(server: ServerProcess) -> bool:
    stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return bool(stats["store"]["queue"]["tasks"] == 0)
