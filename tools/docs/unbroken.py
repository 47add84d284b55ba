"""A hook of MkDocs: a browser breaks code within text only between words, not within an option.

In code in a table, GitHub needs `\\|` for a pipe, but MkDocs would show the backslash, too.
"""

from __future__ import annotations

import re

_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_WORD = re.compile(r"(?<!\S)\S{1,40}(?!\S)")
"""A longer word, such as an address, would not fit a phone."""
_CELL = re.compile(r"(?<=<td>).*?(?=</td>)", re.DOTALL)


def on_page_content(html: str, **_: object) -> str:
    """Put a span around each word of code; site.css styles the spans. Unescape pipes in cells."""
    html = _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
    return _CODE.sub(lambda code: _WORD.sub(r"<span>\g<0></span>", code[0]), html)
