"""Stop words, found in the text of a reply, however the model cut it into tokens."""

from __future__ import annotations

from collections.abc import Iterable


class StopWords:
    """Cuts a text, which comes in pieces, at the first stop word that is complete.

    Text that may be the beginning of a stop word is held back until that is known.
    """

    found: str | None = None
    """The stop word that ended the text."""

    def __init__(self, words: Iterable[str]) -> None:
        # Of words that are complete at one place, the longest begins first.
        self._words = sorted(filter(None, words), key=len, reverse=True)
        self._held = ""

    def cut(self, piece: str) -> str:
        """Return what can be shown now; after a stop word nothing more."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = {word: at + len(word) for word in self._words if (at := text.find(word)) >= 0}
        if ends:
            self.found = min(ends, key=ends.__getitem__)
            self._held = ""
            return text[: ends[self.found] - len(self.found)]
        n_held = max((_n_begun(text, word) for word in self._words), default=0)
        shown, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        return shown

    def rest(self) -> str:
        """Return what was held back: the text has ended without a stop word."""
        rest, self._held = self._held, ""
        return rest


def _n_begun(text: str, word: str) -> int:
    """Return how many last characters of a text begin a word."""
    longest = range(min(len(word) - 1, len(text)), 0, -1)
    return next((n for n in longest if word.startswith(text[-n:])), 0)
