"""How quickly prompts are computed, learned while serving."""

from __future__ import annotations

_SHORT = 64
"""A chunk of so few tokens may be nothing but overhead."""

_MOST_FOR_OVERHEAD = 256
"""A chunk is made longer than its time allows, for the sake of its overhead, up to so many."""


class Pace:
    """How long chunks take: seconds = overhead + tokens * seconds a token, by least squares.

    A token takes longer the more keys it attends to, so there is a line for each power of two of
    the position. An unknown place is taken for twice as slow as the last known one before it.
    """

    _KEEP = 0.7
    """What an older measurement counts for after each newer one."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, ...]] = {}
        self._sizes: set[int] = set()

    def learn(self, position: int, n_tokens: int, seconds: float) -> None:
        """A chunk of `n_tokens` after `position` cached ones took so long.

        The first chunk of a size may be slow because kernels are compiled for it.
        """
        place = position.bit_length()
        is_first = n_tokens not in self._sizes
        self._sizes.add(n_tokens)
        if is_first and self.tokens(position, seconds / 2) > n_tokens:
            return
        new = 1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds
        old = self._sums.get(place, (0.0,) * len(new))
        self._sums[place] = tuple(self._KEEP * x + y for x, y in zip(old, new, strict=True))

    def tokens(self, position: int, seconds: float) -> int:
        """Return how many tokens can be computed in so many seconds; 0 while nothing is known.

        At most four times as many as lately. Where a chunk's overhead alone takes that time, as
        many as take as long as the overhead: fewer would hardly be quicker.
        """
        place = position.bit_length()
        if not self._sums:
            return 0
        known = max((p for p in self._sums if p <= place), default=min(self._sums))
        weight, *sums = self._sums[known]
        n, s, n_squared, n_s = (one / weight for one in sums)
        token_s = s / n
        if (variance := n_squared - n * n) > (n / 16) ** 2:
            token_s = min(token_s, max(token_s / 16, (n_s - n * s) / variance))
        elif n <= _SHORT and s > seconds:
            return int(2 * n)  # perhaps all overhead: one longer chunk will tell
        overhead_s = s - n * token_s
        worth_it = (
            min(overhead_s / token_s, _MOST_FOR_OVERHEAD) if overhead_s > 0.75 * seconds else 0.0
        )
        if known < place:
            s, token_s = 2 * s, 2 * token_s
        return int(max(worth_it, min(n + (seconds - s) / token_s, 4 * n)))
