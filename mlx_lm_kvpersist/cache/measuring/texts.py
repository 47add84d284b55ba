"""Short texts of many kinds that measure a cache's precision, all written for this project.

The first `GRID` tokens, the context, lose nothing: a query sees its own block of the grid as
computed. Each later part uses the context's names and facts in another language or format, and the
last part copies a passage of the context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..live.packed import GRID

_TEXTS = Path(__file__).with_name("texts.json")


def all_parts() -> dict[str, str]:
    """Return the context, then the parts in the order in which they are read, by name."""
    texts: dict[str, str] = json.loads(_TEXTS.read_text(encoding="utf-8"))
    return texts


def placed(
    tokenizer: Any, texts: Mapping[str, str] | None = None
) -> tuple[list[int], dict[str, range]]:
    """Return the ids of all parts as one text, and the positions of each but the context.

    The context is repeated up to `GRID` tokens. There are 800 to 1,050 ids in all, and some
    hundreds more if a vocabulary knows few languages.
    """
    (_, context), *passages = (all_parts() if texts is None else texts).items()
    ids, again = encode(tokenizer, context)
    while len(ids) < GRID:
        ids += again
    places: dict[str, range] = {}
    for name, text in passages:
        start = len(ids)
        ids += encode(tokenizer, text)[1]
        places[name] = range(start, len(ids))
    return ids, places


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the begin token, or an empty list, and the text's ids without the begin token."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    return ([bos] if begins else []), ids
