"""Requests with a draft model on a real server are stored like requests without a draft model."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandLine, block_files
from tests.support import (
    FULL_PRECISION,
    Message,
    Reply,
    ServerProcess,
    StartServer,
    make_tiny_model,
    make_zoo_model,
    synthetic_text,
)
from tests.support.drafts import make_draft

from .lora import make_adapter
from .stored import wait_for_writer
from .test_prefill import LeavingClient


def user(n: int, n_chars: int = 90) -> Message:
    return {"role": "user", "content": f"{n}? " + synthetic_text(n_chars, seed=70 + n)}


def said(n: int) -> Message:
    return {"role": "assistant", "content": synthetic_text(60, seed=170 + n)}


@pytest.fixture(scope="module")
def drafts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("drafts")
    return [str(make_draft(tiny_model, folder / str(n), n)) for n in range(2)]


@pytest.fixture
def server(start_server: StartServer, tiny_model: Path) -> ServerProcess:
    return start_server.with_plugin(tiny_model, *FULL_PRECISION)


def ask(server: ServerProcess, talk: list[Message], draft: str | None, **params: Any) -> Reply:
    draft_params = {"draft_model": draft} if draft is not None else {}
    params = {
        "model": str(server.model),
        "max_tokens": 12,
        "logprobs": True,
        **draft_params,
        **params,
    }
    reply = server.chat(talk, **params)
    wait_for_writer(server)
    return reply


def logprobs(reply: Reply) -> list[float]:
    return [token["logprob"] for token in reply.raw["choices"][0]["logprobs"]["content"]]


def test_conversation_is_reused_after_its_draft_model_changes(
    server: ServerProcess, drafts: list[str]
) -> None:
    """The server is killed after each turn; each reply equals a reply without stored turns."""
    talk: list[Message] = [{"role": "system", "content": synthetic_text(600, seed=61)}]
    for draft in drafts:
        ask(server, [user(9)], draft)
    n_before = 0
    turns: list[str | None] = [drafts[0], drafts[0], drafts[1], None, drafts[0]]
    for n, turn_draft in enumerate(turns):
        talk.append(user(n))
        cold = ask(server, talk, turn_draft, headers={"X-KVPersist-Namespace": f"cold {n}"})
        reply = ask(server, talk, turn_draft)
        assert cold.cached_tokens == 0 and reply.cached_tokens >= n_before
        assert reply.text == cold.text and logprobs(reply) == pytest.approx(
            logprobs(cold), abs=1e-5
        )
        talk.append(said(n))
        n_before = reply.prompt_tokens - 8  # without the template's text after the question
        server.restart(kill=True)


def test_penalties_are_equal_in_a_batch_alone_and_with_a_draft(
    server: ServerProcess, drafts: list[str]
) -> None:
    """Each prompt is first computed, then restored up to its last token."""
    for draft in (None, drafts[0]):
        ask(server, [user(9)], draft)
    talk = [user(4, 900)]
    penalties = {"repetition_penalty": 1.8, "presence_penalty": 0.7, "presence_context_size": 200}
    replies = []
    for name, draft, params in (
        ("batch", None, {}),
        ("alone", None, {"seed": 5}),
        ("draft", drafts[0], {}),
    ):
        headers = {"X-KVPersist-Namespace": name}
        for _ in range(2):
            replies.append(ask(server, talk, draft, headers=headers, **penalties, **params))
    first, *others = replies
    assert first.text != ask(server, talk, None).text
    n_prompt = first.prompt_tokens
    assert [reply.cached_tokens for reply in replies] == [0, n_prompt - 1] * 3
    for reply in others:
        assert reply.text == first.text
        assert logprobs(reply) == pytest.approx(logprobs(first), abs=1e-5)


@pytest.mark.slow
def test_tokens_computed_for_a_disconnected_client_are_reused(
    server: ServerProcess, drafts: list[str]
) -> None:
    talk: list[Message] = [{"role": "system", "content": synthetic_text(14_000, seed=62)}, user(0)]
    ask(server, [user(9)], drafts[0])
    params = {"model": str(server.model), "draft_model": drafts[0]}
    leaving = LeavingClient(server, talk, stream=True, **params)
    n_done = leaving.read_until(0.4)
    leaving.leave()
    reply = ask(server, talk, drafts[0])
    assert 0.9 * n_done <= reply.cached_tokens < reply.prompt_tokens // 256 * 256
    assert ask(server, talk, None).text == reply.text


@pytest.mark.slow
def test_tokens_computed_before_a_kill_are_reused(server: ServerProcess, drafts: list[str]) -> None:
    """After each kill, the reply equals the reply to a computed prompt."""
    talk: list[Message] = [{"role": "system", "content": synthetic_text(14_000, seed=63)}, user(0)]
    params = {"model": str(server.model), "draft_model": drafts[0], "stream": True}
    ask(server, [user(9)], drafts[0])

    def check(n_least: int) -> Reply:
        cold = ask(server, talk, drafts[0], headers={"X-KVPersist-Namespace": f"cold {n_least}"})
        reply = ask(server, talk, drafts[0])
        assert cold.cached_tokens == 0 and reply.cached_tokens >= n_least
        assert reply.text == cold.text
        assert logprobs(reply) == pytest.approx(logprobs(cold), abs=1e-5)
        return reply

    leaving = LeavingClient(server, talk, **params)
    leaving.read_until(0.6)
    server.restart(kill=True)
    leaving.leave()
    n_prompt = check(256).prompt_tokens

    leaving, read = LeavingClient(server, talk, max_tokens=400, **params), ""
    while len(read) < 100 and (line := leaving.lines.readline()):
        if line.startswith(b"data: {"):
            read += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    server.restart(kill=True)
    leaving.leave()
    talk += [{"role": "assistant", "content": read}, user(1)]
    check(n_prompt - 256)


def test_model_and_draft_blocks_are_one_session_and_deleted_together(
    server: ServerProcess, drafts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(server, [user(9)], drafts[0])
    reply = ask(server, [user(1, 900)], drafts[0], headers={"X-Session-ID": "mine"})
    talk = [user(1, 900), {"role": "assistant", "content": reply.text}, user(2)]
    ask(server, talk, drafts[0], headers={"X-Session-ID": "mine"})
    server.stop()
    run = CommandLine(Path(server.extra[server.extra.index("--kvpersist-dir") + 1]), capsys)
    listed = run.json("sessions", "list")["sessions"]
    assert {(session["name"], session["model"]) for session in listed} == {
        (name, str(server.model)) for name in (None, "mine")
    }
    assert run("store", "rebuild") == 0 and run.json("store", "verify")["ok"]
    run("sessions", "rm", *(session["id"] for session in listed))
    assert block_files(run.folder) == {}


def test_alternating_models_drafts_and_adapters_reuse_their_own_blocks(
    server: ServerProcess, drafts: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1, n_layers=1)
    kinds: list[dict[str, Any]] = [
        {"draft": drafts[0]},
        {"draft": str(make_draft(other, tmp_path / "its draft")), "model": str(other)},
        {"draft": drafts[0], "adapters": str(make_adapter(tmp_path / "adapter", tiny_model))},
        {"draft": None},
    ]
    talk = [user(1, 900)]
    replies: list[Reply] = []
    for n in range(2):
        for kind in kinds:
            if n == 0:
                ask(server, [user(9)], **kind)  # a model's first request makes no lookup
            replies.append(ask(server, talk, **kind))
    n_kinds = len(kinds)
    for first, again in zip(replies[:n_kinds], replies[n_kinds:], strict=True):
        assert again.text == first.text and again.cached_tokens == again.prompt_tokens - 1
    with ThreadPoolExecutor(4) as pool:  # each waits while another model's stream runs
        more = pool.map(lambda kind: ask(server, talk, **kind, max_tokens=60), kinds)
        for first, longer in zip(replies, list(more), strict=False):
            assert longer.text.startswith(first.text)
    # A draft model changes neither replies nor reuse.
    assert [reply.cached_tokens > 0 for reply in replies[:n_kinds]] == [False, False, False, True]
    assert replies[0].text == replies[3].text != replies[1].text


def test_lost_blocks_of_the_draft_model_are_recomputed(
    server: ServerProcess, drafts: list[str]
) -> None:
    talk = [user(2, 2500)]
    ask(server, [user(9)], drafts[0])
    first = ask(server, talk, drafts[0])
    server.stop()
    store = Path(server.extra[server.extra.index("--kvpersist-dir") + 1])
    with sqlite3.connect(store / "index.sqlite") as db:
        rows = db.execute(
            "SELECT hex(blocks.key), start, about FROM blocks JOIN roots ON root = roots.key"
        )
        starts = {
            key.lower(): start
            for key, start, about in rows
            if json.loads(about)["model"] == drafts[0] and start >= 512
        }
    files = {path: starts.get(path.stem) for path in (store / "blocks").rglob("*.safetensors")}
    assert len(starts) > 2
    for path, start in files.items():
        if start == 512:
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif start is not None:
            path.unlink()
    server.restart()
    again = ask(server, talk, drafts[0])
    assert again.text == first.text and again.cached_tokens == again.prompt_tokens - 1
    assert "quarantine" in server.log


def test_windowed_model_with_a_draft_is_served_as_stock(
    started: StartServer, drafts: list[str], tmp_path: Path
) -> None:
    model = make_zoo_model(tmp_path / "windows", "gemma3_text")
    server = started.with_plugin(model, "--draft-model", drafts[0])
    assert server.chat([user(3)], max_tokens=2).kvpersist["outcome"] == "STOCK"
    line = (
        "served as stock does, nothing is kept: a draft model is in use, and layer 0 of the model"
    )
    assert server.log.count(line) == 1


def test_log_says_once_that_drafts_prevent_concurrent_requests(
    started: StartServer, tiny_model: Path, drafts: list[str]
) -> None:
    server = started.with_plugin(tiny_model, "--draft-model", drafts[0])
    for n in range(2):
        assert server.chat([user(n)], max_tokens=2).kvpersist["outcome"] != "STOCK"
    assert server.log.count("with a draft model requests are served one after another") == 1
