"""The conversation that every model has, in token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

N_TURNS = 5
N_REPLY = 10
N_SYSTEM = 70
N_STRANGER = 150
"""Tokens of an unrelated prompt."""

_N_USER = (37, 52, 44, 61, 33)
"""Tokens of each user message: different numbers, and no multiple of a window. With the system
prompt and the replies, a conversation is longer than a block of 256 tokens."""


def random_ids(seed: int, n: int) -> list[int]:
    """Return ids that every model of the zoo knows."""
    return [int(i) for i in np.random.default_rng(seed).integers(2, 250, n)]


@dataclass(frozen=True)
class Conversation:
    system: list[int]
    users: list[list[int]]

    @classmethod
    def make(cls, seed: int = 0) -> Conversation:
        users = [random_ids(1000 * seed + turn, n) for turn, n in enumerate(_N_USER, start=1)]
        return cls(random_ids(1000 * seed, N_SYSTEM), users)

    def segments(self, turn: int, replies: list[list[int]]) -> list[list[int]]:
        """Return a turn's prompt, cut as the server does: system prompt, and the rest."""
        rest: list[int] = []
        for user, reply in zip(self.users[:turn], replies[:turn], strict=True):
            rest += [*user, *reply]
        return [self.system, rest + self.users[turn]]

    def prompt(self, turn: int, replies: list[list[int]]) -> list[int]:
        return [token for segment in self.segments(turn, replies) for token in segment]

    def ending_differently(self, seed: int) -> Conversation:
        """Change only the last user message."""
        last_user = random_ids(seed, len(self.users[-1]) + seed % 17)
        return Conversation(self.system, [*self.users[:-1], last_user])
