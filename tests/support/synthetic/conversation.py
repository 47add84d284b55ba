"""Text and conversations of any length, the same for the same seed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

CORPUS_PATH = Path(__file__).with_name("corpus.txt")

Message = dict[str, Any]
"""One message of the chat completions API: `role`, `content`, and further fields."""


@cache
def corpus_lines() -> tuple[str, ...]:
    """The lines are prose in many languages, code, JSON and emoji."""
    return tuple(CORPUS_PATH.read_text(encoding="utf-8").splitlines())


def synthetic_text(n_chars: int, seed: int = 0) -> str:
    """Return exactly `n_chars` characters of corpus sentences in a random order."""
    rng = random.Random(seed)
    prose = [line for line in corpus_lines() if len(line) > 60]
    parts: list[str] = []
    length = 0
    while length < n_chars:
        # A number makes each passage unique.
        part = f"[{rng.randrange(1000)}] {rng.choice(prose)}\n"
        parts.append(part)
        length += len(part)
    return "".join(parts)[:n_chars]


def synthetic_conversation(n_turns: int, n_chars: int, seed: int = 0) -> list[Message]:
    """Return a system message and `n_turns` user messages with replies between them.

    All contents together have about `n_chars` characters. The last message is the user's.
    """
    n_checkpoints = 2 * n_turns
    share = max(1, n_chars // n_checkpoints)
    system = "You are a careful assistant.\n"
    messages: list[Message] = [{"role": "system", "content": system + synthetic_text(share, seed)}]
    for part in range(1, n_checkpoints):
        role = "user" if part % 2 else "assistant"
        content = synthetic_text(share, seed * 1009 + part)
        messages.append({"role": role, "content": content})
    return messages
