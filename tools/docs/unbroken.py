"""A hook of MkDocs: a browser breaks code within text only between words, not within an option."""

from __future__ import annotations

import re

_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_WORD = re.compile(r"(?<!\S)\S{1,40}(?!\S)")
"""A longer word, such as an address, would not fit a phone."""


def on_page_content(html: str, **_: object) -> str:
    """Put a span around each word of code; site.css styles the spans."""
    return _CODE.sub(lambda code: _WORD.sub(r"<span>\g<0></span>", code[0]), html)
