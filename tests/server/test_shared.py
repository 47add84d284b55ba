"""Servers share computed blocks: each restores the others' blocks, and replies do not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    AT_ONCE,
    Message,
    Reply,
    ServerProcess,
    StartServer,
    make_zoo_model,
    synthetic_text,
    wait_until,
)
from tests.support.bucket import Bucket

from .stored import wait_for_reply, wait_for_writer

SYSTEM: Message = {"role": "system", "content": synthetic_text(900, seed=7)}
QUESTIONS = [synthetic_text(300, seed=n) for n in range(20, 23)]


def stats_of(server: ServerProcess) -> dict[str, Any]:
    stats: dict[str, Any] = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return stats


def shared_counts(server: ServerProcess) -> dict[str, Any]:
    counts: dict[str, Any] = stats_of(server)["store"]["tiers"]["shared"]
    return counts


def wait_until_put(server: ServerProcess) -> None:
    wait_for_writer(server)
    wait_until(lambda: shared_counts(server)["waiting"] == 0, "everything put", 60)


class Talk:
    """A conversation whose turns go to any server."""

    def __init__(self) -> None:
        self.messages: list[Message] = [SYSTEM]
        self.replies: list[Reply] = []

    def ask(self, server: ServerProcess, *questions: str) -> Reply:
        """Run one turn for each question; return the last reply."""
        for question in questions:
            self.messages.append({"role": "user", "content": question})
            reply = server.chat(self.messages, "s", max_tokens=270, temperature=0.0)
            self.messages.append({"role": "assistant", "content": reply.text})
            self.replies.append(reply)
        return reply

    @property
    def texts(self) -> list[str]:
        return [reply.text for reply in self.replies]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return path


class Team:
    """Servers of one model, each with its own folder, and all with one shared store."""

    def __init__(self, start: StartServer, model: Path, folder: Path, url: str, key: Path) -> None:
        self._start, self._model, self._folder = start, model, folder
        self._shared = "--kvpersist-shared", url, "--kvpersist-shared-key", str(key)
        self._n_servers = 0

    def server(self, *options: str) -> ServerProcess:
        """Start a server with an empty disk."""
        self._n_servers += 1
        folder = "--kvpersist-dir", str(self._folder / f"dir-{self._n_servers}")
        shared = options or self._shared
        return self._start.with_plugin(self._model, *folder, *shared, launcher=AT_ONCE)

    def expected(self) -> Talk:
        """Return the conversation with a server that shares nothing."""
        talk = Talk()
        talk.ask(alone := self.server("--kvpersist-ram", "256M"), *QUESTIONS)
        alone.stop()
        return talk


@pytest.fixture
def team(started: StartServer, tiny_model: Path, tmp_path: Path, key: Path) -> Team:
    return Team(started, tiny_model, tmp_path, str(tmp_path / "bucket"), key)


@pytest.mark.parametrize(
    "architecture",
    ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "gemma3_text"))],
)
def test_conversation_continues_at_another_server(
    started: StartServer, tiny_model: Path, tmp_path: Path, key: Path, architecture: str
) -> None:
    model = make_zoo_model(tmp_path / "model", architecture) if architecture else tiny_model
    team = Team(started, model, tmp_path, str(tmp_path / "bucket"), key)
    expected, talk = team.expected(), Talk()
    servers = [team.server() for _ in range(2)]
    for n, question in enumerate(QUESTIONS):
        talk.ask(servers[n % 2], question)
        wait_until_put(servers[n % 2])
    assert talk.texts == expected.texts
    for before, reply in pairwise(talk.replies):
        n_before = before.prompt_tokens + before.completion_tokens
        assert reply.cached_tokens > 0.9 * n_before - 256, reply.headers
    assert "tier=shared" in talk.replies[1].headers["x-kvpersist"]
    for server in servers:
        assert shared_counts(server)["refused"] == 0


@pytest.mark.slow
def test_killed_server_shares_its_blocks_after_a_restart(team: Team, tmp_path: Path) -> None:
    expected, talk = team.expected(), Talk()
    first = team.server()
    obstacle = tmp_path / "bucket" / "kvpersist"
    obstacle.touch()
    talk.ask(first, QUESTIONS[0])
    wait_for_reply(first)  # otherwise the next prompt has the tokenized text of the reply
    assert shared_counts(first)["written"] == 0
    first.restart(kill=True)
    obstacle.unlink()
    talk.ask(first, QUESTIONS[1])
    wait_until_put(first)
    second = team.server()
    reply = talk.ask(second, QUESTIONS[2])
    assert talk.texts == expected.texts and reply.cached_tokens > 512
    assert shared_counts(second)["refused"] == 0


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    folder = tmp_path / "weed"
    folder.mkdir()
    made = Bucket(folder)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_servers_with_empty_disks_continue_conversations_from_s3(
    started: StartServer, tiny_model: Path, tmp_path: Path, key: Path, bucket: Bucket
) -> None:
    """A new server replies as if it had computed the conversation.

    Then the store is slow, and later gone: replies are correct, and local blocks are reused.
    """
    team = Team(started, tiny_model, tmp_path, bucket.url, key)
    expected, talk = team.expected(), Talk()
    first, again = team.server(), Talk()
    talk.ask(first, *QUESTIONS[:2])
    wait_until_put(first)
    first.stop()
    second = team.server()
    reply = talk.ask(second, QUESTIONS[2])
    n_before = talk.replies[1].prompt_tokens + talk.replies[1].completion_tokens
    assert talk.texts == expected.texts and reply.cached_tokens > n_before - 256, reply.headers
    assert "tier=shared" in reply.headers["x-kvpersist"]
    wait_until_put(second)
    bucket.link.bytes_per_s = 100e3
    slow = team.server()
    again.ask(slow, QUESTIONS[0])
    bucket.kill()
    again.ask(slow, QUESTIONS[1])
    wait_for_reply(slow)
    slow.restart(kill=True)
    reply = again.ask(slow, QUESTIONS[2])
    assert again.texts == expected.texts
    n_before = again.replies[1].prompt_tokens + again.replies[1].completion_tokens
    assert reply.cached_tokens > n_before - 256, reply.headers


HANGING = """
import sys
import threading
import obstore.store
from mlx_lm_kvpersist._startup import serve
obstore.store.LocalStore = lambda *args, **options: threading.Event().wait()
serve(sys.argv[1:])
"""
"""A server whose shared folder never answers, like an NFS folder without its server."""


@pytest.mark.slow
def test_server_starts_serves_and_ends_with_a_hanging_shared_folder(
    started: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    (launcher := tmp_path / "hanging.py").write_text(HANGING)
    options = "--kvpersist-shared", str(tmp_path / "nas"), "--kvpersist-shared-key", "plain"
    server = started.with_plugin(tiny_model, *options, launcher=(str(launcher),))
    talk = Talk()
    talk.ask(server, *QUESTIONS[:2])
    assert talk.replies[1].cached_tokens > 512
    assert "does not answer" in shared_counts(server)["failed_with"]
    log = server.log_path.read_text()
    assert server.terminate() == 0, "it had to be killed"
    assert log.count("the shared store cannot be read: it does not answer") == 1
    assert log.count("WARNING") == 1
