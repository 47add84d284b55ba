"""Long prompts on a real server: disconnects, shared prefixes, kills."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    Message,
    Reply,
    ServerProcess,
    StartServer,
    make_zoo_model,
    synthetic_text,
)
from tests.support.openblas import openblas_env
from tests.support.waiting import wait_until
from tests.support.zygote import Zygote

from .stored import wait_for_reply, wait_for_writer

LONG = 10_000
"""Characters of a prompt that takes seconds."""


@pytest.fixture(scope="module", autouse=True)
def zygote() -> Iterator[None]:
    """These servers compute with OpenBLAS; they are forked from a process that has loaded it."""
    before = ServerProcess.zygotes[sys.executable]
    made = Zygote(env=openblas_env())
    ServerProcess.zygotes[sys.executable] = (*before, made)
    yield
    ServerProcess.zygotes[sys.executable] = before
    made.close()


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path, zygote: None) -> ServerProcess:
    return started.with_plugin(tiny_model, env=openblas_env())


class LeavingClient:
    """A client that sends a prompt, reads its progress, and disconnects."""

    def __init__(self, server: ServerProcess, messages: list[Message], **params: Any) -> None:
        self._server, self._from = server, len(server.log)
        body = {"messages": messages, "max_tokens": 4, "temperature": 0.0, **params}
        payload = json.dumps(body).encode()
        self._socket = socket.create_connection(("127.0.0.1", server.port or 0), timeout=120)
        self.lines = self._socket.makefile("rb")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket.sendall(head.encode() + payload)

    def read_until(self, share: float) -> int:
        """Read until at least this share of the prompt is computed; return the computed tokens."""
        latest: list[tuple[int, int]] = []

        def is_far() -> bool:
            progress = re.findall(
                r"processing progress: (\d+)/(\d+)", self._server.log[self._from :]
            )
            latest[:] = [(int(done), int(total)) for done, total in progress[-1:]]
            return bool(latest) and latest[0][0] >= share * latest[0][1]

        wait_until(is_far, "a part of the prompt", 60)
        return latest[0][0]

    def leave(self) -> None:
        self.lines.close()
        self._socket.close()


def talk(seed: int, n_chars: int = LONG, question: str = "What?") -> list[Message]:
    system: Message = {"role": "system", "content": synthetic_text(n_chars, seed=seed)}
    return [system, {"role": "user", "content": question}]


@pytest.mark.parametrize("params", [{}, {"seed": 7}], ids=["in a batch", "alone"])
def test_tokens_computed_for_a_disconnected_client_are_reused(
    server: ServerProcess, params: dict[str, Any]
) -> None:
    messages = talk(len(params) + 100, 2 * LONG)  # chunks of 2,048 tokens are a sixth of it
    leaving = LeavingClient(server, messages, stream=True, **params)
    n_done = leaving.read_until(0.4)
    leaving.leave()
    reply = server.chat(messages, max_tokens=4, temperature=0.0, **params)
    assert reply.cached_tokens >= 0.9 * n_done, (reply.cached_tokens, n_done)
    # The prompt was not computed to its end: its last full block is not reused.
    assert reply.cached_tokens < reply.prompt_tokens // 256 * 256
    wait_for_reply(server)


def test_prompt_continues_from_written_blocks_after_kill_9(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    plugin = "--plugin", "kvpersist"
    folder, env = str(tmp_path / "store"), openblas_env()
    server = start_server(tiny_model, *plugin, "--kvpersist-dir", folder, env=env)
    messages = talk(2, 2 * LONG)
    leaving = LeavingClient(server, messages, stream=True)
    leaving.read_until(0.5)
    wait_until(lambda: n_stored(server) >= 5, "blocks on the disk")
    server.restart(kill=True)
    leaving.leave()
    cut = server.chat(messages, max_tokens=8, temperature=0.0)
    assert 5 * 256 <= cut.cached_tokens < cut.prompt_tokens - 1, cut.cached_tokens
    other = {"X-KVPersist-Namespace": "other"}  # with an empty store
    whole = server.chat(messages, max_tokens=8, temperature=0.0, headers=other)
    assert whole.cached_tokens == 0 and whole.text == cut.text


@pytest.mark.parametrize(
    "family", ["gemma3_text", "qwen3_next", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_models_with_windows_and_states_continue_from_prefill_checkpoints(
    family: str, start_server: StartServer, tmp_path: Path
) -> None:
    model = make_zoo_model(tmp_path / "model", family)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 16}))
    server = start_server.with_plugin(model, env=openblas_env())
    messages = talk(3, 10_000)
    leaving = LeavingClient(server, messages, stream=True)
    n_done = leaving.read_until(0.7)
    leaving.leave()
    reply = server.chat(messages, max_tokens=4, temperature=0.0)
    assert reply.cached_tokens >= n_done - 2048 > 0, (reply.cached_tokens, n_done)
    wait_for_reply(server)
    again = server.chat(talk(3, 10_000, question="Other?"), max_tokens=4)
    assert again.cached_tokens > 0.9 * again.prompt_tokens
    wait_for_writer(server)
    stored = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])["store"]["tiers"]["disk"]
    # Checkpoints between chunks are deleted; the first, the prompt's and the reply's are left.
    assert stored["checkpoints"] <= 24, stored


@pytest.mark.parametrize("params", [{}, {"seed": 7}])
def test_disconnect_without_streaming_stops_the_reply(
    server: ServerProcess, params: dict[str, Any]
) -> None:
    """The reply to a request with a seed would run alone while other requests wait."""
    before = served_tokens(server)
    for pause_s in (0.3, 3.0, 30.0):  # until some tokens of the reply are computed
        leaving = LeavingClient(server, talk(4, 40), max_tokens=30_000, **params)
        leaving.read_until(1.0)
        time.sleep(pause_s)
        leaving.leave()
        server.chat(talk(5, 40), max_tokens=4)
        if served_tokens(server) > before + 3:
            break
    wait_until(lambda: served_tokens(server) > before + 3, "the reply that was cut off")
    assert served_tokens(server) < before + 15_000


def n_stored(server: ServerProcess) -> int:
    """Return how many blocks the index has; the file of a block is written earlier."""
    stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return int(stats["store"]["tiers"]["disk"]["blocks"])


def served_tokens(server: ServerProcess) -> int:
    """Return how many reply tokens clients got, without the first of each reply."""
    text = server.request("GET", "/metrics")[2].decode()
    counts = [
        line.split()[-1]
        for line in text.splitlines()
        if line.startswith("kvpersist_inter_token_seconds_count")
    ]
    return int(sum(map(float, counts)))


def test_concurrent_agents_compute_a_shared_system_prompt_once(server: ServerProcess) -> None:
    agents = [talk(6, 3000, question=f"I am agent {n}.") for n in range(6)]

    def ask(messages: list[Message], **params: Any) -> Reply:
        return server.chat(messages, max_tokens=8, temperature=0.0, **params)

    with ThreadPoolExecutor(len(agents)) as pool:
        replies = list(pool.map(ask, agents))
    computed = [reply.prompt_tokens - reply.cached_tokens for reply in replies]
    assert sum(computed) <= 1.5 * max(reply.prompt_tokens for reply in replies), computed
    for n, (messages, reply) in enumerate(zip(agents, replies, strict=True)):
        alone = ask(messages, headers={"X-KVPersist-Namespace": f"alone {n}"})
        assert (alone.cached_tokens, alone.text) == (0, reply.text)


def test_short_prompt_does_not_wait_for_a_long_one(server: ServerProcess) -> None:
    first = threading.Event()
    long = LeavingClient(server, talk(7), stream=True, max_tokens=2)

    def read() -> None:
        for line in long.lines:
            if line.startswith(b"data: "):
                first.set()

    reader = threading.Thread(target=read)
    reader.start()
    server.chat(talk(8, 10), max_tokens=1)
    assert not first.is_set()
    reader.join()
    long.leave()
    assert first.is_set()
