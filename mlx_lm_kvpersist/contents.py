"""The content of messages: a text, or a list of parts; and texts that have no UTF-8."""

from __future__ import annotations

import json
from typing import Any


def joined(content: Any, more: Any, between: str = "\n\n") -> Any:
    """Join the contents of two messages; by default an empty line stands between them."""
    if not content or not more:
        return content or more or ""
    if isinstance(content, list) or isinstance(more, list):
        return [*parts_of(content), *(parts_of(between) if between else ()), *parts_of(more)]
    return f"{content}{between}{more}"


def parts_of(content: Any) -> list[Any]:
    """Return content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def text_of(content: Any) -> Any:
    """Return content as one text, joined as the server does; other content unchanged."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [block.get("text") for block in content if block.get("type") == "text"]
    are_all = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if are_all else content


def readable(value: Any) -> Any:
    """Return JSON in which U+FFFD stands in the place of each half of a surrogate pair.

    A client that cuts a text between two halves sends such a half, which has no UTF-8.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return value
