"""Prompts of an exact number of tokens, the same for every side of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support import Reply
from tests.support.synthetic import Message, synthetic_text

_FILLER = " a"
_MAX_TRIES = 40


class Prompts:
    """Makes conversations for one model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._made: dict[tuple[tuple[str, ...], int, int], list[Message]] = {}

    def of_length(self, n_tokens: int, seed: int) -> list[Message]:
        """Return one user message whose rendered prompt has `n_tokens`.

        Raises ValueError if the template alone is longer.
        """
        return self.filled([], n_tokens, seed)

    def filled(self, before: Sequence[Message], n_tokens: int, seed: int) -> list[Message]:
        """Return `before` and a user message, rendered as a prompt of exactly `n_tokens`."""
        key = tuple(message["content"] for message in before)
        if (key, n_tokens, seed) not in self._made:
            self._made[key, n_tokens, seed] = self._fill(before, n_tokens, seed)
        return list(self._made[key, n_tokens, seed])

    def next_turn(self, messages: list[Message], reply: Reply, n_new: int) -> list[Message]:
        """Return the conversation with a reply and one more question.

        The question and the template's tokens around both messages have `n_new` tokens in total.
        """
        said = [*messages, {"role": "assistant", "content": reply.text}]
        before = self.count(messages) + len(self._encode(reply.text))

        def count(question: str) -> int:
            return self.count([*said, {"role": "user", "content": question}]) - before

        question = _fit("And", n_new, count)
        return [*said, {"role": "user", "content": question}]

    def count(self, messages: list[Message]) -> int:
        """Return the number of tokens of the rendered prompt."""
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return len(ids)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _fill(self, before: Sequence[Message], n_tokens: int, seed: int) -> list[Message]:
        def filled(content: str) -> list[Message]:
            return [*before, {"role": "user", "content": content}]

        def count(content: str) -> int:
            return self.count(filled(content))

        sample = synthetic_text(4000)
        chars_per_token = len(sample) / len(self._encode(sample))
        # The seed comes first, so that prompts of different seeds differ from the beginning.
        begin = f"{seed}: "
        n_free = max(1, n_tokens - count(begin))
        text = begin + synthetic_text(int(n_free * chars_per_token), seed)
        for _ in range(_MAX_TRIES):
            surplus = count(text) - n_tokens
            if surplus <= 0:
                break
            text = text[: max(len(begin), len(text) - int((surplus + 2) * chars_per_token))]
        return filled(_fit(text.rstrip(), n_tokens, count))


def _fit(text: str, n_tokens: int, count: Any) -> str:
    for _ in range(_MAX_TRIES):
        missing = n_tokens - count(text)
        if missing == 0:
            return text
        if missing < 0:
            if not text.endswith(_FILLER):
                break
            text = text.removesuffix(_FILLER)
        else:
            text += _FILLER * missing
    raise ValueError(f"no text has exactly {n_tokens} tokens; the nearest text has {count(text)}")
