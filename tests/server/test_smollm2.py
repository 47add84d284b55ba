"""A real model with a real text: after kill -9 all stored tokens are reused, no reply changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli.servers import OWN_TEXT
from tests.support import Message, Reply, ServerProcess, StartServer
from tests.support.openblas import openblas_env
from tests.support.synthetic.outliers import add_outliers

from .stored import wait_for_commit, wait_for_reply

DOCUMENT = OWN_TEXT.read_text(encoding="utf-8")[:4000]  # about 950 tokens
QUESTIONS = (
    "Who was the keeper of the lock?",
    "What was Ruth Amsel sent to find out?",
    "How long is the chamber?",
    "Thank you. What did the keeper write down?",
)
N_BEFORE_KILL = 2


@dataclass
class Talk:
    """A conversation about the document; it sends its replies back."""

    server: ServerProcess
    store: Path
    messages: list[Message] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def ask(self, question: str) -> None:
        before = "" if self.messages else f"{DOCUMENT}\n\n"
        self.messages.append({"role": "user", "content": before + question})
        reply = self.server.chat(
            self.messages, "talk", max_tokens=24, temperature=0.0, logprobs=True
        )
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply)
        wait_for_commit(self.store, "talk", reply.prompt_tokens + reply.completion_tokens)
        wait_for_reply(self.server)


def run_talk(folder: Path, model: Path, *, is_killed: bool) -> list[Reply]:
    """Ask all questions and return the replies; kill the server between them if `is_killed`."""
    folder.mkdir()
    start = StartServer(folder)
    try:
        server = start.with_plugin(
            model,
            env=openblas_env(),
            start_timeout_s=600,
            request_timeout_s=1200,
        )
        talk = Talk(server, start.store)
        for n, question in enumerate(QUESTIONS):
            if is_killed and n == N_BEFORE_KILL:
                server.restart(kill=True)
            talk.ask(question)
        return talk.replies
    finally:
        start.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_conversation_with_a_real_model_continues_after_kill_9(
    smollm2: Path, tmp_path: Path
) -> None:
    expected = run_talk(tmp_path / "uninterrupted", smollm2, is_killed=False)
    replies = run_talk(tmp_path / "killed", smollm2, is_killed=True)
    assert [reply.text for reply in replies] == [reply.text for reply in expected]
    assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    assert [reply.cached_tokens for reply in replies] == [reply.cached_tokens for reply in expected]
    assert replies[0].cached_tokens == 0 and replies[0].prompt_tokens > 900
    for before, after in pairwise(replies):
        assert after.cached_tokens >= before.prompt_tokens + before.completion_tokens - 1
    restored = replies[N_BEFORE_KILL].kvpersist
    assert restored["tier"] == "disk"
    assert int(restored["restored"]) == replies[N_BEFORE_KILL].cached_tokens
    assert expected[N_BEFORE_KILL].kvpersist["tier"] == "ram"
    assert "Thomas Pell" in replies[0].text
    assert len({reply.text for reply in replies}) == len(QUESTIONS)


FACTS = {
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Spain?": "Madrid",
    "Why is the sky blue?": "light",
    "What do bees make?": "honey",
    "What is a bridge?": "structure",
    "What is the opposite of cold?": "heat",
    "What is water made of?": "hydrogen",
    "Why do plants need water?": "water",
    "What is a telescope?": "device",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}
"""Facts whose first word the model predicts with certainty in full precision."""


def count_correct_facts(folder: Path, model: Path, *options: str) -> int:
    """Ask for the facts in one conversation; return how many replies name the right fact."""
    folder.mkdir()
    start = StartServer(folder)
    try:
        server = start.with_plugin(
            model, *options, env=openblas_env(), start_timeout_s=900, request_timeout_s=1200
        )
        messages: list[Message] = []
        for question in FACTS:
            messages.append({"role": "user", "content": question})
            reply = server.chat(messages, "facts", max_tokens=40, temperature=0.0)
            messages.append({"role": "assistant", "content": reply.text})
        texts = [message["content"] for message in messages[1::2]]
        return sum(fact in text for fact, text in zip(FACTS.values(), texts, strict=True))
    finally:
        start.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_model_with_outlier_channels_names_correct_facts(smollm2: Path, tmp_path: Path) -> None:
    model = add_outliers(smollm2, tmp_path / "outliers", factors=(8.0, 16.0))
    assert count_correct_facts(tmp_path / "default", model) >= 8
