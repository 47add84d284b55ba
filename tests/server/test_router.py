"""Two servers behind the newest SGLang gateway: one is killed, and every reply is correct."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.connect import router
from tests.support import ServerProcess, StartServer, synthetic_text, wait_until
from tests.support.bucket import install
from tests.support.server_process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N_CONVERSATIONS = 16
"""Enough for several at each server: the router sends a new conversation to a random server."""
N_TURNS = 4
LEAST_SHARE = 0.9
"""The least reuse of the living server, as a share of the reuse without a router."""
TOOLS = [
    {
        "name": "read",
        "description": "Read a file. " + synthetic_text(600, seed=77),
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]


class Router(ServerProcess):
    """The gateway, run with the command of `connect router`, and used like a server."""

    def __init__(self, command: str, programs: Path, port: int, folder: Path) -> None:
        super().__init__("team", port=port, launcher=("smg",), log_path=folder / "router.log")
        words = shlex.split(command)
        words[0] = str(programs / "smg")
        words[words.index("--port") + 1] = str(port)
        self._words = [*words, "--prometheus-port", str(free_port())]

    @property
    def command(self) -> list[str]:
        return self._words


Talk = list[dict[str, Any]]
Answer = tuple[str, int, int]
"""A reply's text, the number of reused prompt tokens, and the number of prompt tokens."""


def chat(server: ServerProcess, talk: Talk, n: int) -> Answer:
    """Ask as most clients do; every fourth conversation is streamed."""
    reply = server.chat(talk, model="default_model", max_tokens=8, stream=n % 4 == 1)
    return reply.text, reply.cached_tokens, reply.prompt_tokens


def claude_code(server: ServerProcess, talk: Talk, n: int) -> Answer:
    """Ask as Claude Code does: count the tokens, then request a stream, with tools."""
    system = [{"type": "text", "text": f"You help with project {n}. " + "Be brief. " * 40}]
    request = {"model": "claude-local", "system": system, "tools": TOOLS, "messages": talk}
    status, _, body = server.request("POST", "/v1/messages/count_tokens", request)
    assert status == 200, body
    text, usage = "", dict[str, int]()
    streamed = {**request, "max_tokens": 8, "stream": True}
    for name, data in server.events("/v1/messages?beta=true", streamed):
        content = json.loads(data)
        if name == "content_block_delta":
            text += content["delta"].get("text", "")
        usage |= content.get("usage") or {}
    n_prompt = sum(n for kind, n in usage.items() if kind.endswith("input_tokens"))
    assert n_prompt == json.loads(body)["input_tokens"]
    return text, usage["cache_read_input_tokens"], n_prompt


def ask(server: ServerProcess, talk: Talk, n: int) -> Answer:
    return (claude_code if n % 2 else chat)(server, talk, n // 2)


def n_served(server: ServerProcess) -> int:
    """Return how many requests a living server has answered so far."""
    return len(json.loads(server.request("GET", "/v1/kvpersist/requests")[2]))


@dataclass
class Exchange:
    """A request that went through the router, and its answer."""

    n: int
    talk: Talk
    server: ServerProcess
    answer: Answer


def test_killing_one_routed_server_keeps_replies_and_reuse(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    def start(name: str, *more: str) -> ServerProcess:
        folder = ("--kvpersist-dir", str(tmp_path / name))
        name_option = ("--kvpersist-served-name", "team")
        return start_server.with_plugin(tiny_model, *folder, *name_option, *more)

    servers = [start("a"), start("b")]
    assert json.loads(servers[0].request("GET", "/v1/models")[2])["data"][0]["id"] == "team"
    command = router([f"http://127.0.0.1:{server.port}" for server in servers])
    talks: list[Talk] = [[] for _ in range(N_CONVERSATIONS)]
    exchanges: list[Exchange] = []
    with Router(command, install(tmp_path, "smg"), free_port(), tmp_path) as gateway:
        wait_until(lambda: n_workers(gateway) == 2, "both servers behind the router", 60)
        for turn in range(N_TURNS):
            for n, talk in enumerate(talks):
                if (turn, n) == (2, N_CONVERSATIONS // 2):
                    servers.pop().kill9()
                seed = N_TURNS * n + turn
                talk.append({"role": "user", "content": synthetic_text(900, seed)})
                before = [n_served(server) for server in servers]
                answer = ask(gateway, talk, n)
                (server,) = [s for s, was in zip(servers, before, strict=True) if n_served(s) > was]
                exchanges.append(Exchange(n, list(talk), server, answer))
                # Not the model's reply: a cold server would tokenize its text differently.
                talk.append({"role": "assistant", "content": synthetic_text(200, 1000 + seed)})
    (living,) = servers
    cold, alone = start("cold", "--kvpersist-isolation", "session"), start("alone")
    single_answers = [ask(alone, exchange.talk, exchange.n) for exchange in exchanges]
    for exchange in exchanges:
        text, n_reused, n_prompt = ask(cold, exchange.talk, exchange.n)
        assert (text, n_prompt) == (exchange.answer[0], exchange.answer[2]) and n_reused == 0
    homes = {
        n: {exchange.server for exchange in exchanges if exchange.n == n}
        for n in range(N_CONVERSATIONS)
    }
    stayed = [n for n, used in homes.items() if used == {living}]
    assert 2 <= len(stayed) < N_CONVERSATIONS, "the router uses both"
    reused = sum(exchange.answer[1] for exchange in exchanges if exchange.n in stayed)
    single_reused = sum(
        answer[1]
        for exchange, answer in zip(exchanges, single_answers, strict=True)
        if exchange.n in stayed
    )
    assert reused >= LEAST_SHARE * single_reused > 0, f"{reused:,} of {single_reused:,} tokens"


def n_workers(gateway: ServerProcess) -> int:
    """Return how many servers the router knows as healthy."""
    workers = json.loads(gateway.request("GET", "/workers")[2])["workers"]
    return sum(worker["is_healthy"] for worker in workers)
