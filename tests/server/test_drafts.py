"""Requests with a draft model behind the real server: kept as those without one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    Message,
    Reply,
    ServerProcess,
    StartServer,
    make_tiny_model,
    make_zoo_model,
    synthetic_text,
    wait_until,
)
from tests.support.drafts import make_draft
from tests.support.openblas import openblas_env

from .lora import make_adapter
from .stored import wait_for_writer
from .test_prefill import Leaving

FULL = "--kvpersist-kv-bits", "16"


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
    return start_server.with_plugin(tiny_model, *FULL, env=openblas_env())


def ask(server: ServerProcess, talk: list[Message], draft: str | None, **params: Any) -> Reply:
    its = {"draft_model": draft} if draft is not None else {}
    params = {"model": str(server.model), "max_tokens": 12, "logprobs": True, **its, **params}
    reply = server.chat(talk, **params)
    wait_until(lambda: not server.is_examining(), "what is found out of a model", 60)
    wait_for_writer(server)
    return reply


def logprobs(reply: Reply) -> list[float]:
    return [token["logprob"] for token in reply.raw["choices"][0]["logprobs"]["content"]]


def test_a_conversation_goes_on_when_its_draft_comes_changes_and_goes(
    server: ServerProcess, drafts: list[str]
) -> None:
    """Each turn after a kill; it says what it says where nothing is stored."""
    talk: list[Message] = [{"role": "system", "content": synthetic_text(1500, seed=61)}]
    for draft in drafts:
        ask(server, [user(9)], draft)
    n_before = 0
    turns: list[str | None] = [drafts[0], drafts[0], drafts[1], None, drafts[0]]
    for n, its in enumerate(turns):
        talk.append(user(n))
        cold = ask(server, talk, its, headers={"X-KVPersist-Namespace": f"cold {n}"})
        reply = ask(server, talk, its)
        assert cold.cached_tokens == 0 and reply.cached_tokens >= n_before
        assert reply.text == cold.text and logprobs(reply) == pytest.approx(
            logprobs(cold), abs=1e-5
        )
        talk.append(said(n))
        n_before = reply.prompt_tokens - 8  # with what the template puts behind the question
        server.restart(kill=True)


def test_what_a_client_that_left_had_computed_is_reused(
    server: ServerProcess, drafts: list[str]
) -> None:
    talk: list[Message] = [{"role": "system", "content": synthetic_text(14_000, seed=62)}, user(0)]
    ask(server, [user(9)], drafts[0])
    params = {"model": str(server.model), "draft_model": drafts[0]}
    leaving = Leaving(server, talk, stream=True, **params)
    n_done = leaving.read_until(0.4)
    leaving.leave()
    reply = ask(server, talk, drafts[0])
    assert 0.9 * n_done <= reply.cached_tokens < 0.9 * reply.prompt_tokens
    assert ask(server, talk, None).text == reply.text


def test_models_with_drafts_and_adapters_take_turns(
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
                ask(server, [user(9)], **kind)  # until it is known, nothing is looked up
            replies.append(ask(server, talk, **kind))
    n_kinds = len(kinds)
    for first, again in zip(replies[:n_kinds], replies[n_kinds:], strict=True):
        assert again.text == first.text and again.cached_tokens == again.prompt_tokens - 1
    # A draft changes neither what a model says, nor what is found of it.
    assert [reply.cached_tokens > 0 for reply in replies[:n_kinds]] == [False, False, False, True]
    assert replies[0].text == replies[3].text != replies[1].text


def test_what_is_lost_of_a_draft_is_computed_again(
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
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        elif start is not None:
            path.unlink()
    server.restart()
    again = ask(server, talk, drafts[0])
    assert again.text == first.text and again.cached_tokens == again.prompt_tokens - 1
    assert "quarantine" in server.log


def test_a_draft_over_windows_is_served_as_stock(
    started: StartServer, drafts: list[str], tmp_path: Path
) -> None:
    model = make_zoo_model(tmp_path / "windows", "gemma3_text")
    server = started.with_plugin(model, "--draft-model", drafts[0])
    assert server.chat([user(3)], max_tokens=2).kvpersist["outcome"] == "STOCK"
    line = (
        "served as stock does, nothing is kept: a draft model is in use, and layer 0 of the model"
    )
    assert server.log.count(line) == 1


def test_the_log_says_once_what_a_draft_costs_others(
    started: StartServer, tiny_model: Path, drafts: list[str]
) -> None:
    server = started.with_plugin(tiny_model, "--draft-model", drafts[0])
    for n in range(2):
        assert server.chat([user(n)], max_tokens=2).kvpersist["outcome"] != "STOCK"
    assert server.log.count("with a draft model requests are served one after another") == 1
