"""Conversations of models with windows and states survive kill -9 of a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import (
    AT_ONCE,
    Message,
    ServerProcess,
    StartServer,
    heed_biases,
    make_zoo_model,
    synthetic_text,
    whole_characters,
)

from .stored import wait_for_commit, wait_for_reply

FAMILIES = ["gemma3_text", "qwen3_next", "gpt_oss", "falcon_h1", "mamba2"]
CASES = [
    *((family, {1, 4}) for family in FAMILIES[:2]),
    *(pytest.param(family, set(range(5)), marks=pytest.mark.slow) for family in FAMILIES),
]
"""Model families, and the turns after which the server is killed."""
N_TURNS = 5
SYSTEM: Message = {"role": "system", "content": synthetic_text(40, seed=99)}
QUESTIONS = [synthetic_text(25, seed=n) for n in range(N_TURNS)]
OTHER = "Something else: " + QUESTIONS[0]


class Talk:
    """A conversation that sends its replies back."""

    def __init__(self, server: ServerProcess, store: Path) -> None:
        self.server, self.store = server, store
        self.logit_bias = whole_characters(Path(server.model))
        self.messages: list[Message] = [SYSTEM]
        self.replies: list[str] = []
        self.cached: list[int] = []
        self.totals: list[int] = []

    def turn(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        heed_biases(self.server)
        reply = self.server.chat(
            self.messages, "main", max_tokens=12, temperature=0.0, logit_bias=self.logit_bias
        )
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply.text)
        self.cached.append(reply.cached_tokens)
        self.totals.append(reply.prompt_tokens + reply.completion_tokens)
        wait_for_commit(self.store, "main", self.totals[-1])
        wait_for_reply(self.server)

    def rewind(self) -> None:
        del self.messages[-2:]


@pytest.mark.parametrize(("family", "kills"), CASES)
def test_conversation_continues_after_kill_9(
    family: str, kills: set[int], start_server: StartServer, tmp_path: Path
) -> None:
    model = make_zoo_model(tmp_path / "model", family)
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir")

    def started(name: str) -> ServerProcess:
        return start_server(model, *plugin, str(tmp_path / name), launcher=AT_ONCE)

    whole = Talk(started("whole"), tmp_path / "whole")
    for question in QUESTIONS:
        whole.turn(question)
    whole.rewind()
    whole.turn(OTHER)
    whole.server.stop()

    server = started("killed")
    killed = Talk(server, tmp_path / "killed")
    for n, question in enumerate(QUESTIONS):
        killed.turn(question)
        if n in kills:
            server.restart(kill=True)
    killed.rewind()
    killed.turn(OTHER)
    assert killed.replies == whole.replies
    assert killed.cached == whole.cached
    # Each turn continues from the checkpoint at the end of the previous turn. The last turn
    # replaces the turn before it.
    ends = [*killed.totals[: N_TURNS - 1], killed.totals[N_TURNS - 2]]
    for before, cached in zip(ends, killed.cached[1:], strict=True):
        assert before - 1 <= cached <= before
