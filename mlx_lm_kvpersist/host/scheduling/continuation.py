"""A reply that continues the last message of its request, the assistant's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_N_BEFORE = 8
"""Number of tokens before a reply that are decoded together with its first tokens."""


class Continuing:
    """A tokenizer of mlx-lm that leaves the last message open and begins no new message."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool, **options: Any
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True, **options
        )


def with_first_space(tokens: Iterable[Any], prompt: Sequence[int], tokenizer: Any) -> Iterator[Any]:
    """Yield stock's responses; the first text gets back the space that stock's detokenizer drops.

    The drop is right only at the beginning of a message. prompt: the ids before the reply.
    """
    before = list(prompt[-_N_BEFORE:])
    n_chars, ids = len(tokenizer.decode(before)), list[int]()
    is_begun = False
    for token in tokens:
        ids.append(token.token)
        if not is_begun and token.text:
            is_begun = True
            if tokenizer.decode([*before, *ids])[n_chars:].startswith(" " + token.text):
                token.text = " " + token.text
        yield token
