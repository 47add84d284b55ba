"""HTTP routes that plugins add to the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """One path that a plugin answers.

    `handle` gets the `BaseHTTPRequestHandler` of the request, on its HTTP thread.
    `path` is compared with the request's path without its query. A part of it in braces, such as
    `{id}`, is any part that is not empty; a path without braces goes before one with them.
    """

    method: str
    path: str
    handle: Callable[[Any], None]

    def matches(self, method: str, path: str) -> bool:
        own, parts = self.path.split("/"), path.split("/")
        if method != self.method or "{" not in self.path or len(own) != len(parts):
            return False
        pairs = zip(own, parts, strict=True)
        return all(bool(part) if one.startswith("{") else part == one for one, part in pairs)
