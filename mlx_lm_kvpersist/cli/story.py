"""The text that `demo`, `bench` and `quality` let a model read."""

from __future__ import annotations

from pathlib import Path

OWN_TEXT = Path(__file__).with_name("quality_text.txt")


def document(n_chars: int) -> str:
    """Return the first `n_chars` characters of the story, repeated if it is too short."""
    text = OWN_TEXT.read_text(encoding="utf-8")
    return (text * (n_chars // len(text) + 1))[:n_chars]
