"""How quickly a model computes prompts, learned from the chunks that it computes while serving."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

_SHORT = 64
"""If a chunk has at most this number of tokens, its time may be only overhead."""

_MOST_FOR_OVERHEAD = 256
"""If overhead takes most of the allowed time, a chunk of up to this length may take longer."""

_USUAL_CHUNK = 512
"""The chunk length that `seconds` assumes."""

_LEAST_S = 1e-9

_MUCH_FASTER = 8.0
"""If the second chunk is this many times faster per token, the first chunk is ignored: in a
server's first chunk, CUDA compiles kernels for a minute."""


class _Line(NamedTuple):
    """seconds = overhead_s + tokens * token_s, fitted to chunks around `n` tokens and `s` seconds.

    If not `is_told_apart`, the chunks were too similar to separate overhead and time per token.
    """

    n: float
    s: float
    overhead_s: float
    token_s: float
    is_told_apart: bool


class Pace:
    """How long chunks take to compute, without the steps of replies between them.

    Cost grows with position: there is one linear fit, by least squares, for each power of two of
    the position. The generation thread measures; any thread may read.
    """

    _KEEP = 0.7
    """The weight of a measurement, relative to the next measurement."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, ...]] = {}
        """A dict that is replaced, never changed: other threads iterate over it."""
        self._sizes: set[int] = set()

    def learn(
        self, position: int, n_tokens: int, seconds: float, *, unsure_s: float = 0.0
    ) -> float:
        """Learn that a chunk of `n_tokens` after `position` cached tokens took `seconds`.

        Up to `unsure_s` of `seconds` may be a wait for something else. The possible time that is
        nearest to earlier measurements is learned; if there are none, the longest. Returns this
        time.

        The first chunk of a size, or in a range of positions, is ignored if it was much slower than
        others: kernels were compiled.
        """
        place = position.bit_length()
        if unsure_s and place in self._sums:
            line = self._line(place)
            expected_s = line.overhead_s + n_tokens * line.token_s
            seconds = min(seconds, max(expected_s, seconds - unsure_s))
        is_first = n_tokens not in self._sizes
        self._sizes.add(n_tokens)
        if is_first and self.tokens(position, seconds / 2) > n_tokens:
            return seconds
        new = 1.0, n_tokens, seconds, n_tokens * n_tokens, n_tokens * seconds
        old = self._sums.get(place, (0.0,) * len(new))
        weight, n, s, *_ = old
        if weight == 1 and s / n > _MUCH_FASTER * seconds / n_tokens:
            old = (0.0,) * len(new)
        sums = tuple(self._KEEP * x + y for x, y in zip(old, new, strict=True))
        self._sums = {**self._sums, place: sums}
        return seconds

    def tokens(self, position: int, seconds: float) -> int:
        """Return how many tokens can be computed in `seconds`; 0 while no chunk was measured.

        The result is at most four times the length of recent chunks. If overhead takes most of
        `seconds`, the tokens may take as long as the overhead. In a range of positions without a
        measurement, half the speed of the range before is assumed.
        """
        place = position.bit_length()
        if not self._sums:
            return 0
        nearest = _nearest(place, self._sums)
        n, s, overhead_s, token_s, is_told_apart = self._line(nearest)
        if not is_told_apart and n <= _SHORT and s > seconds:
            return int(2 * n)  # perhaps only overhead: measure one longer chunk
        worth_it = (
            min(overhead_s / token_s, _MOST_FOR_OVERHEAD) if overhead_s > 0.75 * seconds else 0.0
        )
        if nearest < place:
            s, token_s = 2 * s, 2 * token_s
        return int(max(worth_it, min(n + (seconds - s) / token_s, 4 * n)))

    def seconds(self, position: int, n_tokens: int) -> float | None:
        """Return how long `n_tokens` tokens after `position` take if nothing else is computed.

        None until enough was measured. The estimate assumes chunks of `_USUAL_CHUNK` tokens.
        """
        lines = {place: self._line(place) for place in self._sums}
        places = [place for place, line in lines.items() if line.is_told_apart or line.n > _SHORT]
        if not places:
            return None
        total_s, stop = 0.0, position + n_tokens
        while position < stop:
            place = position.bit_length()
            line, end = lines[_nearest(place, places)], min(stop, 1 << place)
            total_s += (end - position) * (line.token_s + line.overhead_s / _USUAL_CHUNK)
            position = end
        return total_s

    def describe(self) -> dict[str, float]:
        """Return the tokens per second of recent chunks, by the first position of each range."""
        lines = {1 << place >> 1: self._line(place) for place in sorted(self._sums)}
        return {str(first): line.n / max(line.s, _LEAST_S) for first, line in lines.items()}

    def _line(self, place: int) -> _Line:
        weight, *sums = self._sums[place]
        n, s, n_squared, n_s = (total / weight for total in sums)
        token_s, variance = max(s, _LEAST_S) / n, n_squared - n * n
        is_told_apart = variance > (n / 16) ** 2
        if is_told_apart:
            token_s = min(token_s, max(token_s / 16, (n_s - n * s) / variance))
        return _Line(n, s, s - n * token_s, token_s, is_told_apart)


def _nearest(place: int, places: Collection[int]) -> int:
    """Return the greatest of `places` up to `place`; the least if all are greater."""
    return max((candidate for candidate in places if candidate <= place), default=min(places))
