"""Random histories of appends, edits, branches and restarts: every reusable token is reused."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist.request.lookup import MIN_TOKENS

from .replayer import Message, Replayer

WORDS = [
    "the",
    " the ",
    " north",
    " tower",
    "ü",
    "🎉",
    "\n",
    "\n\n",
    "  ",
    "1",
    "0.5",
    "Grüße",
    ".",
]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=10).map("".join)
steps = st.tuples(
    st.sampled_from(["append", "append", "edit", "branch", "restart"]),
    st.integers(0, 9),
    st.integers(0, 9),
    texts,
    st.lists(st.integers(0, 599), max_size=12),
)
SYSTEM: Message = {"role": "system", "content": "You keep the light house of the north tower."}


@dataclass
class Talk:
    """A conversation's messages, and the bytes of all its prompts and replies."""

    messages: list[Message] = field(default_factory=lambda: [copy.deepcopy(SYSTEM)])
    fed: bytes = b""


class History:
    """Applies random steps to conversations, and checks the reuse of each prompt."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.replayer = Replayer(model, folder)
        self.talks = [Talk()]
        self.reply_tokens = [
            i
            for i, piece in enumerate(self.replayer.bytes_of([i]) for i in range(600))
            if i > 10 and _is_whole(piece)
        ]

    def step(self, kind: str, talk_number: int, position: int, text: str, reply: list[int]) -> None:
        if kind == "restart":
            self.replayer.restart()
            return
        talk = self.talks[talk_number % len(self.talks)]
        n_messages = len(talk.messages)
        if kind == "branch":
            # Cut before a question: the last kept message is a system message or a reply.
            talk = Talk(copy.deepcopy(talk.messages[: 1 + position % n_messages // 2 * 2]))
            self.talks.append(talk)
        elif kind == "edit":
            edited = talk.messages[position % n_messages]
            content = edited.get("content") or ""
            middle = len(content) // 2
            edited["content"] = content[:middle] + text + content[middle:]
            talk.fed = b""
        self.append(talk, text, [self.reply_tokens[i % len(self.reply_tokens)] for i in reply])

    def append(self, talk: Talk, text: str, reply: list[int]) -> None:
        replayer = self.replayer
        before = list(replayer.stored)
        talk.messages.append({"role": "user", "content": text})
        turn = replayer.turn(talk.messages, reply)
        prompt = replayer.bytes_of(turn.prompt)
        # The last token of a prompt is always computed.
        max_reused = len(replayer.bytes_of(turn.prompt[:-1]))
        n_reused = len(replayer.bytes_of(turn.prompt[: turn.n_reused]))
        n_common = [len(replayer.bytes_of(ids[: replayer.n_common(ids, prompt)])) for ids in before]
        nearest = [ids for ids, n in zip(before, n_common, strict=True) if n == max(n_common)]
        n_tokens = min((replayer.n_reusable(ids, prompt) for ids in nearest), default=0)
        allowed = min(
            (len(replayer.bytes_of(ids[: replayer.n_reusable(ids, prompt)])) for ids in nearest),
            default=0,
        )
        assert prompt.startswith(talk.fed)
        if n_tokens >= MIN_TOKENS:  # a shorter common prefix is computed again
            assert n_reused >= min(allowed, max_reused), (nearest, turn.prompt)
            assert n_reused >= len(talk.fed), "less than the conversation's own last turn"
        talk.fed = replayer.bytes_of(turn.ids)
        talk.messages.append(turn.message)


def _is_whole(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("n", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_random_histories_reuse_every_stored_token(tiny_model: Path, n: int) -> None:
    """Except tokens that end inside a token of the prompt. The replayer also compares logits."""

    @settings(max_examples=n, suppress_health_check=[HealthCheck.too_slow])
    @given(history=st.lists(steps, min_size=3, max_size=8))
    def check(history: list[tuple[str, int, int, str, list[int]]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            runner = History(tiny_model, Path(folder))
            try:
                for step in history:
                    runner.step(*step)
            finally:
                runner.replayer.close()

    check()


def test_reuse_check_fails_if_the_store_is_deleted(tiny_model: Path, tmp_path: Path) -> None:
    runner = History(tiny_model, tmp_path)
    try:
        runner.step("append", 0, 0, "the north tower", [5, 6])
        runner.replayer.close()
        shutil.rmtree(tmp_path)
        runner.replayer.open()
        with pytest.raises(AssertionError):
            runner.step("append", 0, 0, "the north tower", [5, 6])
    finally:
        runner.replayer.close()
