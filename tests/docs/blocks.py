"""Code in the pages for users: fenced blocks, their commands, and inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.host import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "benchmarks" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")


class Block(NamedTuple):
    """A fenced block or a piece of inline code, with its page and language."""

    page: str
    language: str
    text: str


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(language: str | None = None) -> list[Block]:
    """Return the fenced blocks of all pages."""
    return [
        Block(page.name, match[1], match[2])
        for page in PAGES
        for match in _FENCED.finditer(text_of(page))
        if language is None or match[1] == language
    ]


def inline_code() -> list[Block]:
    """Return inline code of all pages, except generated parts."""
    generated = re.compile(r"<!-- made: .*?<!-- end of ", re.DOTALL)
    return [
        Block(page.name, "", code)
        for page in PAGES
        for code in _INLINE.findall(_FENCED.sub("", generated.sub("", text_of(page))))
    ]


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the commands of a shell block as words, without leading variable assignments.

    "&&" begins a command; commands after a pipe are left out.
    """
    text = re.sub(r"\$\([^)]*\)", "OUTPUT", block.text)
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)
