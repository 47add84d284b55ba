"""Short texts of many kinds, on which a cache's precision is judged. All written for this project.

A query sees its own block of the grid as it was computed, so the first `GRID` tokens lose nothing.
They are the context. The parts after it take up its names and facts, each in a language or format
of its own, and the last one copies a passage of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..live.packed import GRID

_TEXTS = Path(__file__).with_name("texts.json")


@dataclass(frozen=True)
class Part:
    """A text with a name for people."""

    name: str
    kind: Literal["context", "language", "code", "data", "tool calls", "far copy"]
    text: str


def all_parts() -> list[Part]:
    """Return the context, then the parts in the order in which they are read."""
    return [Part(**part) for part in json.loads(_TEXTS.read_text(encoding="utf-8"))]


def placed(
    tokenizer: Any, parts: Sequence[Part] | None = None
) -> tuple[list[int], dict[str, range]]:
    """Return the ids of all parts as one text, and where each but the context lies in them.

    The ranges are of positions; together they are all positions from the end of the context on. The
    context is at least `GRID` tokens long: it is repeated where it is shorter. There are about 700
    ids in all, and some hundreds more where a vocabulary knows few languages.
    """
    context, *others = all_parts() if parts is None else parts
    ids, again = encode(tokenizer, context.text)
    while len(ids) < GRID:
        ids += again
    places: dict[str, range] = {}
    for part in others:
        start = len(ids)
        ids += encode(tokenizer, part.text)[1]
        places[part.name] = range(start, len(ids))
    return ids, places


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the begin token (an empty list where there is none) and the text's ids without it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    return ([bos] if begins else []), ids
